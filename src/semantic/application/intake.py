"""Turns what a caller asks into a request, or says what is wrong with it.

Checks everything that can be checked without the pool, before any state changes. Knows the
model's vocabulary and tokenizer; not whether there is room.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from semantic.application.request import Request
from semantic.domain.entities import AgentBlocks
from semantic.domain.errors import CacheReconstructionError, InvalidRequestError
from semantic.domain.value_objects import SamplingParams
from semantic.ports.outbound import BatchBackend, Tokenizer

KV = TypeVar("KV")


class Intake(Generic[KV]):
    """Makes requests for one model."""

    def __init__(self, model: BatchBackend[KV], tokenizer: Tokenizer) -> None:
        self._model_id = model.model_id
        self._vocab_size = model.vocab_size
        self._tokenizer = tokenizer

    def accept(
        self,
        agent_id: str,
        prompt: str | Sequence[int],
        cache: AgentBlocks[KV] | None,
        max_tokens: int,
        *,
        sampling: SamplingParams,
        append: bool,
        kept: AgentBlocks[KV] | None,
        number: int,
    ) -> Request[KV]:
        """The request; `kept` is the agent's cache, to append to when no `cache` is given.

        Raises as `GenerationEnginePort.submit`.
        """
        if not _is_text(agent_id) or not agent_id:
            raise InvalidRequestError(f"agent_id must be a non-empty string, got {agent_id!r}")
        if not _is_int(max_tokens) or max_tokens < 1:
            raise InvalidRequestError(f"max_tokens must be at least 1, got {max_tokens!r}")
        self._check_cache(cache)
        params = self._checked(sampling)
        tokens = self._tokens(prompt, add_special_tokens=not append)
        if append:
            before = cache if cache is not None else kept
            if before is None or not before.token_ids:
                raise InvalidRequestError(f"append: agent {agent_id!r} has no cache to append to")
            tokens = before.token_ids + tokens
        return Request(
            uid=f"request-{number}",
            number=number,
            agent_id=agent_id,
            prompt=tokens,
            max_tokens=max_tokens,
            params=params,
            eos_token_ids=self._tokenizer.eos_token_ids,
            decode=self._tokenizer.decode,
            given_cache=cache,
        )

    def _checked(self, params: SamplingParams) -> SamplingParams:
        """The parameters with a seed, unless they need none."""
        for token in params.logit_bias:
            if not 0 <= token < self._vocab_size:
                raise InvalidRequestError(
                    f"logit_bias names token {token}; token ids are below {self._vocab_size}"
                )
        if params.greedy or params.seed is not None:
            return params
        return replace(params, seed=secrets.randbits(62))

    def _check_cache(self, cache: AgentBlocks[KV] | None) -> None:
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
        for token in tokens:
            if not _is_int(token):
                raise InvalidRequestError(f"prompt must be text or token ids, got {token!r}")
            if not 0 <= token < self._vocab_size:
                raise InvalidRequestError(
                    f"token id {token} is not in the model's vocabulary of {self._vocab_size}"
                )
        return tuple(tokens)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence)


def _is_int(value: object) -> bool:
    """Whether `value` is a whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)
