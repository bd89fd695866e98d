"""Answers as pieces of a completion: what one chunk of a stream says.

Chunks and whole replies are both made of these, so that they cannot disagree. Knows neither ids
nor server-sent events.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Literal

from semantic.adapters.http.openai.choices import IndexedEvent
from semantic.adapters.http.openai.completion_request import CompletionRequest, TextPrompt
from semantic.adapters.http.openai.failures import check_ended_well
from semantic.adapters.http.openai.legacy_logprobs import LegacyLogprobs, legacy_logprobs
from semantic.domain.answer import (
    AnswerEnd,
    AnswerEvent,
    AnswerStarted,
    PromptScored,
    TextDelta,
    Usage,
)
from semantic.ports.serving import ServingPort

CompletionFinish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class CompletionPiece:
    """What is new in choice number `index`. `usage` is the choice's, known at its end."""

    index: int
    text: str = ""
    logprobs: LegacyLogprobs = field(default_factory=LegacyLogprobs)
    finish: CompletionFinish | None = None
    usage: Usage | None = None


async def completion_pieces(
    events: AsyncGenerator[IndexedEvent, None], serving: ServingPort, asked: CompletionRequest
) -> AsyncGenerator[CompletionPiece, None]:
    """The pieces of all choices as they come; the first when every answer has begun.

    Raises WireError for an answer that fails; `events` are closed in any case.
    """
    choices = [
        _Choice(index, asked.prompts[index // asked.n], asked, serving)
        for index in range(len(asked.asks))
    ]
    async with aclosing(events):
        async for index, event in events:
            piece = await choices[index].piece(event)
            if piece is not None:
                yield piece


@dataclass(slots=True)
class _Choice:
    """One choice, and how much of it was told."""

    index: int
    prompt: TextPrompt
    asked: CompletionRequest
    serving: ServingPort
    told: int = 0
    n_scored: int = 0

    async def piece(self, event: AnswerEvent) -> CompletionPiece | None:
        """What `event` adds; None for an event that this wire does not tell of."""
        match event:
            case AnswerStarted():
                return await self._began()
            case PromptScored():
                return await self._scored(event)
            case TextDelta():
                return None if self.asked.only_score else await self._text(event)
            case AnswerEnd():
                return self._end(event)
            case _:
                return None

    async def _began(self) -> CompletionPiece:
        """A first piece that shows that the answer has begun, with the prompt if it is echoed.

        A prompt with log-probabilities is echoed when they are known.
        """
        echo = self.asked.echo and not self.asked.logprobs
        return self._told(await self._prompt_text() if echo else "")

    async def _scored(self, event: PromptScored) -> CompletionPiece:
        text = await self._prompt_text()
        logprobs = await legacy_logprobs(self.serving, event.tokens, event.logprobs, 0, len(text))
        return self._told(text, logprobs)

    async def _text(self, event: TextDelta) -> CompletionPiece:
        tokens = [one.token for one in event.logprobs]
        self.n_scored += len(tokens)
        logprobs = await legacy_logprobs(
            self.serving, tokens, event.logprobs, self.told, len(event.text)
        )
        return self._told(event.text, logprobs)

    async def _prompt_text(self) -> str:
        if isinstance(self.prompt, str):
            return self.prompt
        return await self.serving.detokenize(self.prompt)

    def _told(self, text: str, logprobs: LegacyLogprobs | None = None) -> CompletionPiece:
        self.told += len(text)
        return CompletionPiece(self.index, text, logprobs or LegacyLogprobs())

    def _end(self, end: AnswerEnd) -> CompletionPiece:
        check_ended_well(end)
        if self.asked.only_score:
            usage = replace(end.usage, completion=0)
            return CompletionPiece(self.index, finish="length", usage=usage)
        finish: CompletionFinish = "length" if end.reason == "length" else "stop"
        left = self._left_out(end.usage.completion)
        return CompletionPiece(self.index, logprobs=left, finish=finish, usage=end.usage)

    def _left_out(self, completion: int) -> LegacyLogprobs:
        """Entries without a value for generated tokens that no text came of, as an end token.

        Who scores a prompt counts from both ends of the lists: each token must have its place.
        """
        if not (self.asked.echo and self.asked.logprobs):
            return LegacyLogprobs()
        n = max(completion - self.n_scored, 0)
        return LegacyLogprobs([""] * n, [None] * n, [None] * n, [self.told] * n)
