"""What leaves the process: one line and the exit code of the error's branch, never a traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import ModuleType

import pytest
import typer

from semantic.__main__ import main
from semantic.cli.driving import Timing
from semantic.cli.edge import exit_code, print_error, process_edge
from semantic.cli.report import show_bytes, show_seconds
from semantic.domain import errors
from semantic.domain.errors import SemanticError
from tests.cli.support import command_line, environment


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


def test_ctrl_c_while_the_program_is_imported_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    class Imported(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "semantic.cli.main", Imported("semantic.cli.main"))
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 130


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
