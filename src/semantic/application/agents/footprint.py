"""What a store has of an agent: which of its blocks, how large, and shared with whom.

Counts; knows neither how it is shown nor what is in the pool.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from semantic.domain.block_hash import BlockHash, BlockKey, Part, Scope
from semantic.domain.stored import Found, Manifest
from semantic.ports.store import CacheStorePort

_MOST_BLOCKS = 1 << 17
"""Blocks whose names are remembered; 200 bytes each."""


@dataclass(frozen=True, slots=True)
class ChainBlock:
    """A block of an agent's chain without its tokens: `start` to `stop` are positions."""

    hash: BlockHash
    start: int
    stop: int

    def key(self, part: Part) -> BlockKey:
        """Names the body of one part."""
        return BlockKey(self.hash, part)


Chain = tuple[ChainBlock, ...]


def chain_of(manifest: Manifest) -> Chain:
    """The agent's blocks in order."""
    links = manifest.scope.chain(manifest.token_ids)
    return tuple(ChainBlock(link.hash, link.start, link.stop) for link in links)


class Chains:
    """Remembers the chains of agents that were looked at last: hashing them takes a while.

    Not locked: whoever shares it between threads guards it.
    """

    def __init__(self, most_blocks: int = _MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._n_blocks = 0
        self._chains: OrderedDict[tuple[Scope, str, int, float], Chain] = OrderedDict()

    def of(self, manifest: Manifest) -> Chain:
        """See `chain_of`."""
        # An agent that was forgotten and is there again begins to count anew, but later.
        key = manifest.scope, manifest.agent_id, manifest.generation, manifest.saved_at
        chain = self._chains.pop(key, None)
        if chain is None or (chain[-1].stop if chain else 0) != len(manifest.token_ids):
            self._n_blocks -= len(chain or ())
            chain = chain_of(manifest)
            self._n_blocks += len(chain)
        self._chains[key] = chain
        while self._n_blocks > self._most_blocks:
            self._n_blocks -= len(self._chains.popitem(last=False)[1])
        return chain


@dataclass(frozen=True, slots=True)
class AgentFootprint:
    """An agent, its chain of blocks, and the bodies that the store has of each."""

    manifest: Manifest
    chain: Chain
    found: Mapping[BlockKey, Found]
    shared: frozenset[BlockKey]
    """Bodies that are another agent's too."""

    def parts(self, block: ChainBlock) -> dict[Part, int]:
        """Bytes of each part of a block that is there."""
        keys = {part: block.key(part) for part in Part}
        return {part: self.found[key].n_bytes for part, key in keys.items() if key in self.found}

    @property
    def stored_blocks(self) -> int:
        """Blocks of which there is anything."""
        return sum(bool(self.parts(block)) for block in self.chain)

    @property
    def n_bytes(self) -> int:
        """Bytes of all bodies that are there."""
        return sum(found.n_bytes for found in self.found.values())

    @property
    def shared_bytes(self) -> int:
        """How many of `n_bytes` another agent has as well."""
        return sum(found.n_bytes for key, found in self.found.items() if key in self.shared)


def all_footprints(
    store: CacheStorePort,
    manifests: Sequence[Manifest],
    chain: Callable[[Manifest], Chain] = chain_of,
) -> list[AgentFootprint]:
    """The facts of all these agents, which may share blocks with one another only."""
    chains = [chain(manifest) for manifest in manifests]
    users = Counter(block.hash for blocks in chains for block in blocks)
    facts: list[AgentFootprint] = []
    for manifest, blocks in zip(manifests, chains, strict=True):
        found = store.find([block.key(part) for block in blocks for part in Part])
        shared = frozenset(key for key in found if users[key.hash] > 1)
        facts.append(AgentFootprint(manifest, blocks, found, shared))
    return facts


def footprint_of(
    store: CacheStorePort,
    manifest: Manifest,
    others: Sequence[Manifest],
    chain: Callable[[Manifest], Chain] = chain_of,
) -> AgentFootprint:
    """The facts of one agent among `others`, which may hold it too."""
    name = manifest.scope, manifest.agent_id
    blocks = chain(manifest)
    theirs = {
        block.hash
        for other in others
        if (other.scope, other.agent_id) != name
        for block in chain(other)
    }
    found = store.find([block.key(part) for block in blocks for part in Part])
    return AgentFootprint(manifest, blocks, found, frozenset(k for k in found if k.hash in theirs))
