"""Typed access of routes to the server's state: the served model, its agents, the settings.

Decides nothing itself. See `identity` for the sender of a request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import Request

from semantic.adapters.http.activity.watch import Watch
from semantic.adapters.http.errors import RETRY_SECONDS
from semantic.adapters.http.logs import log_entry_of
from semantic.adapters.http.metrics import InstrumentedServing, Observer
from semantic.adapters.http.settings import ServerSettings
from semantic.application.engine.engine_state import Figures
from semantic.domain.errors import OverloadedError
from semantic.ports.agents import AgentsPort
from semantic.ports.serving import ServingPort


@dataclass(slots=True)
class ServerContext:
    """The state of one server. `serving` and `agents` are None until the model is loaded.

    `observers` are notified of every answer. `figures` returns the engine's current figures and may
    be called from any thread. `version` is the program's. `watch` is what the page shows.
    """

    serving: ServingPort | None = None
    agents: AgentsPort | None = None
    settings: ServerSettings = field(default_factory=ServerSettings)
    observers: list[Observer] = field(default_factory=list)
    figures: Callable[[], Figures] | None = None
    version: str = "unknown"
    watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = Watch(
            lambda: None if self.figures is None else self.figures(), lambda: self.agents
        )


def context_of(request: Request) -> ServerContext:
    """The state of the server that handles this request."""
    context: ServerContext = request.app.state.context
    return context


def settings_of(request: Request) -> ServerSettings:
    """The server's settings."""
    return context_of(request).settings


def serving_of(request: Request) -> ServingPort:
    """The served model, instrumented for metrics and log. Raises OverloadedError while it loads."""
    context = context_of(request)
    if context.serving is None:
        raise OverloadedError("the model is being loaded", retry_after=RETRY_SECONDS)
    recorder = context.watch.recorder.of(getattr(request.state, "tenant", ""))
    observers = [*context.observers, recorder, log_entry_of(request.scope)]
    return InstrumentedServing(context.serving, observers)


def agents_of(request: Request) -> AgentsPort:
    """The agents of the served model. Raises OverloadedError while it loads."""
    agents = context_of(request).agents
    if agents is None:
        raise OverloadedError("the model is being loaded", retry_after=RETRY_SECONDS)
    return agents
