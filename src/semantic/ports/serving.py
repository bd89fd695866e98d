"""ServingPort: a served model's interface for APIs; answers are streams of events. Runs on an event
loop and never blocks it. An API translates and decides nothing. `Figures` are for monitoring."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

from semantic.domain.answer import AnswerEvent
from semantic.domain.chat import Chat
from semantic.domain.identity import NO_HINTS, Hints, Identity
from semantic.domain.stored import StoreStats, Tier
from semantic.domain.value_objects import SamplingParams

Prompt = Chat | str | tuple[int, ...]
"""A conversation, a text, or token ids."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for one answer.

    `max_tokens` of None is the rest of the context. An `agent` of None is the one whose history the
    prompt continues, or a new one; with an `identity`, one of that identity's agents. Tenants share
    nothing. `thinking_tokens` limits the reasoning of the answer, if the model has marks of it:
    None for any number, 0 for none. Without `keep` the request may read caches and adds nothing to
    them. `context_tokens` limits prompt and answer together below the model's limit. With
    `numbered_calls` the ids of the answer's calls are `numbered_call` of their place in the
    conversation, else random. The store keeps `note`, one line, with the agent. `hints` are the
    agent's.
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
"""How tools reach a model: by its chat template, as text where that has none, or unknown, where no
parser reads its calls."""


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

    def answer(self, ask: Ask) -> AsyncGenerator[AnswerEvent, None]:
        """Yield the answer's events; awaiting the first one submits the request. Closing the
        generator before its end cancels the request. Before the first event it raises
        InvalidRequestError, ContextOverflowError (exceeds the context) or OverloadedError (the
        queue is full); after that every failure is an AnswerEnd with the reason "error"."""

    async def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool = True, tenant: str = ""
    ) -> tuple[int, ...]:
        """The tokens of `prompt` in a request of `tenant`. Raises InvalidRequestError and
        ContextOverflowError."""

    async def detokenize(self, tokens: Sequence[int], tenant: str = "") -> str:
        """The text of `tokens`. Raises InvalidRequestError for an unknown id."""

    async def token_texts(self, tokens: Sequence[int], tenant: str = "") -> tuple[str, ...]:
        """The text of each token alone, for APIs that report log-probabilities by text."""


class EngineState(StrEnum):
    """The state of an engine's thread."""

    LOADING = "loading"
    """The thread builds the engine, and refuses submissions until it is ready."""
    READY = "ready"
    REBUILDING = "rebuilding"
    """The engine failed; the thread builds another and queues submissions."""
    STOPPING = "stopping"
    """The thread refuses submissions; earlier ones finish, or it cancels them."""
    STOPPED = "stopped"
    FAILED = "failed"
    """There is no engine, and there will be none."""

    @property
    def accepts_submissions(self) -> bool:
        return self in (EngineState.READY, EngineState.REBUILDING)

    @property
    def is_over(self) -> bool:
        return self in (EngineState.STOPPED, EngineState.FAILED)


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """Figures of an engine at one moment.

    `inbox` counts submissions that the engine has not validated yet, `waiting` its requests without
    blocks; among both, `queued` never ran and may need `queued_bytes`. `idle` counts agents with a
    cache in the pool and no request. `pool_bytes` is the pool's limit. `preemptions`,
    `rebuilds` and `restored_bytes` (by tier of the store) count from the start.
    """

    state: EngineState
    inbox: int = 0
    waiting: int = 0
    running: int = 0
    idle: int = 0
    queued: int = 0
    queued_bytes: int = 0
    pool_used_bytes: int = 0
    pool_bytes: int = 0
    preemptions: int = 0
    rebuilds: int = 0
    restored_bytes: Mapping[Tier, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Bytes that the process has, as the system counts them, and may have: now, less than
    `max_bytes` while the system is short of memory, and otherwise. `steps` are what pressure took
    and has not ended yet, in order; `counts` how often each was, since the start."""

    used_bytes: int
    limit_bytes: int
    max_bytes: int
    steps: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)


class MemoryLimit(Protocol):
    """The limit of the process' memory."""

    @property
    def memory(self) -> MemoryFigures | None:
        """Figures of the last measurement, None without a limit. Thread-safe."""

    async def look_at_memory(self) -> None:
        """Measure, unless the guard did so lately: an idle thread does not."""

    async def limit_memory(self, n_bytes: int | None) -> MemoryFigures:
        """Set another limit, None for that of the start; return when the process has freed the
        excess. Raises InvalidRequestError, with nothing changed, for a limit that the process
        cannot keep, or where it has none."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of the engine, and statistics of each tier of its store. With several models `engine`
    is their sum, and `models` has each loaded one. `memory` is None without a limit."""

    engine: EngineFigures
    stores: tuple[StoreStats, ...] = ()
    models: Mapping[str, EngineFigures] = field(default_factory=dict)
    memory: MemoryFigures | None = None
