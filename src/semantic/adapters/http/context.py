"""What a route may ask of its request: the served model, the tenant, the agent, the settings.

Typed access to what the edge has put there; decides nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from fastapi import Request

from semantic.adapters.http.errors import RETRY_SECONDS, FieldError
from semantic.adapters.http.identity import read_identity
from semantic.adapters.http.observed import ObservedServing, Observer
from semantic.adapters.http.request_log import line_of
from semantic.adapters.http.settings import ServerSettings
from semantic.application.engine.observing import Figures
from semantic.domain.errors import OverloadedError
from semantic.domain.identity import Identity
from semantic.ports.agents import AgentsPort
from semantic.ports.serving import ServingPort

AGENT_HEADER: Final = "x-agent-id"
_AGENT_FIELD: Final = "agent_id"
_LONGEST_AGENT: Final = 256


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
    return ObservedServing(context.serving, [*context.observers, line_of(request.scope)])


def agents_of(request: Request) -> AgentsPort:
    """The agents of the served model. Raises OverloadedError while it is being loaded."""
    agents = context_of(request).agents
    if agents is None:
        raise OverloadedError("the model is being loaded", retry_after=RETRY_SECONDS)
    return agents


def tenant_of(request: Request) -> str:
    """Whose request it is: derived from its API key; "" where there are no keys."""
    tenant: str = getattr(request.state, "tenant", "")
    return tenant


def agent_of(request: Request, body: Mapping[str, object]) -> str | None:
    """The agent's name from the header X-Agent-ID, else from the field `agent_id`.

    None when the request names none. Raises InvalidRequestError for a name that cannot be one.
    """
    given = _agent_header(request)
    param = "X-Agent-ID"
    if given is None:
        named = body.get(_AGENT_FIELD)
        if named is None:
            return None
        if not isinstance(named, str):
            raise FieldError("agent_id: expected a text", param=_AGENT_FIELD)
        given, param = named, _AGENT_FIELD
    if not 1 <= len(given) <= _LONGEST_AGENT or not given.isprintable():
        raise FieldError(
            f"{param}: expected 1 to {_LONGEST_AGENT} printable characters", param=param
        )
    return given


def identity_of(request: Request, body: Mapping[str, object]) -> Identity | None:
    """Who asks, as far as the client says so without being told to."""
    headers = {name: _text(value) for name, value in request.headers.items()}
    return read_identity(headers, body)


def _agent_header(request: Request) -> str | None:
    given = request.headers.get(AGENT_HEADER)
    return None if given is None else _text(given)


def _text(value: str) -> str:
    """A header's text: UTF-8, as a name is in a body or a path, else Latin-1."""
    try:
        return value.encode("latin-1").decode()  # as it came
    except UnicodeDecodeError:
        return value
