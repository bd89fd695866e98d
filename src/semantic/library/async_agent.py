"""`AsyncAgent`: an agent's conversation and its cache."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Literal, Unpack, overload

from semantic.application.agents.branches import require_name
from semantic.application.cache.agent_notes import explain
from semantic.application.chat.answer_reader import AnswerMessage
from semantic.application.chat.transcript import transcript_of
from semantic.application.serving import Serving
from semantic.domain.answer import (
    AnswerEnd,
    AnswerEvent,
    AnswerStarted,
    PromptProgress,
    PromptScored,
)
from semantic.domain.block_hash import LOCAL_TENANT
from semantic.domain.chat import Message
from semantic.domain.errors import (
    AgentNotFoundError,
    BackendError,
    InvalidRequestError,
    OperatorError,
)
from semantic.library.answers import Answer, AsyncAnswerStream, whole
from semantic.library.chat_options import (
    ChatOptions,
    Messages,
    ask_for,
    check_options,
    conversation,
)
from semantic.ports.agents import AgentDetail, AgentSummary, Branch, Checkpoints, Comparison

_PIECE_BYTES: Final = 1 << 20


async def write_archive(path: Path, pieces: AsyncIterable[bytes]) -> None:
    """Write `pieces` to the file `path`, readable only by its owner. A failure leaves an existing
    file unchanged. Raises OperatorError if writing fails, and the errors of `pieces`."""
    with _named(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        unfinished = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                async for piece in pieces:
                    await asyncio.to_thread(file.write, piece)
                await asyncio.to_thread(os.fsync, file.fileno())
            unfinished.replace(path)
        finally:
            with suppress(OSError):  # gone by now, unless something failed
                unfinished.unlink()


async def read_archive(path: Path) -> AsyncGenerator[bytes, None]:
    """Yield the content of a file in pieces of at most 1 MiB. Raises InvalidRequestError for an
    unreadable file."""
    try:
        with path.open("rb") as file:
            while piece := await asyncio.to_thread(partial(file.read, _PIECE_BYTES)):
                yield piece
    except OSError as error:
        raise InvalidRequestError(f"cannot read {path}: {error.strerror}") from error


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OperatorError(f"cannot write {path}: {error.strerror or error}") from error


_TURNS_TO_CLOSE: Final = 32
"""Iterations of the event loop in which a dropped stream closes."""


class AsyncAgent:
    """An agent, as `AsyncEngine.agent` returns it. See `Agent` for the methods."""

    def __init__(
        self, name: str, serving: Callable[[], Serving], agents: dict[str, AsyncAgent]
    ) -> None:
        """`serving` returns the loaded model, and raises BackendError once the engine is closed.
        `fork` adds the new agent to `agents`. Raises InvalidRequestError for an invalid `name`."""
        require_name(name)
        self.name = name
        self._loaded = serving
        self._agents = agents
        self._system: str | None = None
        self._messages: tuple[Message, ...] | None = None
        self._is_answering = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    # Its conversation

    @overload
    async def chat(
        self, messages: Messages, *, stream: Literal[False] = ..., **options: Unpack[ChatOptions]
    ) -> Answer: ...

    @overload
    async def chat(
        self, messages: Messages, *, stream: Literal[True], **options: Unpack[ChatOptions]
    ) -> AsyncAnswerStream: ...

    async def chat(
        self, messages: Messages, *, stream: bool = False, **options: Unpack[ChatOptions]
    ) -> Answer | AsyncAnswerStream:
        check_options(options)
        turn = _Turn(self.name)
        events = self._answered(messages, options, turn)
        started = await anext(events)
        answers = AsyncAnswerStream(started, events, turn.answer, lambda: self._cancel(turn))
        return answers if stream else await whole(answers)

    async def history(self) -> tuple[Message, ...]:
        if self._messages is None:
            found: tuple[Message, ...] = ()
            with suppress(AgentNotFoundError):
                found = await self._serving.history(self.name, LOCAL_TENANT)
            if found and self._system not in (None, _system_of(found)):
                raise InvalidRequestError(
                    f"agent {self.name!r} began with another system message: forget it first, or "
                    "change its system message"
                )
            self._messages = found or _begun(self._system)
        return self._messages

    async def set_system(self, text: str | None) -> None:
        before = () if self._messages is None else self._messages
        if self._messages is None:
            self._system = None
            before = await self.history()
        rest = before[1:] if _system_of(before) is not None else before
        self._system, self._messages = text, (*_begun(text), *rest)

    # Its cache

    async def cached_tokens(self) -> int:
        try:
            detail = await self.info()
        except AgentNotFoundError:
            return 0
        stop = 0
        for block in detail.blocks:
            if block.place == "missing":
                break
            stop = block.stop
        return stop

    async def info(self) -> AgentDetail:
        return await self._serving.agents.show(self.name, LOCAL_TENANT)

    async def why(self) -> str:
        match = (await self.info()).match
        texts: dict[int | None, str] = {}
        if match is not None and match.expected is not None and match.got is not None:
            tokens = (match.expected, match.got)
            texts = dict(zip(tokens, await self._serving.token_texts(tokens), strict=True))
        return "\n".join(explain(self.name, match, texts.get))

    async def fork(
        self, name: str, *, checkpoint: str | None = None, turn: int | None = None
    ) -> AsyncAgent:
        branch = Branch(self.name, checkpoint, turn)
        await self._serving.agents.fork(branch, [name], LOCAL_TENANT)
        forked = self._agents[name] = AsyncAgent(name, self._loaded, self._agents)
        if checkpoint is None and turn is None:
            forked._system, forked._messages = self._system, self._messages
        return forked

    async def checkpoint(
        self, name: str, *, turn: int | None = None, pinned: bool = False
    ) -> AgentSummary:
        branch = Branch(self.name, turn=turn)
        return await self._serving.agents.checkpoint(branch, name, LOCAL_TENANT, pinned=pinned)

    async def checkpoints(self) -> Checkpoints:
        return await self._serving.agents.checkpoints(self.name, LOCAL_TENANT)

    async def delete_checkpoint(self, name: str) -> None:
        await self._serving.agents.delete_checkpoint(self.name, name, LOCAL_TENANT)

    async def restore(self, checkpoint: str) -> None:
        await self._require_idle()
        await self._serving.agents.restore(self.name, checkpoint, LOCAL_TENANT)
        self._system = self._messages = None

    async def diff(self, other: AsyncAgent) -> Comparison:
        return await self._serving.agents.compare(self.name, other.name, LOCAL_TENANT)

    async def pin(self, *, pinned: bool = True) -> None:
        await self._serving.agents.pin(self.name, LOCAL_TENANT, pinned=pinned)

    async def export(self, path: str | Path) -> int:
        archive = await self._serving.agents.export(self.name, LOCAL_TENANT)
        try:
            async with aclosing(archive.pieces) as pieces:
                await write_archive(Path(path), pieces)
        finally:
            archive.close()
        return archive.n_bytes

    async def forget(self) -> None:
        await self._require_idle()
        with suppress(AgentNotFoundError):
            await self._serving.agents.forget(self.name, LOCAL_TENANT)
        if self._messages is not None:
            self._system = _system_of(self._messages)
        self._messages = _begun(self._system)

    # Inside

    @property
    def _serving(self) -> Serving:
        return self._loaded()

    def begin(self, system: str) -> None:
        """Set the first system message. Raises InvalidRequestError if the conversation began with
        another one."""
        if self._messages is None or not self._messages:
            self._system, self._messages = system, _begun(system) if self._messages == () else None
        elif _system_of(self._messages) != system:
            raise InvalidRequestError(
                f"agent {self.name!r} began with another system message: forget it first, or "
                "change its system message"
            )

    async def _answered(
        self, messages: Messages, options: ChatOptions, turn: _Turn
    ) -> AsyncGenerator[AnswerEvent, None]:
        keep = options.get("keep", True)
        async with self._answering(keep=keep):
            asked = await self._asked(messages)
            ask = ask_for(self.name, asked, options, self._serving.model.sampling)
            ask = replace(ask, note=transcript_of(asked), tenant=LOCAL_TENANT)
            try:
                async with aclosing(self._serving.answer(ask)) as events:
                    async for event in events:
                        turn.add(event)
                        yield event
            finally:
                if keep and turn.is_answered:
                    self._messages = (*asked, turn.message)

    async def _asked(self, messages: Messages) -> tuple[Message, ...]:
        if not isinstance(messages, str) or not messages:
            return conversation(messages)
        return (*await self.history(), Message("user", messages))

    @asynccontextmanager
    async def _answering(self, *, keep: bool) -> AsyncGenerator[None, None]:
        """Allow only one turn at a time, except for turns without `keep`."""
        if not keep:
            yield
            return
        await self._require_idle()
        self._is_answering = True
        try:
            yield
        finally:
            self._is_answering = False

    async def _require_idle(self) -> None:
        """Raise InvalidRequestError while the agent answers. A dropped stream first gets several
        iterations of the event loop to close."""
        for _ in range(_TURNS_TO_CLOSE):
            if not self._is_answering:
                return
            await asyncio.sleep(0)
        raise InvalidRequestError(
            f"agent {self.name!r} is answering: read its answer or close its stream first"
        )

    async def _cancel(self, turn: _Turn) -> None:
        await self._serving.agents.cancel(turn.uid, LOCAL_TENANT)


class _Turn:
    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._collected = AnswerMessage()
        self._end: AnswerEnd | None = None
        self._has_begun = False
        self.uid = ""

    def add(self, event: AnswerEvent) -> None:
        match event:
            case AnswerStarted():
                self.uid = event.uid
            case AnswerEnd() if event.reason == "error":
                self._has_begun = False
                raise BackendError(event.error or "the model failed")
            case AnswerEnd():
                self._end = event
                self._has_begun |= event.usage.completion > 0
            case PromptProgress() | PromptScored():
                pass
            case _:
                self._has_begun = True
                self._collected.add(event)

    @property
    def message(self) -> Message:
        return self._collected.message

    @property
    def is_answered(self) -> bool:
        return self._has_begun

    def answer(self) -> Answer | None:
        if self._end is None:
            return None
        end = self._end
        return Answer(self._agent, self.message, end.reason, end.usage, end.stop_string)


def _begun(system: str | None) -> tuple[Message, ...]:
    return () if system is None else (Message("system", system),)


def _system_of(messages: tuple[Message, ...]) -> str | None:
    first = messages[:1]
    return first[0].content if first and first[0].role in ("system", "developer") else None
