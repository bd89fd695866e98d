"""Lets in who has a key, and puts the tenant that the key stands for into the request.

Knows where clients put their keys; not what a key opens.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from semantic.adapters.http.errors import Problem, problem_response
from semantic.adapters.http.keys import ApiKeys

OPEN_PATHS: Final = frozenset({"/", "/health", "/ready", "/version", "/api/hello"})
"""What probes ask for before anybody has configured a key."""

_REFUSED: Final = Problem(
    HTTPStatus.UNAUTHORIZED,
    "expected a valid API key, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
    code="invalid_api_key",
)


class Auth:
    """Middleware: 401 without a key, when there are keys."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys:
            await self._app(scope, receive, send)
            return
        tenants = [self._keys.tenant(key) for key in presented_keys(Headers(scope=scope))]
        tenant = next((found for found in tenants if found is not None), None)
        if tenant is not None:
            scope.setdefault("state", {})["tenant"] = tenant
        elif scope["path"] not in OPEN_PATHS:
            await problem_response(scope, _REFUSED)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def presented_keys(headers: Headers) -> list[str]:
    """The keys that a request has, from both headers: some clients send a stale one in one."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if kind.lower() == "bearer" else ""
    return [key for key in (bearer, headers.get("x-api-key", "").strip()) if key]
