"""Changes of what a store holds as vLLM's KV cache events: routers that read vLLM's read these.

A batch is the msgpack of an array `[time, events, rank]`, an event a map with its name at "type".
Fields have vLLM's names; those that it leaves out by default are left out here. Knows no socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from semantic.domain.block_hash import BlockHash
from semantic.domain.stored import BlockHeader, Tier
from semantic.domain.value_objects import BLOCK_TOKENS

_RANK: Final = 0
"""A server has one rank."""
_NAME_BITS: Final = 64
_MEDIA: Final = {Tier.MEMORY: "CPU", Tier.DISK: "STORAGE"}
"""vLLM's words for the tiers of one machine."""


class BlockStored(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A run of blocks, each the parent of the next, can be found. `token_ids` are those of all."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None


class BlockRemoved(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Blocks can not be found in a medium any more."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Nothing can be found until it is stored again."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What one message has. `ts` is Unix time in seconds."""

    ts: float
    events: Sequence[Event]
    data_parallel_rank: int = _RANK


@dataclass(frozen=True, slots=True)
class Stored:
    """A tier has a block."""

    header: BlockHeader
    tier: Tier


@dataclass(frozen=True, slots=True)
class Removed:
    """A tier has a block no more."""

    name: BlockHash
    tier: Tier


Change: TypeAlias = Stored | Removed


def encoded(time: float, events: Sequence[Event]) -> bytes:
    """The message's payload."""
    return msgspec.msgpack.encode(KVEventBatch(time, events))


def events_of(changes: Sequence[Change]) -> list[Event]:
    """`changes` in their order: what follows one another in a chain, or is removed together, is one
    event."""
    runs: list[list[Change]] = []
    for change in changes:
        if runs and _continues(runs[-1][-1], change):
            runs[-1].append(change)
        else:
            runs.append([change])
    return [_event(run) for run in runs]


def _continues(before: Change, change: Change) -> bool:
    if before.tier is not change.tier:
        return False
    if isinstance(before, Stored) and isinstance(change, Stored):
        return change.header.link.parent == before.header.link.hash
    return isinstance(before, Removed) and isinstance(change, Removed)


def _event(run: Sequence[Change]) -> Event:
    medium = _MEDIA[run[0].tier]
    links = [one.header.link for one in run if isinstance(one, Stored)]
    if not links:
        return BlockRemoved([_named(one.name) for one in run if isinstance(one, Removed)], medium)
    return BlockStored(
        block_hashes=[_named(link.hash) for link in links],
        parent_block_hash=_named(links[0].parent) if links[0].start else None,
        token_ids=[token for link in links for token in link.tokens],
        block_size=BLOCK_TOKENS,
        lora_id=None,
        medium=medium,
        lora_name=None,
    )


def _named(name: BlockHash) -> int:
    """The last 64 bits, as vLLM names blocks by default."""
    return int.from_bytes(name, "big") & ((1 << _NAME_BITS) - 1)
