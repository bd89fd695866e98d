"""BlockAllocator: allocates, shares and frees the blocks of requests.

Evicts idle caches when the pool is full; only the scheduler preempts running requests. AgentCaches
manages the agents' caches between requests.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from semantic.application.cache.idle_caches import IdleCaches
from semantic.application.cache.prefix_store import PrefixStore
from semantic.application.request import Request, Restore, Reuse
from semantic.domain.entities import AgentBlocks, BlockId, KVBlock
from semantic.domain.errors import (
    BackendError,
    IntegrityError,
    InvalidRequestError,
    PoolExhaustedError,
)
from semantic.domain.prefix import reusable_prefix
from semantic.domain.services import BlockPool
from semantic.domain.stored import Manifest
from semantic.domain.value_objects import BLOCK_TOKENS, CacheKey, ModelCacheSpec, whole_blocks


@dataclass(eq=False)
class BlockAllocator:
    """Moves blocks between the pool, running requests and agents' idle caches."""

    _pool: BlockPool
    _spec: ModelCacheSpec
    _idle: IdleCaches
    _model_id: str
    _prefixes: PrefixStore | None = None
    _shared_layers: Sequence[bool] = ()

    def key(self, agent_id: str, tenant: str = "") -> CacheKey:
        return CacheKey(self._model_id, agent_id, tenant)

    def require_capacity(self, request: Request, agents: Iterable[str]) -> None:
        """Raise PoolExhaustedError if `request` does not fit into the pool alone. Blocks count as
        used if their holder is not in `agents`."""
        counts = self._spec.blocks_for(whole_blocks(request.max_total_tokens))
        if self._pool.can_allocate(counts, after_eviction=True):
            return
        ours = frozenset(agents)
        others = [holder for holder in self._pool.busy_holders() if holder not in ours]
        if not self._pool.fits_alone(counts, beside=others):
            raise PoolExhaustedError(
                f"Cannot allocate {sum(counts)} blocks ({self._spec.bytes_of(counts)} bytes) for "
                f"{len(request.prompt)} prompt and {request.max_tokens} new tokens: "
                f"the pool has {self._budget()}"
                + (f", {len(others)} other holders use part of it" if others else "")
            )

    def admit(self, request: Request, headroom: int = 0) -> bool:
        """Allocate blocks for the request's tokens and one more token. Keeps `headroom` blocks free
        per layer. Returns False and changes nothing if the pool is too full."""
        spare = headroom * BLOCK_TOKENS
        if request.scoring:
            return self._extend(request, whole_blocks(request.n_tokens + 1), spare)
        restore = self._find_cache(request)
        if self._is_longer_stored(request, restore):
            restore = None
        if restore is None:
            return self._extend(request, whole_blocks(request.n_tokens + 1), spare)
        if self._admit_with(request, restore, spare):
            return True
        # If the pool is otherwise empty, a request must be able to start, if necessary without the
        # cache.
        return headroom == 0 and self._extend(request, whole_blocks(request.n_tokens + 1))

    def grow(self, request: Request) -> bool:
        """Allocate blocks for a decoding request's next token. Returns False if the pool is
        full."""
        if request.n_tokens < request.capacity:
            return True
        return self._extend(request, whole_blocks(request.n_tokens + 1))

    def unpin(self, request: Request) -> None:
        """Release the restored cache after the backend has copied it or taken it over."""
        restore, request.restore = request.restore, None
        if restore is None:
            return
        if not restore.exclusive:
            self._pool.free(restore.pinned, request.owner)
            return
        for block in restore.blocks.all_blocks():
            # Data that the backend did not adopt would stay in memory until the block's next use.
            block.layer_data = None

    def readmit(self, request: Request) -> None:
        """Give the request blocks of its own, if it borrows some. Evicts nothing. Raises
        BackendError if the pool is full."""
        if not request.borrows:
            return
        capacity = request.capacity
        self.release(request)
        try:
            request.blocks = self._pool.allocate_layers(
                self._spec.blocks_for(capacity), request.owner
            )
        except PoolExhaustedError as error:
            raise BackendError("cannot compute the prompt again: the pool is full") from error
        request.capacity = capacity

    def release(self, request: Request) -> None:
        """Return all blocks of `request` to the pool."""
        self.unpin(request)
        for blocks in request.blocks:
            self._pool.free(blocks, request.owner)
        request.blocks = []
        request.capacity = 0
        request.borrows = False

    def free_unused(self, request: Request, unused: Sequence[KVBlock]) -> None:
        """Free the `unused` blocks of `request`."""
        gone = {block.block_id for block in unused}
        self._pool.free(unused, request.owner)
        request.blocks = [[b for b in layer if b.block_id not in gone] for layer in request.blocks]

    def give_back(self, request: Request) -> None:
        """Undo the admission of a request that has computed no token."""
        restore = request.restore
        if restore is None or not restore.exclusive:
            self.release(request)
            return
        if self._idle.get(self.key(request.agent_id, request.tenant)) is not None:
            self.release(request)  # the agent has a newer cache by now
            return
        taken = {block.block_id for block in restore.blocks.all_blocks()}
        unused = [b for layer in request.blocks for b in layer if b.block_id not in taken]
        self.free_unused(request, unused)
        request.restore = None
        self.keep(request, restore.blocks)

    def idle_tokens(self, agent_id: str, tenant: str) -> tuple[int, ...] | None:
        """Return the tokens of the agent's idle cache, or None."""
        cache = self._idle.get(self.key(agent_id, tenant))
        return None if cache is None else cache.token_ids

    def drop_idle(self, agent_id: str, tenant: str) -> bool:
        """Free the agent's idle cache. Returns False if the agent has no idle cache."""
        cache = self._idle.take(self.key(agent_id, tenant))
        if cache is None:
            return False
        self._pool.free(cache.all_blocks(), cache.owner)
        cache.retire()
        return True

    def fork(self, agent_id: str, new_agent_id: str, tenant: str) -> bool:
        """Share an agent's idle cache with a new agent. Returns False without an idle cache."""
        cache = self._idle.get(self.key(agent_id, tenant))
        if cache is None:
            return False
        if self._prefixes is not None and any(self._shared_layers):
            return True  # a request of the new agent finds the cache by its tokens
        key = self.key(new_agent_id, tenant)
        self._pool.share(cache.all_blocks(), key.owner)
        self._idle.put(key, cache.snapshot(new_agent_id, key.owner))
        return True

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise IntegrityError unless the pool's records match the requests and idle caches."""
        expected: dict[str, set[BlockId]] = defaultdict(set)
        for key in self._idle.lru_order():
            cache = self._idle.get(key)
            if cache is not None:
                expected[cache.owner].update(block.block_id for block in cache.all_blocks())
        for request in requests:
            own = expected[request.owner]
            own.update(block.block_id for layer in request.blocks for block in layer)
            if request.restore is not None:
                own.update(block.block_id for block in request.restore.blocks.all_blocks())
        for owner, blocks in expected.items():
            held = self._pool.view(owner).n_blocks
            if held != len(blocks):
                raise IntegrityError(f"agent {owner!r} holds {held} blocks, expected {len(blocks)}")

    def keep(self, request: Request, blocks: AgentBlocks) -> None:
        """Make the blocks of a finished request its agent's idle cache."""
        request.blocks = []
        request.capacity = 0
        self._idle.put(self.key(request.agent_id, request.tenant), blocks)

    def _budget(self) -> str:
        parts = []
        if self._pool.total_blocks is not None:
            parts.append(f"{self._pool.total_blocks} blocks")
        if self._pool.max_bytes is not None:
            parts.append(f"{self._pool.max_bytes} bytes")
        return " and ".join(parts)

    def _find_cache(self, request: Request) -> Restore | None:
        cache = self._idle.get(self.key(request.agent_id, request.tenant))
        best: Restore | None = None
        for blocks in (cache, request.given_cache, *self._alike(request, cache)):
            length = reusable_prefix(self._spec, blocks, request.tokens)
            if blocks is None or length == 0 or (best is not None and length <= best.length):
                continue
            if self._pool.is_live(blocks.all_blocks()):
                # A request with `keep` off works on a copy: its agent's cache stays unchanged.
                mine = (
                    blocks is cache
                    and request.keep
                    and self._pool.is_exclusive(blocks.all_blocks(), request.owner)
                )
                best = Restore(blocks, length, exclusive=mine)
        return best

    def _alike(self, request: Request, own: AgentBlocks | None) -> Iterator[AgentBlocks]:
        """Yield caches of the tenant's other agents that begin like the prompt, if the request can
        share their blocks."""
        if own is not None:
            return
        prefixes = self._prefixes
        for key in self._idle.alike(request.tenant, request.prompt):
            if prefixes is None or not prefixes.has_salt(key.agent_id, key.tenant):
                yield from filter(None, [self._idle.get(key)])

    def _is_longer_stored(self, request: Request, restore: Restore | None) -> bool:
        if self._prefixes is None:
            return False
        if restore is not None and self._prefixes.trusts_pool(request, restore.length):
            return False
        prefix = self._prefixes.find(request)
        if prefix is None:
            return False
        if restore is None or prefix.length >= restore.length + BLOCK_TOKENS:
            return True
        self._prefixes.decline(request)
        return False

    def _admit_with(self, request: Request, restore: Restore, spare: int) -> bool:
        # A snapshot, since eviction or another request may take the original.
        source = restore.blocks
        if restore.exclusive:
            self._idle.take(self.key(request.agent_id, request.tenant))
            request.blocks = [
                list(source.blocks_for_layer(layer)) for layer in range(self._spec.n_layers)
            ]
            request.capacity = whole_blocks(source.total_tokens)
        else:
            self._pool.share(source.all_blocks(), request.owner)
            restore.pinned = self._borrow(request, source, restore.length)
        restore.blocks = source.snapshot()
        request.restore = restore
        if self._extend(request, whole_blocks(request.n_tokens + 1), spare):
            if restore.exclusive:
                source.retire()
            return True
        if restore.exclusive:
            request.restore = None
            self.keep(request, source)
        else:
            self.release(request)
        return False

    def _borrow(self, request: Request, source: AgentBlocks, length: int) -> list[KVBlock]:
        """Let the request use the source's whole blocks in the layers that can share them. Returns
        the other blocks of the source."""
        shared = self._shared_layers or (False,) * self._spec.n_layers
        others: list[KVBlock] = []
        request.blocks = []
        for layer, is_shared in enumerate(shared):
            blocks, n_whole = source.blocks_for_layer(layer), is_shared * length // BLOCK_TOKENS
            request.blocks.append([KVBlock(one.block_id, layer) for one in blocks[:n_whole]])
            others += blocks[n_whole:]
        request.borrows = any(request.blocks)
        return others

    def _extend(self, request: Request, capacity: int, spare: int = 0) -> bool:
        blocks = request.blocks or [[] for _ in self._spec.layers]
        missing = self._missing(blocks, capacity)
        if not self._make_room(self._missing(blocks, capacity + spare)):
            return False
        if any(missing):
            try:
                new = self._pool.allocate_layers(missing, request.owner)
            except PoolExhaustedError:
                return False  # code outside the engine allocated first
            for mine, more in zip(blocks, new, strict=True):
                mine.extend(more)
        request.blocks = blocks
        request.capacity = max(request.capacity, capacity)
        return True

    def _missing(self, blocks: list[list[KVBlock]], capacity: int) -> list[int]:
        wanted = self._spec.blocks_for(capacity)
        return [max(0, want - len(have)) for want, have in zip(wanted, blocks, strict=True)]

    def _make_room(self, counts: list[int]) -> bool:
        if self._pool.can_allocate(counts):
            return True
        if not self._pool.can_allocate(counts, after_eviction=True):
            return False
        while not self._pool.can_allocate(counts):
            if not self._idle.evict():
                return False
        return True


@dataclass(frozen=True, slots=True)
class AgentCaches:
    """The caches of one engine's agents. The lock of AgentCaches guards the allocator."""

    _allocator: BlockAllocator
    _prefixes: PrefixStore | None
    _lock: threading.RLock

    def manifest(self, agent_id: str, tenant: str) -> Manifest | None:
        """Return the manifest of the agent's last turn; None if the store has no manifest."""
        return None if self._prefixes is None else self._prefixes.manifest(agent_id, tenant)

    def recall(self, agent_id: str, tenant: str) -> Reuse:
        """Return the tokens that the agent has cached. May read from disk."""
        manifest = self.manifest(agent_id, tenant)
        with self._lock:
            history = self._allocator.idle_tokens(agent_id, tenant)
        if history is None and manifest is not None:
            history = manifest.token_ids
        return Reuse(history=history, manifest=manifest)

    def forget(self, agent_id: str, tenant: str) -> bool:
        """Drop the agent's idle cache and its manifest. Returns False if the agent has neither."""
        with self._lock:
            dropped = self._allocator.drop_idle(agent_id, tenant)
        saved = self._prefixes is not None and self._prefixes.forget(agent_id, tenant)
        return saved or dropped

    def fork(self, agent_id: str, new_agent_id: str, tenant: str, history: Manifest | None) -> None:
        """Give a new agent the `history`, by default the cache of `agent_id`. Raises
        InvalidRequestError if `agent_id` is unknown or `new_agent_id` exists."""
        if not new_agent_id or self.recall(new_agent_id, tenant).history is not None:
            raise InvalidRequestError(f"fork: expected a new agent's name, got {new_agent_id!r}")
        known = self.recall(agent_id, tenant) if history is None else Reuse(manifest=history)
        if known.history is None and history is None:
            raise InvalidRequestError(f"fork: there is no agent {agent_id!r}")
        if self._prefixes is not None:
            self._prefixes.share_salt(agent_id, new_agent_id, tenant)
            if known.manifest is not None:
                self._prefixes.save(known.manifest.forked(new_agent_id))
        if history is None:
            with self._lock:
                self._allocator.fork(agent_id, new_agent_id, tenant)

    def restore(self, manifest: Manifest, tenant: str) -> None:
        """Make `manifest` the newest one of its agent, whose idle cache has other tokens."""
        if self._prefixes is not None:
            with self._lock:
                self._allocator.drop_idle(manifest.agent_id, tenant)
            self._prefixes.save(manifest)
