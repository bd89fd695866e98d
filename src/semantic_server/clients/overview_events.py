"""A running server's overview as it is sent: one document, or a stream of events.

Knows how events are framed, not what they say.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Final

from semantic.domain.errors import OperatorError
from semantic_server.clients.server_connection import Reply, get, not_ours

_PATH: Final = "/v1/overview"
_LONGEST_LINE: Final = 16 << 20

Document = Mapping[str, object]


def read_overview(url: str, key_variable: str) -> Document:
    """The overview of the server at `url`, as one document.

    Raises as `get`, and OperatorError for a refusal or what is no overview.
    """
    with _accepted(url, _PATH, key_variable) as reply:
        return _document(reply.read(_LONGEST_LINE), reply.base)


def follow_overview(url: str, key_variable: str) -> Generator[tuple[str, Document], None, None]:
    """Events of the server at `url` as (name, document), until it ends the stream.

    Raises as `read_overview`.
    """
    with _accepted(url, f"{_PATH}/stream", key_variable) as reply:
        name = ""
        while line := reply.read_line(_LONGEST_LINE):
            field, _, value = line.decode(errors="replace").strip().partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                yield name, _document(value.encode(), reply.base)


@contextmanager
def _accepted(url: str, path: str, key_variable: str) -> Iterator[Reply]:
    with get(url, path, key_variable) as reply:
        if reply.status != HTTPStatus.OK:
            raise OperatorError(f"{reply.base} refuses {path} with status {reply.status}")
        yield reply


def _document(data: bytes, base: str) -> Document:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise not_ours(base, "an overview")
    return document
