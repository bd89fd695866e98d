"""Replies of OpenAI's APIs, either as chunks of a stream or as one object."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final, Generic, Protocol, TypeVar

from anyio import CancelScope
from fastapi import Request
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from semantic.domain.answer import AnswerEvent, AnswerStarted, Usage
from semantic.domain.errors import SemanticError
from semantic.domain.match import MatchReport
from semantic.domain.value_objects import TokenLogprob
from semantic.ports.serving import Ask, ServedModel, ServingPort
from semantic_server.http.answer_records import usage_extension
from semantic_server.http.context import StartedStream, event_stream, start_stream, until_disconnect
from semantic_server.http.errors import WireError, openai_error, problem_of, sse_event
from semantic_server.http.openai.fields import Json
from semantic_server.http.openai.requests import StreamOptions
from semantic_server.http.request_body import described

_MINUS_INFINITY: Final = -9999.0
"""OpenAI's log-probability for a probability of 0. JSON has no minus infinity."""

_INCOMPLETE: Final = "\ufffd"
"""Marks the text of a token that is only part of a character."""


class TopLogprob(TypedDict):
    """A candidate token. `bytes` is null for a part of a character."""

    token: str
    bytes: list[int] | None
    logprob: float


class ChatTokenLogprob(TopLogprob):
    """A generated token and the likeliest candidates at its position."""

    top_logprobs: list[TopLogprob]


def finite(logprob: float) -> float:
    """Return `logprob`, or -9999 instead of minus infinity."""
    return max(logprob, _MINUS_INFINITY)


async def texts_of(
    serving: ServingPort, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None]
) -> Mapping[int, str]:
    """Return the text of each token, by token id."""
    ids = set(tokens)
    for one in logprobs:
        if one is not None:
            ids |= {one.token, *(token for token, _ in one.top)}
    if not ids:
        return {}
    ordered = sorted(ids)
    return dict(zip(ordered, await serving.token_texts(ordered), strict=True))


async def chat_logprobs(
    serving: ServingPort, logprobs: Sequence[TokenLogprob]
) -> list[ChatTokenLogprob]:
    """Return `logprobs` as the list `choices[].logprobs.content`."""
    texts = await texts_of(serving, (), logprobs)
    return [
        {
            **_top(texts[one.token], one.logprob),
            "top_logprobs": [_top(texts[token], logprob) for token, logprob in one.top],
        }
        for one in logprobs
    ]


def _top(text: str, logprob: float) -> TopLogprob:
    whole = _INCOMPLETE not in text
    return {
        "token": text,
        "bytes": list(text.encode("utf-8", "surrogatepass")) if whole else None,
        "logprob": finite(logprob),
    }


D = TypeVar("D", bound="Delta")
D_contra = TypeVar("D_contra", contravariant=True)

IndexedEvent = tuple[int, AnswerEvent]
"""An event and the index of its choice."""

_DONE: Final = "[DONE]"

_VERSIONED: Final = ("semantic-engine", "mlx", "mlx-lm")
"""Python packages whose version may change an answer."""


# Events of all choices


async def merged_events(
    serving: ServingPort, choices: Sequence[Ask]
) -> AsyncGenerator[IndexedEvent, None]:
    """Yield the events of all answers in order of arrival. If one answer fails, all answers end.
    Closing this generator cancels the answers."""
    if len(choices) == 1:  # nothing to merge: no task for each event
        answer = serving.answer(choices[0])
        try:
            async for event in answer:
                yield 0, event
        finally:
            with CancelScope(shield=True):  # as in `_merged`
                await answer.aclose()
        return
    async with aclosing(_merged([serving.answer(choice) for choice in choices])) as merged:
        async for one in merged:
            yield one


async def _merged(
    answers: Sequence[AsyncGenerator[AnswerEvent, None]],
) -> AsyncGenerator[IndexedEvent, None]:
    pending: dict[asyncio.Task[AnswerEvent | None], int] = {}
    held: list[IndexedEvent] = []
    unstarted = len(answers)
    try:
        for index, answer in enumerate(answers):
            pending[asyncio.create_task(_next(answer))] = index
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=pending.__getitem__):
                found, index = task.result(), pending.pop(task)
                if found is None:
                    continue
                pending[asyncio.create_task(_next(answers[index]))] = index
                unstarted -= isinstance(found, AnswerStarted)
                held.append((index, found))
            if unstarted:
                continue
            for one in held:
                yield one
            held.clear()
    finally:
        # Shielded: a disconnect cancels the scope around the response.
        with CancelScope(shield=True):
            await _end(pending, answers)


async def _next(answer: AsyncGenerator[AnswerEvent, None]) -> AnswerEvent | None:
    return await anext(answer, None)


async def _end(
    pending: dict[asyncio.Task[AnswerEvent | None], int],
    answers: Sequence[AsyncGenerator[AnswerEvent, None]],
) -> None:
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for answer in answers:
        await answer.aclose()


# Usage


@dataclass(slots=True)
class UsageSum:
    """The sum of the usage of all choices. A prompt counts once for all its choices."""

    n: int = 1
    _ended: dict[int, Usage] = field(default_factory=dict)

    def add(self, index: int, usage: Usage) -> None:
        """Add the usage of choice number `index`."""
        self._ended[index] = usage

    def total(self) -> Usage:
        """Return the usage of the finished choices."""
        prompts: dict[int, Usage] = {}
        for index, usage in self._ended.items():
            prompt = index // self.n
            known = prompts.get(prompt)
            if known is None or usage.cached < known.cached:
                prompts[prompt] = usage
        return Usage(
            prompt=sum(usage.prompt for usage in prompts.values()),
            cached=sum(usage.cached for usage in prompts.values()),
            completion=sum(usage.completion for usage in self._ended.values()),
            reasoning=sum(usage.reasoning for usage in self._ended.values()),
            match=max((usage.match for usage in prompts.values()), key=_n_recomputed, default=None),
            kept=all(usage.kept for usage in prompts.values()),
            noted=sum(usage.noted for usage in prompts.values()),
            lane=next((usage.lane for usage in prompts.values()), None),
            exact=all(usage.exact for usage in self._ended.values()),
            drafted=sum(usage.drafted for usage in self._ended.values()),
            accepted=sum(usage.accepted for usage in self._ended.values()),
        )


def usage_object(usage: Usage) -> Json:
    """Return the member `usage` of a reply or a last chunk."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.total,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached,
            "cache_write_tokens": usage.written,
        },
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning,
            "accepted_prediction_tokens": usage.accepted,
            "rejected_prediction_tokens": usage.drafted - usage.accepted,
        },
        **usage_extension(usage),
    }


def _n_recomputed(match: MatchReport | None) -> int:
    return 0 if match is None or match.lost is None else match.lost.tokens


# Replies


class Delta(Protocol):
    """An addition to one choice of a reply. Only a choice's last delta has a `usage`."""

    @property
    def index(self) -> int:
        """The index of the choice."""

    @property
    def usage(self) -> Usage | None:
        """The usage of the choice. It is None before the choice's end."""

    def as_object(self) -> Json:
        """Return this delta as a member of a chunk's `choices`."""


class ChoiceSum(Protocol[D_contra]):
    """Sums up the deltas of one choice."""

    def add(self, delta: D_contra) -> None:
        """Add the choice's next delta."""

    def as_object(self, index: int) -> Json:
        """Return the complete choice as a member of the reply's `choices`."""


@dataclass(frozen=True, slots=True)
class ReplyKind(Generic[D]):
    """The names with which an API marks its replies."""

    id_prefix: str
    name: str
    chunk_name: str
    new_sum: Callable[[], ChoiceSum[D]]


class Reply(Generic[D]):
    """One reply of an API. `n` is the number of choices per prompt."""

    def __init__(
        self, kind: ReplyKind[D], model: ServedModel, options: StreamOptions, *, n: int
    ) -> None:
        self._kind = kind
        self._options = options
        self._usage = UsageSum(n)
        self._id = f"{kind.id_prefix}-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._model = model.id

    async def respond(self, request: Request, deltas: AsyncGenerator[D, None]) -> Response:
        """Return the HTTP response once its first data is ready. An earlier error of `deltas`
        becomes an HTTP error. A later one ends the stream."""
        if not self._options.stream:
            return JSONResponse(await until_disconnect(request, self._whole(deltas)))
        chunks = await start_stream(request, self._chunks(deltas))
        return event_stream(request, _events(chunks))

    async def _whole(self, deltas: AsyncIterator[D]) -> Json:
        sums: dict[int, ChoiceSum[D]] = {}
        async for delta in deltas:
            sums.setdefault(delta.index, self._kind.new_sum()).add(delta)
            if delta.usage is not None:
                self._usage.add(delta.index, delta.usage)
        choices = [sums[index].as_object(index) for index in sorted(sums)]
        return self._object(self._kind.name, choices) | self._total_usage()

    async def _chunks(self, deltas: AsyncGenerator[D, None]) -> AsyncGenerator[Json, None]:
        """Yield the chunks of a stream. If the client requests usage, every chunk has a `usage`, as
        in OpenAI's streams."""
        name, options = self._kind.chunk_name, self._options
        last: Json | None = None  # the end of a choice, until another chunk follows
        async with aclosing(deltas):
            async for delta in deltas:
                if last is not None:
                    yield last
                    last = None
                chunk = self._object(name, [delta.as_object()])
                if delta.usage is not None:
                    self._usage.add(delta.index, delta.usage)
                if options.usage == "own chunk":
                    known = options.running_usage and delta.usage is not None
                    chunk |= self._total_usage() if known else {"usage": None}
                elif delta.usage is not None and options.usage == "finish":
                    last = chunk
                    continue
                yield chunk
        if last is not None:
            yield last | self._total_usage()
        if options.usage == "own chunk":
            yield self._object(name, []) | self._total_usage()

    def _object(self, name: str, choices: Sequence[Json]) -> Json:
        return {
            "id": self._id,
            "object": name,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": _fingerprint(self._model),
            "choices": choices,
        }

    def _total_usage(self) -> Json:
        return {"usage": usage_object(self._usage.total())}


async def _events(chunks: StartedStream[Json]) -> AsyncGenerator[bytes, None]:
    try:
        async for chunk in chunks:
            yield sse_event(chunk)
        yield sse_event(_DONE)
    except (SemanticError, WireError) as error:
        yield sse_event(openai_error(problem_of(error)))
    finally:
        await chunks.aclose()


@lru_cache(maxsize=16)
def _fingerprint(model_id: str) -> str:
    versions = (f"{name} {_version(name)}" for name in _VERSIONED)
    named = "\0".join((*versions, model_id)).encode("utf-8", "surrogatepass")
    return f"fp_{hashlib.sha256(named).hexdigest()[:10]}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


# Descriptions


def openai_body(required: str, *, streams: bool = True) -> dict[str, object]:
    """Return the OpenAPI description of a route whose body requires `model` and `required`."""
    return described(
        {"model": {"type": "string"}, required: {}},
        {"stream": {"type": "boolean"}} if streams else {},
        f"The reply{', or a stream of its chunks' if streams else ''}.",
        body="As OpenAI documents it; an unsupported field is a 400.",
        stream="text/event-stream" if streams else None,
    )
