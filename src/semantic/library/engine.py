"""Engine and Agent: the library for programs without an event loop. Each method runs its twin of
`AsyncEngine` or `AsyncAgent` on a loop in a thread of its own."""

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

    It loads the model at once. Any thread may call it. `AsyncEngine` is its twin for programs on
    an event loop.
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
        """`model` is a folder, a hub id, an alias or the model inside the package; or `Settings`,
        which have the store and all budgets too.

        `adapters` are folders with adapters that mlx-lm trained, by name. Each makes a model of its
        own, `base+name`, of the same weights, with an equal part of the pool: see `agent`.

        With a folder as `store` agents outlive the process; True is the folder of the command line,
        which one process at a time may use. `max_context` limits a prompt and its answer together,
        in tokens. `on_store_unavailable` gets the reason why a store is not usable; without it that
        is a StoreError.

        Raises ModelNotFoundError, UnsupportedModelError, InvalidRequestError for a store or
        adapters together with `Settings` that have them and for an invalid name of an adapter, and
        OperatorError when MLX is not usable.
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
        """Return when the store, if any, has every agent on disk as of its last turn. `close` does
        this too."""
        self._loop.run(self._engine.flush())

    def close(self) -> None:
        """Cancel what runs, save every agent, and end all threads. A second call does nothing, or
        waits for the first."""
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
        """The model's names, context and default sampling."""
        return self._engine.model

    @property
    def models(self) -> Sequence[ServedModel]:
        """The model, and what it is under each adapter."""
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
        the caller iterates over the text as it comes. `model` is that of `agent`; options and
        errors are those of `Agent.chat`."""
        asked = self.agent(agent, model=model)
        if stream:
            return asked.chat(messages, stream=True, **options)
        return asked.chat(messages, **options)

    def run_batch(
        self, requests: Iterable[tuple[str, Messages] | Request], **options: Unpack[ChatOptions]
    ) -> list[Answer]:
        """Answer many requests in one batch, and return the answers in their order.

        A request is an agent's name with its messages, or a `Request` with options of its own,
        which precede `options`. The engine computes common prefixes once. Raises
        InvalidRequestError, before any work, for an agent that two requests name; an error of one
        request when all others have ended.
        """
        return self._loop.run(self._engine.run_batch(requests, **options))

    def count_tokens(self, messages: Messages) -> int:
        """Tokens of the prompt of a message (a text) or a whole conversation (messages). Raises
        InvalidRequestError for wrong messages, and if the model has no chat template."""
        return self._loop.run(self._engine.count_tokens(messages))

    def agent(self, name: str, *, system: str | None = None, model: str | None = None) -> Agent:
        """Return the agent of that name: known, saved in the store, or new. Computes nothing.

        With adapters `model` is one of the names in `models`, or an adapter's; without one it is
        the base. Each model has agents of its own. Raises InvalidRequestError for an invalid name,
        and if the agent's conversation began with another message than `system`, and
        ModelNotFoundError for another model.
        """
        return Agent(self._engine.agent(name, system=system, model=model), self._loop)

    def agents(self, model: str | None = None) -> Sequence[AgentSummary]:
        """All agents of a model that have a turn: with a request first, then the last used."""
        return self._loop.run(self._engine.agents(model))

    def stores(self) -> Sequence[StoreStats]:
        """Size and counts of each tier of the store."""
        return self._engine.stores()

    def import_agent(
        self, path: str | Path, name: str | None = None, *, model: str | None = None
    ) -> Agent:
        """The agent of a file of `Agent.export`, under `name` or its own. The engine checks every
        byte before it stores anything. Import only files that you trust: checksums detect damage,
        not forged contents. Raises InvalidRequestError for the name of another agent, another
        model's agent and a damaged file, and CapacityError when the store does not take it."""
        work = self._engine.import_agent(path, name, model=model)
        return Agent(self._loop.run(work), self._loop)


class Agent:
    """An agent: a conversation, and the cache of all its tokens. `Engine.agent` returns one. One
    turn runs at a time; different agents answer together."""

    def __init__(self, agent: AsyncAgent, loop: _LoopThread) -> None:
        self._agent = agent
        self._loop = loop

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @property
    def name(self) -> str:
        """Its name."""
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
        """Answer the next message, or a whole conversation.

        A text continues the agent's conversation, also one of an earlier process if the engine has
        a store. Messages replace it. The engine reuses the cached tokens of either. With `stream`
        the caller iterates over the text as it comes. `options` are those of `ChatOptions`:
        `max_tokens`, `temperature`, `seed`, `stop`, `tools`, `schema` and others.

        Raises InvalidRequestError for wrong messages or options, and while the agent answers;
        ContextOverflowError for more than the context; BackendError if the model fails. An error
        leaves the conversation as it was.
        """
        if stream:
            found = self._loop.run(self._agent.chat(messages, stream=True, **options))
            return AnswerStream(found, self._loop)
        return self._loop.run(self._agent.chat(messages, **options))

    def history(self) -> tuple[Message, ...]:
        """Return the messages of the conversation so far. Raises InvalidRequestError if the store
        has the agent without its messages, as a server saves it, and if it began with another
        system message than its own here."""
        return self._loop.run(self._agent.history())

    def set_system(self, text: str | None) -> None:
        """Continue with another system message; None for none. The engine computes the next prompt
        from there."""
        self._loop.run(self._agent.set_system(text))

    @property
    def cached_tokens(self) -> int:
        """Cached tokens from its beginning: a prompt that begins like it computes none of them
        again. 0 for an agent without a turn."""
        return self._loop.run(self._agent.cached_tokens())

    def info(self) -> AgentDetail:
        """Its tokens, bytes, parent and blocks, each block with its place. Raises
        AgentNotFoundError for an agent without a turn."""
        return self._loop.run(self._agent.info())

    def why(self) -> str:
        """Say how much of its last prompt the engine reused, and why not more: a sentence a line.
        Raises AgentNotFoundError for an agent without a turn."""
        return self._loop.run(self._agent.why())

    def fork(self, name: str) -> Agent:
        """Return a new agent with this one's conversation and cache, without copying either. Raises
        InvalidRequestError if there is an agent of that name, or this one has no turn yet."""
        return Agent(self._loop.run(self._agent.fork(name)), self._loop)

    def pin(self, *, pinned: bool = True) -> None:
        """Exempt its blocks from eviction, or with `pinned=False` allow it again. Raises
        AgentNotFoundError for an agent without a turn."""
        self._loop.run(self._agent.pin(pinned=pinned))

    def export(self, path: str | Path) -> int:
        """Write the agent with its cache to one file, for another machine; returns its bytes. The
        file has the whole conversation, with access for its owner alone, and replaces an earlier
        one when it is whole. Raises AgentNotFoundError for an agent without a turn, and
        OperatorError if it cannot write the file."""
        return self._loop.run(self._agent.export(path))

    def forget(self) -> None:
        """Delete its conversation and its cache, on disk too. Its system message stays. Raises
        InvalidRequestError while it is answering."""
        self._loop.run(self._agent.forget())


class AnswerStream:
    """An answer as it comes: iterate over it for its text, or over `events` for everything. The end
    of a `with` block, or `close`, cancels the rest. After the last piece `answer` has the whole.
    `cancel` returns at once: a signal handler may call it."""

    def __init__(self, stream: AsyncAnswerStream, loop: _LoopThread) -> None:
        self._stream = stream
        self._loop = loop

    @property
    def answer(self) -> Answer:
        """The whole answer. Raises BackendError before the stream has ended."""
        return self._stream.answer

    def events(self) -> Iterator[AnswerEvent]:
        """Every event: progress of the prompt, text, reasoning, tool calls, the end. Raises
        BackendError if the answer fails."""
        return _Items(self._stream.events(), self._loop)

    def __iter__(self) -> Iterator[str]:
        """The answer's text, piece by piece. Raises BackendError if the answer fails."""
        return _Items(self._stream.__aiter__(), self._loop)

    def cancel(self) -> None:
        """End the answer at the next step; its stream ends with the text so far."""
        self._loop.begin(self._stream.cancel())

    def close(self) -> None:
        """Cancel the rest and read no more. Does nothing after the engine's end."""
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
        self._lock = threading.RLock()  # the handler of a signal may begin work within `_begun`
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """True if it accepts no more work."""
        return self._is_closed

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Return the result of `work`; an interrupt while waiting cancels it. Raises BackendError
        if the loop closes, also before the end of `work`."""
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
        """Start `work`, and wait for nothing. Raises BackendError after the loop's end."""
        self._begun(work)

    def close(self) -> None:
        """Cancel the rest, and end the loop and its thread. Call once."""
        with self._lock:
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _begun(self, work: Coroutine[object, object, T]) -> Future[T]:
        with self._lock:  # `close` cancels all that begins before it
            if not self._is_closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise BackendError(_CLOSED)


async def _cancel_others() -> None:
    """Cancel all tasks of the running loop but this one, and wait for their ends."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for one in others:
        one.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class _Items(Iterator[T]):
    """The items of an asynchronous generator of a loop, each as it arrives. The loop closes a
    dropped one. Not a generator: its `finally` could wait for the loop on the loop's own thread."""

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
