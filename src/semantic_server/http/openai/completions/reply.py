"""Choices of completions: converts answer events to deltas, and sums deltas to a text.

The text is the sum of the deltas that a stream's chunks have, so the two cannot differ. Knows
OpenAI's shapes; neither ids nor server-sent events.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from semantic.domain.answer import (
    AnswerEnd,
    AnswerEvent,
    AnswerStarted,
    PromptScored,
    TextDelta,
    Usage,
)
from semantic.domain.value_objects import TokenLogprob
from semantic.ports.serving import ServingPort
from semantic_server.http.errors import check_finished
from semantic_server.http.openai.completions.request import CompletionRequest, TextPrompt
from semantic_server.http.openai.fields import Json
from semantic_server.http.openai.replies import IndexedEvent, ReplyKind, finite, texts_of

FinishReason = Literal["stop", "length"]


@dataclass(slots=True)
class LegacyLogprobs:
    """Log-probabilities as four lists with one entry per token.

    A token without a predecessor has no log-probability. `text_offset` is where a token begins in
    the choice's text, in characters.
    """

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.tokens)

    def extend(self, more: LegacyLogprobs) -> None:
        """Append the entries of the tokens that follow."""
        self.tokens += more.tokens
        self.token_logprobs += more.token_logprobs
        self.top_logprobs += more.top_logprobs
        self.text_offset += more.text_offset

    def as_object(self) -> Json:
        """The member `logprobs` of a choice."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """What is new in choice number `index`. The last delta of a choice has its `usage`."""

    index: int
    text: str = ""
    logprobs: LegacyLogprobs = field(default_factory=LegacyLogprobs)
    finish_reason: FinishReason | None = None
    usage: Usage | None = None

    def as_object(self) -> Json:
        """The member of `choices`: chunks and whole replies have the same."""
        return {
            "index": self.index,
            "text": self.text,
            "logprobs": self.logprobs.as_object() if self.logprobs else None,
            "finish_reason": self.finish_reason,
        }


# Events to deltas


async def completion_deltas(
    events: AsyncGenerator[IndexedEvent, None], serving: ServingPort, request: CompletionRequest
) -> AsyncGenerator[CompletionDelta, None]:
    """The deltas of all choices as their events arrive.

    Raises WireError for an answer that fails; `events` are closed in any case.
    """
    choices = [
        _Choice(index, request.prompts[index // request.n], request, serving)
        for index in range(len(request.choices))
    ]
    async with aclosing(events):
        async for index, event in events:
            delta = await choices[index].delta(event)
            if delta is not None:
                yield delta


@dataclass(slots=True)
class _Choice:
    """One choice, with the characters sent and the generated tokens scored so far."""

    index: int
    prompt: TextPrompt
    request: CompletionRequest
    serving: ServingPort
    n_characters: int = 0
    n_scored: int = 0

    async def delta(self, event: AnswerEvent) -> CompletionDelta | None:
        """The delta of `event`; None for an event that this wire does not report."""
        match event:
            case AnswerStarted():
                return await self._started()
            case PromptScored():
                return await self._prompt_scored(event)
            case TextDelta():
                return None if self.request.only_score else await self._text(event)
            case AnswerEnd():
                return self._end(event)
            case _:
                return None

    async def _started(self) -> CompletionDelta:
        """The first delta of every choice: the prompt if it is echoed, else empty.

        A prompt with log-probabilities is echoed together with them.
        """
        echo = self.request.echo and not self.request.logprobs
        return self._delta(await self._prompt_text() if echo else "")

    async def _prompt_scored(self, event: PromptScored) -> CompletionDelta:
        text = await self._prompt_text()
        logprobs = await _logprobs(self.serving, event.tokens, event.logprobs, 0, len(text))
        return self._delta(text, logprobs)

    async def _text(self, event: TextDelta) -> CompletionDelta:
        tokens = [one.token for one in event.logprobs]
        self.n_scored += len(tokens)
        logprobs = await _logprobs(
            self.serving, tokens, event.logprobs, self.n_characters, len(event.text)
        )
        return self._delta(event.text, logprobs)

    async def _prompt_text(self) -> str:
        if isinstance(self.prompt, str):
            return self.prompt
        return await self.serving.detokenize(self.prompt)

    def _delta(self, text: str, logprobs: LegacyLogprobs | None = None) -> CompletionDelta:
        self.n_characters += len(text)
        return CompletionDelta(self.index, text, logprobs or LegacyLogprobs())

    def _end(self, end: AnswerEnd) -> CompletionDelta:
        check_finished(end)
        if self.request.only_score:
            usage = replace(end.usage, completion=0)
            return CompletionDelta(self.index, finish_reason="length", usage=usage)
        reason: FinishReason = "length" if end.reason == "length" else "stop"
        textless = self._textless(end.usage.completion)
        return CompletionDelta(self.index, logprobs=textless, finish_reason=reason, usage=end.usage)

    def _textless(self, completion: int) -> LegacyLogprobs:
        """Entries without a value for generated tokens without text, such as an end token.

        Clients that score a prompt count from both ends of the lists: no token may be missing.
        """
        if not (self.request.echo and self.request.logprobs):
            return LegacyLogprobs()
        n = max(completion - self.n_scored, 0)
        return LegacyLogprobs([""] * n, [None] * n, [None] * n, [self.n_characters] * n)


async def _logprobs(
    serving: ServingPort,
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
    offset: int,
    length: int,
) -> LegacyLogprobs:
    """The entries of `tokens`; their text begins at `offset` and has `length` characters.

    The offset of a token that is only a part of a character is at most the character's end.
    """
    texts = await texts_of(serving, tokens, logprobs)
    found = LegacyLogprobs()
    end = offset + length
    for token, logprob in zip(tokens, logprobs, strict=True):
        found.tokens.append(texts[token])
        found.token_logprobs.append(None if logprob is None else finite(logprob.logprob))
        found.top_logprobs.append(None if logprob is None else _by_text(logprob, texts))
        found.text_offset.append(min(offset, end))
        offset += len(texts[token])
    return found


def _by_text(logprob: TokenLogprob, texts: Mapping[int, str]) -> dict[str, float]:
    """The likeliest tokens and the actual one; of two with the same text the likelier counts."""
    found: dict[str, float] = {}
    for token, value in (*logprob.top, (logprob.token, logprob.logprob)):
        text = texts[token]
        found[text] = max(finite(value), found.get(text, finite(value)))
    return found


# The sum of deltas


@dataclass(slots=True)
class _Text:
    """The sum of a choice's deltas."""

    fragments: list[str] = field(default_factory=list)
    logprobs: LegacyLogprobs = field(default_factory=LegacyLogprobs)
    finish_reason: FinishReason | None = None

    def add(self, delta: CompletionDelta) -> None:
        self.fragments.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason = delta.finish_reason or self.finish_reason

    def as_object(self, index: int) -> Json:
        """The member of `choices`."""
        text = "".join(self.fragments)
        return CompletionDelta(index, text, self.logprobs, self.finish_reason).as_object()


COMPLETION_REPLY: Final = ReplyKind("cmpl", "text_completion", "text_completion", _Text)
