"""A running server's overview as it is sent: one document, or a stream of events.

Read without proxies and redirects: a key is sent to the named host alone. Knows how events are
framed, not what they say.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Final

from semantic.adapters.clients.running_server import read_address, read_key
from semantic.domain.errors import OperatorError

_PATH: Final = "/v1/overview"
_TIMEOUT: Final = 30.0
"""Seconds; events come each second."""
_LONGEST_LINE: Final = 16 << 20

Document = Mapping[str, object]


def read_overview(url: str, key_variable: str) -> Document:
    """The overview of the server at `url`, as one document.

    The key in the environment variable `key_variable` is sent only if a request without one is
    refused. Raises InvalidRequestError for a malformed address, and OperatorError when there is no
    response or a refusal.
    """
    connection, response = _open(url, key_variable, _PATH)
    with closing(connection):
        return _document(_read(response, url), url)


def follow_overview(url: str, key_variable: str) -> Generator[tuple[str, Document], None, None]:
    """Events of the server at `url` as (name, document), until it ends the stream.

    Raises as `read_overview`.
    """
    connection, response = _open(url, key_variable, f"{_PATH}/stream")
    with closing(connection):
        name = ""
        while line := _read(response, url, whole=False):
            field, _, value = line.decode(errors="replace").strip().partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                yield name, _document(value.encode(), url)


def _open(url: str, key_variable: str, path: str) -> tuple[HTTPConnection, HTTPResponse]:
    connection, response = _request(url, path, None)
    if response.status == HTTPStatus.UNAUTHORIZED:
        connection.close()
        connection, response = _request(url, path, read_key(url, key_variable))
    if response.status != HTTPStatus.OK:
        connection.close()
        raise OperatorError(f"{url} refuses {path} with status {response.status}")
    return connection, response


def _request(url: str, path: str, key: str | None) -> tuple[HTTPConnection, HTTPResponse]:
    address = read_address(url)
    connect = HTTPSConnection if address.scheme == "https" else HTTPConnection
    connection = connect(address.hostname or "", address.port, timeout=_TIMEOUT)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        connection.request("GET", path, headers=headers)
        return connection, connection.getresponse()
    except (OSError, HTTPException, UnicodeError) as error:
        connection.close()
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise OperatorError(
            f"no server answers at {url} ({reason}); `semantic serve` starts one, --url names "
            "another"
        ) from None


def _read(response: HTTPResponse, url: str, *, whole: bool = True) -> bytes:
    """The rest of a response, or its next line; b"" at the end."""
    try:
        return response.read(_LONGEST_LINE) if whole else response.readline(_LONGEST_LINE)
    except (OSError, HTTPException) as error:
        raise OperatorError(f"the connection to {url} ended: {type(error).__name__}") from None


def _document(data: bytes, url: str) -> Document:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise OperatorError(f"what answers at {url} is no server of ours: expected an overview")
    return document
