"""Helpers of routes: the server's state, and streams that end when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Final, Generic, Self, TypeVar

from fastapi import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from semantic.application.models.model_names import unknown_model
from semantic.domain.errors import InvalidRequestError, ModelNotFoundError, OverloadedError
from semantic.ports.agents import AgentsPort
from semantic.ports.embedding import EmbeddingPort
from semantic.ports.models import ModelsPort
from semantic.ports.serving import Figures, MemoryLimit, ServingPort
from semantic_server.http.activity import Ending, Watch
from semantic_server.http.answer_records import InstrumentedServing, Observer
from semantic_server.http.errors import RETRY_SECONDS, ClientDisconnectedError
from semantic_server.http.logs import WarnOnce, log_entry_of
from semantic_server.http.settings import ServerSettings

MODEL_QUERY: Final = "model"
"""Query parameter that names the model."""


@dataclass(slots=True)
class ServerContext:
    """The state of one server. `serving`, `agents`, `models` and `embedding` are None until the
    model has loaded.

    Any thread may call `figures`. `version` is the program's version.
    """

    serving: ServingPort | None = None
    agents: AgentsPort | None = None
    models: ModelsPort | None = None
    embedding: EmbeddingPort | None = None
    memory: MemoryLimit | None = None
    settings: ServerSettings = field(default_factory=ServerSettings)
    observers: list[Observer] = field(default_factory=list)
    figures: Callable[[], Figures] | None = None
    version: str = "unknown"
    watch: Watch = field(init=False)
    ending: Ending = field(default_factory=Ending)

    def __post_init__(self) -> None:
        self.watch = Watch(
            lambda: None if self.figures is None else self.figures(), lambda: self.agents
        )


def context_of(request: Request) -> ServerContext:
    """Return the state of the server that handles this request."""
    context: ServerContext = request.app.state.context
    return context


def settings_of(request: Request) -> ServerSettings:
    return context_of(request).settings


def serving_of(request: Request, name: object = None) -> ServingPort:
    """Return the model that a request names, by default the first model. Raises OverloadedError
    while the server loads, and ModelNotFoundError for an unknown name."""
    context = context_of(request)
    serving = context.serving
    if serving is None:
        raise OverloadedError("the model is loading", retry_after=RETRY_SECONDS)
    if context.models is not None and isinstance(name, str):
        serving = context.models.serving_of(name)
    known = serving.model
    called = name if known.any_name and isinstance(name, str) and known.accepts(name) else None
    if called not in (None, known.id):
        _names.warn(f"requests name the model {called!a}: {known.id} answers")
    recorder = context.watch.recorder.of(getattr(request.state, "tenant", ""), known.id)
    observers = [*context.observers, recorder, log_entry_of(request.scope)]
    model = "" if context.models is None else known.id
    return InstrumentedServing(
        serving, observers, model=model, name=called, through=context.ending.events
    )


_names: Final = WarnOnce()


def embedding_of(request: Request) -> EmbeddingPort:
    """Return the embedding model. Raises OverloadedError while it loads, and ModelNotFoundError on
    a server without one."""
    context = context_of(request)
    if context.serving is None:
        raise OverloadedError("the model is loading", retry_after=RETRY_SECONDS)
    if context.embedding is None:
        raise ModelNotFoundError(
            "this server has no embedding model: start it with --embedding-model"
        )
    return context.embedding


def model_in_query(request: Request) -> str | None:
    """Return the model's name in the query. A plus sign means a space."""
    given, models = request.query_params.get(MODEL_QUERY), context_of(request).models
    if given is None or models is None:
        return given
    served = [one.served for one in models.statuses()]
    names = (given, given.replace(" ", "+"))
    return next((name for name in names if any(one.accepts(name) for one in served)), given)


def agents_of_named(request: Request) -> AgentsPort:
    """Return the agents of the model in the query. Raises the same errors as `agents_of`, and
    InvalidRequestError if the query must name a model."""
    models = context_of(request).models
    names = () if models is None else [one.served.id for one in models.statuses()]
    if len(names) > 1 and MODEL_QUERY not in request.query_params:
        raise InvalidRequestError(
            f"expected the agent's model in --model, or in {MODEL_QUERY}= of the query: one of "
            f"{', '.join(names)}"
        )
    return agents_of(request)


def agents_of(request: Request) -> AgentsPort:
    """Return the agents of the model in the query, or of the first model. Raises OverloadedError
    while the server loads, and ModelNotFoundError for an unknown name."""
    context = context_of(request)
    if context.agents is None:
        raise OverloadedError("the model is loading", retry_after=RETRY_SECONDS)
    name = model_in_query(request)
    if name is None:
        return context.agents
    if context.models is not None:
        return context.models.agents_of(name)
    if context.serving is not None and not context.serving.model.accepts(name):
        raise ModelNotFoundError(unknown_model(name, context.serving.model.names))
    return context.agents


T = TypeVar("T")

_STREAM_HEADERS: Final = {"cache-control": "no-store", "x-accel-buffering": "no"}


def heartbeat() -> bytes:
    """Return a comment line, which keeps the connection alive."""
    return b": keep-alive\n\n"


def event_stream(
    request: Request,
    events: AsyncGenerator[bytes, None] | StartedStream[bytes],
    keep_alive: Callable[[], bytes] = heartbeat,
    media_type: str = "text/event-stream",
) -> Response:
    """Return a response that streams `events`, and `keep_alive()` in each keep-alive interval. A
    disconnect closes `events`."""
    response = _EventStream(events, headers=_STREAM_HEADERS, media_type=media_type)
    response.seconds, response.keep_alive = settings_of(request).keep_alive, keep_alive
    return response


class _EventStream(StreamingResponse):
    body_iterator: AsyncGenerator[bytes, None] | StartedStream[bytes]
    seconds: float
    keep_alive: Callable[[], bytes]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnectedError):
            await until_disconnect(Request(scope, receive), self.stream_response(send))

    async def stream_response(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        pings = asyncio.ensure_future(self._ping(send))
        try:
            async with aclosing(self.body_iterator) as events:
                await send({"type": "http.response.start", **start})
                async for event in events:
                    await send(_body(event))
        finally:
            await _cancel_and_wait(pings)
        await send(_body(b"", more=False))

    async def _ping(self, send: Send) -> None:
        while True:
            await asyncio.sleep(self.seconds)
            await send(_body(self.keep_alive()))


def _body(data: bytes, *, more: bool = True) -> dict[str, object]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def until_disconnect(request: Request, work: Coroutine[object, object, T]) -> T:
    """Await `work` and return its result. On a disconnect, cancels `work` and raises
    ClientDisconnectedError. Read the request's body before the call."""
    task = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait((task, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnectedError
    finally:
        await _cancel_and_wait(task)
        await _cancel_and_wait(disconnected)


class StartedStream(Generic[T]):
    """A stream whose errors before the first item can still become HTTP errors."""

    def __init__(self, first: asyncio.Future[T], rest: AsyncGenerator[T, None]) -> None:
        self._first: asyncio.Future[T] | None = first
        self._rest = rest

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        first, self._first = self._first, None
        return await (anext(self._rest) if first is None else first)

    async def aclose(self) -> None:
        """Close the generator of the stream, which cancels a running request."""
        if self._first is not None:
            await _cancel_and_wait(self._first)
        await self._rest.aclose()


async def start_stream(request: Request, events: AsyncGenerator[T, None]) -> StartedStream[T]:
    """Wait for the first of `events`, but no longer than the keep-alive interval. Raises the same
    errors as `events`, and ClientDisconnectedError."""

    async def take_first() -> T:
        return await anext(events)

    first = asyncio.ensure_future(take_first())
    disconnected = asyncio.ensure_future(_wait_for_disconnect(request))
    started: StartedStream[T] | None = None
    try:
        await asyncio.wait(
            (first, disconnected),
            timeout=settings_of(request).keep_alive,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if first.done():
            first.result()
        elif disconnected.done():
            raise ClientDisconnectedError
        started = StartedStream(first, events)
    finally:
        await _cancel_and_wait(disconnected)
        if started is None:
            await _cancel_and_wait(first)
            await events.aclose()
    return started


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _cancel_and_wait(task: asyncio.Future[T]) -> None:
    if task.done():
        return
    task.cancel()
    await asyncio.wait((task,))
