"""What a served model offers to the wires: answers as streams of pieces, and its agents.

Everything here runs on an event loop and never blocks it. A wire translates; it decides nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from semantic.domain.answer import AnswerEvent
from semantic.domain.chat import Chat
from semantic.domain.identity import Identity
from semantic.domain.value_objects import SamplingParams

Prompt = Chat | str | tuple[int, ...]
"""A conversation, a text, or token ids."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for one answer.

    `max_tokens` of None means as many as the context has room for. An `agent` of None is the one
    whose history the prompt goes on from, or a new one; with an `identity` it is one of those that
    the same one asked as. Nothing is shared between two tenants.
    """

    prompt: Prompt
    sampling: SamplingParams
    max_tokens: int | None = None
    agent: str | None = None
    tenant: str = ""
    identity: Identity | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model behind a server. `names` are all it answers to, its own id first.

    `context_tokens` is the most that prompt and answer may have together: the model's own limit
    or what the pool can hold, whichever is less. `sampling` is what a request gets that asks
    for nothing else. `created` is in seconds since 1970.
    """

    names: tuple[str, ...]
    context_tokens: int
    vocab_size: int
    created: int
    sampling: SamplingParams = field(default_factory=SamplingParams)

    @property
    def id(self) -> str:
        return self.names[0]


class ServingPort(Protocol):
    """A served model. Methods may be called by any number of tasks of one event loop."""

    @property
    def model(self) -> ServedModel:
        """What is served."""
        ...

    def answer(self, ask: Ask) -> AsyncGenerator[AnswerEvent, None]:
        """The answer's events; the request is taken in when the first one is asked for.

        Closing the generator before its end cancels the request. Before its first event it raises
        InvalidRequestError, ContextOverflowError (does not fit the context) and OverloadedError
        (the queue is full); after that every failure is an AnswerEnd of reason "error".
        """
        ...

    async def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool = True, tenant: str = ""
    ) -> tuple[int, ...]:
        """The tokens that `prompt` stands for, when `tenant` asks. Raises InvalidRequestError and
        ContextOverflowError."""
        ...

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`. Raises InvalidRequestError for an id that is none."""
        ...

    async def token_texts(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """The text of each token alone, for wires that tell log-probabilities by text."""
        ...
