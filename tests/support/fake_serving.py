"""Fake of the `ServingPort` with scripted answers; one character is one token."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from semantic.domain.answer import (
    AnswerEnd,
    AnswerEvent,
    AnswerPiece,
    AnswerReason,
    AnswerStarted,
    PromptProgress,
    TextDelta,
    Usage,
)
from semantic.domain.chat import Chat
from semantic.domain.errors import ContextOverflowError, InvalidRequestError, SemanticError
from semantic.domain.match import MatchReport
from semantic.domain.value_objects import SamplingParams
from semantic.ports.serving import Ask, Prompt, ServedModel

_CONTEXT = 512
_LAST_CHARACTER = 0x10FFFF


@dataclass(frozen=True, slots=True)
class Script:
    """The content of an answer; `failure` is raised before its first event."""

    pieces: tuple[AnswerPiece, ...] = (TextDelta("Hello."),)
    reason: AnswerReason = "stop"
    completion: int | None = None
    cached: int = 0
    reasoning: int = 0
    stop_string: str | None = None
    error: str | None = None
    failure: SemanticError | None = None
    match: MatchReport | None = None


@dataclass(slots=True)
class FakeServing:
    """Answers each request by `script`; records requests and cancellations."""

    script: Callable[[Ask], Script] = lambda _: Script()
    asked: list[Ask] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def model(self) -> ServedModel:
        """See `ServingPort.model`."""
        return ServedModel(
            ("fake", "default"),
            _CONTEXT,
            _LAST_CHARACTER + 1,
            1_700_000_000,
            SamplingParams(),
            aliases=frozenset({"/models/fake"}),
        )

    async def answer(self, ask: Ask) -> AsyncGenerator[AnswerEvent, None]:
        """See `ServingPort.answer`."""
        tokens = await self.tokenize(ask.prompt)
        if not tokens:
            raise InvalidRequestError("prompt must not be empty")
        limit = min(_CONTEXT, ask.context_tokens or _CONTEXT)
        if len(tokens) >= limit:
            raise ContextOverflowError(
                f"the prompt has {len(tokens)} tokens, the context {limit}",
                prompt_tokens=len(tokens),
                limit=limit,
            )
        script = self.script(ask)
        if script.failure is not None:
            raise script.failure
        self.asked.append(ask)
        uid = f"request-{next(self._numbers)}"
        ended = False
        try:
            yield AnswerStarted(uid, ask.agent or f"auto-{uid}", len(tokens))
            yield PromptProgress(len(tokens) - 1, len(tokens) - 1)
            for piece in script.pieces:
                yield piece
            ended = True
            yield self._end(script, len(tokens))
        finally:
            if not ended:
                self.cancelled.append(uid)

    async def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool = True, tenant: str = ""
    ) -> tuple[int, ...]:
        """See `ServingPort.tokenize`."""
        del add_special_tokens, tenant
        if isinstance(prompt, Chat):
            prompt = "".join(message.content for message in prompt.messages)
        return tuple(map(ord, prompt)) if isinstance(prompt, str) else prompt

    async def detokenize(self, tokens: Sequence[int], tenant: str = "") -> str:
        """See `ServingPort.detokenize`."""
        del tenant
        if len(tokens) > self.model.context_tokens:
            raise InvalidRequestError(f"tokens must have at most {self.model.context_tokens}")
        for token in tokens:
            if not 0 <= token <= _LAST_CHARACTER:
                raise InvalidRequestError(f"{token} is no token id")
        return "".join(map(chr, tokens))

    async def token_texts(self, tokens: Sequence[int], tenant: str = "") -> tuple[str, ...]:
        """See `ServingPort.token_texts`."""
        return tuple([await self.detokenize([token], tenant) for token in tokens])

    @staticmethod
    def _end(script: Script, n_prompt: int) -> AnswerEnd:
        written = sum(len(p.text) for p in script.pieces if isinstance(p, TextDelta))
        completion = written if script.completion is None else script.completion
        usage = Usage(n_prompt, script.cached, completion, script.reasoning, script.match)
        return AnswerEnd(script.reason, usage, script.stop_string, script.error, script.match)
