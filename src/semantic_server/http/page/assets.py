"""The page at / and its files: fixed names, read once from the package.

A request's path is only looked up among them and never becomes a path of a file. The page itself
needs no key and shows nothing: its requests do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from http import HTTPStatus
from importlib.resources import files
from types import MappingProxyType
from typing import Final

from fastapi import APIRouter, Request, Response

router: Final = APIRouter(include_in_schema=False)

_HTML, _STYLE, _IMAGE = "text/html", "text/css", "image/svg+xml"
_MODULE: Final = "text/javascript"

MODULES: Final = (
    "agent.js",
    "agents.js",
    "budgets.js",
    "chat.js",
    "client.js",
    "confirm.js",
    "dom.js",
    "main.js",
    "models.js",
    "savings.js",
    "state.js",
    "timeline.js",
)
FILES: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "/": ("index.html", _HTML),
        "/page/style.css": ("style.css", _STYLE),
        "/page/icon.svg": ("icon.svg", _IMAGE),
        **{f"/page/{name}": (name, _MODULE) for name in MODULES},
    }
)
"""Each path with the name and media type of its file."""

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)

HEADERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "content-security-policy": _POLICY,
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-cache",
    }
)


@dataclass(frozen=True, slots=True)
class _Asset:
    body: bytes
    media_type: str
    etag: str


@cache
def _asset(path: str) -> _Asset:
    name, media_type = FILES[path]
    body = files("semantic_server.http.page").joinpath("static", name).read_bytes()
    return _Asset(body, media_type, f'"{sha256(body).hexdigest()[:32]}"')


async def serve(request: Request) -> Response:
    """A file of the page; 304 if the client has it."""
    asset = _asset(request.scope["path"])
    headers = {**HEADERS, "etag": asset.etag}
    known = request.headers.get("if-none-match", "")
    if asset.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(asset.body, media_type=asset.media_type, headers=headers)


for _path in FILES:
    router.add_api_route(_path, serve, methods=["GET", "HEAD"])
