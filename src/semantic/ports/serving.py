"""The interface of a served model for the APIs. Methods run on an event loop and never block the
loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

from semantic.domain.answer import AnswerEvent
from semantic.domain.chat import Chat
from semantic.domain.identity import NO_HINTS, Hints, Identity
from semantic.domain.stored import StoreStats, Tier
from semantic.domain.value_objects import Lane, SamplingParams

_LONGEST_NAME = 200

Prompt = Chat | str | tuple[int, ...]
"""A conversation, a text, or token ids."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for one answer. Requests of different tenants share nothing."""

    prompt: Prompt
    sampling: SamplingParams
    max_tokens: int | None = None
    """The limit on the answer in tokens. None means that the answer may fill the context."""
    agent: str | None = None
    """None means the agent whose history the prompt continues, or a new one."""
    tenant: str = ""
    identity: Identity | None = None
    """Only agents with this identity may continue."""
    thinking_tokens: int | None = None
    """The limit on reasoning in tokens. None sets no limit, 0 allows no reasoning."""
    keep: bool = True
    """False means that the request adds nothing to caches."""
    context_tokens: int | None = None
    """The limit on prompt plus answer, in tokens."""
    numbered_calls: bool = False
    """True if a tool call's id is its place in the conversation, not random."""
    note: str = ""
    """A line of text that the store keeps with the agent."""
    hints: Hints = NO_HINTS
    predicted: str = ""
    """Text that the answer may contain. A step may make several tokens of it."""


ToolSupport = Literal["native", "text", "unknown"]
"""How a model sees tools: through its chat template ("native") or as text in the prompt ("text").
"unknown" if the server cannot parse the model's calls."""


@dataclass(frozen=True, slots=True)
class ModelDetails:
    """A model's files, size and abilities."""

    architecture: str
    parameters: int
    stored_as: str
    """The type of the weights on disk, such as "4bit" or "bf16"."""
    digest: str
    """The hash of the model's files, in hexadecimal."""
    file_bytes: int
    """The size of the weights on disk, in bytes."""
    memory_bytes: int
    """The size of the weights in memory, in bytes."""
    on_gpu: bool
    modified: float
    """The newest Unix time at which one of the files was modified."""
    trained_tokens: int | None = None
    """The context length in the model's training, or None."""
    layers: int | None = None
    width: int | None = None
    template: str = ""
    """The model's chat template, or ""."""
    thinks: bool = False
    """True if the model marks reasoning."""
    tools: ToolSupport = "text"
    call_parser: str = ""
    """The name of the parser of tool calls."""
    lane: Lane | None = None
    """The lane of the model's decode steps."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that a server offers."""

    names: tuple[str, ...]
    """The names that lists of models show, the id first."""
    context_tokens: int
    """The limit on prompt plus answer, in tokens."""
    vocab_size: int
    created: int
    """Unix time in seconds."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """The default sampling parameters of requests."""
    aliases: frozenset[str] = frozenset()
    """More names that requests may use."""
    details: ModelDetails | None = None
    """None for a model without files."""
    parent: str | None = None
    """The id of an adapter's base model, else None."""
    any_name: bool = False
    """True if requests may use any name of at most 200 characters."""

    def accepts(self, name: str) -> bool:
        """Return True if a request may use `name` for this model."""
        by_any = self.any_name and len(name) <= _LONGEST_NAME
        return by_any or name in self.names or name in self.aliases

    @property
    def id(self) -> str:
        return self.names[0]


class ServingPort(Protocol):
    """A served model. Tasks of one event loop may call the methods concurrently."""

    @property
    def model(self) -> ServedModel:
        """The names, limits and defaults of the served model."""

    def answer(self, ask: Ask) -> AsyncGenerator[AnswerEvent, None]:
        """Yield the answer's events. Closing this generator cancels the request. Before the first
        event, raises InvalidRequestError, ContextOverflowError, and OverloadedError for a full
        queue. A later failure is an AnswerEnd with the reason "error"."""

    async def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool = True, tenant: str = ""
    ) -> tuple[int, ...]:
        """Return the tokens that `prompt` would have in a request. Raises InvalidRequestError and
        ContextOverflowError."""

    async def detokenize(self, tokens: Sequence[int], tenant: str = "") -> str:
        """Return the text of `tokens`. Raises InvalidRequestError for an unknown token id."""

    async def token_texts(self, tokens: Sequence[int], tenant: str = "") -> tuple[str, ...]:
        """Return the text of each token by itself."""


class EngineState(StrEnum):
    """The state of an engine's thread."""

    LOADING = "loading"
    """The engine is not ready yet, and submissions fail."""
    READY = "ready"
    REBUILDING = "rebuilding"
    """The engine failed, and another one is not ready yet. Submissions wait."""
    STOPPING = "stopping"
    """The thread refuses new submissions, and finishes the accepted ones."""
    STOPPED = "stopped"
    FAILED = "failed"
    """The engine failed, and nothing will replace it."""

    @property
    def accepts_submissions(self) -> bool:
        return self in (EngineState.READY, EngineState.REBUILDING)

    @property
    def is_over(self) -> bool:
        return self in (EngineState.STOPPED, EngineState.FAILED)


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """Figures of an engine at one moment."""

    state: EngineState
    inbox: int = 0
    """The number of submissions that the engine has not validated yet."""
    waiting: int = 0
    """The number of requests without blocks."""
    running: int = 0
    idle: int = 0
    """The number of agents that have a cache in the pool, but no request."""
    queued: int = 0
    """The number of submissions and requests that have never run."""
    queued_bytes: int = 0
    """The maximum size of the caches for `queued`, in bytes."""
    pool_used_bytes: int = 0
    pool_bytes: int = 0
    """The limit of the pool, in bytes."""
    preemptions: int = 0
    """A number since the start of the process, as is `rebuilds`."""
    rebuilds: int = 0
    restored_bytes: Mapping[Tier, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """The process's memory in bytes, as the system counts it."""

    used_bytes: int
    limit_bytes: int
    """The current limit on the memory. It is at most `max_bytes`."""
    max_bytes: int
    steps: tuple[str, ...] = ()
    """The measures against memory pressure that are in effect."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """The number of times that the process took each measure."""


class MemoryLimit(Protocol):
    """Reads and sets the limit on the process's memory."""

    @property
    def memory(self) -> MemoryFigures | None:
        """Return the last measurement, or None without a limit. Thread-safe."""

    async def look_at_memory(self) -> None:
        """Measure the memory, unless the last measurement is recent."""

    async def limit_memory(self, n_bytes: int | None) -> MemoryFigures:
        """Set another limit, or the initial one for None. Returns once the process is below the
        limit. Raises InvalidRequestError if the process cannot free enough memory."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of the engine, and statistics of each tier of the store. `engine` is the sum over
    `models`. `memory` is None if memory has no limit."""

    engine: EngineFigures
    stores: tuple[StoreStats, ...] = ()
    models: Mapping[str, EngineFigures] = field(default_factory=dict)
    memory: MemoryFigures | None = None
