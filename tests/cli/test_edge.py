"""What leaves the process: one line and the exit code of the error's branch, never a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer

from semantic.__main__ import main
from semantic.cli.driving import Timing
from semantic.cli.edge import exit_code, print_error, process_edge
from semantic.cli.report import show_bytes, show_seconds
from semantic.composition.framework import mlx_provider
from semantic.domain import errors
from semantic.domain.errors import SemanticError
from tests.cli.support import command_line, environment, process


def leaves(kind: type[SemanticError]) -> list[type[SemanticError]]:
    below = [leaf for child in kind.__subclasses__() for leaf in leaves(child)]
    return below or [kind]


@pytest.mark.parametrize("kind", leaves(SemanticError))
def test_every_error_of_the_tree_has_an_exit_code(kind: type[SemanticError]) -> None:
    branches = [errors.AnswerError, errors.RequestError, errors.CapacityError, errors.OperatorError]
    (branch,) = (number for number, one in enumerate(branches) if one in kind.__mro__)
    assert exit_code(kind.__new__(kind)) == 1 + branch


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(ValueError("first\n  second"))
    assert capsys.readouterr().err == "error: first second\n"


def test_a_bug_is_one_line_too_and_says_how_to_see_more(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SEMANTIC_TRACEBACK", raising=False)
    with pytest.raises(typer.Exit) as left, process_edge():
        raise KeyError("x")
    assert left.value.exit_code == 70
    shown = capsys.readouterr().err
    assert shown == "error: KeyError: 'x' (a bug; SEMANTIC_TRACEBACK=1 shows where)\n"
    monkeypatch.setenv("SEMANTIC_TRACEBACK", "1")
    with pytest.raises(KeyError), process_edge():
        raise KeyError("x")


@pytest.mark.parametrize("error", [typer.Exit(5), typer.Abort(), BrokenPipeError()])
def test_what_typer_handles_is_left_to_it(error: Exception) -> None:
    with pytest.raises(type(error)), process_edge():
        raise error


@pytest.mark.process
def test_ctrl_c_ends_a_run_quietly_with_130() -> None:
    # A seed with which the answer goes on for thousands of tokens: it runs until it is stopped.
    endless = ("run", "Count from 1 to 99.", "--raw", "--max-tokens", "100000", "--seed", "2")
    with subprocess.Popen(
        command_line(*endless, "--temperature", "5", "--pool-gb", "8"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.read(20)
        running.send_signal(signal.SIGINT)
        running.stdout.read()
        assert running.wait(60) == 130
        assert running.stderr.read() == b""


@pytest.mark.process
def test_ctrl_c_while_the_program_is_imported_is_quiet(tmp_path: Path) -> None:
    """The imported module turns an interrupt into another error, as some libraries do."""
    (tmp_path / "typer.py").write_text(
        "import signal\n"
        "try:\n    signal.raise_signal(signal.SIGINT)\n"
        "except KeyboardInterrupt:\n    raise ImportError('typer')\n"
    )
    path = f"{tmp_path}{os.pathsep}{environment()['PYTHONPATH']}"
    ran = process("doctor", PYTHONPATH=path)
    assert (ran.code, ran.out, ran.err) == (130, "", "")


@pytest.mark.process
def test_the_package_imports_nothing_before_the_program_handles_ctrl_c() -> None:
    code = (
        "import __future__, sys; seen = {*sys.modules}; import semantic; print({*sys.modules}-seen)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environment(), capture_output=True, check=True
    )
    assert done.stdout == b"{'semantic'}\n"


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_ctrl_c_before_the_command_begins_is_quiet(
    handler: signal.Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program in the background ignores Ctrl-C, and goes on to do so."""
    seen = []

    def run() -> None:
        seen.append(signal.getsignal(signal.SIGINT))
        raise KeyboardInterrupt

    monkeypatch.setattr("semantic.cli.main.main", run)
    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(SystemExit) as left:
            main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert left.value.code == 130
    assert seen == [handler]


def test_ctrl_c_waits_until_mlx_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = []

    class Provider(ModuleType):
        def __getattr__(self, name: str) -> object:
            signal.raise_signal(signal.SIGINT)
            imported.append(name)
            return None

    name = "semantic.adapters.mlx.model.provider"
    monkeypatch.setitem(sys.modules, name, Provider(name))
    with pytest.raises(KeyboardInterrupt):
        mlx_provider()
    assert imported[-1:] == ["MLXModelProvider"]


def test_numbers_are_shown_for_people() -> None:
    assert [show_bytes(n) for n in (0, 1023, 1536, 5 << 30, 3 << 50)] == [
        "0 bytes", "1023 bytes", "1.5 KiB", "5.0 GiB", "3072.0 TiB",
    ]  # fmt: skip
    assert [show_seconds(s) for s in (None, 0.0123, 1.234)] == ["-", "12.3 ms", "1.23 s"]


def test_rates_need_two_tokens() -> None:
    timing = Timing(1.0, first_token=2.0, ended=4.0, n_tokens=5)
    assert (timing.ttft, timing.total, timing.decode_rate) == (1.0, 3.0, 2.0)
    assert Timing(1.0, 2.0, 2.0, 1).decode_rate is None
    assert (Timing(1.0).ttft, Timing(1.0).total) == (None, None)
