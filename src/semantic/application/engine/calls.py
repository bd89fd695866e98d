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


def guarded(work: Callable[[], T]) -> T:
    """The result of `work`, on a thread that is not the main one.

    Raises what it raises, but BackendError for what is no Exception: a panic of a library that is
    written in Rust, or a module that calls `sys.exit`. Those would end the thread, or the loop that
    waits for it; Ctrl-C reaches the main thread only.
    """
    try:
        return work()
    except Exception:
        raise
    except BaseException as error:
        raise BackendError(f"{type(error).__name__}: {error}") from error


def attempt(work: Callable[[], T]) -> T | Failure:
    """The result of `work`, or the failure that it raised, as `guarded`."""
    try:
        return guarded(work)
    except Exception as error:  # noqa: BLE001  returned as a value, never swallowed
        return Failure(error)


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
