"""Values of a block store: block bodies with headers, and one manifest per agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import isnan
from typing import NamedTuple, Protocol

from semantic.domain.block_hash import BlockKey, BlockLink, Part, Scope
from semantic.domain.match import MatchReport
from semantic.domain.value_objects import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How block bodies divide a model's cache.

    A body of `n` tokens consists of segments: the keys or the values of one head of one layer.
    Segment `s` has `n * bytes_per_token[s]` bytes. `name` describes shapes, dtypes and order.
    """

    name: str
    full: tuple[int, ...] = ()
    window: tuple[int, ...] = ()
    window_tokens: int | None = None
    """The window size in tokens of the layers in `window`."""
    needs_checkpoint: bool = False
    """True if a sequence can resume only at a checkpoint."""
    other_name: str = ""
    """The name of the layout in which the same model's numbers have other bits, if there is one."""

    def bytes_per_token(self, part: Part) -> tuple[int, ...]:
        """Return the bytes per token in each segment of `part`; a checkpoint has no segments."""
        return {Part.FULL: self.full, Part.WINDOW: self.window, Part.CHECKPOINT: ()}[part]

    def body_bytes(self, part: Part, n_tokens: int) -> int:
        return n_tokens * sum(self.bytes_per_token(part))


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """Identifies a stored body. A store verifies every field when it reads the body."""

    link: BlockLink
    part: Part
    layout: str

    @property
    def key(self) -> BlockKey:
        return self.link.key(self.part)

    @property
    def is_whole_block(self) -> bool:
        """True if the body has the keys and values of a whole block."""
        return self.part is Part.FULL and self.link.is_full


class DeferredBody(Protocol):
    """A body of known size that is still being copied from a device."""

    def __len__(self) -> int: ...

    def wait(self) -> memoryview:
        """Wait for all bytes and return them. Thread-safe. Raises OSError on failure."""


Body = bytes | DeferredBody


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A body and its header. An `interim` block belongs to an unfinished request."""

    header: BlockHeader
    body: Body
    interim: bool = False  # a store that `holds_back` does not write it

    def data(self) -> bytes | memoryview:
        """Return the bytes of the body. Waits if necessary. Raises OSError if they never arrive."""
        return self.body if isinstance(self.body, bytes) else self.body.wait()


@dataclass(frozen=True, slots=True)
class BlockRead:
    """A request to a store to read a body into memory.

    Segment `s` goes to the start of `targets[s]`, which has space for 256 tokens.
    """

    header: BlockHeader
    targets: Sequence[memoryview]

    @property
    def segments(self) -> list[memoryview]:
        """Return the part of each target that the body fills, without empty segments."""
        n_tokens = len(self.header.link.tokens)
        return [
            target.cast("B")[: target.nbytes // BLOCK_TOKENS * n_tokens]
            for target in self.targets
            if target.nbytes
        ]


class Tier(StrEnum):
    MEMORY = "memory"
    QUEUE = "queue"
    """In memory, waiting to be written to disk."""
    DISK = "disk"
    UPLOADS = "uploads"
    """In memory, waiting to be sent to the object store."""
    REMOTE = "remote"
    """In a fleet's object store."""


@dataclass(frozen=True, slots=True)
class Found:
    """The size in bytes and the tier of an unverified body, as the index lists them."""

    n_bytes: int
    tier: Tier


OnProgress = Callable[[int, int], None]
"""Called with the finished and the whole amount of a long task."""


def no_progress(done: int, total: int) -> None:
    """An `OnProgress` that shows nothing."""


Place = tuple[int, bytes]
"""The time of an agent's last save in microseconds, and its `packed_name`, for sorted lists."""
AgentName = tuple[Scope, str]
_LATEST = 1 << 62


def packed_name(name: str) -> bytes:
    """Return an agent's name as bytes. The bytes sort in the same order as the names."""
    return name.encode("utf-8", "surrogatepass")


class TurnEnd(NamedTuple):
    """The number of tokens in a turn's prompt, and in the history after its answer."""

    prompt_tokens: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """An agent at the end of its last turn. `scope` and `token_ids` determine its blocks."""

    scope: Scope
    agent_id: str
    token_ids: tuple[int, ...]
    generation: int = 0  # the store increments it with each save
    turns: int = 0  # since a fork; only for display
    pinned: bool = False
    parent: str | None = None  # the agent that forked or started this one; only for display
    prompt_tokens: int = 0  # how many of the ids were the last turn's prompt
    note: str = ""  # opaque text of the caller
    model: str = ""  # only for display
    saved_at: float = 0.0  # Unix time in seconds; only for display
    match: MatchReport | None = None
    earlier: tuple[TurnEnd, ...] = ()  # earlier turns that are a part of the history

    @property
    def turn_ends(self) -> tuple[TurnEnd, ...]:
        """All turns that are a part of the history, oldest first."""
        return (*self.earlier, TurnEnd(self.prompt_tokens, len(self.token_ids)))

    def forked(self, new_id: str) -> Manifest:
        """Return a new agent with this one's history."""
        new = replace(self, agent_id=new_id, parent=self.agent_id, pinned=False)
        return replace(new, generation=0, turns=0)

    @property
    def place(self) -> Place:
        microseconds = 0 if isnan(self.saved_at) else min(max(self.saved_at * 1e6, 0), _LATEST)
        return int(microseconds), packed_name(self.agent_id)


COUNTERS = ("hits", "misses", "written", "dropped", "evicted", "damaged", "write_errors")
"""The events that every tier with writes of its own counts."""
QUEUE_COUNTERS = tuple(name for name in COUNTERS if name != "written")


@dataclass(frozen=True, slots=True)
class Pinned:
    """The number of bytes that a tenant has pinned. A single tenant has no `max_bytes`."""

    n_bytes: int
    max_bytes: int | None


@dataclass(frozen=True, slots=True)
class Wear:
    """Bytes that a store has written to its drive, in all processes together.

    Days are local dates such as "2026-01-31".
    """

    day: str  # today
    since: str
    total: int  # since the day `since`
    days: Mapping[str, int]  # the last days with writes, oldest first
    max_a_day: int | None = None  # the daily write limit
    rated: int | None = None  # the bytes that the drive is rated for

    @property
    def today(self) -> int:
        """The number of bytes written today."""
        return self.days.get(self.day, 0)

    @property
    def holds_back(self) -> bool:
        """True once today's write limit is reached."""
        return self.max_a_day is not None and self.today >= self.max_a_day

    @property
    def share(self) -> float | None:
        """The fraction of the drive's rated life used by this store; None if unknown."""
        return None if self.rated is None else self.total / self.rated


@dataclass(frozen=True, slots=True)
class StoreStats:
    """One tier's contents, and counts of events since the store opened. `wear` is None if the tier
    has no drive."""

    tier: Tier
    n_blocks: int
    n_bytes: int
    max_bytes: int
    n_agents: int = 0
    pinned_bytes: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)  # at least COUNTERS
    wear: Wear | None = None


_LEFT_FRACTION = 4


def left_at(first: int, now: int) -> int:
    """Return the time to record as the last use of a history that its agent has left.

    It is a quarter of the way from `first`, the last use of the oldest block, to `now`. See
    `benchmarks.left_histories`.
    """
    return first + (now - first) // _LEFT_FRACTION
