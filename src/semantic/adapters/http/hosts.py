"""Refuses what a web page makes a browser send: a foreign name that leads here, or a foreign page.

A name that an attacker owns may resolve to this machine; then the browser sends that name as
Host. A page may also post to a known address; then the browser sends the page's Origin.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from semantic.adapters.http.errors import Problem, problem_response
from semantic.adapters.http.settings import is_loopback

_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
ANY: Final = "*"


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
        problem = self._problem(scope) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
        else:
            await problem_response(scope, problem)(scope, receive, send)

    def _problem(self, scope: Scope) -> Problem | None:
        headers = Headers(scope=scope)
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
        if ANY in self._origins or origin in self._origins:
            return True
        return origin in {f"http://{authority.lower()}", f"https://{authority.lower()}"}


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
