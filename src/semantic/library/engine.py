"""`Engine` and `Agent`: the library for programs without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Literal, Self, TypeVar, Unpack, overload

from semantic.bootstrap import OnStoreUnavailable
from semantic.composition.engine_settings import DEFAULT_MODEL, Settings
from semantic.domain.answer import AnswerEvent
from semantic.domain.chat import Message
from semantic.domain.errors import BackendError
from semantic.domain.stored import StoreStats
from semantic.library.answers import Answer, AsyncAnswerStream
from semantic.library.async_agent import AsyncAgent
from semantic.library.async_engine import AsyncEngine
from semantic.library.chat_options import ChatOptions, Messages, Request
from semantic.ports.agents import AgentDetail, AgentSummary, Checkpoints, Comparison
from semantic.ports.serving import ServedModel

T = TypeVar("T")

_CLOSED = "the engine is closed"


class Engine:
    """A model that computes no agent's tokens twice.

        with Engine("semantic-tiny", store="agents") as engine:
            print(engine.chat("ada", "My name is Ada.").text)
            for text in engine.chat("ada", "What is my name?", stream=True):
                print(text, end="")

    The constructor loads the model. Any thread may use the engine. `AsyncEngine` is the same class
    for programs with an event loop.
    """

    def __init__(
        self,
        model: str | Settings = DEFAULT_MODEL,
        *,
        store: str | Path | bool = False,
        max_context: int | None = None,
        on_store_unavailable: OnStoreUnavailable | None = None,
        adapters: Mapping[str, str | Path] | None = None,
    ) -> None:
        """`model` is a folder, a hub id, an alias or `Settings`. By default it is the model inside
        the package.

        `adapters` maps names to folders with adapters that mlx-lm trained. Each adapter makes
        another model, `base+name`, on the same weights.

        With a folder as `store`, agents outlive the process. True means the command line's folder,
        which only one process at a time may use. `max_context` limits a prompt plus its answer, in
        tokens. `on_store_unavailable` receives the reason if the store is not usable; without it,
        the constructor raises StoreError.

        Raises ModelNotFoundError, UnsupportedModelError, and OperatorError if MLX is not usable.
        Raises InvalidRequestError for an invalid adapter name, and for arguments that contradict
        `Settings`.
        """
        self._engine = AsyncEngine(
            model,
            store=store,
            max_context=max_context,
            on_store_unavailable=on_store_unavailable,
            adapters=adapters,
        )
        self._loop = _LoopThread()
        self._closing = threading.Lock()
        try:
            self._loop.run(self._engine.start())
        finally:
            if not self._engine.is_loaded:
                self._loop.close()

    def flush(self) -> None:
        """Return once every agent's last turn is on disk. `close` does the same."""
        self._loop.run(self._engine.flush())

    def close(self) -> None:
        """Cancel running requests, save every agent, and end all threads."""
        with self._closing:
            if self._engine.is_loaded:
                self._loop.run(self._engine.close())
                self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    @property
    def model(self) -> ServedModel:
        """The names of the model, its context limit and its default sampling parameters."""
        return self._engine.model

    @property
    def models(self) -> Sequence[ServedModel]:
        """The base model, followed by one model for each adapter."""
        return self._engine.models

    @overload
    def chat(
        self,
        agent: str,
        messages: Messages,
        *,
        stream: Literal[False] = ...,
        model: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> Answer: ...

    @overload
    def chat(
        self,
        agent: str,
        messages: Messages,
        *,
        stream: Literal[True],
        model: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> AnswerStream: ...

    def chat(
        self,
        agent: str,
        messages: Messages,
        *,
        stream: bool = False,
        model: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> Answer | AnswerStream:
        """Answer an agent's next message, which is a text, or a whole conversation, which is a
        list. With `stream`, iterate over the text as it arrives. `model` is as for `agent`. Options
        and errors are as for `Agent.chat`."""
        asked = self.agent(agent, model=model)
        if stream:
            return asked.chat(messages, stream=True, **options)
        return asked.chat(messages, **options)

    def run_batch(
        self, requests: Iterable[tuple[str, Messages] | Request], **options: Unpack[ChatOptions]
    ) -> list[Answer]:
        """Answer many requests in one batch. Returns the answers in the same order. A request is a
        `Request`, or a pair of an agent's name and messages. Raises InvalidRequestError if two name
        the same agent. A failed request raises its error at the end."""
        return self._loop.run(self._engine.run_batch(requests, **options))

    def count_tokens(self, messages: Messages) -> int:
        """Return the number of prompt tokens of a message or of a whole conversation. Raises
        InvalidRequestError for invalid messages, and if the model has no chat template."""
        return self._loop.run(self._engine.count_tokens(messages))

    def agent(self, name: str, *, system: str | None = None, model: str | None = None) -> Agent:
        """Return the agent `name`, which may be new. `model` is one of `models`. By default it is
        the base model. Raises ModelNotFoundError for an unknown model, and InvalidRequestError for
        an invalid name or a different system message."""
        return Agent(self._engine.agent(name, system=system, model=model), self._loop)

    def agents(self, model: str | None = None) -> Sequence[AgentSummary]:
        """Return all agents of a model that have had a turn. Agents with a request come first. The
        other agents follow, last used first."""
        return self._loop.run(self._engine.agents(model))

    def stores(self) -> Sequence[StoreStats]:
        """Return the size and the event counts of each tier of the store."""
        return self._engine.stores()

    def import_agent(
        self, path: str | Path, name: str | None = None, *, model: str | None = None
    ) -> Agent:
        """Import an agent from a file that `Agent.export` wrote. Import only files that you trust,
        because checksums do not detect forged contents. Raises InvalidRequestError if the name is
        taken or the file is damaged, and CapacityError if the store lacks space."""
        work = self._engine.import_agent(path, name, model=model)
        return Agent(self._loop.run(work), self._loop)


class Agent:
    """An agent: a conversation and its cache. An agent runs one turn at a time; different agents
    can answer at once."""

    def __init__(self, agent: AsyncAgent, loop: _LoopThread) -> None:
        self._agent = agent
        self._loop = loop

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @property
    def name(self) -> str:
        """The agent's name."""
        return self._agent.name

    @overload
    def chat(
        self, messages: Messages, *, stream: Literal[False] = ..., **options: Unpack[ChatOptions]
    ) -> Answer: ...

    @overload
    def chat(
        self, messages: Messages, *, stream: Literal[True], **options: Unpack[ChatOptions]
    ) -> AnswerStream: ...

    def chat(
        self, messages: Messages, *, stream: bool = False, **options: Unpack[ChatOptions]
    ) -> Answer | AnswerStream:
        """Answer the agent's next message (a text), or a whole conversation (messages).

        A text continues the agent's conversation, also from an earlier process if there is a store.
        Messages replace the conversation. Both reuse cached tokens. With `stream`, iterate over the
        text as it arrives. `options` are the fields of `ChatOptions`.

        Raises InvalidRequestError for invalid messages or options, and while the agent answers.
        Raises ContextOverflowError if the context is too small, and BackendError if the model
        fails. An error leaves the conversation unchanged.
        """
        if stream:
            found = self._loop.run(self._agent.chat(messages, stream=True, **options))
            return AnswerStream(found, self._loop)
        return self._loop.run(self._agent.chat(messages, **options))

    def history(self) -> tuple[Message, ...]:
        """Return the messages of the conversation. Raises InvalidRequestError if a server saved the
        agent, or if the system message differs."""
        return self._loop.run(self._agent.history())

    def set_system(self, text: str | None) -> None:
        """Continue with another system message, or with none."""
        self._loop.run(self._agent.set_system(text))

    @property
    def cached_tokens(self) -> int:
        """The number of cached tokens from the start of the conversation."""
        return self._loop.run(self._agent.cached_tokens())

    def info(self) -> AgentDetail:
        """Return facts about the agent, such as its tokens, bytes and blocks. Raises
        AgentNotFoundError for an agent without a turn."""
        return self._loop.run(self._agent.info())

    def why(self) -> str:
        """Return a sentence about how much of the last prompt the cache had, and why not more.
        Raises AgentNotFoundError for an agent without a turn."""
        return self._loop.run(self._agent.why())

    def fork(self, name: str, *, checkpoint: str | None = None, turn: int | None = None) -> Agent:
        """Return a new agent with this agent's conversation and cache, or those at a checkpoint or
        an earlier turn, counted from 1. Raises InvalidRequestError for a taken name, or before
        the first turn, and AgentNotFoundError for an unknown checkpoint."""
        forked = self._agent.fork(name, checkpoint=checkpoint, turn=turn)
        return Agent(self._loop.run(forked), self._loop)

    def checkpoint(
        self, name: str, *, turn: int | None = None, pinned: bool = False
    ) -> AgentSummary:
        """Save the conversation under a name, as it is or as of an earlier turn; copies nothing.
        Returns once it is on disk. Raises InvalidRequestError if the agent has one of that name."""
        return self._loop.run(self._agent.checkpoint(name, turn=turn, pinned=pinned))

    def checkpoints(self) -> Checkpoints:
        """Return the agent's checkpoints, and the lengths of the turns in its history."""
        return self._loop.run(self._agent.checkpoints())

    def delete_checkpoint(self, name: str) -> None:
        """Delete a checkpoint. Raises AgentNotFoundError for an unknown name."""
        self._loop.run(self._agent.delete_checkpoint(name))

    def restore(self, checkpoint: str) -> None:
        """Continue from a checkpoint, without the later conversation. Raises InvalidRequestError
        while the agent answers, and AgentNotFoundError for an unknown name."""
        self._loop.run(self._agent.restore(checkpoint))

    def diff(self, other: Agent) -> Comparison:
        """Return where and why the history of `other` leaves that of this agent. Raises
        AgentNotFoundError for an agent without a turn."""
        return self._loop.run(self._agent.diff(other._agent))

    def pin(self, *, pinned: bool = True) -> None:
        """Exempt the agent's blocks from eviction. `pinned=False` allows their eviction again.
        Raises AgentNotFoundError for an agent without a turn."""
        self._loop.run(self._agent.pin(pinned=pinned))

    def export(self, path: str | Path) -> int:
        """Write the agent and its cache to a file for another machine. Returns the file's size in
        bytes. The file contains the whole conversation; only its owner may read it. Raises
        AgentNotFoundError for an agent without a turn, and OperatorError if writing fails."""
        return self._loop.run(self._agent.export(path))

    def forget(self) -> None:
        """Delete the agent's conversation and cache, also on disk. Its system message stays. Raises
        InvalidRequestError while the agent answers."""
        self._loop.run(self._agent.forget())


class AnswerStream:
    """An answer as it arrives. Iterate over the stream for the answer's text, or over `events` for
    all events. The end of a `with` block cancels an unfinished answer."""

    def __init__(self, stream: AsyncAnswerStream, loop: _LoopThread) -> None:
        self._stream = stream
        self._loop = loop

    @property
    def answer(self) -> Answer:
        """The whole answer. Raises BackendError until the stream has finished."""
        return self._stream.answer

    def events(self) -> Iterator[AnswerEvent]:
        """Iterate over all events of the answer. Raises BackendError if it fails."""
        return _Items(self._stream.events(), self._loop)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the answer's text in pieces. Raises BackendError if the answer fails."""
        return _Items(self._stream.__aiter__(), self._loop)

    def cancel(self) -> None:
        """End the answer at the engine's next step. Returns at once, also in a signal handler."""
        self._loop.begin(self._stream.cancel())

    def close(self) -> None:
        """Cancel the unfinished answer."""
        if not self._loop.is_closed:
            self._loop.run(self._stream.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


class _LoopThread:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="library", daemon=True)
        self._thread.start()
        self._lock = threading.RLock()  # a signal handler may start work while `_begun` runs
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Run `work` on the event loop and return its result. An interrupt cancels `work`. Raises
        BackendError if the loop closes before the end of `work`."""
        future = self._begun(work)
        try:
            return future.result()
        except CancelledError:
            if self._is_closed:
                raise BackendError(_CLOSED) from None
            raise
        finally:
            future.cancel()

    def begin(self, work: Coroutine[object, object, None]) -> None:
        """Start `work` on the loop and return. Raises BackendError once the loop is closed."""
        self._begun(work)

    def close(self) -> None:
        """Cancel all work, and end the loop and its thread. Call this once."""
        with self._lock:
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _begun(self, work: Coroutine[object, object, T]) -> Future[T]:
        with self._lock:  # `close` cancels all work started before it
            if not self._is_closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise BackendError(_CLOSED)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for one in others:
        one.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class _Items(Iterator[T]):
    """Iterates over an asynchronous generator on the loop. A generator would not do, because its
    `finally` could wait for the loop on the loop's own thread."""

    def __init__(self, items: AsyncGenerator[T, None], loop: _LoopThread) -> None:
        self._items = items
        self._loop = loop

    def __next__(self) -> T:
        try:
            return self._loop.run(_next(self._items))
        except StopAsyncIteration:
            raise StopIteration from None


async def _next(items: AsyncGenerator[T, None]) -> T:
    return await anext(items)
