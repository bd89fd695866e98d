"""The edge of a fleet. Checks requests as a server does, and passes them on to replicas.

All requests of one session have the same key. Thus they reach the replica with their caches.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from http import HTTPStatus
from typing import Final

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.types import Receive, Scope, Send

from semantic.domain.errors import InvalidRequestError, OverloadedError
from semantic.domain.identity import home_of
from semantic_fleet.replicas.fleet_port import PassedRequest, ReplicasPort, ResponseHead
from semantic_server.http.app import NO_TELEMETRY, guarding_middleware, large_bodies
from semantic_server.http.context import ServerContext, context_of, settings_of, until_disconnect
from semantic_server.http.errors import (
    NDJSON,
    ClientDisconnectedError,
    Problem,
    WireError,
    add_error_handlers,
    anthropic_error,
    is_anthropic,
    is_ollama,
    json_line,
    logger,
    ollama_error,
    openai_error,
    problem_of,
    sse_event,
)
from semantic_server.http.health import Status
from semantic_server.http.identity import (
    AGENT_FIELD,
    AGENT_HEADER,
    Json,
    header_texts,
    read_identity,
    require_operator,
)
from semantic_server.http.openai.responses.output_items import ID_BYTES, RESPONSE_PREFIX
from semantic_server.http.openai.responses.routes import RESPONSES_PATH
from semantic_server.http.openai.responses.writer import error_event
from semantic_server.http.request_body import parse_offloaded, read_body
from semantic_server.http.settings import ServerSettings

_ACTIONS: Final = "why|fork|pin|checkpoints|restore|family|diff"
_AGENT_PATH: Final = re.compile(rf"/v1/agents/(.+?)(?:/(?:{_ACTIONS}))?")
_LISTS: Final = ("messages", "input", "prompt", "documents")
"""Fields that contain the beginning of a conversation, or texts for vectors."""
_FIXED: Final = ("system", "instructions")
"""Fields that precede the beginning of a conversation."""
_TEXT: Final = 2048
"""The number of characters of a prompt that count as its opening."""
_TOKENS: Final = 512
"""The number of token ids of a prompt that count as its opening."""
_USER: Final = "user"
_CACHE_MARK: Final = "cache_control"
_DIGITS: Final = 8
"""The number of hexadecimal digits of a key. Ids of responses end with the key."""
_RESPONSE_ID: Final = re.compile(
    rf"{RESPONSE_PREFIX}[0-9a-f]{{{2 * ID_BYTES}}}(?P<key>[0-9a-f]{{{_DIGITS}}})"
)
_RESPONSE_PATH: Final = re.compile(rf"{RESPONSES_PATH}/([^/]+)(?:/input_items)?")
_PREVIOUS: Final = "previous_response_id"


def routing_key(path: str, headers: Mapping[str, str], body: Json, tenant: str = "") -> str:
    """Return the routing key of a request to `path`. `headers` have lower-case names.

    Requests of the same agent, session or chain of responses have the same key. The key of any
    other request depends on its first messages.
    """
    found = _named(path, headers, body)
    if found is None:
        identity = read_identity(headers, body)
        if identity is not None and not identity.shared:
            found = home_of(identity.name)
    of_response = _key_of_response(path, body)
    if found is None and of_response is not None:
        return of_response
    name = f"opening:{_opening(body)}" if found is None else f"agent:{found}"
    text = f"{len(tenant)}:{tenant}{name}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(text).hexdigest()[:_DIGITS]


def _named(path: str, headers: Mapping[str, str], body: Json) -> str | None:
    in_path = _AGENT_PATH.fullmatch(path)
    given = headers.get(AGENT_HEADER, body.get(AGENT_FIELD)) if in_path is None else in_path[1]
    return home_of(given) if isinstance(given, str) and given else None


def _key_of_response(path: str, body: Json) -> str | None:
    in_path = _RESPONSE_PATH.fullmatch(path)
    given = body.get(_PREVIOUS) if in_path is None else in_path[1]
    match = _RESPONSE_ID.fullmatch(given) if isinstance(given, str) else None
    return None if match is None else match["key"]


def _opening(body: Json) -> str:
    """Return a conversation up to and including its first user message."""
    fixed = [_words(body[name]) for name in _FIXED if name in body]
    begins = [_words(_first(body[name])) for name in _LISTS if name in body]
    return json.dumps([fixed, begins])


def _first(found: object) -> object:
    if isinstance(found, str):
        return found[:_TEXT]
    if not isinstance(found, list):
        return None
    for number, one in enumerate(found):
        if isinstance(one, dict) and one.get("role") == _USER:
            return found[: number + 1]
    return found[:_TOKENS] if all(isinstance(one, int) for one in found) else found[:1]


def _words(found: object) -> str:
    """Return the text of messages. Omits details that clients change later."""
    if isinstance(found, str):
        return found
    if isinstance(found, list):
        return "\n".join(map(_words, found))
    if not isinstance(found, dict):
        return json.dumps(found)
    inner = found.get("content", found.get("text"))
    if inner is not None:
        return _words(inner)
    plain = {name: value for name, value in found.items() if name != _CACHE_MARK}
    return json.dumps(plain, sort_keys=True)


_REPLICA_LABEL: Final = "replica"
_STREAMS: Final = (b"text/event-stream", NDJSON.encode())

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def create_edge(
    replicas: ReplicasPort, settings: ServerSettings, lifespan: Lifespan, version: str
) -> FastAPI:
    """Return the app that passes requests on to `replicas`. `lifespan` runs the replicas."""
    app = FastAPI(
        title="semantic",
        version=version,
        middleware=guarding_middleware(settings),
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        telemetry=NO_TELEMETRY,
    )
    app.state.context = ServerContext(settings=settings, version=version)
    app.state.bodies = large_bodies(settings)
    add_error_handlers(app)

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Status:
        return Status(status="ok")

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        if settings_of(request).api_keys:
            require_operator(request, "metrics cover all tenants")
        return await _all_metrics(replicas, request)

    for path in ("/v1/agents/{agent_id:path}", "/v1/requests/{request_id}"):

        @app.delete(path)
        async def end_everywhere(request: Request) -> Response:
            return await _first_done(replicas, request)

    for path in ("/v1/agents/import", "/v1/agents/{agent_id:path}/export"):
        app.add_api_route(path, _refuse_archives, methods=["GET", "POST"])
    app.add_api_route("/v1/overview/stream", _refuse_watching, methods=["GET"])
    app.mount("/", _PassOn(replicas))
    return app


async def _refuse_archives() -> Response:
    raise WireError(
        HTTPStatus.NOT_IMPLEMENTED,
        "a fleet does not import or export agents: its replicas share them through --remote-store; "
        "export from `semantic serve` with the same store",
        code="not_in_a_fleet",
    )


async def _refuse_watching() -> Response:
    raise WireError(
        HTTPStatus.NOT_IMPLEMENTED,
        "a fleet streams no overview, which would delay stopping replicas: use /v1/overview",
        code="not_in_a_fleet",
    )


class _PassOn:
    def __init__(self, replicas: ReplicasPort) -> None:
        self._replicas = replicas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        answer = _Answer(scope["path"], send)
        async with read_body(request) as data:
            key = await _key_of(request, data)
            try:
                await until_disconnect(request, self._answer(request, key, answer, data))
            except ClientDisconnectedError:
                return
            except OverloadedError as error:
                if not answer.has_begun:
                    raise
                logger.warning("cut an answer short: %s", error)
                await answer.fail(problem_of(error))

    async def _answer(self, request: Request, key: str, answer: _Answer, data: bytes) -> None:
        async with (
            aclosing(self._replicas.answer(key, _passed(request, data, key))) as replies,
            aclosing(context_of(request).ending.events(replies)) as pieces,
        ):
            async for piece in pieces:
                await answer.send(piece)
        await answer.end()


class _Answer:
    """A response as ASGI messages. Sends a stream as it arrives. Collects any other response, so
    that an error can replace it."""

    def __init__(self, path: str, send: Send) -> None:
        self._path = path
        self._send = send
        self._head: ResponseHead | None = None
        self._body = bytearray()
        self.has_begun = False

    async def send(self, piece: ResponseHead | bytes) -> None:
        if isinstance(piece, ResponseHead):
            self._head = piece
            if dict(piece.headers).get(b"content-type", b"").startswith(_STREAMS):
                await self._begin(piece)
        elif self.has_begun:
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        else:
            self._body += piece

    async def end(self) -> None:
        if self._head is None:
            raise OverloadedError("the replica ended without an answer", retry_after=1)
        if not self.has_begun:
            await self._begin(self._head)
        await self._send({"type": "http.response.body", "body": bytes(self._body)})

    async def fail(self, problem: Problem) -> None:
        await self.send(_last_event(self._path, problem))
        await self.end()

    async def _begin(self, head: ResponseHead) -> None:
        self.has_begun = True
        headers = list(head.headers)
        await self._send({"type": "http.response.start", "status": head.status, "headers": headers})


def _last_event(path: str, problem: Problem) -> bytes:
    if is_ollama(path):
        return json_line(ollama_error(problem))
    if is_anthropic(path):
        return sse_event(anthropic_error(problem), "error")
    if path == RESPONSES_PATH:
        event = error_event(problem)
        return sse_event({**event, "sequence_number": 0}, str(event["type"]))
    return sse_event(openai_error(problem))


async def _key_of(request: Request, data: bytes) -> str:
    """Return the routing key of a request. For a malformed body, the replica reports the error."""
    body: Mapping[str, object] = {}
    with suppress(InvalidRequestError, WireError):
        body = await parse_offloaded(request, data)
    tenant = getattr(request.state, "tenant", "")
    return routing_key(request.scope["path"], header_texts(request.headers), body, tenant)


def _passed(request: Request, body: bytes = b"", key: str = "") -> PassedRequest:
    scope = request.scope
    return PassedRequest(
        scope["method"],
        scope["path"],
        scope["raw_path"],
        scope["query_string"],
        tuple(scope["headers"]),
        body,
        key,
    )


async def _first_done(replicas: ReplicasPort, request: Request) -> Response:
    """Send a deletion to all replicas. Return a successful response, or else the first response."""
    replies = [*(await replicas.answers(_passed(request))).values()]
    done = [one for one in replies if one[0].status < HTTPStatus.BAD_REQUEST]
    head, body = (done or replies)[0]
    response = Response(body, head.status)
    response.raw_headers = list(head.headers)
    return response


async def _all_metrics(replicas: ReplicasPort, request: Request) -> Response:
    texts: dict[str, str] = {}
    for name, (head, body) in (await replicas.answers(_passed(request))).items():
        if head.status != HTTPStatus.OK:
            return Response(body, head.status)
        texts[name] = body.decode()
    return Response(merged_metrics(texts), media_type=CONTENT_TYPE_LATEST)


def merged_metrics(texts: Mapping[str, str]) -> bytes:
    """Merge the replicas' metrics in Prometheus' text format. A label names the replica."""
    registry = CollectorRegistry()
    registry.register(_Merged(texts))
    return generate_latest(registry)


class _Merged(Collector):
    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for name, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                known = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for one in family.samples:
                    labels = {**one.labels, _REPLICA_LABEL: name}
                    known.samples.append(one._replace(labels=labels))
        yield from families.values()
