"""Runs scenes of `victim` under strace, which kills them or fails their system calls."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}


@functools.cache
def why_not() -> str | None:
    """Why nothing can be traced here; None when it can."""
    strace = shutil.which("strace")
    if strace is None:
        return "strace is not installed"
    tried = subprocess.run(
        [strace, "-f", "-o", os.devnull, "-e", "inject=getuid:retval=42", sys.executable, "-c",
         "import os; raise SystemExit(os.getuid() != 42)"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return None if tried.returncode == 0 else f"strace cannot trace: {tried.stderr[-200:]}"


@dataclass(frozen=True)
class Outcome:
    """How a scene ended: its exit code (negative: the signal), and what it said until then."""

    code: int
    said: list[str]

    @property
    def raised(self) -> str | None:
        for line in self.said:
            if line.startswith("raised "):
                return str(json.loads(line.removeprefix("raised ")))
        return None

    @property
    def was_refused(self) -> bool:
        return any(line.startswith("refused ") for line in self.said)

    @property
    def counts(self) -> dict[str, int]:
        for line in self.said:
            if line.startswith("counts "):
                return dict(json.loads(line.removeprefix("counts ")))
        return {}


class Stage:
    """A process that plays scenes, one after the other. Use as a context manager."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.victim"],
            cwd=ROOT, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        self._stdin.close()
        self._process.wait(timeout=60)
        self._stdout.close()

    def play(self, scene: str, root: Path, *options: str) -> Outcome:
        """Play `scene` on the store at `root`, traced with `options` from its beginning on."""
        self._tell(json.dumps([scene, str(root)]))
        child = int(self._stdout.readline())
        with _attached(child, options):
            self._tell("go")
            code, said = json.loads(self._stdout.readline())
        return Outcome(code, said)

    def count(self, scene: str, root: Path, calls: str) -> Counter[str]:
        """How often the scene makes each of `calls` when nothing goes wrong."""
        with tempfile.NamedTemporaryFile() as log:
            outcome = self.play(scene, root, "-e", f"trace={calls}", "-o", log.name)
            assert outcome.code == 0, outcome
            text = Path(log.name).read_text()
        return Counter(re.findall(r"^\d+ +(\w+)\(", text, re.MULTILINE))

    @property
    def _stdin(self) -> IO[str]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def _stdout(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    def _tell(self, line: str) -> None:
        self._stdin.write(line + "\n")
        self._stdin.flush()


class _attached:  # noqa: N801  # reads as a verb
    """Strace is attached to a process; it ends with it."""

    def __init__(self, process: int, options: tuple[str, ...]) -> None:
        out = () if "-o" in options else ("-o", os.devnull)
        self._command = ["strace", "-f", "-p", str(process), *out, *options]

    def __enter__(self) -> None:
        self._strace = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        assert self._strace.stderr is not None
        line = self._strace.stderr.readline()
        assert "attached" in line, line

    def __exit__(self, *_: object) -> None:
        assert self._strace.stderr is not None
        self._strace.wait(timeout=60)
        self._strace.stderr.close()
