"""Submission: a request before its validation by the engine."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from semantic.application.request import Request, Reuse
from semantic.domain.entities import AgentBlocks
from semantic.domain.errors import CacheReconstructionError, InvalidRequestError
from semantic.domain.identity import NO_HINTS, Hints
from semantic.domain.value_objects import CompletedGeneration, SamplingParams, TokenEvent
from semantic.ports.generation import BatchBackend, EngineEvent, Tokenizer

_MAX_ALTERNATIVES = 100
"""The maximum number of alternatives per token."""
_MAX_NOTE = 1 << 20
"""The maximum number of characters in a note."""


class RequestValidator:
    """Validates submissions to one model."""

    def __init__(self, model: BatchBackend, tokenizer: Tokenizer) -> None:
        self._model = model
        self._model_id = model.model_id
        self._vocab_size = model.vocab_size
        self._tokenizer = tokenizer

    def check(self, submission: Submission) -> None:
        """Check the fields that need no tokenizer. Raises the same errors as
        `GenerationEnginePort.submit`."""
        if not _is_text(submission.agent_id) or not submission.agent_id:
            raise InvalidRequestError(
                f"agent_id must be a non-empty string, got {submission.agent_id!r}"
            )
        if not _is_int(submission.max_tokens) or submission.max_tokens < 1:
            raise InvalidRequestError(
                f"max_tokens must be at least 1, got {submission.max_tokens!r}"
            )
        if not _is_text(submission.tenant):
            raise InvalidRequestError(f"tenant must be a string, got {submission.tenant!r}")
        if not _is_text(submission.note) or len(submission.note) > _MAX_NOTE:
            raise InvalidRequestError(f"note must be a string of at most {_MAX_NOTE} characters")
        self._check_cache(submission.cache)

    def accept(self, submission: Submission, cached: Reuse, number: int) -> Request:
        """Return the submission as a request. Raises the same errors as
        `GenerationEnginePort.submit`."""
        self.check(submission)
        params = self._checked(submission.sampling, submission.tenant)
        tokens = self._tokens(submission.prompt, add_special_tokens=not submission.append)
        if submission.append:
            before = submission.cache.token_ids if submission.cache is not None else cached.history
            if not before:
                raise InvalidRequestError(
                    f"append: agent {submission.agent_id!r} has no cache to append to"
                )
            tokens = before + tokens
        return Request(
            uid=f"request-{number}",
            number=number,
            agent_id=submission.agent_id,
            prompt=tokens,
            max_tokens=submission.max_tokens,
            params=params,
            eos_token_ids=frozenset() if params.ignore_eos else self._tokenizer.eos_token_ids,
            detokenizer=self._tokenizer.detokenizer(tokens if submission.continues else ()),
            given_cache=submission.cache,
            tenant=submission.tenant,
            note=submission.note,
            keep=submission.keep,
            hints=submission.hints,
            predicted=submission.predicted,
            reuse=cached,
        )

    def _checked(self, params: SamplingParams, tenant: str) -> SamplingParams:
        end = () if params.thinking is None else params.thinking.end_tokens
        for name, tokens in (("logit_bias", params.logit_bias), ("thinking", end)):
            for token in tokens:
                if not 0 <= token < self._vocab_size:
                    raise InvalidRequestError(
                        f"{name}: token ids must be below {self._vocab_size}, got {token}"
                    )
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > _MAX_ALTERNATIVES:
                raise InvalidRequestError(
                    f"{name} must be at most {_MAX_ALTERNATIVES}, got {getattr(params, name)}"
                )
        if params.grammar is not None:
            if params.ignore_eos:
                raise InvalidRequestError(
                    "ignore_eos cannot be combined with a grammar, which says where an answer ends"
                )
            own = replace(params.grammar, tenant=tenant)
            self._model.check_grammar(own)
            params = replace(params, grammar=own)
        if params.greedy or params.seed is not None:
            return params
        return replace(params, seed=secrets.randbits(62))

    def _check_cache(self, cache: AgentBlocks | None) -> None:
        if cache is None or cache.model_id == self._model_id:
            return
        raise CacheReconstructionError(
            f"the cache of agent {cache.agent_id!r} was computed by model "
            f"{cache.model_id or '(unnamed)'}, but this engine runs {self._model_id}"
        )

    def _tokens(self, prompt: str | Sequence[int], *, add_special_tokens: bool) -> tuple[int, ...]:
        if not _is_sequence(prompt):
            raise InvalidRequestError(f"prompt must be text or token ids, got {prompt!r}")
        # Checked before encoding: a tokenizer that adds BOS turns empty text into a token.
        if not prompt:
            raise InvalidRequestError("prompt must not be empty")
        tokens: Sequence[int] = (
            self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            if isinstance(prompt, str)
            else prompt
        )
        # All tokens at once, which is quick; one by one only to name the wrong one.
        if {*map(type, tokens)} != {int} or min(tokens) < 0 or max(tokens) >= self._vocab_size:
            self._check_each(tokens)
        return tuple(tokens)

    def _check_each(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not _is_int(token):
                raise InvalidRequestError(f"prompt must be text or token ids, got {token!r}")
            if not 0 <= token < self._vocab_size:
                raise InvalidRequestError(
                    f"token id {token} is not in the model's vocabulary of {self._vocab_size}"
                )


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


Listener = Callable[[Sequence[EngineEvent]], None]
"""Gets all events of a request in one step. It runs on the engine's thread, and must not block.
The last event is a CompletedGeneration."""


@dataclass(frozen=True, slots=True)
class Submission:
    """The arguments of `GenerationEnginePort.submit`."""

    agent_id: str
    prompt: str | Sequence[int]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    tenant: str = ""
    note: str = ""
    cache: AgentBlocks | None = None
    append: bool = False
    keep: bool = True
    hints: Hints = NO_HINTS
    predicted: tuple[int, ...] = ()
    continues: bool = False

    @property
    def max_total_tokens(self) -> int:
        """The maximum length of prompt and answer together, for a prompt of token ids."""
        return len(self.prompt) + self.max_tokens


@dataclass(eq=False, slots=True)
class RequestHandle:
    """A queued submission. `accepted` resolves to the request's uid, or raises the errors of
    `GenerationEnginePort.submit`, and OverloadedError or BackendError if the engine ends first."""

    submission: Submission
    listener: Listener
    accepted: Future[str] = field(default_factory=Future)
    uid: str | None = None
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)

    def notify(self, events: Sequence[EngineEvent]) -> None:
        """Record the tokens in `events` and pass them to the listener."""
        for event in events:
            if isinstance(event, TokenEvent):
                self.tokens.append(event.token)
                self.text.append(event.text)
        self.listener(events)

    def failed(self, error: str) -> CompletedGeneration:
        """Return the result of an accepted request whose engine failed."""
        return CompletedGeneration(
            uid=self.uid or "",
            agent_id=self.submission.agent_id,
            text="".join(self.text),
            tokens=tuple(self.tokens),
            finish_reason="error",
            prompt_tokens=len(self.submission.prompt),
            cached_tokens=0,
            error=error,
        )
