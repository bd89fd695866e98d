"""Requests to a running server. A key is sent only to the host in the URL, without proxies and
redirects."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Final, Literal
from urllib.parse import SplitResult, quote, urlencode, urlsplit

from semantic.domain.errors import CapacityError, InvalidRequestError, OperatorError, SemanticError

_MODELS: Final = "/v1/models"
_LOAD_SECONDS: Final = 3600.0
"""Seconds to wait while a server loads or unloads a model."""

Row = Mapping[str, object]


def list_models(url: str, key_variable: str) -> Sequence[Row]:
    """Return the server's models. Raises the same errors as `get`, and OperatorError if the reply
    is not a list of models."""
    with get(url, _MODELS, key_variable) as reply:
        found = found_object(reply)
        match found:
            case {"data": [*rows]} if all(isinstance(row, dict) and "id" in row for row in rows):
                return rows
        raise not_ours(reply.base)


def change_model(url: str, key_variable: str, name: str, action: Literal["load", "unload"]) -> Row:
    """Load or unload a model, as `action` says. Return the model's new entry. Raises the same
    errors as `list_models`."""
    key = key_for(url, key_variable)
    path = f"{_MODELS}/{quote(name, safe='/')}/{action}"
    with send(url, path, key, Upload((), 0, _LOAD_SECONDS)) as reply:
        found = found_object(reply)
        if not isinstance(found, dict) or "state" not in found:
            raise not_ours(reply.base)
        return found


_MEMORY: Final = "/v1/memory"
_SECONDS: Final = 60.0

Document = Mapping[str, object]


def read_memory(url: str, key_variable: str) -> Document:
    """Return the memory figures of the server's process. Raises the same errors as
    `list_models`."""
    with get(url, _MEMORY, key_variable) as reply:
        return _found(reply)


def limit_memory(url: str, key_variable: str, limit_gb: float | None) -> Document:
    """Set the memory limit. None restores the limit at the server's start. Returns the memory
    figures. Raises the same errors as `read_memory`."""
    body = json.dumps({"limit_gb": limit_gb}).encode()
    key = key_for(url, key_variable)
    with send(url, _MEMORY, key, Upload((body,), len(body), _SECONDS)) as reply:
        return _found(reply)


def _found(reply: Reply) -> Document:
    found = found_object(reply)
    if not isinstance(found, dict) or found.get("object") != "memory":
        raise not_ours(reply.base)
    return found


_EXAMPLE: Final = "http://127.0.0.1:8000"

_CHEAP: Final = "/v1/models"
"""A path whose reply is short and requires a key as other paths do."""
_MOST_JSON: Final = 1 << 20
_MOST_CHARACTERS: Final = 500
_TIMEOUT: Final = 30.0
"""Seconds to wait for data from the server."""


@dataclass(frozen=True, slots=True)
class Upload:
    """The body of a request, with its size and a timeout in seconds."""

    pieces: Iterable[bytes]
    n_bytes: int
    timeout: float
    method: Literal["POST", "DELETE"] = "POST"


@dataclass(frozen=True, slots=True)
class Reply:
    """A response of the server at `base`. Its body is read piece by piece."""

    base: str
    response: HTTPResponse

    @property
    def status(self) -> int:
        return self.response.status

    def read(self, most: int) -> bytes:
        """Return at most `most` bytes of the body. Raises OperatorError if the body is cut off."""
        with self._unbroken():
            return self.response.read(most)

    def read_line(self, most: int) -> bytes:
        """Return the next line of the body. Raises OperatorError if the body is cut off."""
        with self._unbroken():
            return self.response.readline(most)

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        try:
            yield
        except (OSError, HTTPException) as error:
            raise OperatorError(
                f"the connection to {self.base} ended: {type(error).__name__}"
            ) from None


@contextmanager
def get(url: str, path: str, key_variable: str) -> Iterator[Reply]:
    """Yield the response to a GET. A first attempt sends no key; the second one sends it if
    required. Raises the same errors as `send` and `read_key`."""
    with send(url, path) as reply:
        if reply.status != HTTPStatus.UNAUTHORIZED:
            yield reply
            return
    with send(url, path, read_key(reply.base, key_variable)) as reply:
        yield reply


@contextmanager
def send(
    url: str, path: str, key: str | None = None, upload: Upload | None = None
) -> Iterator[Reply]:
    """Yield the response to `upload`, or to a GET without one. Raises InvalidRequestError
    for a malformed address, and OperatorError if the server does not respond."""
    address = read_address(url)
    base = f"{address.scheme}://{address.netloc}"
    connect = HTTPSConnection if address.scheme == "https" else HTTPConnection
    timeout = _TIMEOUT if upload is None else upload.timeout
    connection = connect(address.hostname or "", address.port, timeout=timeout)
    with closing(connection):
        try:
            response = _exchange(connection, path, key, upload)
        except (OSError, HTTPException, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise OperatorError(
                f"cannot reach {base}: {reason}; start one with `semantic serve`, or name another "
                "with --url"
            ) from None
        with response:
            yield Reply(base, response)


def key_for(url: str, variable: str) -> str | None:
    """Return the server's key, or None if it requires none. Raises the same errors as `get`."""
    with send(url, _CHEAP) as reply:
        is_open = reply.status != HTTPStatus.UNAUTHORIZED
        return None if is_open else read_key(reply.base, variable)


def read_address(url: str) -> SplitResult:
    """Parse a server's address, http by default. Raises InvalidRequestError for a malformed
    `url`."""
    try:
        address = urlsplit(url.strip() if "://" in url else f"http://{url.strip()}")
        _ = address.port  # raises ValueError unless the port is a number
    except ValueError as error:
        raise InvalidRequestError(f"--url must be like {_EXAMPLE}: {error}") from None
    plain = address.scheme in {"http", "https"} and address.hostname and url.strip().isprintable()
    rest = address.path.rstrip("/") in {"", "/v1"} and not (address.query or address.fragment)
    if not plain or not rest or "@" in address.netloc or " " in url.strip():
        # The message omits the address, which may contain a password.
        raise InvalidRequestError(
            f"--url must have a scheme, a host and an optional port, such as {_EXAMPLE}"
        )
    return address


def read_key(base: str, variable: str) -> str:
    """Return the key in an environment variable. Raises OperatorError if the variable is unset."""
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise OperatorError(
            f"{base} requires an API key: expected one in the environment variable {variable} "
            "(or name another with --key-variable)"
        )
    return key


def not_ours(base: str, expected: str = "") -> OperatorError:
    """Return an error that says that the response is not the `expected` one."""
    more = f": expected {expected}" if expected else ""
    return OperatorError(f"the server at {base} is not a semantic server{more}")


def refusal(reply: Reply, what: str) -> SemanticError:
    """Return an error with the message from a failed response."""
    match json_object(reply):
        case {"error": {"message": str(said)}}:
            plain = "".join(c if c.isprintable() else " " for c in said[:_MOST_CHARACTERS])
        case _:
            plain = f"status {reply.status}"
    message = f"{reply.base} refuses {what}: {plain}"
    if reply.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        return OperatorError(message)
    if reply.status in {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}:
        return CapacityError(message)
    is_ours = HTTPStatus.BAD_REQUEST <= reply.status < HTTPStatus.INTERNAL_SERVER_ERROR
    return InvalidRequestError(message) if is_ours else OperatorError(message)


def json_object(reply: Reply) -> object:
    """Return the response as JSON, or None if it is not JSON."""
    try:
        return json.loads(reply.read(_MOST_JSON))
    except (ValueError, RecursionError):
        return None


def found_object(reply: Reply) -> object:
    """Return the response as JSON, or None if it is not JSON. Raises an error if the status is not
    200."""
    if reply.status != HTTPStatus.OK:
        raise refusal(reply, "that")
    return json_object(reply)


def _exchange(
    connection: HTTPConnection, path: str, key: str | None, upload: Upload | None
) -> HTTPResponse:
    headers = {"Connection": "close"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    if upload is None:
        connection.request("GET", path, headers=headers)
        return connection.getresponse()
    headers |= {"Content-Length": str(upload.n_bytes), "Content-Type": "application/octet-stream"}
    connection.connect()
    # The server stops receiving a refused body: the response says why.
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.request(upload.method, path, body=upload.pieces, headers=headers)
    return connection.getresponse()


_OVERVIEW: Final = "/v1/overview"
_LONGEST_LINE: Final = 16 << 20


def read_overview(url: str, key_variable: str) -> Document:
    """Return the overview of the server at `url`. Raises the same errors as `get`, and
    OperatorError if the server refuses."""
    with _accepted(url, _OVERVIEW, key_variable) as reply:
        return _document(reply.read(_LONGEST_LINE), reply.base)


def follow_overview(url: str, key_variable: str) -> Generator[tuple[str, Document], None, None]:
    """Yield the name and the document of each event until the stream ends. Raises the same errors
    as `read_overview`."""
    with _accepted(url, f"{_OVERVIEW}/stream", key_variable) as reply:
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


_EXPORT: Final = "/v1/agents/{}/export"
_IMPORT: Final = "/v1/agents/import"
_TAR: Final = "application/x-tar"
_PIECE_BYTES: Final = 1 << 20
_STORE_SECONDS: Final = 600.0
"""Seconds that a server may take to store an archive."""


@dataclass(frozen=True, slots=True)
class Archive:
    """An agent's archive in transfer. Iterating `pieces` raises OperatorError if the transfer stops
    early."""

    n_bytes: int
    pieces: Iterator[bytes]


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of an agent: a model and a tenant's id. Only operators may name a tenant."""

    model: str | None = None
    tenant: str | None = None


@contextmanager
def exported(url: str, key_variable: str, agent: str, owner: Owner) -> Iterator[Archive]:
    """Yield an agent's archive. Raises the same errors as `get`, InvalidRequestError for a refused
    request, OperatorError for a refused key, and CapacityError for a busy server."""
    path = _EXPORT.format(quote(agent, safe="")) + query(tenant=owner.tenant, model=owner.model)
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
    """Send an archive. Return the agent's name on the server and its number of tokens. If `name` is
    None, the agent keeps its name. Raises the same errors as `exported`."""
    key = key_for(url, key_variable)
    upload = Upload(*archive, _STORE_SECONDS)
    path = _IMPORT + query(name=name, tenant=owner.tenant, model=owner.model)
    with send(url, path, key, upload) as reply:
        if reply.status != HTTPStatus.OK:
            raise refusal(reply, "the import")
        agent = json_object(reply)
        match agent:
            case {"id": str(own), "tokens": int(tokens)}:
                return own, tokens
        raise not_ours(reply.base)


def query(**given: str | None) -> str:
    """Return the part of an address after its path. A None leaves its name out."""
    named = {name: value for name, value in given.items() if value is not None}
    return f"?{urlencode(named)}" if named else ""


def _pieces(reply: Reply, n_bytes: int) -> Iterator[bytes]:
    n_left = n_bytes
    while n_left:
        piece = reply.read(min(n_left, _PIECE_BYTES))
        if not piece:
            raise OperatorError(
                f"{reply.base} cut the archive off after {n_bytes - n_left} of {n_bytes} bytes; "
                "its log says why"
            )
        n_left -= len(piece)
        yield piece
