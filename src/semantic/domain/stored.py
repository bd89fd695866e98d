"""Values of a block store: block bodies as plain bytes, with headers, and one manifest per agent.
Knows neither how a store keeps these values nor how a backend reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import isnan
from typing import Protocol

from semantic.domain.block_hash import BlockKey, BlockLink, Part, Scope
from semantic.domain.match import MatchReport
from semantic.domain.value_objects import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Describes how block bodies divide a model's cache. The body of a part, for `n` tokens, is its
    segments one after another. Segment `s` has `n * bytes_per_token[s]` bytes: the keys or the
    values of one head of one layer. `name`, which is part of the namespace, describes shapes,
    dtypes and order."""

    name: str
    full: tuple[int, ...] = ()
    window: tuple[int, ...] = ()
    window_tokens: int | None = None
    """Window size of the layers in `window`."""
    needs_checkpoint: bool = False
    """True if a sequence can resume only at a checkpoint."""

    def bytes_per_token(self, part: Part) -> tuple[int, ...]:
        """Return the bytes per token in each segment of `part`; a checkpoint has no segments."""
        return {Part.FULL: self.full, Part.WINDOW: self.window, Part.CHECKPOINT: ()}[part]

    def body_bytes(self, part: Part, n_tokens: int) -> int:
        return n_tokens * sum(self.bytes_per_token(part))


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """Identifies a stored body; a store verifies every field when it reads the body."""

    link: BlockLink
    part: Part
    layout: str

    @property
    def key(self) -> BlockKey:
        return self.link.key(self.part)

    @property
    def is_whole_block(self) -> bool:
        """True if the body has the keys and values of a whole block, which a prefix can contain."""
        return self.part is Part.FULL and self.link.is_full


class DeferredBody(Protocol):
    """A body of known size that is still being copied from a device."""

    def __len__(self) -> int: ...

    def wait(self) -> memoryview:
        """Wait for all bytes and return them. Any thread may call it. Raises OSError on failure."""


Body = bytes | DeferredBody


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A body and its header. An `interim` block belongs to an unfinished request: a store whose
    `holds_back` is true does not write it to disk."""

    header: BlockHeader
    body: Body
    interim: bool = False

    def data(self) -> bytes | memoryview:
        """Return the bytes of the body, which never change. Waits for the bytes if necessary.
        Raises OSError if they never arrive."""
        return self.body if isinstance(self.body, bytes) else self.body.wait()


@dataclass(frozen=True, slots=True)
class BlockRead:
    """Asks a store to read a body into existing memory. Segment `s` of the body goes to the start
    of `targets[s]`, which has room for 256 tokens of the segment."""

    header: BlockHeader
    targets: Sequence[memoryview]

    @property
    def segments(self) -> list[memoryview]:
        """Return the part of each target that the body fills, leaving out empty segments."""
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
    """The index's entry for a body not verified yet: the body's size in bytes and its tier."""

    n_bytes: int
    tier: Tier


OnProgress = Callable[[int, int], None]
"""Called with the finished amount and the whole amount of a long task."""


def no_progress(done: int, total: int) -> None:
    """An `OnProgress` that shows nothing."""


Place = tuple[int, bytes]
"""An agent's place in a list of agents: the time of its last save in microseconds, and its
`packed_name`."""
AgentName = tuple[Scope, str]
_LATEST = 1 << 62


def packed_name(name: str) -> bytes:
    """Return an agent's name as bytes, which sort in the same order as the names."""
    return name.encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class Manifest:
    """An agent at the end of its last turn. `scope` and `token_ids` determine its blocks; the first
    `prompt_tokens` of the ids were the last turn's prompt. `note` is opaque text of the caller. The
    store increments `generation` with each save. `model`, `parent` (the agent that forked or
    started this agent), `turns` (turns since a fork, without other saves) and `saved_at` (Unix time
    in seconds) are for display: no decision depends on a clock."""

    scope: Scope
    agent_id: str
    token_ids: tuple[int, ...]
    generation: int = 0
    turns: int = 0
    pinned: bool = False
    parent: str | None = None
    prompt_tokens: int = 0
    note: str = ""
    model: str = ""
    saved_at: float = 0.0
    match: MatchReport | None = None

    @property
    def place(self) -> Place:
        microseconds = 0 if isnan(self.saved_at) else min(max(self.saved_at * 1e6, 0), _LATEST)
        return int(microseconds), packed_name(self.agent_id)


COUNTERS = ("hits", "misses", "written", "dropped", "evicted", "damaged", "write_errors")
"""The events counted by every tier that writes blocks itself."""
QUEUE_COUNTERS = tuple(name for name in COUNTERS if name != "written")


@dataclass(frozen=True, slots=True)
class Pinned:
    """How many bytes a tenant has pinned. `max_bytes` is the tenant's equal part of the quota,
    which other tenants cannot take; None if the tenant is alone."""

    n_bytes: int
    max_bytes: int | None


@dataclass(frozen=True, slots=True)
class Wear:
    """Bytes that a store has written to its drive, in all processes together. `total` counts from
    the day `since`; `days` has the last days with writes, oldest first. Days are local dates such
    as "2026-01-31"; `day` is today. `max_a_day` is the daily write limit, and `rated` the bytes
    that the drive is rated for; each is None if unknown."""

    day: str
    since: str
    total: int
    days: Mapping[str, int]
    max_a_day: int | None = None
    rated: int | None = None

    @property
    def today(self) -> int:
        """Bytes written today."""
        return self.days.get(self.day, 0)

    @property
    def holds_back(self) -> bool:
        """True once today's write limit is reached."""
        return self.max_a_day is not None and self.today >= self.max_a_day

    @property
    def share(self) -> float | None:
        """The fraction of the drive's rated life that this store has used; None if unknown."""
        return None if self.rated is None else self.total / self.rated


@dataclass(frozen=True, slots=True)
class StoreStats:
    """One tier's contents, and how often events have happened since the store opened the tier.
    `counts` contains at least "hits", "misses", "written", "dropped", "evicted" and "damaged" (in
    blocks) and "write_errors". Each kind of damage or error also has a count, such as "damaged:
    body checksum". `wear` is the drive's wear; None if the tier has no drive."""

    tier: Tier
    n_blocks: int
    n_bytes: int
    max_bytes: int
    n_agents: int = 0
    pinned_bytes: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    wear: Wear | None = None


_LEFT_FRACTION = 4


def left_at(first: int, now: int) -> int:
    """Return the time to record as the last use of a history that its agent has left, for example
    after a compaction. The time is a quarter of the way from `first`, the last use of the block to
    evict next, to `now`. So a store that replaces its blocks fast soon evicts the history, and a
    large store evicts older blocks first. See `benchmarks.left_histories`."""
    return first + (now - first) // _LEFT_FRACTION
