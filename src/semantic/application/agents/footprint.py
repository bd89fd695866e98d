"""AgentFootprint: an agent's blocks in a store, and their bytes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from semantic.domain.block_hash import BlockHash, BlockKey, Part, Scope
from semantic.domain.fair_share import FairLru
from semantic.domain.stored import Found, Manifest, Place, Tier
from semantic.ports.agents import AgentBlock
from semantic.ports.agents import Place as BlockPlace
from semantic.ports.store import AgentIndexPort, StorePort

_MAX_BLOCKS = 1 << 17
"""The maximum number of blocks in the cache of hash chains. A block takes 200 bytes."""


@dataclass(frozen=True, slots=True)
class ChainBlock:
    """A block of an agent. `start` and `stop` are positions in tokens."""

    hash: BlockHash
    start: int
    stop: int

    def key(self, part: Part) -> BlockKey:
        """Return the key of the block's body for `part`."""
        return BlockKey(self.hash, part)


Chain = tuple[ChainBlock, ...]


def chain_of(manifest: Manifest) -> Chain:
    """Return the agent's blocks in order."""
    links = manifest.scope.chain(manifest.token_ids)
    return tuple(ChainBlock(link.hash, link.start, link.stop) for link in links)


class Chains:
    """A cache of agents' hash chains, fair between tenants. Not thread-safe."""

    def __init__(self, max_blocks: int = _MAX_BLOCKS) -> None:
        self._chains: FairLru[tuple[str, int, float], Chain] = FairLru(max_blocks)

    def of(self, manifest: Manifest) -> Chain:
        # An agent created again after deletion restarts its generations, but has a later time.
        key = manifest.agent_id, manifest.generation, manifest.saved_at
        chain = self._chains.get(manifest.scope, key)
        if chain is None or (chain[-1].stop if chain else 0) != len(manifest.token_ids):
            chain = chain_of(manifest)
            self._chains.put(manifest.scope, key, chain, max(1, len(chain)))
        return chain


@dataclass(frozen=True, slots=True)
class AgentFootprint:
    """An agent's manifest, the agent's blocks, and the stored bodies of these blocks."""

    manifest: Manifest
    chain: Chain
    found: Mapping[BlockKey, Found]
    shared: frozenset[BlockKey]
    """The keys of the bodies that other agents use too."""

    def parts(self, block: ChainBlock) -> dict[Part, int]:
        """Return the size in bytes of each stored part of a block."""
        keys = {part: block.key(part) for part in Part}
        return {part: self.found[key].n_bytes for part, key in keys.items() if key in self.found}

    @property
    def stored_blocks(self) -> int:
        """The number of the agent's blocks that the store has."""
        return sum(bool(self.parts(block)) for block in self.chain)

    @property
    def n_bytes(self) -> int:
        """The size of the agent's stored bodies in bytes."""
        return sum(found.n_bytes for found in self.found.values())

    @property
    def shared_bytes(self) -> int:
        """The size in bytes of the bodies that other agents share."""
        return sum(found.n_bytes for key, found in self.found.items() if key in self.shared)


def footprints(
    store: StorePort, manifests: Sequence[Manifest], chain: Callable[[Manifest], Chain] = chain_of
) -> list[AgentFootprint]:
    """Return the footprint of the agent of each manifest."""
    chains = [chain(manifest) for manifest in manifests]
    users = store.agents.users(list({block.hash: None for blocks in chains for block in blocks}))
    stored = store.find([key for blocks in chains for key in _keys(blocks)])
    found = []
    for manifest, blocks in zip(manifests, chains, strict=True):
        name = manifest.scope, manifest.agent_id
        bodies = {key: stored[key] for key in _keys(blocks) if key in stored}
        shared = frozenset(key for key in bodies if users.get(key.hash, frozenset()) - {name})
        found.append(AgentFootprint(manifest, blocks, bodies, shared))
    return found


def _keys(blocks: Chain) -> list[BlockKey]:
    return [block.key(part) for block in blocks for part in Part]


_PAGE = 64


def walk(
    agents: AgentIndexPort, scope: Scope, page: int = _PAGE, after: Place | None = None
) -> Iterator[Manifest]:
    """Yield the manifests of a scope, newest first. Each query reads up to `page` manifests."""
    while found := agents.page(scope, page, after):
        yield from found
        if len(found) < page:
            return
        after = found[-1].place


def newest_first(agents: AgentIndexPort) -> Iterator[Manifest]:
    """Return the manifests of all scopes, newest first."""
    of_scopes = [walk(agents, scope) for scope in agents.scopes()]
    return heapq.merge(*of_scopes, key=lambda one: one.place, reverse=True)


_PLACES: Mapping[Tier, BlockPlace] = {
    Tier.MEMORY: "memory",
    Tier.QUEUE: "memory",
    Tier.DISK: "disk",
    Tier.UPLOADS: "memory",
    Tier.REMOTE: "remote",
}


def place_of(footprint: AgentFootprint, block: ChainBlock, pool_tokens: int) -> BlockPlace:
    """Return the fastest place of a block. The pool has the agent's first `pool_tokens`."""
    if block.stop <= pool_tokens:
        return "pool"
    found = _found(footprint, block)
    return "missing" if found is None else _PLACES[found.tier]


_RESUMED_FROM = (Part.WINDOW, Part.CHECKPOINT)


def _found(footprint: AgentFootprint, block: ChainBlock) -> Found | None:
    bodies = (footprint.found.get(block.key(part)) for part in Part)
    return next((one for one in bodies if one is not None), None)


def agent_block(footprint: AgentFootprint, block: ChainBlock, pool_tokens: int) -> AgentBlock:
    """Return a block as callers see it."""
    parts = footprint.parts(block)
    return AgentBlock(
        block.start,
        block.stop,
        block.hash.hex(),
        place_of(footprint, block, pool_tokens),
        sum(parts.values()),
        any(block.key(part) in footprint.shared for part in Part),
        not parts.keys().isdisjoint(_RESUMED_FROM),
    )
