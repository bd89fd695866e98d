"""What replies of chat completions and completions share: events of all choices to JSON or SSE.

The answers of a request's choices run concurrently and are merged into one stream of events. A
wire turns events into deltas, and deltas into chunks or into one object, with metadata and usage
from here. Knows no wire's choices.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from typing import Final, Protocol, TypeVar

from anyio import CancelScope
from fastapi import Request
from sse_starlette import ServerSentEvent
from starlette.responses import Response

from semantic.adapters.http.cache_miss_report import usage_extension
from semantic.adapters.http.errors import WireError, openai_error, problem_of
from semantic.adapters.http.openai.requests import StreamOptions
from semantic.adapters.http.streaming import StartedStream, event_stream, sse_event, start_stream
from semantic.domain.answer import AnswerEnd, AnswerEvent, AnswerStarted, ToolCallFailed, Usage
from semantic.domain.errors import SemanticError
from semantic.domain.match import MatchReport
from semantic.ports.serving import Ask, ServedModel, ServingPort

logger = logging.getLogger("semantic.server")

D = TypeVar("D")
D_contra = TypeVar("D_contra", contravariant=True)

IndexedEvent = tuple[int, AnswerEvent]
"""An event and the index of its choice."""

_DONE: Final = "[DONE]"

_VERSIONED: Final = ("semantic", "mlx", "mlx-lm")
"""Packages whose versions may change the last bits of a result."""


# Events of all choices


async def merged_events(
    serving: ServingPort, choices: Sequence[Ask]
) -> AsyncGenerator[IndexedEvent, None]:
    """The events of all answers as they arrive, from the moment that every answer has started.

    What `ServingPort.answer` raises is thus raised before the first event. If one answer fails
    all end. Closing this generator cancels the answers that still run.
    """
    answers = [serving.answer(choice) for choice in choices]
    pending: dict[asyncio.Task[AnswerEvent | None], int] = {}
    held: list[IndexedEvent] = []
    unstarted = len(answers)
    try:
        for index, answer in enumerate(answers):
            pending[asyncio.create_task(_next(answer))] = index
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=pending.__getitem__):
                event, index = task.result(), pending.pop(task)
                if event is None:
                    continue
                pending[asyncio.create_task(_next(answers[index]))] = index
                unstarted -= isinstance(event, AnswerStarted)
                held.append((index, event))
            if unstarted:
                continue
            for one in held:
                yield one
            held.clear()
    finally:
        # Shielded: after a disconnect the scope around the response is cancelled.
        with CancelScope(shield=True):
            await _end(pending, answers)


async def _next(answer: AsyncGenerator[AnswerEvent, None]) -> AnswerEvent | None:
    """The next event; None after the last one."""
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


def check_finished(end: AnswerEnd) -> None:
    """Raise WireError unless the answer is complete or was cut at `max_tokens`."""
    if end.reason == "cancelled":
        raise WireError(
            HTTPStatus.SERVICE_UNAVAILABLE, "the answer was cancelled", code="cancelled"
        )
    if end.reason == "error":
        # The cause may disclose details of the machine: it goes to the log alone.
        logger.error("answer failed: %s", end.error)
        raise WireError(
            HTTPStatus.INTERNAL_SERVER_ERROR,
            "the model failed while it answered",
            code="answer_failed",
        )


def unreadable_call(failed: ToolCallFailed) -> WireError:
    """The error of an answer with a malformed tool call, including the text of the call.

    It is an error and not a text: as text it would end an agent's work silently.
    """
    return WireError(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        f"the model wrote a tool call that cannot be read: {failed.problem}; it wrote: "
        f"{failed.text}",
        code="tool_call_unreadable",
    )


# Metadata and usage


@dataclass(frozen=True, slots=True)
class ReplyMetadata:
    """Identical in all chunks of a reply. `created` is in seconds since 1970."""

    id: str
    created: int
    model: str
    fingerprint: str

    def as_object(self, kind: str) -> dict[str, object]:
        """The first fields of a JSON object of this `kind`."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def new_metadata(prefix: str, model: ServedModel) -> ReplyMetadata:
    """Metadata with a new random id that starts with `prefix`."""
    return ReplyMetadata(
        f"{prefix}-{secrets.token_hex(16)}", int(time.time()), model.id, _fingerprint(model.id)
    )


@lru_cache(maxsize=16)
def _fingerprint(model_id: str) -> str:
    """Changes with everything that may change the answer to a seed: the model and the packages."""
    versions = (f"{name} {_version(name)}" for name in _VERSIONED)
    named = "\0".join((*versions, model_id)).encode("utf-8", "surrogatepass")
    return f"fp_{hashlib.sha256(named).hexdigest()[:10]}"


def _version(package: str) -> str:
    """The installed version; "none" for a package that runs from its source."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


@dataclass(slots=True)
class UsageSum:
    """Sums the usage of a request whose prompts have `n` choices each.

    A prompt counts once, whatever its number of choices; its cached tokens are those that none of
    the choices computed. `match` is that of the prompt with the most tokens computed again.
    """

    n: int = 1
    _ended: dict[int, Usage] = field(default_factory=dict)

    def add(self, index: int, usage: Usage) -> None:
        """Count choice number `index`, which has ended."""
        self._ended[index] = usage

    def total(self) -> Usage:
        """The usage of the choices that have ended."""
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
        )


def usage_object(usage: Usage) -> dict[str, object]:
    """The member `usage` of replies and last chunks."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.total,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached,
            "cache_write_tokens": usage.written,
        },
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
        **usage_extension(usage.match),
    }


def _n_recomputed(match: MatchReport | None) -> int:
    return 0 if match is None or match.lost is None else match.lost.tokens


# Streams


class Chunks(Protocol[D_contra]):
    """Serializes the deltas of a wire as chunks."""

    def chunk(self, delta: D_contra) -> dict[str, object]:
        """The chunk with `delta`."""
        ...

    def last(self) -> dict[str, object] | None:
        """The chunk after all deltas, if there is one."""
        ...


@dataclass(frozen=True, slots=True)
class ChunkFactory:
    """Wraps choices into chunks of this `kind`: metadata, and usage where the options request it.

    With usage requested every chunk has the member `usage`, as OpenAI's have.
    """

    kind: str
    metadata: ReplyMetadata
    options: StreamOptions
    usage: UsageSum

    def chunk(
        self, choice: dict[str, object], index: int, ended: Usage | None
    ) -> dict[str, object]:
        """The chunk with `choice`; `ended` is the usage of choice number `index` at its end."""
        chunk = self.metadata.as_object(self.kind) | {"choices": [choice]}
        if ended is not None:
            self.usage.add(index, ended)
        if self.options.usage:
            known = self.options.running_usage and ended is not None
            chunk["usage"] = usage_object(self.usage.total()) if known else None
        return chunk

    def last(self) -> dict[str, object] | None:
        """The final chunk, with the total usage; None unless usage was requested."""
        if not self.options.usage:
            return None
        usage = usage_object(self.usage.total())
        return self.metadata.as_object(self.kind) | {"choices": [], "usage": usage}


async def streamed(
    request: Request, deltas: AsyncGenerator[D, None], chunks: Chunks[D]
) -> Response:
    """A response that streams `deltas`, once the first has arrived.

    What `deltas` raises before the first is raised here, and becomes an HTTP error. A later error
    is the last event of the stream; clients raise it.
    """
    stream = await start_stream(request, deltas)
    return event_stream(request, _events(stream, chunks))


async def _events(
    stream: StartedStream[D], chunks: Chunks[D]
) -> AsyncGenerator[ServerSentEvent, None]:
    try:
        async for delta in stream:
            yield sse_event(chunks.chunk(delta))
        last = chunks.last()
        if last is not None:
            yield sse_event(last)
        yield sse_event(_DONE)
    except (SemanticError, WireError) as error:
        yield sse_event(openai_error(problem_of(error)))
    finally:
        await stream.aclose()
