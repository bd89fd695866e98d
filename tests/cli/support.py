"""How the tests here call the program: in this process, or as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from typer import testing
from typer.testing import CliRunner

from semantic.bootstrap import App, assemble
from semantic.cli.main import app
from semantic.composition.engine_settings import Settings
from semantic.domain.value_objects import KvBits, ModelCacheSpec
from semantic.ports.generation import BatchBackend, Slices, Tokenizer
from tests.support.fake_backend import FULL, FakeBackend
from tests.support.fake_tokenizer import ByteTokenizer
from tests.support.program import program

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """What a process of our own is started with, this test's folders included."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "100",
        "TERM": "dumb",
    }


class Ran:
    """What a command printed and how it ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def error_lines(self) -> list[str]:
        return self.err.splitlines()


def semantic(*arguments: str, stdin: str | bytes = "") -> Ran:
    """Run a command in this process, with pipes."""
    with mock.patch.object(testing, "_get_command", return_value=program()):
        result = CliRunner().invoke(app, arguments, input=stdin, prog_name="semantic")
    return Ran(result.exit_code, result.stdout, result.stderr)


def process(*arguments: str, **variables: str) -> Ran:
    """Run `python -m semantic` with pipes and no input, and with these in its environment."""
    done = subprocess.run(
        command_line(*arguments),
        input="",
        capture_output=True,
        text=True,
        check=False,
        env=environment() | variables,
        timeout=60,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def imported(*arguments: str) -> tuple[list[str], str]:
    """The modules that a process of a command has imported at its end, and what it printed."""
    code = (
        "import sys; import semantic.cli.main as program; "
        f"sys.argv = ['semantic', *{arguments}]\n"
        "try: program.main()\n"
        "except SystemExit: print(*sys.modules, sep=chr(10), file=sys.stderr)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment()
    )
    return ran.stderr.split(), ran.stdout


def command_line(*arguments: str) -> Sequence[str]:
    return [sys.executable, "-m", "semantic", *arguments]


class FakeProvider:
    """Implements `ModelProviderPort` with a model in plain Python."""

    def __init__(self) -> None:
        self.tokenizer = ByteTokenizer()
        self.model = FakeBackend(ModelCacheSpec((FULL,)), vocab_size=self.tokenizer.vocab_size)

    def load_model(
        self, model_id: str, adapter: Path | None = None, *, kv_bits: KvBits = 16
    ) -> tuple[BatchBackend, Tokenizer]:
        del model_id, adapter, kv_bits  # there is only one
        return self.model, self.tokenizer

    def load_in_slices(
        self,
        model_id: str,
        adapter: Path | None = None,
        max_bytes: int | None = None,
        *,
        kv_bits: KvBits = 16,
    ) -> Slices[tuple[BatchBackend, Tokenizer]]:
        del max_bytes, kv_bits
        yield None
        return self.load_model(model_id, adapter)

    def extract_spec(self, model: BatchBackend) -> ModelCacheSpec:
        return model.cache_spec()


def fake_app(pool_blocks: int = 100) -> tuple[App, FakeBackend]:
    """An engine around the fake model, and that model."""
    provider = FakeProvider()
    return assemble(Settings(pool_blocks=pool_blocks), provider), provider.model
