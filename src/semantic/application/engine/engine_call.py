"""Work that somebody wants done with an engine, between two of its steps.

Knows neither thread nor engine.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from semantic.application.engine.attempt import Failure, attempt
from semantic.domain.errors import SemanticError

E = TypeVar("E")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineCall(Generic[E]):
    """One of the two is called, once. Neither raises."""

    work: Callable[[E], None]
    refuse: Callable[[SemanticError], None]


def engine_call(function: Callable[[E], T]) -> tuple[EngineCall[E], Future[T]]:
    """A call of `function`, and what will come of it; a cancelled future is not worked for."""
    result: Future[T] = Future()

    def work(engine: E) -> None:
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

    return EngineCall(work, refuse), result
