"""`semantic bench`: each figure with its unit, nothing private, and nothing left behind."""

from __future__ import annotations

import getpass
import json
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from semantic.composition.engine_settings import DEFAULT_MODEL
from semantic.composition.named_models import find_model
from semantic.domain.errors import OperatorError
from semantic_server.cli import bench
from semantic_server.cli.bench import OURS, THEIRS, Figures, Measures, Sizes
from semantic_server.clients.private_server import Message, PrivateServer, TimedAnswer
from tests.cli.support import command_line, environment, semantic
from tests.support.ports import HERE, free_port

pytestmark = [pytest.mark.process, pytest.mark.mlx]

FIGURES = {
    "decode, 1 stream": "tokens/s",
    "decode, 4 streams": "tokens/s",
    "decode, 8 streams": "tokens/s",
    "prefill, 32 tokens": "tokens/s",
    "prefill, 128 tokens": "tokens/s",
    "prefill, 512 tokens": "tokens/s",
    "turn 2 of 4 agents, first token": "s",
    "turn 5 of 4 agents, first token": "s",
    "turn 5 over turn 2": "x",
    "512 tokens cold, first token": "s",
    "512 tokens from memory, first token": "s",
    "cold over from memory": "x",
    "512 tokens after kill -9, first token": "s",
    "cold over after kill -9": "x",
    "256 tokens join 7 streams, longest gap": "s",
    "256 tokens join 7 streams, first token": "s",
}
_SECONDS = 120.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of the command, which must be empty after it."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return shutil.copytree(find_model(DEFAULT_MODEL), tmp_path / "private-name")


def nothing_left(folder: Path) -> bool:
    """Whether the folder is empty but for MLX's kernels of this process, and no process has it in
    its command."""
    listed = subprocess.run(
        ["ps", "-axww", "-o", "command"], capture_output=True, text=True, check=True
    )
    return {one.name for one in folder.iterdir()} <= {"mlx"} and str(folder) not in listed.stdout


@pytest.mark.thorough
def test_it_measures_both_servers_and_writes_nothing_private(
    folder: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_LONGEST", 512)
    monkeypatch.setattr(bench, "_DECODED", (16, 16))
    output = tmp_path / "figures.json"
    ran = semantic("bench", "--model", str(model), "--output", str(output))
    assert ran.code == 0, ran.err
    text = output.read_text("utf-8")
    document = json.loads(text)
    assert {one["name"]: one["unit"] for one in document["figures"]} == FIGURES
    assert document["failures"] == document["notes"] == []
    for one in document["figures"]:
        assert one[OURS] > 0
        assert one[THEIRS] > 0
        assert (one["ratio"] is None) == (one["unit"] == "x")
        shown = {"s": r"\d (s|ms)", "x": r"\d x", "tokens/s": r"\d tokens/s"}[one["unit"]]
        line = next(line for line in ran.out.splitlines() if line.startswith(f"{one['name']}  "))
        assert len(re.findall(shown, line)) >= 2, line
        assert line.endswith(" x"), line
    assert re.search("^exact batch  +(yes|no): ", ran.out, re.MULTILINE)
    assert {"semantic", "mlx", "mlx-lm", "device", "release"} <= set(document["machine"])
    assert {"caches", "exact batch", "drafts"} <= set(document["caches"])
    assert document["model"]["name"] == document["model"]["model_type"] == "llama"
    private = ("private-name", str(tmp_path), str(Path.home()), socket.gethostname())
    assert [one for one in (*private, getpass.getuser()) if one in text] == []
    assert re.findall(r'["\s]~?/\w[^"]*', text) == []
    assert nothing_left(folder)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_its_servers_and_files_end_with_it(
    how: signal.Signals, folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "figures.json"
    with subprocess.Popen(
        command_line("bench", "--no-baseline", "--output", str(output)),
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        assert first.startswith("semantic: decode, 1 stream: "), first
        assert not nothing_left(folder)
        process.send_signal(how)
        out, _ = process.communicate(timeout=_SECONDS)
    until = time.monotonic() + _SECONDS
    while not nothing_left(folder):
        assert time.monotonic() < until, list(folder.iterdir())
        time.sleep(0.05)
    if how == signal.SIGKILL:
        return
    assert process.returncode == 130
    assert out.splitlines()[1].startswith("decode, 1 stream  ")
    document = json.loads(output.read_text("utf-8"))
    assert document["figures"][0]["name"] == "decode, 1 stream"
    assert len(document["figures"]) < len(FIGURES)
    assert document["notes"] == ["Ctrl-C ended the command early"]


def test_a_model_that_cannot_load_is_one_line(folder: Path, model: Path, tmp_path: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    output = tmp_path / "figures.json"
    ran = semantic("bench", "--model", str(model), "--output", str(output))
    assert ran.code == 4
    (line,) = ran.error_lines
    assert line.startswith("error: cannot start the server: ")
    assert "model.safetensors" in line
    assert line.endswith("; `semantic doctor --model` examines a model")
    assert not output.exists()
    assert nothing_left(folder)


def test_the_time_ends_it(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "_OUR_SHARE", 0)
    ran = semantic("bench", "--minutes", "0.1")
    assert ran.code == 0
    (output,) = tmp_path.glob("semantic-bench-2*.json")
    notes = json.loads(output.read_text("utf-8"))["notes"]
    assert notes == ["semantic: its time ended early"]
    assert notes[0] in ran.out
    assert nothing_left(folder)


def test_an_output_without_a_folder_is_refused(tmp_path: Path) -> None:
    ran = semantic("bench", "--output", str(tmp_path / "none" / "one.json"))
    assert ran.code == 2
    assert "--output must be a file in a folder that exists, got " in ran.err


class ForgetfulServer(PrivateServer):
    """Answers without a process, and differently after each start."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.until, self.starts = folder, float("inf"), 0

    def start(self, command: Sequence[str], ready: str) -> None:
        del command, ready
        self.starts += 1

    def kill(self) -> None:
        pass

    def begin(self, said: Sequence[Message], n_tokens: int, agent: str = "") -> TimedAnswer:
        del said, n_tokens, agent
        now = time.perf_counter()
        return TimedAnswer(now, now + 1, f"start {self.starts}", pieces=[now + 1])

    def finish(self, answer: TimedAnswer) -> TimedAnswer:
        return answer


@pytest.mark.parametrize(("name", "n_failures"), [(OURS, 1), (THEIRS, 0)])
def test_an_answer_that_depends_on_the_cache_is_a_failure_of_ours(
    name: str, n_failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_SETTLED_SECONDS", 0)
    figures = Figures()
    Measures(name, ForgetfulServer(tmp_path), figures, ())._restore(Sizes(256, 16, 16, 10))
    told = ["the answer after kill -9 differs from the cold one"]
    assert figures.failures == told * n_failures
    assert ("FAILED: the answer after kill -9" in figures.table()) == (name == OURS)


def test_an_answer_that_failed_has_ended(folder: Path) -> None:
    with closing(PrivateServer()) as server:
        server.url = f"http://{HERE}:{free_port()}"
        answer = server.begin([], 1)
        with pytest.raises(OperatorError, match="cannot reach http"):
            server.finish(answer)
        assert answer.ended > answer.sent
    assert nothing_left(folder)


@pytest.mark.usefixtures("folder")
def test_a_guard_that_ended_is_an_error() -> None:
    with closing(PrivateServer()) as server:
        server._guard.kill()
        with pytest.raises(OperatorError, match="cannot hold a server: its guard ended; "):
            server.kill()
