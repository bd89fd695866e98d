"""Serving: a model's engine, as wires see it. Implements `ServingPort`.

Joins what is apart elsewhere: prompts are prepared on worker threads, orders run on the engine's
thread, and an answer's events come to the event loop of whoever asked. Knows no transport.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

from semantic.application.agents.agent_names import AgentNames
from semantic.application.agents.served_agents import ServedAgents
from semantic.application.chat.answer_reader import AnswerReader
from semantic.application.chat.preparation import Preparation, Prepared
from semantic.application.chat.reading import Reading
from semantic.application.chat.replay import Replay
from semantic.application.engine.engine_state import Figures
from semantic.application.engine.engine_thread import EngineThread
from semantic.application.engine.submission import EventQueue, RequestHandle, Submission
from semantic.domain.answer import (
    AnswerEnd,
    AnswerEvent,
    AnswerPiece,
    AnswerReason,
    AnswerStarted,
    PromptProgress,
    PromptScored,
    Usage,
)
from semantic.domain.block_hash import PUBLIC_TENANT, pack_tokens
from semantic.domain.chat import Chat
from semantic.domain.digest import digest
from semantic.domain.errors import BackendError, InvalidRequestError
from semantic.domain.value_objects import (
    CompletedGeneration,
    PrefillEvent,
    SamplingParams,
    TokenEvent,
)
from semantic.ports.chat import ChatFormat
from semantic.ports.outbound import Tokenizer
from semantic.ports.serving import Ask, Prompt, ServedModel

T = TypeVar("T")

_CALL_ID_BYTES = 18
"""24 characters in base 64, as clients know them."""
_COMPLETE = ("stop", "length", "tool_calls")
"""Of other answers clients have less than was written."""
_PUBLIC_NAME = 16
"""Characters of a digest that tell public prefixes from one another."""


class Serving:
    """Answers requests with the engine of one thread."""

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
        workers: Executor,
    ) -> None:
        """`workers` run what takes long but no engine; `close` ends them."""
        self._thread = thread
        self._model = model
        self._tokenizer = tokenizer
        self._format = chat_format
        self._preparation = preparation
        self._replay = replay
        self._names = names
        self.agents = agents
        self._workers = workers

    @property
    def model(self) -> ServedModel:
        """See `ServingPort.model`."""
        return self._model

    async def close(self) -> None:
        """Cancel what runs, save every agent, and end all threads."""
        await asyncio.get_running_loop().run_in_executor(None, self._end)

    def figures(self) -> Figures:
        """Of this moment. Any thread may call it."""
        return Figures(self._thread.figures, self.agents.stores())

    async def publish(self, chat: Chat) -> tuple[int, ...]:
        """Let every tenant begin with the keys and values of `chat`; its tokens.

        Computes them unless they are stored, and pins them. To be done again for a new engine.
        Raises as `answer`, BackendError when computing them fails, and StoreError when they
        cannot be kept.
        """
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
        """See `ServingPort.answer`."""
        prepared = await self._work(lambda: self._preparation.prepare(ask))
        with self._names.claimed(prepared, ask) as agent:
            submission = Submission(
                agent,
                prepared.tokens,
                prepared.max_tokens,
                prepared.sampling,
                ask.tenant,
                self._names.note(agent, prepared, ask),
            )
            inbox: EventQueue = EventQueue(asyncio.get_running_loop())
            ticket = self._thread.submit(submission, inbox.put)
            try:
                uid = await asyncio.wrap_future(ticket.accepted)
                yield AnswerStarted(uid, agent, len(prepared.tokens))
                async for event in self._read(prepared, inbox, ticket):
                    yield event
            finally:
                self._thread.cancel(ticket)

    async def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool = True, tenant: str = ""
    ) -> tuple[int, ...]:
        """See `ServingPort.tokenize`."""
        return await self._work(
            lambda: self._preparation.tokens(
                prompt, add_special_tokens=add_special_tokens, tenant=tenant
            )
        )

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """See `ServingPort.detokenize`."""
        self._check(tokens)
        return await self._work(lambda: self._tokenizer.decode(tokens))

    async def token_texts(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """See `ServingPort.token_texts`."""
        self._check(tokens)
        return await self._work(lambda: tuple(self._tokenizer.decode([one]) for one in tokens))

    # Inside

    def _end(self) -> None:
        self._thread.stop(drain=False)
        self._workers.shutdown(cancel_futures=True)
        self._replay.close()

    async def _work(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._workers, function)

    def _check(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not 0 <= token < self._model.vocab_size:
                raise InvalidRequestError(
                    f"token id {token} is not in the model's vocabulary of {self._model.vocab_size}"
                )

    async def _read(
        self, prepared: Prepared, inbox: EventQueue, ticket: RequestHandle
    ) -> AsyncGenerator[AnswerEvent, None]:
        """The answer's events after its start.

        What is written is held back while the prompt is scored: the scores come first, and are
        complete only at the end.
        """
        reading = Reading(self._reader(prepared))
        held: list[AnswerPiece] = []
        scores = prepared.sampling.prompt_logprobs is not None
        async for event in inbox:
            if isinstance(event, PrefillEvent):
                yield PromptProgress(event.done, event.total)
            elif isinstance(event, TokenEvent):
                held += reading.token(event)
                if reading.done:
                    self._thread.cancel(ticket)
            else:
                pieces, reason = reading.end(event)
                if reason in _COMPLETE:
                    self._remember(prepared, reading, event)
                if scores and event.prompt_logprobs:
                    yield PromptScored(prepared.tokens, event.prompt_logprobs)
                for piece in (*held, *pieces):
                    yield piece
                yield _end(event, reason, reading.reasoning_tokens)
                return
            if not scores:
                for piece in held:
                    yield piece
                held = []

    def _remember(self, prepared: Prepared, reading: Reading, done: CompletedGeneration) -> None:
        """That the conversation goes on from this answer in the tokens that were computed."""
        replayed, said = prepared.replayed, reading.said.message
        if replayed is None:
            return
        if done.stop_string is None:
            generated = done.tokens[: reading.n_tokens]
            self._replay.remember(replayed, prepared.tokens, said, generated)
        else:
            self._replay.remember_cut(replayed, said)

    def _reader(self, prepared: Prepared) -> AnswerReader | None:
        """What sorts the answer's text; None for a plain prompt, whose answer is all text."""
        if prepared.chat is None:
            return None
        return AnswerReader(
            self._format, prepared.chat, opens_thought=prepared.opens_thought, new_id=_new_call_id
        )


def _end(done: CompletedGeneration, reason: AnswerReason, reasoning: int) -> AnswerEnd:
    n_generated, match = done.generated_tokens, done.match
    usage = Usage(done.prompt_tokens, done.cached_tokens, n_generated, reasoning, match)
    return AnswerEnd(reason, usage, done.stop_string, done.error, match)


def _new_call_id() -> str:
    return f"call_{secrets.token_urlsafe(_CALL_ID_BYTES)}"
