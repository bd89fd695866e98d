"""Serving: answers requests of the APIs with one engine.

Worker threads prepare prompts, and the engine's thread runs requests.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TypeVar

from semantic.application.agents.finder import AgentNames
from semantic.application.agents.served_agents import ServedAgents
from semantic.application.cache.prefix_lookup import Discovery
from semantic.application.cache.read_ahead import ToolTimes
from semantic.application.chat.answer_reader import AnswerReader, AnswerStream, message_in
from semantic.application.chat.preparation import Preparation, Prepared, length_of
from semantic.application.chat.replay import Replay
from semantic.application.chat.transcript import messages_in
from semantic.application.engine.engine_thread import EngineThread
from semantic.application.engine.submission import RequestHandle, Submission
from semantic.application.fair_threads import FairThreads
from semantic.domain.answer import (
    AnswerEnd,
    AnswerEvent,
    AnswerPiece,
    AnswerStarted,
    PromptProgress,
    PromptScored,
    Usage,
)
from semantic.domain.block_hash import PUBLIC_TENANT, pack_tokens
from semantic.domain.chat import Chat, Message, numbered_call
from semantic.domain.errors import (
    BackendError,
    InvalidRequestError,
    SemanticError,
    UncheckedGrammarError,
)
from semantic.domain.identity import digest
from semantic.domain.stored import Manifest
from semantic.domain.value_objects import (
    CompletedGeneration,
    PrefillEvent,
    SamplingParams,
    TokenEvent,
)
from semantic.ports.chat import ChatFormat
from semantic.ports.embedding import EmbeddingPort
from semantic.ports.generation import EngineEvent, Tokenizer
from semantic.ports.models import ModelsPort
from semantic.ports.serving import Ask, EngineState, Figures, MemoryLimit, Prompt, ServedModel
from semantic.ports.store import MOST_WAIT

T = TypeVar("T")

_CALL_ID_BYTES = 18
"""The random bytes in a call's id: 24 characters in base64, as clients expect."""
_COMPLETE = ("stop", "length", "tool_calls")
"""The finish reasons of complete answers."""
_MOST_CHECKS = 4
"""The maximum number of checks of a request's grammars."""
_SHORT = 1 << 16
"""The number of characters or token ids whose preparation takes about a tenth of a second."""
_PART = 256
"""The number of characters that take as long to prepare as one message."""
_AT_ONCE = 128
"""The maximum number of tokens whose texts the event loop looks up itself."""
_PUBLIC_NAME = 16
"""The number of characters of the digest in a public prefix's name."""


class Serving:
    """Answers requests with one engine."""

    models: ModelsPort | None = None
    """The models of the server; None if this model is the only one."""

    def __init__(
        self,
        thread: EngineThread,
        model: ServedModel,
        tokenizer: Tokenizer,
        chat_format: ChatFormat,
        preparation: Preparation,
        replay: Replay,
        names: AgentNames,
        agents: ServedAgents,
        workers: FairThreads,
    ) -> None:
        """`workers` run slow work that does not need the engine."""
        self._thread = thread
        self.model = model
        self._tokenizer = tokenizer
        self._format = chat_format
        self._preparation = preparation
        self._replay = replay
        self._names = names
        self.agents = agents
        self._workers = workers
        self.embedding: EmbeddingPort | None = None
        self.memory: MemoryLimit | None = None
        self.discovery: Discovery | None = None
        """Looks prompts up in the store's slow tier; None without a slow tier."""
        self.at_end: Callable[[], None] | None = None
        """Ends all readers of the store before the store closes."""
        self._arrivals: Arrivals | None = None
        self._tool_times = ToolTimes()

    async def close(self) -> None:
        """Cancel running requests, save every agent, and end all threads."""
        # The executor may keep a reference to its call a moment longer; this one does not keep the
        # serving or its model alive.
        here = [self.end]

        def end() -> None:
            here.pop()()

        await asyncio.get_running_loop().run_in_executor(None, end)

    def end(self) -> None:
        """Do the work of `close` on a thread without an event loop."""
        self._names.close()
        self.agents.close()
        if self.at_end is not None:
            self.at_end()
        self._thread.stop(drain=False)
        self._preparation.close()
        self._workers.close()
        if self.discovery is not None:
            self.discovery.close()
        self._replay.close()

    async def flush(self) -> None:
        """Wait until every agent saved so far is durable."""
        await asyncio.wrap_future(self._thread.call(lambda engine: engine.flush()))

    @property
    def has_failed(self) -> bool:
        return self._thread.state is EngineState.FAILED

    def figures(self) -> Figures:
        """Return the current figures. Thread-safe."""
        return Figures(self._thread.figures, self.agents.stores())

    async def publish(self, chat: Chat) -> tuple[int, ...]:
        """Compute the prefix `chat`, pin it and share it with every tenant; return its tokens.
        Raises BackendError, StoreError or an error of `answer`."""
        tokens = await self.tokenize(chat)
        name = f"public-{digest('public-v1', pack_tokens(tokens)).hex()[:_PUBLIC_NAME]}"
        ask = Ask(chat, SamplingParams(), max_tokens=1, agent=name, tenant=PUBLIC_TENANT)
        async for event in self.answer(ask):
            if isinstance(event, AnswerEnd) and event.error is not None:
                raise BackendError(event.error)
        await self.agents.pin(name, PUBLIC_TENANT, pinned=True)
        await asyncio.wrap_future(self._thread.call(lambda engine: engine.make_public(tokens)))
        return tokens

    async def answer(self, ask: Ask) -> AsyncGenerator[AnswerEvent, None]:
        prepared = await self._prepared(ask)
        await self._names.ready(ask)
        with self._names.claimed(prepared, ask) as agent:
            self._tool_times.returned(agent, ask.tenant)
            if self.discovery is not None:
                await self.discovery.wait(agent, ask.tenant, prepared.tokens)
            predicted: tuple[int, ...] = ()
            if ask.predicted and ask.hints.drafts:
                predicted = await self.tokenize(
                    ask.predicted, add_special_tokens=False, tenant=ask.tenant
                )
            submission = Submission(
                agent,
                prepared.tokens,
                prepared.max_tokens,
                prepared.sampling,
                ask.tenant,
                self._names.note(agent, prepared, ask),
                keep=ask.keep,
                hints=ask.hints,
                predicted=predicted,
                continues=prepared.chat is None,
            )
            events = EventQueue(self._arrivals_here())
            handle = self._thread.submit(submission, events.put)
            try:
                uid = await asyncio.wrap_future(handle.accepted)
                yield AnswerStarted(uid, agent, len(prepared.tokens))
                async for event in self._read(prepared, events, handle, _call_ids(ask)):
                    yield event
            finally:
                self._thread.cancel(handle)

    async def history(self, agent: str, tenant: str = "") -> tuple[Message, ...]:
        """Return the messages of a saved agent. Raises AgentNotFoundError, and InvalidRequestError
        for an agent without messages."""
        saved = await self.agents.saved(agent, tenant)
        return await self._workers.run(tenant, lambda: self._history(saved), is_short=False)

    async def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool = True, tenant: str = ""
    ) -> tuple[int, ...]:
        tokens = partial(
            self._preparation.tokens, prompt, add_special_tokens=add_special_tokens, tenant=tenant
        )
        return await self._workers.run(tenant, tokens, is_short=_is_short(prompt))

    async def detokenize(self, tokens: Sequence[int], tenant: str = "") -> str:
        most = self.model.context_tokens
        if len(tokens) > most:
            raise InvalidRequestError(
                f"tokens must have at most {most} ids, the model's context, got {len(tokens)}"
            )

        def decode() -> str:
            self._check(tokens)
            return self._tokenizer.decode(tokens)

        return await self._workers.run(tenant, decode, is_short=len(tokens) <= _SHORT)

    async def token_texts(self, tokens: Sequence[int], tenant: str = "") -> tuple[str, ...]:
        def texts() -> tuple[str, ...]:
            self._check(tokens)
            return tuple(map(self._tokenizer.text_of, tokens))

        if len(tokens) <= _AT_ONCE:
            return texts()
        return await self._workers.run(tenant, texts, is_short=len(tokens) <= _SHORT)

    # Inside

    def _history(self, saved: Manifest) -> tuple[Message, ...]:
        messages = messages_in(saved.note)
        if messages is None:
            raise InvalidRequestError(
                f"agent {saved.agent_id!r:.300} is saved without its messages: send all of them"
            )
        ends = self._tokenizer.eos_token_ids
        tokens = [one for one in saved.token_ids[saved.prompt_tokens :] if one not in ends]
        chat = Chat(messages)
        opens = self._format.render(chat).opens_thought
        reader = AnswerReader(self._format, chat, opens_thought=opens, new_id=_new_call_id)
        return (*messages, message_in(reader, self._tokenizer.decode(tokens)))

    def _arrivals_here(self) -> Arrivals:
        loop = asyncio.get_running_loop()
        if self._arrivals is None or self._arrivals.loop is not loop:
            self._arrivals = Arrivals(loop)
        return self._arrivals

    async def _prepared(self, ask: Ask) -> Prepared:
        # A worker never waits for a check of a grammar.
        is_short = _is_short(ask.prompt)
        prepare = partial(self._preparation.prepare, ask)
        for _ in range(_MOST_CHECKS):
            try:
                return await self._workers.run(ask.tenant, prepare, is_short=is_short)
            except UncheckedGrammarError as unchecked:
                await self._preparation.check(unchecked, ask.tenant)
        return await self._workers.run(ask.tenant, prepare, is_short=is_short)

    def _check(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not 0 <= token < self.model.vocab_size:
                raise InvalidRequestError(
                    f"token id {token} is not in the model's vocabulary of {self.model.vocab_size}"
                )

    async def _read(
        self,
        prepared: Prepared,
        events: EventQueue,
        handle: RequestHandle,
        new_id: Callable[[], str],
    ) -> AsyncGenerator[AnswerEvent, None]:
        # Log-probabilities of the prompt come first, and are complete only at the end. The last
        # event waits for the upload: the next request may reach another replica.
        stream = AnswerStream(self._reader(prepared, new_id))
        held: list[AnswerPiece] = []
        scores = prepared.sampling.prompt_logprobs is not None
        async for event in events:
            if isinstance(event, PrefillEvent):
                yield PromptProgress(event.done, event.total)
            elif isinstance(event, TokenEvent):
                held += stream.token(event)
                if stream.done:
                    self._thread.cancel(handle)
            else:
                pieces, reason = stream.end(event)
                uploading: Future[None] | None = None
                if reason in _COMPLETE:
                    uploading = self._record_turn(prepared, stream, event)
                    self._expect(handle.submission, stream.message)
                if scores and event.prompt_logprobs:
                    yield PromptScored(prepared.tokens, event.prompt_logprobs)
                for piece in (*held, *pieces):
                    yield piece
                await _ended(uploading)
                chat, details = prepared.chat, self.model.details
                usage = Usage(
                    event.prompt_tokens,
                    event.cached_tokens,
                    event.generated_tokens,
                    stream.reasoning_tokens,
                    event.match,
                    handle.submission.keep,
                    0 if chat is None else chat.n_attachments,
                    None if details is None else details.lane,
                    event.exact,
                    event.drafted,
                    event.accepted,
                )
                yield AnswerEnd(reason, usage, event.stop_string, event.error, event.match)
                return
            if not scores:
                for piece in held:
                    yield piece
                held = []

    def _record_turn(
        self, prepared: Prepared, stream: AnswerStream, done: CompletedGeneration
    ) -> Future[None] | None:
        replayed, message = prepared.replayed, stream.message
        if replayed is None:
            return None
        if done.stop_string is None:
            generated = done.tokens[: stream.n_tokens]
            return self._replay.record(replayed, prepared.tokens, message, generated)
        return self._replay.record_cut(replayed, message)

    def _expect(self, submission: Submission, message: Message) -> None:
        """If `message` calls tools, expect the agent back after the tools' usual time."""
        agent, tenant, hints = submission.agent_id, submission.tenant, submission.hints
        tools = [call.name for call in message.tool_calls]
        seconds = self._tool_times.called(agent, tenant, tools) if submission.keep else None
        if seconds is None or hints.done or hints.back_in is not None:
            return
        with suppress(SemanticError):  # the engine is ending
            self._thread.call(lambda engine: engine.expect(agent, seconds, tenant=tenant))

    def _reader(self, prepared: Prepared, new_id: Callable[[], str]) -> AnswerReader | None:
        if prepared.chat is None:
            return None
        return AnswerReader(
            self._format,
            prepared.chat,
            opens_thought=prepared.opens_thought,
            closes_thought=prepared.closes_thought,
            new_id=new_id,
        )


class Arrivals:
    """Wakes the tasks of `loop` for which events have arrived. One call into the loop serves
    many events."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._arrived: deque[asyncio.Event] = deque()
        self._is_called = False

    def add(self, arrived: asyncio.Event) -> None:
        """Wake the task of `arrived`. Thread-safe. Raises RuntimeError if the loop is closed."""
        self._arrived.append(arrived)
        if self._is_called:
            return
        self._is_called = True
        try:
            self.loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            self._is_called = False
            raise

    def _wake(self) -> None:
        self._is_called = False  # first: events that arrive from now on need another call
        while self._arrived:
            self._arrived.popleft().set()


class EventQueue:
    """The events of one request, from the engine's thread to a task of a loop."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._events: deque[EngineEvent] = deque()
        self._arrived = asyncio.Event()

    def put(self, events: Sequence[EngineEvent]) -> None:
        """Append one step's events. Thread-safe. Raises RuntimeError after the loop closes."""
        self._events.extend(events)
        self._arrivals.add(self._arrived)

    def __aiter__(self) -> EventQueue:
        return self

    async def __anext__(self) -> EngineEvent:
        """Wait for the next event and return it."""
        while not self._events:
            self._arrived.clear()
            if not self._events:
                await self._arrived.wait()
        return self._events.popleft()


async def _ended(uploading: Future[None] | None) -> None:
    # A cancelled caller does not stop the upload.
    if uploading is not None:
        await asyncio.wait((asyncio.wrap_future(uploading),), timeout=MOST_WAIT)


def _call_ids(ask: Ask) -> Callable[[], str]:
    if not (ask.numbered_calls and isinstance(ask.prompt, Chat)):
        return _new_call_id
    numbers = itertools.count(sum(len(one.tool_calls) for one in ask.prompt.messages))
    return lambda: numbered_call(next(numbers))


def _new_call_id() -> str:
    return f"call_{secrets.token_urlsafe(_CALL_ID_BYTES)}"


def _is_short(prompt: Prompt) -> bool:
    n_parts = len(prompt.messages) + len(prompt.tools) if isinstance(prompt, Chat) else 0
    return length_of(prompt) + _PART * n_parts <= _SHORT
