"""The sender of a request: its tenant, its agent, and the client session that it identifies itself
with.

Sessions are read from headers and fields that clients send unconfigured; each client has its own,
and the first reader that recognizes one wins. They are tags only: a value that is too long, not
printable or malformed is ignored, never an error. What an agent says of itself is in the field
`semantic` of a body, the same on every wire, and in the headers of its members.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from http import HTTPStatus
from math import nan
from typing import Final, NamedTuple

from fastapi import Request
from pydantic_core import from_json

from semantic.domain.identity import (
    AIPERF,
    CLAUDE_CODE,
    CODEX,
    LONGEST_ABSENCE,
    MOST_PRIORITY,
    OPENCODE,
    Hints,
    Identity,
    is_tag,
    name_of,
)
from semantic_server.http.errors import FieldError, WireError

AGENT_HEADER: Final = "x-agent-id"
AGENT_FIELD: Final = "agent_id"
_LONGEST_AGENT: Final = 256

Json = Mapping[str, object]

_LONGEST_JSON: Final = 16 << 10
"""Maximum characters of JSON within a header or a field."""
_OLD_USER_ID: Final = re.compile(r"user_.{1,200}_session_([0-9A-Za-z-]{1,64})", re.ASCII)
_ROOT: Final = "root"
"""Codex's name of the agent that talks to the user; agent names are paths."""
_NOTHING: Final[Json] = {}


def tenant_of(request: Request) -> str:
    """The tenant of the request, derived from its API key; "" on a server without keys.

    Raises WireError for an operator's key, which has no tenant.
    """
    if is_operator(request):
        raise WireError(
            HTTPStatus.FORBIDDEN,
            "expected an API key: an operator's key reads metrics, and lists, pins, deletes, "
            "exports and imports agents",
            code="not_for_operators",
        )
    tenant: str = getattr(request.state, "tenant", "")
    return tenant


def route_of(request: Request) -> str:
    """The key by which a fleet has routed the request; "" on a server alone."""
    route: str = getattr(request.state, "route", "")
    return route


def is_operator(request: Request) -> bool:
    """Whether the request has an operator's key."""
    return getattr(request.state, "operator", False) is True


def require_operator(request: Request, what: str) -> None:
    """Raise WireError unless the request has an operator's key: `what` only operators may do."""
    if not is_operator(request):
        raise WireError(
            HTTPStatus.FORBIDDEN,
            f"{what}: expected an operator's key, see --operator-key",
            code="operators_only",
        )


def agent_of(request: Request, body: Mapping[str, object]) -> str | None:
    """The agent's name from the header X-Agent-ID, else from the field `agent_id`.

    None if the request names none. Raises FieldError for an invalid name.
    """
    given = _agent_header(request)
    param = "X-Agent-ID"
    if given is None:
        named = body.get(AGENT_FIELD)
        if named is None:
            return None
        if not isinstance(named, str):
            raise FieldError("agent_id: expected a text", param=AGENT_FIELD)
        given, param = named, AGENT_FIELD
    if not 1 <= len(given) <= _LONGEST_AGENT or not given.isprintable():
        raise FieldError(
            f"{param}: expected 1 to {_LONGEST_AGENT} printable characters", param=param
        )
    return given


def identity_of(request: Request, body: Mapping[str, object]) -> Identity | None:
    """The identity that the client sends by itself; None if there is none."""
    return read_identity(header_texts(request.headers), body)


def header_texts(headers: Mapping[str, str]) -> dict[str, str]:
    """The values of `headers` as text, by their lower-case names."""
    return {name: _header_text(value) for name, value in headers.items()}


def read_identity(headers: Mapping[str, str], body: Json) -> Identity | None:
    """The identity in `headers` (lower-case names) and `body`; None if no reader recognizes one."""
    for read in _READERS:
        found = read(headers, body)
        if found is not None:
            return found
    return None


def _claude_code(headers: Mapping[str, str], body: Json) -> Identity | None:
    """Subagents have ids of their own; a parent id is sent only by nested subagents."""
    session = _tag(headers.get("x-claude-code-session-id")) or _session_of_user_id(body)
    if session is None:
        return None
    agent = _tag(headers.get("x-claude-code-agent-id"))
    parent = None
    if agent is not None:
        parent = name_of(CLAUDE_CODE, session, _tag(headers.get("x-claude-code-parent-agent-id")))
    return Identity(session, CLAUDE_CODE, agent, parent)


def _session_of_user_id(body: Json) -> str | None:
    """The session in `metadata.user_id`: JSON, or the suffix of the text in older versions."""
    user_id = _object(body.get("metadata")).get("user_id")
    if not isinstance(user_id, str):
        return None
    session = _tag(_parsed(user_id).get("session_id"))
    if session is None and len(user_id) <= _LONGEST_JSON:
        old = _OLD_USER_ID.fullmatch(user_id)
        session = None if old is None else old[1]
    return session


def _codex(headers: Mapping[str, str], body: Json) -> Identity | None:
    """A thread is an agent. The root agent's thread has the session's own id."""
    metadata = _object(body.get("client_metadata"))
    turn = _parsed(headers.get("x-codex-turn-metadata") or metadata.get("x-codex-turn-metadata"))
    if not (turn or _sent_by(CODEX, headers, "originator", "user-agent")):
        return None
    session = _first_tag(
        headers.get("session-id"),
        turn.get("session_id"),
        metadata.get("session_id"),
        body.get("prompt_cache_key"),
        headers.get("x-client-request-id"),
    )
    if session is None:
        return None
    thread = _first_tag(headers.get("thread-id"), turn.get("thread_id"), metadata.get("thread_id"))
    name = _tag(turn.get("agent_name"))
    is_root = name is None or name.removeprefix("/") == _ROOT
    agent = thread if thread not in (None, session) else None if is_root else name
    if agent is None:
        return Identity(session, CODEX)
    parent = _first_tag(
        headers.get("x-codex-parent-thread-id"),
        metadata.get("x-codex-parent-thread-id"),
        turn.get("parent_thread_id"),
    )
    own = parent is None or parent == session
    return Identity(session, CODEX, agent, name_of(CODEX, session, None if own else parent))


def _opencode(headers: Mapping[str, str], body: Json) -> Identity | None:
    """A subagent has a session of its own."""
    del body
    if "x-correlation-id" in headers:
        return None
    if "x-session-affinity" not in headers and not _sent_by(OPENCODE, headers, "user-agent"):
        return None
    session = _first_tag(headers.get("x-session-id"), headers.get("x-session-affinity"))
    parent = _tag(headers.get("x-parent-session-id"))
    if session is None:
        return None
    return Identity(session, OPENCODE, None, None if parent is None else name_of(OPENCODE, parent))


def _aiperf(headers: Mapping[str, str], body: Json) -> Identity | None:
    """Both headers hold the same id; x-correlation-id alone may be sent by any client."""
    del body
    session = _tag(headers.get("x-correlation-id"))
    if session is None or "x-session-affinity" not in headers:
        return None
    return Identity(session, AIPERF)


def _any_session(headers: Mapping[str, str], body: Json) -> Identity | None:
    """A conversation id in one of the common fields, of any client."""
    metadata = _object(body.get("metadata"))
    conversation = body.get("conversation")
    session = _first_tag(
        headers.get("x-session-id"),
        conversation if isinstance(conversation, str) else _object(conversation).get("id"),
        metadata.get("session_id"),
        metadata.get("conversation_id"),
    )
    return None if session is None else Identity(session)


def _shared_tag(headers: Mapping[str, str], body: Json) -> Identity | None:
    """A tag that a client uses for all conversations of a user, or for all with a common prefix."""
    del headers
    user_id = _object(body.get("metadata")).get("user_id")
    tag = _first_tag(
        body.get("prompt_cache_key"),
        body.get("user"),
        body.get("safety_identifier"),
        None if _parsed(user_id) else user_id,
    )
    return None if tag is None else Identity(tag, shared=True)


_READERS: Final[tuple[Callable[[Mapping[str, str], Json], Identity | None], ...]] = (
    _claude_code,
    _codex,
    _opencode,
    _aiperf,
    _any_session,
    _shared_tag,
)


def _sent_by(client: str, headers: Mapping[str, str], *names: str) -> bool:
    """Whether one of these headers starts with the client's name."""
    return any(headers.get(name, "").startswith(client) for name in names)


def _first_tag(*found: object) -> str | None:
    """The first of these values that is a valid tag."""
    return next((one for one in found if is_tag(one)), None)


def _tag(found: object) -> str | None:
    return found if is_tag(found) else None


def _object(value: object) -> Json:
    """`value` if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else _NOTHING


def _parsed(text: object) -> Json:
    """The JSON object that `text` encodes; an empty one for anything else."""
    if not isinstance(text, str) or len(text) > _LONGEST_JSON:
        return _NOTHING
    try:
        return _object(from_json(text))
    except ValueError:
        return _NOTHING


def _agent_header(request: Request) -> str | None:
    given = request.headers.get(AGENT_HEADER)
    return None if given is None else _header_text(given)


def _header_text(value: str) -> str:
    """A header value decoded as UTF-8, as in a body or a path, else as Latin-1."""
    try:
        return value.encode("latin-1").decode()  # the raw bytes
    except UnicodeDecodeError:
        return value


# The field `semantic`

_OWN_FIELD: Final = "semantic"
_KEEP, _DONE, _BACK_IN, _PRIORITY = "keep", "done", "back_in", "priority"
_MEMBERS: Final = (_KEEP, _DONE, _BACK_IN, _PRIORITY)
_HEADERS: Final = {name: f"X-Semantic-{name.title().replace('_', '-')}" for name in _MEMBERS}
_FLAGS: Final = {"true": True, "false": False}
_LONGEST_NAME: Final = 80


class OwnField(NamedTuple):
    """What an agent says of its request: whether anything of it may stay after its end, and hints
    about the agent itself."""

    keep: bool
    hints: Hints


def own_field_of(request: Request, body: Mapping[str, object]) -> OwnField:
    """The field `semantic`, else the headers. Nothing of a request is kept if either the header
    X-Semantic-Keep or the field `semantic.keep` is false.

    Raises FieldError for a value of another type or out of range, for an unknown member, which a
    misspelt one would be, and for `back_in` of an agent that is done.
    """
    own = _own(body)
    hints = _hints(request, own)
    keep = _header_flag(request, _KEEP) is not False and _flag(own, _KEEP) is not False
    return OwnField(keep, hints)


def _hints(request: Request, own: Mapping[str, object]) -> Hints:
    done = _flag(own, _DONE)
    if done is None:
        done = _header_flag(request, _DONE) or False
    back_in = _seconds(request, own)
    if done and back_in is not None:
        path = f"{_OWN_FIELD}.{_BACK_IN}"
        raise FieldError(f"{path}: expected nothing beside {_OWN_FIELD}.{_DONE}", param=path)
    return Hints(done, back_in, _priority(request, own))


def _own(body: Mapping[str, object]) -> Mapping[str, object]:
    own = body.get(_OWN_FIELD)
    if own is None:
        return {}
    if not isinstance(own, dict):
        raise FieldError(f"{_OWN_FIELD}: expected an object", param=_OWN_FIELD)
    for name in own:
        if name not in _MEMBERS:
            path = f"{_OWN_FIELD}.{name[:_LONGEST_NAME]}"
            known = f"{', '.join(_MEMBERS[:-1])} or {_MEMBERS[-1]}"
            raise FieldError(f"{path}: there is no such field; expected {known}", param=path)
    return own


def _flag(own: Mapping[str, object], name: str) -> bool | None:
    value = own.get(name)
    if not isinstance(value, bool | None):
        path = f"{_OWN_FIELD}.{name}"
        raise FieldError(f"{path}: expected true or false", param=path)
    return value


def _header_flag(request: Request, name: str) -> bool | None:
    text = request.headers.get(_HEADERS[name])
    if text is not None and text.lower() not in _FLAGS:
        raise FieldError(f"{_HEADERS[name]}: expected true or false", param=_HEADERS[name])
    return None if text is None else _FLAGS[text.lower()]


def _seconds(request: Request, own: Mapping[str, object]) -> float | None:
    value, label = _number(request, own, _BACK_IN)
    if value is None or 0 <= value <= LONGEST_ABSENCE:
        return None if value is None else float(value)
    raise FieldError(
        f"{label}: expected a number of seconds from 0 to {LONGEST_ABSENCE:.0f}", param=label
    )


def _priority(request: Request, own: Mapping[str, object]) -> int:
    value, label = _number(request, own, _PRIORITY)
    if value is None or value in range(-MOST_PRIORITY, MOST_PRIORITY + 1):
        return int(value or 0)
    raise FieldError(
        f"{label}: expected an integer from {-MOST_PRIORITY} to {MOST_PRIORITY}", param=label
    )


def _number(request: Request, own: Mapping[str, object], name: str) -> tuple[float | None, str]:
    """A member and where it stands; None without one, not a number for anything else."""
    value, label = own.get(name), f"{_OWN_FIELD}.{name}"
    if value is None:
        label = _HEADERS[name]
        value = request.headers.get(label)
        return (None if value is None else _as_number(value)), label
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value, label
    return nan, label


def _as_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return nan
