"""Turns what a caller asks into a request, or says what is wrong with it.

Checks everything that can be checked without the pool, before any state changes. Knows the
model's vocabulary and tokenizer; not whether there is room.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from semantic.application.cache.prefix_state import PrefixState
from semantic.application.engine.submission import Submission
from semantic.application.request import Request
from semantic.domain.entities import AgentBlocks
from semantic.domain.errors import CacheReconstructionError, InvalidRequestError
from semantic.domain.value_objects import SamplingParams
from semantic.ports.outbound import BatchBackend, Tokenizer

_MOST_ALTERNATIVES = 100
"""Of each token's log-probabilities: a request for all of them would fill the memory."""
_LONGEST_NOTE = 1 << 20
"""Characters; a note is saved with each turn."""


class RequestValidator:
    """Makes requests for one model."""

    def __init__(self, model: BatchBackend, tokenizer: Tokenizer) -> None:
        self._model = model
        self._model_id = model.model_id
        self._vocab_size = model.vocab_size
        self._tokenizer = tokenizer

    def check(self, asked: Submission) -> None:
        """Raise as `GenerationEnginePort.submit` unless the simple fields are right."""
        if not _is_text(asked.agent_id) or not asked.agent_id:
            raise InvalidRequestError(
                f"agent_id must be a non-empty string, got {asked.agent_id!r}"
            )
        if not _is_int(asked.max_tokens) or asked.max_tokens < 1:
            raise InvalidRequestError(f"max_tokens must be at least 1, got {asked.max_tokens!r}")
        if not _is_text(asked.tenant):
            raise InvalidRequestError(f"tenant must be a string, got {asked.tenant!r}")
        if not _is_text(asked.note) or len(asked.note) > _LONGEST_NOTE:
            raise InvalidRequestError(
                f"note must be a string of at most {_LONGEST_NOTE} characters"
            )
        self._check_cache(asked.cache)

    def accept(self, asked: Submission, archived: PrefixState, number: int) -> Request:
        """The request; `archived` says what the agent had, to append to when no cache is given.

        Raises as `GenerationEnginePort.submit`.
        """
        self.check(asked)
        params = self._checked(asked.sampling)
        tokens = self._tokens(asked.prompt, add_special_tokens=not asked.append)
        if asked.append:
            before = asked.cache.token_ids if asked.cache is not None else archived.history
            if not before:
                raise InvalidRequestError(
                    f"append: agent {asked.agent_id!r} has no cache to append to"
                )
            tokens = before + tokens
        return Request(
            uid=f"request-{number}",
            number=number,
            agent_id=asked.agent_id,
            prompt=tokens,
            max_tokens=asked.max_tokens,
            params=params,
            eos_token_ids=frozenset() if params.ignore_eos else self._tokenizer.eos_token_ids,
            decode=self._tokenizer.decode,
            given_cache=asked.cache,
            tenant=asked.tenant,
            note=asked.note,
            archived=archived,
        )

    def _checked(self, params: SamplingParams) -> SamplingParams:
        """The parameters with a seed, unless they need none."""
        for token in params.logit_bias:
            if not 0 <= token < self._vocab_size:
                raise InvalidRequestError(
                    f"logit_bias names token {token}; token ids are below {self._vocab_size}"
                )
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > _MOST_ALTERNATIVES:
                raise InvalidRequestError(
                    f"{name} must be at most {_MOST_ALTERNATIVES}, got {getattr(params, name)}"
                )
        if params.grammar is not None:
            if params.ignore_eos:
                raise InvalidRequestError(
                    "ignore_eos cannot be combined with a grammar, which says where an answer ends"
                )
            self._model.check_grammar(params.grammar)
        if params.greedy or params.seed is not None:
            return params
        return replace(params, seed=secrets.randbits(62))

    def _check_cache(self, cache: AgentBlocks | None) -> None:
        if cache is None or cache.model_id == self._model_id:
            return
        raise CacheReconstructionError(
            f"the cache of agent {cache.agent_id!r} was computed by model "
            f"{cache.model_id or '(unnamed)'}, this engine runs {self._model_id}"
        )

    def _tokens(self, prompt: str | Sequence[int], *, add_special_tokens: bool) -> tuple[int, ...]:
        if not _is_sequence(prompt):
            raise InvalidRequestError(f"prompt must be text or token ids, got {prompt!r}")
        # Asked before encoding: where a tokenizer adds a BOS token, no text becomes a token.
        if not prompt:
            raise InvalidRequestError("prompt must not be empty")
        tokens: Sequence[int] = (
            self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            if isinstance(prompt, str)
            else prompt
        )
        # Of a hundred thousand tokens all at once; one by one only to say which is wrong.
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
    """Whether `value` is a whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)
