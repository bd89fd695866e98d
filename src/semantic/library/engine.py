"""Engine and Agent: the library for programs without an event loop. Each method runs the
`AsyncEngine` or `AsyncAgent` method of the same name, on an event loop in another thread."""

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
from semantic.ports.agents import AgentDetail, AgentSummary
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
    for programs on an event loop.
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
        """`model` is a folder, a hub id, an alias, the model inside the package, or `Settings`,
        which also include the store and all budgets.

        `adapters` maps names to folders with adapters that mlx-lm trained. Each adapter makes
        another model, `base+name`, on the same weights, with an equal part of the pool: see
        `agent`.

        If `store` is a folder, agents outlive the process; True means the command line's folder,
        which only one process at a time may use. `max_context` limits a prompt plus its answer, in
        tokens. `on_store_unavailable` is called with the reason if the store is not usable; without
        `on_store_unavailable` the constructor raises StoreError.

        Raises ModelNotFoundError, UnsupportedModelError, and OperatorError if MLX is not usable.
        Raises InvalidRequestError for an invalid adapter name, for `store` with `Settings`, and for
        `adapters` with `Settings` that have an adapter.
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
        """Return once every agent is on disk as of its last turn, if the engine has a store.
        `close` does the same."""
        self._loop.run(self._engine.flush())

    def close(self) -> None:
        """Cancel running requests, save every agent, and end all threads. A second call only waits
        until the first has finished."""
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
        """The model's names, context limit and default sampling parameters."""
        return self._engine.model

    @property
    def models(self) -> Sequence[ServedModel]:
        """The base model, then one model for each adapter."""
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
        """Answer an agent's next message (a text) or a whole conversation (messages). With `stream`
        the caller iterates over the text as it arrives. `model` is the same as for the method
        `agent`; options and errors are the same as for `Agent.chat`."""
        asked = self.agent(agent, model=model)
        if stream:
            return asked.chat(messages, stream=True, **options)
        return asked.chat(messages, **options)

    def run_batch(
        self, requests: Iterable[tuple[str, Messages] | Request], **options: Unpack[ChatOptions]
    ) -> list[Answer]:
        """Answer many requests in one batch, and return the answers in the order of the requests. A
        request is a pair of an agent's name and its messages, or a `Request`, whose own options
        override `options`. The engine computes common prefixes once. Raises InvalidRequestError,
        before any work, if two requests name the same agent. If a request fails, raises its error
        once all other requests have finished."""
        return self._loop.run(self._engine.run_batch(requests, **options))

    def count_tokens(self, messages: Messages) -> int:
        """Return how many prompt tokens a message (a text) or a conversation (messages) has. Raises
        InvalidRequestError for invalid messages, and for a model without a chat template."""
        return self._loop.run(self._engine.count_tokens(messages))

    def agent(self, name: str, *, system: str | None = None, model: str | None = None) -> Agent:
        """Return the agent `name`, which may be known, saved in the store, or new. Computes
        nothing. With adapters, `model` is a name in `models` or an adapter's name; by default the
        base model. Each model has its own agents. Raises InvalidRequestError for an invalid name or
        if the agent's conversation began with another system message than `system`, and
        ModelNotFoundError for an unknown model."""
        return Agent(self._engine.agent(name, system=system, model=model), self._loop)

    def agents(self, model: str | None = None) -> Sequence[AgentSummary]:
        """Return all agents of a model that have had a turn: first the agents with a request, then
        the other agents, last used first."""
        return self._loop.run(self._engine.agents(model))

    def stores(self) -> Sequence[StoreStats]:
        """Return the size and the event counts of each tier of the store."""
        return self._engine.stores()

    def import_agent(
        self, path: str | Path, name: str | None = None, *, model: str | None = None
    ) -> Agent:
        """Import an agent from a file that `Agent.export` wrote, under `name` or else the name in
        the file. The engine checks every byte before it stores anything. Import only files that you
        trust: checksums detect damage, not forged contents. Raises InvalidRequestError if the name
        is taken, the agent belongs to another model or the file is damaged. Raises CapacityError if
        the store lacks space for the agent."""
        work = self._engine.import_agent(path, name, model=model)
        return Agent(self._loop.run(work), self._loop)


class Agent:
    """An agent: a conversation, and the cache of all its tokens. `Engine.agent` returns an agent.
    An agent runs one turn at a time; different agents can answer at the same time."""

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

        A text continues the agent's conversation; with a store, also a conversation from an earlier
        process. Messages replace the conversation. Texts and messages reuse cached tokens. With
        `stream` the caller iterates over the text as it arrives. `options` are the fields of
        `ChatOptions`: `max_tokens`, `temperature`, `seed`, `stop`, `tools`, `schema` and others.

        Raises InvalidRequestError for invalid messages or options, and while the agent answers;
        ContextOverflowError if the context is too small; BackendError if the model fails. An error
        leaves the conversation as it was.
        """
        if stream:
            found = self._loop.run(self._agent.chat(messages, stream=True, **options))
            return AnswerStream(found, self._loop)
        return self._loop.run(self._agent.chat(messages, **options))

    def history(self) -> tuple[Message, ...]:
        """Return the messages of the conversation so far. Raises InvalidRequestError if a server
        saved the agent, because the store then lacks its messages. Also raises if the conversation
        began with another system message than `Engine.agent` got."""
        return self._loop.run(self._agent.history())

    def set_system(self, text: str | None) -> None:
        """Continue with another system message; None removes the system message. The engine
        computes the next prompt from the first changed token on."""
        self._loop.run(self._agent.set_system(text))

    @property
    def cached_tokens(self) -> int:
        """The number of cached tokens from the start of the conversation: a prompt that begins with
        these tokens reuses their cache. 0 for an agent without a turn."""
        return self._loop.run(self._agent.cached_tokens())

    def info(self) -> AgentDetail:
        """Return the agent's tokens, bytes, parent and blocks, and the places of each block. Raises
        AgentNotFoundError for an agent without a turn."""
        return self._loop.run(self._agent.info())

    def why(self) -> str:
        """Return a text that says how much of the last prompt the engine reused, and why not more,
        in one sentence per line. Raises AgentNotFoundError for an agent without a turn."""
        return self._loop.run(self._agent.why())

    def fork(self, name: str) -> Agent:
        """Return a new agent that begins with this agent's conversation and shares its cache.
        Raises InvalidRequestError if the name is taken, or if this agent has no turn yet."""
        return Agent(self._loop.run(self._agent.fork(name)), self._loop)

    def pin(self, *, pinned: bool = True) -> None:
        """Exempt the agent's blocks from eviction; with `pinned=False`, end the exemption. Raises
        AgentNotFoundError for an agent without a turn."""
        self._loop.run(self._agent.pin(pinned=pinned))

    def export(self, path: str | Path) -> int:
        """Write the agent with its cache to a file, which another machine can import, and return
        the file's size in bytes. The file contains the whole conversation, is readable only by its
        owner, and replaces an earlier file only once complete. Raises AgentNotFoundError for an
        agent without a turn, and OperatorError if the file cannot be written."""
        return self._loop.run(self._agent.export(path))

    def forget(self) -> None:
        """Delete the agent's conversation and cache, also on disk. The agent's system message
        stays. Raises InvalidRequestError while the agent is answering."""
        self._loop.run(self._agent.forget())


class AnswerStream:
    """An answer as it arrives: iterate over the stream for the text, or over `events` for all
    events. `close`, which the end of a `with` block calls, cancels the unfinished answer. After the
    last piece, `answer` is the whole answer. `cancel` returns at once, so a signal handler may call
    it."""

    def __init__(self, stream: AsyncAnswerStream, loop: _LoopThread) -> None:
        self._stream = stream
        self._loop = loop

    @property
    def answer(self) -> Answer:
        """The whole answer. Raises BackendError until the stream has finished."""
        return self._stream.answer

    def events(self) -> Iterator[AnswerEvent]:
        """Iterate over every event: prompt progress, text, reasoning, tool calls, and the end.
        Raises BackendError if the answer fails."""
        return _Items(self._stream.events(), self._loop)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the answer's text in pieces. Raises BackendError if the answer fails."""
        return _Items(self._stream.__aiter__(), self._loop)

    def cancel(self) -> None:
        """End the answer at the next step; the stream ends with the text so far."""
        self._loop.begin(self._stream.cancel())

    def close(self) -> None:
        """Cancel the unfinished answer and stop reading. Does nothing if the engine is closed."""
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
        """True once the loop accepts no more work."""
        return self._is_closed

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Run `work` on the loop and return its result; an interrupt of this call cancels `work`.
        Raises BackendError if the loop is closed, or closes before `work` finishes."""
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
        """Start `work` and return at once. Raises BackendError once the loop is closed."""
        self._begun(work)

    def close(self) -> None:
        """Cancel all remaining work, and end the loop and its thread. Call `close` once."""
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
    """Cancel all other tasks of the running loop, and wait until all have finished."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for one in others:
        one.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class _Items(Iterator[T]):
    """Iterates over the items of an asynchronous generator on the loop as they arrive. The loop
    closes a dropped generator. This is a class, because the `finally` of a generator could wait for
    the loop on the loop's own thread."""

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
