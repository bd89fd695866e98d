"""Agents of a running server as archives: read from it, or sent to it, in pieces.

Knows the two routes and how they refuse; not what is in an archive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final
from urllib.parse import quote, urlencode

from semantic.domain.errors import OperatorError
from semantic_server.clients.server_connection import (
    Reply,
    Upload,
    get,
    json_object,
    key_for,
    not_ours,
    refusal,
    send,
)

_EXPORT: Final = "/v1/agents/{}/export"
_IMPORT: Final = "/v1/agents/import"
_TAR: Final = "application/x-tar"
_PIECE_BYTES: Final = 1 << 20
_STORE_SECONDS: Final = 600.0
"""For a server to check and store an archive that it has received."""


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive that is being received. `pieces` raise OperatorError if it breaks off."""

    n_bytes: int
    pieces: Iterator[bytes]


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose an agent is: a model's, which a server of several requires, and a tenant's, by the id
    that an operator names."""

    model: str | None = None
    tenant: str | None = None


@contextmanager
def exported(url: str, key_variable: str, agent: str, owner: Owner) -> Iterator[Archive]:
    """The archive of an agent of the server at `url`.

    Raises as `get`, InvalidRequestError for a refused request, OperatorError for a refused key,
    and CapacityError if the server is busy.
    """
    path = _EXPORT.format(quote(agent, safe="")) + _query(tenant=owner.tenant, model=owner.model)
    with get(url, path, key_variable) as reply:
        length = reply.response.getheader("content-length", "")
        if reply.status != HTTPStatus.OK:
            raise refusal(reply, "the export")
        if reply.response.getheader("content-type") != _TAR or not length.isdecimal():
            raise not_ours(reply.base)
        yield Archive(int(length), _pieces(reply, int(length)))


def import_archive(
    url: str,
    key_variable: str,
    archive: tuple[Iterable[bytes], int],
    name: str | None,
    owner: Owner,
) -> tuple[str, int]:
    """Send an archive, as its pieces and size, for `owner`; its agent's name there and tokens.

    `name` None leaves the agent its own. Raises as `exported`.
    """
    key = key_for(url, key_variable)
    upload = Upload(*archive, _STORE_SECONDS)
    path = _IMPORT + _query(name=name, tenant=owner.tenant, model=owner.model)
    with send(url, path, key, upload) as reply:
        if reply.status != HTTPStatus.OK:
            raise refusal(reply, "the import")
        agent = json_object(reply)
        match agent:
            case {"id": str(own), "tokens": int(tokens)}:
                return own, tokens
        raise not_ours(reply.base)


def _query(**given: str | None) -> str:
    named = {name: value for name, value in given.items() if value is not None}
    return f"?{urlencode(named)}" if named else ""


def _pieces(reply: Reply, n_bytes: int) -> Iterator[bytes]:
    n_left = n_bytes
    while n_left:
        piece = reply.read(min(n_left, _PIECE_BYTES))
        if not piece:
            raise OperatorError(
                f"{reply.base} broke off after {n_bytes - n_left} of {n_bytes} bytes: its log says "
                "why"
            )
        n_left -= len(piece)
        yield piece
