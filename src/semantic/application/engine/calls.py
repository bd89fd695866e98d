"""Calls into the engine that must not end its thread, whatever they raise.

The one place outside the command line where every exception is caught: a broken engine and a
broken listener are defects of other code, and the thread that serves all requests continues.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from semantic.domain.errors import BackendError, SemanticError

E = TypeVar("E")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failure:
    """The exception that was raised instead of a result."""

    error: Exception

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"

    def drop_frames(self) -> None:
        """Release everything that the frames of the traceback refer to."""
        error: BaseException | None = self.error
        while error is not None:
            error.__traceback__ = None
            error = error.__cause__ or error.__context__


def attempt(work: Callable[[], T]) -> T | Failure:
    """The result of `work`, or the failure that it raised.

    What is no Exception becomes a BackendError: a panic of a library that is written in Rust, a
    module that calls `sys.exit`. It would end the thread, or the loop that waits for it. Not for
    the main thread, which Ctrl-C reaches.
    """
    try:
        return work()
    except BaseException as error:  # noqa: BLE001  returned as a value, never swallowed
        if isinstance(error, Exception):
            return Failure(error)
        failure = BackendError(f"{type(error).__name__}: {error}")
        failure.__cause__ = error
        return Failure(failure)


def guarded(work: Callable[[], T]) -> T:
    """The result of `work`; raises the error of its failure (see `attempt`)."""
    outcome = attempt(work)
    if isinstance(outcome, Failure):
        raise outcome.error
    return outcome


@dataclass(frozen=True, slots=True)
class EngineCall(Generic[E]):
    """Work to do with the engine between two of its steps.

    Either `run` or `refuse` is called, once. Neither raises.
    """

    run: Callable[[E], None]
    refuse: Callable[[SemanticError], None]


def engine_call(function: Callable[[E], T]) -> tuple[EngineCall[E], Future[T]]:
    """A call of `function` and the future of its result; cancelling the future skips the call."""
    result: Future[T] = Future()

    def run(engine: E) -> None:
        if not result.set_running_or_notify_cancel():
            return
        outcome = attempt(lambda: function(engine))
        if isinstance(outcome, Failure):
            result.set_exception(outcome.error)
        else:
            result.set_result(outcome)

    def refuse(reason: SemanticError) -> None:
        if result.set_running_or_notify_cancel():
            result.set_exception(reason)

    return EngineCall(run, refuse), result
