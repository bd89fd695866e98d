"""What a store keeps: block bodies with what identifies them, and one manifest per agent.

Bodies are plain bytes here. Knows neither where they lie nor how a backend reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from semantic.domain.block_hash import BlockKey, BlockLink, Part, Scope
from semantic.domain.match import MatchReport


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How a model's cache becomes bodies.

    The body of `n` tokens of a part is its segments one behind the other, segment `s` holding
    `n * bytes_per_token[s]` bytes: one layer's keys or values of one head. `name` describes
    shapes, dtypes and order, and is part of the namespace.
    """

    name: str
    full: tuple[int, ...] = ()
    window: tuple[int, ...] = ()
    window_tokens: int | None = None
    """The window of the layers in `window`."""
    needs_checkpoint: bool = False
    """Whether a sequence can be resumed only where a checkpoint was taken."""

    def bytes_per_token(self, part: Part) -> tuple[int, ...]:
        """Bytes of one token in each segment of `part`; a checkpoint has no segments."""
        return {Part.FULL: self.full, Part.WINDOW: self.window, Part.CHECKPOINT: ()}[part]

    def body_bytes(self, part: Part, n_tokens: int) -> int:
        """Bytes of the body of `n_tokens` tokens of `part`."""
        return n_tokens * sum(self.bytes_per_token(part))


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What identifies a body: compared field by field before a body is believed."""

    link: BlockLink
    part: Part
    layout: str

    @property
    def key(self) -> BlockKey:
        return self.link.key(self.part)


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A body and its header."""

    header: BlockHeader
    body: bytes


@dataclass(frozen=True, slots=True)
class BlockRead:
    """A body to read into memory that is waiting for it.

    Segment `s` of the body goes to the front of `targets[s]`, which has room for 256 tokens and
    so says how many bytes a token has there.
    """

    header: BlockHeader
    targets: Sequence[memoryview]


class Tier(StrEnum):
    """Where a body lies."""

    MEMORY = "memory"
    QUEUE = "queue"
    """In memory, on its way to the disk."""
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Found:
    """A body that a store believes to have: its size in bytes, and where it lies."""

    n_bytes: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class Manifest:
    """An agent as it was at the end of its last turn.

    Its blocks follow from `scope` and `token_ids`, of which the first `prompt_tokens` were the last
    turn's prompt. `note` is text that the agent's client wants to find again, such as its messages;
    no store reads it. `generation` is given by the store, one more
    with each save; `model` and `parent` (the agent it was forked from) are for people to read, and
    so is `saved_at` (seconds since 1970): nothing is decided by a clock.
    """

    scope: Scope
    agent_id: str
    token_ids: tuple[int, ...]
    generation: int = 0
    pinned: bool = False
    parent: str | None = None
    prompt_tokens: int = 0
    note: str = ""
    model: str = ""
    saved_at: float = 0.0
    match: MatchReport | None = None


@dataclass(frozen=True, slots=True)
class StoreStats:
    """One tier's contents, and how often what happened since it was opened.

    `counts` has at least "hits", "misses", "written", "dropped", "evicted" and "damaged" (blocks)
    and "write_errors", and names a kind of damage or error as "damaged: body checksum".
    """

    tier: Tier
    n_blocks: int
    n_bytes: int
    max_bytes: int
    n_agents: int = 0
    pinned_bytes: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
