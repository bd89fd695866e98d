"""ServingPort: a served model's interface for the wires; answers are streams of events.

Runs on an event loop and never blocks it. A wire translates; it makes no decisions.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from semantic.domain.answer import AnswerEvent
from semantic.domain.chat import Chat
from semantic.domain.identity import NO_HINTS, Hints, Identity
from semantic.domain.value_objects import SamplingParams

Prompt = Chat | str | tuple[int, ...]
"""A conversation, a text, or token ids."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for one answer.

    `max_tokens` of None is the rest of the context. An `agent` of None is the one whose history the
    prompt continues, or a new one; with an `identity`, one of that identity's agents. Tenants share
    nothing. `thinking_tokens` limits the reasoning of the answer, if the model has marks of it:
    None for any number, 0 for none. Without `keep` nothing of the request stays after its end: it
    may read caches, and adds nothing to them. `context_tokens` limits prompt and answer together
    below the model's limit. With `numbered_calls` the ids of the answer's calls are `numbered_call`
    of their place in the conversation, else random. The store keeps `note`, one line of text, with
    the agent. `hints` are the agent's.
    """

    prompt: Prompt
    sampling: SamplingParams
    max_tokens: int | None = None
    agent: str | None = None
    tenant: str = ""
    identity: Identity | None = None
    thinking_tokens: int | None = None
    keep: bool = True
    context_tokens: int | None = None
    numbered_calls: bool = False
    note: str = ""
    hints: Hints = NO_HINTS


ToolSupport = Literal["native", "text", "unknown"]
"""The way of tools to a model: its chat template, or text where that has none, or none whose calls
a parser knows."""


@dataclass(frozen=True, slots=True)
class ModelDetails:
    """A description of a model. `digest` is the hash of its files in hexadecimal, `stored_as` the
    type of its weights on disk ("4bit", "mxfp4", "bf16").

    `file_bytes` is the size of its weights on disk, `memory_bytes` in memory, on a GPU if `on_gpu`.
    `modified` is the newest time of its files, Unix time in seconds. `trained_tokens` is the
    context of its training, None if its configuration has none. `template` is its chat template, ""
    without one. `thinks`: it has marks of reasoning. `call_parser` reads its calls.
    """

    architecture: str
    parameters: int
    stored_as: str
    digest: str
    file_bytes: int
    memory_bytes: int
    on_gpu: bool
    modified: float
    trained_tokens: int | None = None
    layers: int | None = None
    width: int | None = None
    template: str = ""
    thinks: bool = False
    tools: ToolSupport = "text"
    call_parser: str = ""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of a server. Lists show `names`, its own id first; requests may also use `aliases`.
    `details` is None for one without files.

    `context_tokens` limits prompt and answer together: the model's own limit or the capacity of the
    pool, whichever is less. `sampling` is the default of a request. `created` is Unix time in
    seconds. `parent` is the id of an adapter's base, None for another model.
    """

    names: tuple[str, ...]
    context_tokens: int
    vocab_size: int
    created: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    aliases: frozenset[str] = frozenset()
    details: ModelDetails | None = None
    parent: str | None = None

    def accepts(self, name: str) -> bool:
        """Return whether requests may call the model `name`."""
        return name in self.names or name in self.aliases

    @property
    def id(self) -> str:
        return self.names[0]


class ServingPort(Protocol):
    """A served model. Any number of tasks of one event loop may call it concurrently."""

    @property
    def model(self) -> ServedModel:
        """The served model."""
        ...

    def answer(self, ask: Ask) -> AsyncGenerator[AnswerEvent, None]:
        """Yield the answer's events; awaiting the first one submits the request.

        Closing the generator before its end cancels the request. Before the first event it raises
        InvalidRequestError, ContextOverflowError (exceeds the context) or OverloadedError (the
        queue is full); after that every failure is an AnswerEnd with the reason "error".
        """
        ...

    async def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool = True, tenant: str = ""
    ) -> tuple[int, ...]:
        """The tokens of `prompt` in a request of `tenant`. Raises InvalidRequestError and
        ContextOverflowError."""
        ...

    async def detokenize(self, tokens: Sequence[int], tenant: str = "") -> str:
        """The text of `tokens`. Raises InvalidRequestError for an unknown id."""
        ...

    async def token_texts(self, tokens: Sequence[int], tenant: str = "") -> tuple[str, ...]:
        """The text of each token alone, for wires that report log-probabilities by text."""
        ...
