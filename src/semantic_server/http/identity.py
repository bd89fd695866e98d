"""The sender of a request: its tenant, its agent and the session of its client.

Each kind of client has its own function here. The first one that finds a session wins.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Final

from fastapi import Request
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from semantic.domain.fair_share import FairRoom
from semantic.domain.identity import AIPERF, CLAUDE_CODE, CODEX, OPENCODE, Identity, is_tag, name_of
from semantic_server.http.errors import (
    RETRY_SECONDS,
    FieldError,
    Problem,
    WireError,
    problem_response,
)

AGENT_HEADER: Final = "x-agent-id"
AGENT_FIELD: Final = "agent_id"
_LONGEST_AGENT: Final = 256

Json = Mapping[str, object]

_LONGEST_JSON: Final = 16 << 10
"""The maximum number of characters of JSON in a header or a field."""
_OLD_USER_ID: Final = re.compile(r"user_.{1,200}_session_([0-9A-Za-z-]{1,64})", re.ASCII)
_ROOT: Final = "root"
"""Codex's name for the agent that talks to the user."""
_NOTHING: Final[Json] = {}


def tenant_of(request: Request) -> str:
    """Return the API key's tenant, or "" on a server without keys. Raises WireError for
    operators."""
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
    """Return the routing key of a fleet's request, or "" outside a fleet."""
    route: str = getattr(request.state, "route", "")
    return route


def is_operator(request: Request) -> bool:
    """Return whether the request has an operator's key."""
    return getattr(request.state, "operator", False) is True


def require_operator(request: Request, what: str) -> None:
    """Raise WireError unless the request has an operator's key. `what` names the action."""
    if not is_operator(request):
        raise WireError(
            HTTPStatus.FORBIDDEN,
            f"{what}: expected an operator's key, see --operator-key",
            code="operators_only",
        )


def agent_of(request: Request, body: Mapping[str, object]) -> str | None:
    """Return the agent named in the header X-Agent-ID or the field `agent_id`, or None. Raises
    FieldError."""
    given = _agent_header(request)
    param = "X-Agent-ID"
    if given is None:
        named = body.get(AGENT_FIELD)
        if named is None:
            return None
        if not isinstance(named, str):
            raise FieldError("agent_id must be a string", param=AGENT_FIELD)
        given, param = named, AGENT_FIELD
    if not 1 <= len(given) <= _LONGEST_AGENT or not given.isprintable():
        raise FieldError(
            f"{param} must have 1 to {_LONGEST_AGENT} printable characters", param=param
        )
    return given


def identity_of(request: Request, body: Mapping[str, object]) -> Identity | None:
    """Return the session that the client's own headers and fields identify, or None."""
    return read_identity(header_texts(request.headers), body)


def header_texts(headers: Mapping[str, str]) -> dict[str, str]:
    """Return `headers` as text, with lower-case names as keys."""
    return {name: _header_text(value) for name, value in headers.items()}


def read_identity(headers: Mapping[str, str], body: Json) -> Identity | None:
    """Return the session in `headers` and `body`, or None."""
    for read in _READERS:
        found = read(headers, body)
        if found is not None:
            return found
    return None


def _claude_code(headers: Mapping[str, str], body: Json) -> Identity | None:
    """Subagents have their own ids. A nested subagent also sends its parent's id."""
    session = _tag(headers.get("x-claude-code-session-id")) or _session_of_user_id(body)
    if session is None:
        return None
    agent = _tag(headers.get("x-claude-code-agent-id"))
    parent = None
    if agent is not None:
        parent = name_of(CLAUDE_CODE, session, _tag(headers.get("x-claude-code-parent-agent-id")))
    return Identity(session, CLAUDE_CODE, agent, parent)


def _session_of_user_id(body: Json) -> str | None:
    """Return the session in `metadata.user_id`: JSON, or in older clients a plain text."""
    user_id = _object(body.get("metadata")).get("user_id")
    if not isinstance(user_id, str):
        return None
    session = _tag(_parsed(user_id).get("session_id"))
    if session is None and len(user_id) <= _LONGEST_JSON:
        old = _OLD_USER_ID.fullmatch(user_id)
        session = None if old is None else old[1]
    return session


def _codex(headers: Mapping[str, str], body: Json) -> Identity | None:
    """Each thread of Codex is an agent. The root agent's thread has the session's id."""
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
    """A subagent of opencode has its own session."""
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
    """Only AIPerf sends the same id in two headers. Others may send x-correlation-id alone."""
    del body
    session = _tag(headers.get("x-correlation-id"))
    if session is None or "x-session-affinity" not in headers:
        return None
    return Identity(session, AIPERF)


def _any_session(headers: Mapping[str, str], body: Json) -> Identity | None:
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
    """Read a tag that several conversations of a client share."""
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
    return any(headers.get(name, "").startswith(client) for name in names)


def _first_tag(*found: object) -> str | None:
    return next((one for one in found if is_tag(one)), None)


def _tag(found: object) -> str | None:
    return found if is_tag(found) else None


def _object(value: object) -> Json:
    return value if isinstance(value, dict) else _NOTHING


def _parsed(text: object) -> Json:
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
    """Return a header value decoded as UTF-8, or else as Latin-1."""
    try:
        return value.encode("latin-1").decode()  # the raw bytes
    except UnicodeDecodeError:
        return value


# API keys

OPEN_PATHS: Final = frozenset({"/health", "/ready", "/version", "/api/hello"})
"""Paths that need no key."""

_UNAUTHORIZED: Final = Problem(
    HTTPStatus.UNAUTHORIZED,
    "expected a valid API key, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
    code="invalid_api_key",
)


class AuthMiddleware:
    """Replies 401 to a request without a valid key, and 429 to a tenant above its fair share of
    `max_requests`."""

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        operators: ApiKeys,
        max_requests: int,
        open_paths: Iterable[str] = OPEN_PATHS,
    ) -> None:
        self._app = app
        self._open = frozenset(open_paths)
        self._keys = keys
        self._operators = operators
        self._running = FairRoom(max_requests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys:
            await self._app(scope, receive, send)
            return
        presented = presented_keys(Headers(scope=scope))
        operators = [self._operators.tenant(key) for key in presented]
        tenants = [self._keys.tenant(key) for key in presented]
        tenant = next((found for found in tenants if found is not None), None)
        if any(found is not None for found in operators):
            scope.setdefault("state", {})["operator"] = True
        elif tenant is not None:
            scope.setdefault("state", {})["tenant"] = tenant
            await self._run(tenant, scope, receive, send)
            return
        elif scope["path"] not in self._open:
            await problem_response(scope, _UNAUTHORIZED)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _run(self, tenant: str, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self._keys) > 1 and not self._running.leaves_room(tenant, 1):
            problem = _too_many(self._running.of(tenant))
            await problem_response(scope, problem)(scope, receive, send)
            return
        self._running.take(tenant, 1)
        try:
            await self._app(scope, receive, send)
        finally:
            self._running.give(tenant, 1)


def _too_many(own: int) -> Problem:
    return Problem(
        HTTPStatus.TOO_MANY_REQUESTS,
        f"{own} of your requests are running, which is this key's share: wait for one of them",
        code="rate_limit_exceeded",
        retry_after=RETRY_SECONDS,
    )


def presented_keys(headers: Headers) -> list[str]:
    """Return the keys in Authorization and X-Api-Key."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if kind.lower() == "bearer" else ""
    return [key for key in (bearer, headers.get("x-api-key", "").strip()) if key]


class ApiKeys:
    """The API keys of a server, stored as digests. False for a server without keys."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._tenants = {_digest(key): tenant_name(key) for key in keys}

    def __len__(self) -> int:
        return len(self._tenants)

    def tenant(self, presented: str) -> str | None:
        """Return a key's tenant, or None for an unknown key. Compares in constant time."""
        digest = _digest(presented)
        found = None
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, digest):
                found = tenant
        return found


_TENANT: Final = b"semantic:tenant"
_TENANT_BYTES: Final = 16


def tenant_name(key: str) -> str:
    """Return the tenant's name in stores, derived from its key. It is stable across restarts."""
    return hashlib.blake2b(
        key.encode(), digest_size=_TENANT_BYTES, person=_TENANT, usedforsecurity=True
    ).hexdigest()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
