"""Reads request bodies: converts bytes to a JSON object, and validates it."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from difflib import get_close_matches
from functools import partial
from itertools import islice
from typing import Final, Generic, ParamSpec, TypeVar

from fastapi import Request
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from semantic.application.fair_threads import FairThreads
from semantic.domain.errors import InvalidRequestError, OverloadedError
from semantic.domain.fair_share import FairRoom
from semantic_server.http.errors import ClientDisconnectedError, FieldError, TooLargeError

P = ParamSpec("P")
T = TypeVar("T")

_MOST_SPELLINGS: Final = 32
"""The maximum number of unknown fields to check for misspellings, and of their characters."""
_ALIKE: Final = 0.85

MAX_DEPTH: Final = 64
"""The maximum nesting of objects and lists in a request."""

MAX_VALUES: Final = 1_200_000
"""The maximum number of values in a request. A parsed value takes many times the memory of its
text. A prompt of 2^20 token ids has fewer values."""

MAX_MEMBERS: Final = 200_000
"""The maximum number of members of all objects in a request. Parsing and pydantic hold the
interpreter's lock. 16 MiB within these limits take at most 0.13 seconds."""

_MOST_ERRORS: Final = 2000
_MOST_ENTRIES: Final = 20
"""The number of entries of each field to validate again after many errors. pydantic describes all
errors, which takes microseconds each."""

_OFFLOAD_BYTES: Final = 1 << 16
"""The size from which a worker thread parses a body, in bytes."""


_LARGE_BYTES: Final = 1 << 20
"""The size above which a body waits for memory, in bytes."""
_RETRY_SECONDS: Final = 5
_THREADS: Final = 2
"""The number of threads that parse bodies. One of them parses only short bodies."""


class LargeBodies:
    """Limits the memory for large request bodies. Use it on one event loop."""

    def __init__(self, most: int, timeout: float) -> None:
        """At most `most` bytes of bodies are in memory. A body waits at most `timeout` seconds."""
        self.threads = FairThreads(_THREADS, "parse", rests=True)
        self._room = FairRoom(most)
        self._timeout = timeout
        self._waiting: list[tuple[str, int, asyncio.Future[None]]] = []

    async def take(self, n_bytes: int, tenant: str = "") -> None:
        """Wait until `n_bytes` fit in the memory for large bodies. Raises OverloadedError after the
        timeout."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(own := (tenant, n_bytes, turn))
        self._start()
        is_taken = False
        try:
            async with asyncio.timeout(self._timeout):
                await turn
            is_taken = True
        except TimeoutError as error:
            raise OverloadedError(
                "other large requests fill the memory for bodies", retry_after=_RETRY_SECONDS
            ) from error
        finally:
            if own in self._waiting:
                self._waiting.remove(own)
                self._start()
            elif not is_taken:  # the caller left just after it got the memory
                self.give(n_bytes, tenant)

    def give(self, n_bytes: int, tenant: str = "") -> None:
        """Free `n_bytes` of memory that `take` reserved."""
        self._room.give(tenant, n_bytes)
        self._start()

    def _start(self) -> None:
        passed = set[str]()  # other tenants may overtake, but not a tenant's own requests
        for one in [one for one in self._waiting if not one[2].done()]:
            tenant, n_bytes, turn = one
            if tenant in passed or not self._room.leaves_room(tenant, n_bytes):
                passed.add(tenant)
            elif not self._room.fits(n_bytes):
                return
            else:
                self._waiting.remove(one)
                self._room.take(tenant, n_bytes)
                turn.set_result(None)


def check_spelling(unknown: Iterable[str], known: Collection[str], within: str = "") -> None:
    """Raise FieldError if an `unknown` field resembles a `known` one. `within` is the prefix of the
    fields' paths."""
    for name in islice(unknown, _MOST_SPELLINGS):
        if len(name) > _MOST_SPELLINGS:
            continue
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_")
        alike = get_close_matches(snake, known, 1, _ALIKE)
        if alike:
            path = within + name
            meant = within + alike[0]
            raise FieldError(f"{path}: unknown field; did you mean {meant}?", param=path)


async def read_json(request: Request) -> dict[str, object]:
    """Read the body as a JSON object. Raises InvalidRequestError for another body, TooLargeError
    for too many values, and the same errors as `read_body`."""
    async with read_body(request) as data:
        return await parse_offloaded(request, data)


@asynccontextmanager
async def read_body(request: Request) -> AsyncIterator[bytes]:
    """Read the request's body within a `with` block. Raises TooLargeError, ClientDisconnectedError
    on a disconnect, and OverloadedError if large bodies fill the memory."""
    bodies: LargeBodies = request.app.state.bodies
    data, taken, tenant = bytearray(), 0, getattr(request.state, "tenant", "")
    try:
        try:
            async for piece in request.stream():
                data += piece
                if not taken and len(data) > _LARGE_BYTES:
                    await bodies.take(size := _size_of(request), tenant)
                    taken = size
        except ClientDisconnect as error:
            raise ClientDisconnectedError from error
        yield bytes(data)
    finally:
        bodies.give(taken, tenant)


async def parse_offloaded(request: Request, data: bytes) -> dict[str, object]:
    """Call `parse_object` for `data`. Uses a worker thread for a large body."""
    if len(data) < _OFFLOAD_BYTES:
        return parse_object(data)
    return await on_thread(request, parse_object, data)


async def on_thread(
    request: Request, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call `function` on a worker thread. Tenants share the threads fairly."""
    bodies: LargeBodies = request.app.state.bodies
    is_short = _size_of(request) < _OFFLOAD_BYTES
    tenant = getattr(request.state, "tenant", "")
    return await bodies.threads.run(tenant, partial(function, *args, **kwargs), is_short=is_short)


def _size_of(request: Request) -> int:
    most = request.app.state.context.settings.max_body_bytes
    length = request.headers.get("content-length", "")
    if not length:
        return int(most) if "transfer-encoding" in request.headers else 0
    return min(most, int(length)) if length.isdecimal() else int(most)


def parse_object(data: bytes) -> dict[str, object]:
    """Parse `data` as a JSON object. Raises InvalidRequestError and TooLargeError."""
    _require_few_values(data)
    try:
        found: object = from_json(data, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        whole = _with_whole_characters(data)
        if whole == data:
            raise InvalidRequestError(f"the body is not JSON: {error}") from error
        return parse_object(whole)
    if not isinstance(found, dict):
        raise InvalidRequestError(f"the body must be a JSON object, got {kind_of(found)}")
    _check_values(found)
    return found


def _with_whole_characters(data: bytes) -> bytes:
    """Replace each escaped half of a surrogate pair by U+FFFD. JavaScript leaves a half when it
    cuts a text within an emoji."""
    if not _HALF.search(data) or b"\0" in data:
        return data
    marked = data.replace(rb"\\", b"\0\0")  # an escaped backslash starts no escape
    for lone in (_LONE_HIGH, _LONE_LOW):
        marked = lone.sub(rb"\\ufffd", marked)
    return marked.replace(b"\0\0", rb"\\")


class LazyAdapter(Generic[T]):
    """A validator that builds itself at its first use, because building takes milliseconds."""

    def __init__(self, kind: type[T]) -> None:
        self._kind = kind
        self._adapter: TypeAdapter[T] | None = None

    def __call__(self) -> TypeAdapter[T]:
        if self._adapter is None:
            self._adapter = TypeAdapter(self._kind)
        return self._adapter


async def read_as(adapter: TypeAdapter[T], request: Request) -> T:
    """Read the body and validate it with `adapter` on a worker thread. Raises the same errors as
    `read_json` and `validated`."""
    body = await read_json(request)
    return await on_thread(request, validated, adapter, body)


def validated(adapter: TypeAdapter[T], body: Mapping[str, object]) -> T:
    """Validate `body` with `adapter`. Raises FieldError for the first wrong field."""
    try:
        return adapter.validate_python(body)
    except ValidationError as error:
        found = error if error.error_count() <= _MOST_ERRORS else _fewer_errors(adapter, body)
        if found is None:
            wrong = f"{error.error_count()} values of the body are invalid"
            raise InvalidRequestError(wrong) from None
        problems = found.errors(include_url=False, include_context=False, include_input=False)
        first = problems[0]
        path = _path(first["loc"], body)
        said = first["msg"].replace("Input should be", "expected")
        message = f"{path}: {said}" if path else said
        raise FieldError(message, param=path) from found


def _fewer_errors(adapter: TypeAdapter[T], body: Mapping[str, object]) -> ValidationError | None:
    """Validate the first entries of each field. Returns None without errors or with too many."""
    try:
        adapter.validate_python({name: _beginning(value) for name, value in body.items()})
    except ValidationError as error:
        return error if error.error_count() <= _MOST_ERRORS else None
    return None


def _beginning(value: object) -> object:
    if isinstance(value, dict):
        return dict(islice(value.items(), _MOST_ENTRIES))
    return value[:_MOST_ENTRIES] if isinstance(value, list) else value


def _require_few_values(data: bytes) -> None:
    """Raise TooLargeError for JSON with too many values. Parsing would build all of them."""
    if _within_limits(data):
        return
    marks = data.replace(rb"\\", b"").replace(rb"\"", b"")
    texts = marks.count(b'"') // 2
    outside = marks.split(b'"')[::2] if texts <= MAX_VALUES + MAX_MEMBERS else []
    if not outside or not _within_limits(b"".join(outside)):
        raise TooLargeError(
            f"the body has more than {MAX_VALUES} values or {MAX_MEMBERS} members of objects"
        )


def _within_limits(marks: bytes) -> bool:
    values = sum(marks.count(mark) for mark in (b",", b"[", b"{"))
    return values <= MAX_VALUES and marks.count(b":") <= MAX_MEMBERS


_HIGH: Final = rb"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW: Final = rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HALF: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_LONE_HIGH: Final = re.compile(_HIGH + rb"(?!" + _LOW + rb")")
_LONE_LOW: Final = re.compile(rb"(?<!" + _HIGH + rb")" + _LOW)

_KINDS: Final[dict[type, str]] = {
    list: "a list",
    str: "a string",
    bool: "a truth value",
    dict: "an object",
    type(None): "null",
}


def kind_of(value: object) -> str:
    """Return the kind of a JSON value, for an error's text."""
    return _KINDS.get(type(value), "a number")


def _check_values(body: dict[str, object]) -> None:
    level: list[object] = [body]
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for outer in level:
            for child in _children(outer):
                if isinstance(child, (dict, list)):
                    below.append(child)
                elif isinstance(child, float) and not math.isfinite(child):
                    raise InvalidRequestError("a number in the body is too large")
        if not below:
            return
        level = below
    raise InvalidRequestError(f"the body nests deeper than {MAX_DEPTH} levels")


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _path(parts: Sequence[int | str], body: object) -> str:
    """Return the path of an error's field, as in `messages[0].content`. Pydantic's location also
    names branches of unions."""
    path = ""
    at = body
    for part in parts:
        if isinstance(part, int) and isinstance(at, list):
            path += f"[{part}]"
            at = at[part] if part < len(at) else None
        elif isinstance(part, str) and isinstance(at, dict) and (part in at or part == parts[-1]):
            path += f".{part}" if path else part
            at = at.get(part)
    return path


def described(
    required: Mapping[str, object],
    more: Mapping[str, object],
    reply: str,
    *,
    body: str,
    stream: str | None = None,
) -> dict[str, object]:
    """Return the OpenAPI description of a route that reads its body without FastAPI. `stream` is
    the media type of a stream."""
    schema = {
        "type": "object",
        "description": body,
        "required": list(required),
        "properties": {**required, **more},
    }
    content: dict[str, object] = {"application/json": {"schema": {"type": "object"}}}
    if stream is not None:
        content[stream] = {"schema": {"type": "string"}}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": reply, "content": content}},
    }
