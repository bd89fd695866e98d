"""ServingPort: a served model's interface for APIs; answers are streams of events. Methods run on
an event loop and never block it. An API only translates between its protocol and this interface.
`Figures` are for monitoring."""

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
"""The input of a request: a conversation, a text, or token ids."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for one answer.

    If `max_tokens` is None, the answer may fill the context. If `agent` is None, the request
    belongs to the agent whose history the prompt continues, or to a new agent. With an `identity`,
    only agents of this identity count. Tenants share nothing. `thinking_tokens` limits the
    reasoning of the answer, if the model has marks of reasoning: None sets no limit, 0 allows none.
    Without `keep` the request may read caches but adds nothing to them. `context_tokens` limits
    prompt plus answer, below the model's limit. With `numbered_calls`, a tool call's id follows
    from its place in the conversation, see `numbered_call`; otherwise ids are random. The store
    keeps the one-line `note` with the agent. `hints` are the agent's hints.
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
"""How a model learns of the tools in a request: "native", through its chat template; "text", as
text in the prompt, if the template does not support tools; "unknown" if the server cannot parse the
model's calls."""


@dataclass(frozen=True, slots=True)
class ModelDetails:
    """A model's files, size and abilities. `digest` is the hash of the model's files in
    hexadecimal, `stored_as` the type of its weights on disk ("4bit", "mxfp4", "bf16"). `file_bytes`
    is the size of its weights on disk, `memory_bytes` their size in memory, which is GPU memory if
    `on_gpu`. `modified` is the newest modification time of its files, Unix time in seconds.
    `trained_tokens` is the context length of its training, None if unknown. `template` is its chat
    template; "" if it has none. `thinks` is true if the model marks reasoning. `call_parser` names
    the parser of its tool calls."""

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
    """A model of a server. Lists of models show its `names`, the id first; requests may also use
    the `aliases`. `details` is None for a model without files. `context_tokens` limits prompt and
    answer together: the lower of the model's own limit and the pool's capacity. `sampling` is the
    default for requests. `created` is Unix time in seconds. `parent` is the id of the base model if
    this model is an adapter, else None."""

    names: tuple[str, ...]
    context_tokens: int
    vocab_size: int
    created: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    aliases: frozenset[str] = frozenset()
    details: ModelDetails | None = None
    parent: str | None = None

    def accepts(self, name: str) -> bool:
        """Return whether a request may use `name` for this model."""
        return name in self.names or name in self.aliases

    @property
    def id(self) -> str:
        return self.names[0]


class ServingPort(Protocol):
    """A served model. Any number of tasks of one event loop may call the methods concurrently."""

    @property
    def model(self) -> ServedModel:
        """The names, limits and defaults of the model."""

    def answer(self, ask: Ask) -> AsyncGenerator[AnswerEvent, None]:
        """Yield the answer's events; awaiting the first event submits the request. Closing the
        generator before its end cancels the request. Before the first event, raises
        InvalidRequestError, ContextOverflowError (exceeds the context) or OverloadedError (full
        queue). Every later failure is an AnswerEnd with the reason "error"."""

    async def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool = True, tenant: str = ""
    ) -> tuple[int, ...]:
        """Return the tokens of `prompt` as a request of `tenant` would have them. Raises
        InvalidRequestError and ContextOverflowError."""

    async def detokenize(self, tokens: Sequence[int], tenant: str = "") -> str:
        """Return the text of `tokens`. Raises InvalidRequestError for an unknown id."""

    async def token_texts(self, tokens: Sequence[int], tenant: str = "") -> tuple[str, ...]:
        """Return the text of each token by itself: APIs show log-probabilities with texts instead
        of token ids."""


class EngineState(StrEnum):
    """The state of an engine's thread."""

    LOADING = "loading"
    """The thread is building the engine, and refuses submissions until the engine is ready."""
    READY = "ready"
    REBUILDING = "rebuilding"
    """The engine failed; the thread is building another one and queues submissions."""
    STOPPING = "stopping"
    """The thread refuses new submissions; accepted ones finish or are cancelled."""
    STOPPED = "stopped"
    FAILED = "failed"
    """There is no engine, and the thread will not build another one."""

    @property
    def accepts_submissions(self) -> bool:
        return self in (EngineState.READY, EngineState.REBUILDING)

    @property
    def is_over(self) -> bool:
        return self in (EngineState.STOPPED, EngineState.FAILED)


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """Figures of an engine at one moment. `inbox` counts submissions before their validation,
    `waiting` counts requests without blocks. `queued` counts the submissions and requests that have
    never run; their caches may need `queued_bytes`. `idle` counts agents that have a cache in the
    pool but no request. `pool_bytes` is the pool's limit. `preemptions`, `rebuilds` and
    `restored_bytes` (for each tier of the store) count from the start of the process."""

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
    """The process' memory in bytes, as the system counts it. `limit_bytes` is the current limit,
    below `max_bytes` while the system is short of memory. `steps` are the current measures against
    memory pressure, in order; `counts` says how often the memory guard has taken each measure."""

    used_bytes: int
    limit_bytes: int
    max_bytes: int
    steps: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)


class MemoryLimit(Protocol):
    """Reads and sets the limit on the process' memory."""

    @property
    def memory(self) -> MemoryFigures | None:
        """Return the figures of the last measurement; None if memory is not limited.
        Thread-safe."""

    async def look_at_memory(self) -> None:
        """Measure the memory, unless the last measurement is recent. While the engine's thread is
        idle, only this call measures the memory."""

    async def limit_memory(self, n_bytes: int | None) -> MemoryFigures:
        """Set another limit, or the initial limit if None; return once the process has freed the
        excess. Raises InvalidRequestError and changes nothing if the process cannot free enough or
        has no memory limit."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of the engine, and statistics of each tier of its store. With several models,
    `engine` is the sum and `models` contains the figures of each loaded model. `memory` is None if
    memory is not limited."""

    engine: EngineFigures
    stores: tuple[StoreStats, ...] = ()
    models: Mapping[str, EngineFigures] = field(default_factory=dict)
    memory: MemoryFigures | None = None
