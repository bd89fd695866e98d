"""What a route may ask of its request: the served model, the tenant, the agent, the settings.

Typed access to what the edge has put there; decides nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import Request

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
    """What one server has. `serving` and `agents` are None until the model is loaded.

    `observers` are told of every answer; `figures` is of the engine, and may be called by any
    thread. `version` is the program's.
    """

    serving: ServingPort | None = None
    agents: AgentsPort | None = None
    settings: ServerSettings = field(default_factory=ServerSettings)
    observers: list[Observer] = field(default_factory=list)
    figures: Callable[[], Figures] | None = None
    version: str = "unknown"


def context_of(request: Request) -> ServerContext:
    """What the server of this request has."""
    context: ServerContext = request.app.state.context
    return context


def settings_of(request: Request) -> ServerSettings:
    """How the server was set up."""
    return context_of(request).settings


def serving_of(request: Request) -> ServingPort:
    """The served model. Raises OverloadedError while it is being loaded."""
    context = context_of(request)
    if context.serving is None:
        raise OverloadedError("the model is being loaded", retry_after=RETRY_SECONDS)
    return InstrumentedServing(context.serving, [*context.observers, log_entry_of(request.scope)])


def agents_of(request: Request) -> AgentsPort:
    """The agents of the served model. Raises OverloadedError while it is being loaded."""
    agents = context_of(request).agents
    if agents is None:
        raise OverloadedError("the model is being loaded", retry_after=RETRY_SECONDS)
    return agents
