"""Functions in processes of their own: what they say and how they end comes back."""

from __future__ import annotations

import os
import signal
from contextlib import closing

import pytest

from tests.support.own_process import OwnProcess, in_own_process

pytestmark = pytest.mark.process

HERE = "tests.tools.test_own_process:"


def fail(text: str) -> None:
    """In the process."""
    raise AssertionError(text)


def echo(*arguments: str) -> None:
    """In the process: with a line of the input, and what the test set in the environment."""
    os.write(1, " ".join((*arguments, input(), os.environ["OF_THE_TEST"])).encode())


def test_a_failure_is_one_with_its_traceback() -> None:
    with pytest.raises(AssertionError, match=r"(?s)fail failed:.*Traceback.*in the process"):
        in_own_process(f"{HERE}fail", "in the process")


def test_it_reads_its_input_and_has_the_environment_of_the_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OF_THE_TEST", "set")
    with closing(OwnProcess(f"{HERE}echo", "one", 2)) as process:
        process.stdin.write("three\n")
        assert process.finish() == (0, "one 2 three set", "")


def test_it_can_be_killed_while_another_goes_on() -> None:
    with (
        closing(OwnProcess(f"{HERE}echo")) as killed,
        closing(OwnProcess(f"{HERE}fail", "x")) as it,
    ):
        killed.kill()
        assert killed.wait() == -signal.SIGKILL
        killed.kill()
        assert it.finish()[0] == 1
