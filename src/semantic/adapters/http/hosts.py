"""Refuses what a web page makes a browser send: a foreign name that leads here, or a foreign page.

A name that an attacker owns may resolve to this machine; then the browser sends that name as
Host. A page may also post to a known address; then the browser sends the page's Origin. Pages that
are allowed get what their browser wants to see: it asks first, and hides an answer without it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semantic.adapters.http.errors import Problem, problem_response
from semantic.adapters.http.settings import is_loopback

_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
ANY: Final = "*"
_ASK_AGAIN_SECONDS: Final = "600"


class Hosts:
    """Middleware: 421 for a Host, and 403 for an Origin, that is not ours.

    Ours are loopback names, the address we are bound to, `names`, and, when others on the network
    can reach us anyway, every numeric address: nobody else owns one. "*" allows everything.
    """

    def __init__(
        self, app: ASGIApp, *, bound: str, names: Iterable[str] = (), origins: Iterable[str] = ()
    ) -> None:
        self._app = app
        self._bound = bound.lower()
        self._local = is_loopback(bound)
        self._names = frozenset(name.lower() for name in names)
        self._origins = frozenset(origin.lower().rstrip("/") for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        problem = self._problem(scope, headers)
        origin = headers.get("origin", "")
        if problem is not None:
            await problem_response(scope, problem)(scope, receive, send)
        elif not self._is_allowed(origin.lower()):
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _permission(origin, headers)(scope, receive, send)
        else:
            await self._app(scope, receive, _shown_to(origin, send))

    def _problem(self, scope: Scope, headers: Headers) -> Problem | None:
        authority = headers.get("host", "")
        if not self._is_ours(host_of(authority)):
            return Problem(
                HTTPStatus.MISDIRECTED_REQUEST,
                "the Host header names a host that is not allowed; allowed_hosts adds it",
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is None or scope["method"] in _READING or self._may_post(origin, authority):
            return None
        return Problem(
            HTTPStatus.FORBIDDEN,
            "the Origin header names a page that is not allowed; allowed_origins adds it",
            code="origin_not_allowed",
        )

    def _is_ours(self, host: str | None) -> bool:
        if ANY in self._names:
            return True
        if host is None:
            return False
        if is_loopback(host) or host == self._bound or host in self._names:
            return True
        return not self._local and _is_address(host)

    def _may_post(self, origin: str, authority: str) -> bool:
        origin = origin.lower()
        own = {f"http://{authority.lower()}", f"https://{authority.lower()}"}
        return self._is_allowed(origin) or origin in own

    def _is_allowed(self, origin: str) -> bool:
        """Whether it is the origin of a page elsewhere that may send requests."""
        return bool(origin) and (ANY in self._origins or origin in self._origins)


def _permission(origin: str, asked: Headers) -> Response:
    """The answer to a browser that asks whether a page may send what it wants to send."""
    headers = {
        "access-control-allow-origin": origin,
        "access-control-allow-methods": "GET, POST, DELETE",
        "access-control-allow-headers": asked.get("access-control-request-headers", ""),
        "access-control-max-age": _ASK_AGAIN_SECONDS,
        "vary": "origin, access-control-request-headers",
    }
    if asked.get("access-control-request-private-network") == "true":
        headers["access-control-allow-private-network"] = "true"
    return Response(status_code=HTTPStatus.NO_CONTENT, headers=headers)


def _shown_to(origin: str, send: Send) -> Send:
    """A `send` that lets the browser show the answer to the page that asked."""

    async def shown(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["access-control-allow-origin"] = origin
            headers["access-control-expose-headers"] = "x-request-id, request-id, retry-after"
            headers.add_vary_header("origin")
        await send(message)

    return shown


def host_of(authority: str) -> str | None:
    """The host in a Host header, without port and brackets; None for what names none."""
    if any(mark in authority for mark in "/?#@\\"):
        return None
    try:
        return urlsplit(f"//{authority}").hostname
    except ValueError:
        return None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
