"""PrefixLookup: finds the longest stored prefix of a prompt.

A block counts only if the store has every block before it. Discovery asks a slow tier first, so
that the engine never waits for a network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from semantic.application.fair_threads import FairThreads
from semantic.domain.block_hash import (
    BlockHash,
    BlockKey,
    BlockLink,
    Part,
    Scope,
    namespace_of,
    tenant_tag,
)
from semantic.domain.match import MatchEnd
from semantic.domain.prefix import common_prefix
from semantic.domain.stored import BlockHeader, BlockLayout, Found, Tier
from semantic.domain.value_objects import BLOCK_TOKENS
from semantic.ports.generation import BatchBackend
from semantic.ports.store import CacheStorePort, LookUpPort, StorePort


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """The first `length` tokens of a prompt, and the stored bodies to read for these tokens."""

    length: int
    start: int = 0
    full: tuple[BlockHeader, ...] = ()
    window: tuple[BlockHeader, ...] = ()
    checkpoint: BlockHeader | None = None
    known: int = 0
    junction: int | None = None
    end: MatchEnd = MatchEnd.MISSING
    found: Mapping[BlockKey, Found] = field(default_factory=dict)
    is_public: bool = False

    @property
    def headers(self) -> tuple[BlockHeader, ...]:
        """The headers of all bodies to read."""
        last = () if self.checkpoint is None else (self.checkpoint,)
        return (*self.full, *self.window, *last)

    def bytes_in(self, tier: Tier) -> int:
        """Return the size in bytes of the prefix's bodies in `tier`."""
        return self.bytes_by_tier[tier]

    def bytes_of(self, headers: Iterable[BlockHeader]) -> dict[Tier, int]:
        """Return the size in bytes of the bodies of `headers` in each tier."""
        n_bytes = dict.fromkeys(Tier, 0)
        for header in headers:
            if (found := self.found.get(header.key)) is not None:
                n_bytes[found.tier] += found.n_bytes
        return n_bytes

    @property
    def n_bytes(self) -> int:
        """The size in bytes of all bodies of the prefix."""
        return sum(self.bytes_by_tier.values())

    @property
    def bytes_by_tier(self) -> dict[Tier, int]:
        """The size in bytes of the prefix's bodies in each tier."""
        return self.bytes_of(self.headers)

    @property
    def source(self) -> Tier:
        """The slowest tier that has a body of the prefix."""
        slow = (tier for tier in (Tier.REMOTE, Tier.DISK) if self.bytes_in(tier))
        return next(slow, Tier.MEMORY)


def window_start(layout: BlockLayout, length: int) -> int:
    """Return the first position that window layers attend to from position `length`."""
    return max(0, length - (layout.window_tokens or 1) + 1)


def window_links(layout: BlockLayout, links: Sequence[BlockLink]) -> list[BlockLink]:
    """Return the blocks whose WINDOW bodies are needed to resume after `links`."""
    if not layout.window or not links:
        return []
    first = window_start(layout, links[-1].stop)
    return [link for link in links if link.start >= first]


class PrefixLookup:
    """Finds prefixes in one store for one layout."""

    def __init__(self, store: CacheStorePort, layout: BlockLayout) -> None:
        self._store = store
        self._layout = layout

    def find(
        self, scope: Scope, links: Sequence[BlockLink], tokens: Sequence[int], start: int = 0
    ) -> StoredPrefix | None:
        """Return the longest prefix of `tokens` that a sequence can restore, or None. The
        sequence already holds the tokens before `start`, a multiple of 256."""
        first = start // BLOCK_TOKENS
        wanted = [link.key(Part.FULL) for link in links[first:]]
        found = dict(self._store.find(wanted))
        n_stored = next((i for i, key in enumerate(wanted) if key not in found), len(wanted))
        n_blocks = first + n_stored
        known = n_blocks * BLOCK_TOKENS
        if self._layout.needs_checkpoint:
            if start:
                return None
            prefix = self._at_checkpoint(scope, links, tokens, n_blocks)
            return self._with_junction(prefix, scope, links, tokens, known)
        full = [self._header(link) for link in links[first:n_blocks]]
        tail, n_tail = self._tail(_hash_before(scope, links, n_blocks), tokens[known:])
        if tail is not None:
            full.append(tail)
            found.update(self._store.find([tail.key]))
        if not full:
            return None
        return StoredPrefix(known + n_tail, start, tuple(full), known=known, found=found)

    def _with_junction(
        self,
        prefix: StoredPrefix | None,
        scope: Scope,
        links: Sequence[BlockLink],
        tokens: Sequence[int],
        known: int,
    ) -> StoredPrefix | None:
        parent = _hash_before(scope, links, known // BLOCK_TOKENS)
        junction = known + self._tail(parent, tokens[known:])[1]
        if prefix is not None:
            return replace(prefix, junction=junction) if junction > prefix.length else prefix
        if not junction:
            return None
        return StoredPrefix(0, known=known, junction=junction, end=MatchEnd.NO_CHECKPOINT)

    def _at_checkpoint(
        self, scope: Scope, links: Sequence[BlockLink], tokens: Sequence[int], n_blocks: int
    ) -> StoredPrefix | None:
        for k in range(n_blocks, -1, -1):
            rest = tokens[k * BLOCK_TOKENS : (k + 1) * BLOCK_TOKENS]
            for checkpoint in self._checkpoints(_hash_before(scope, links, k), rest):
                prefix = self._resume_at(checkpoint, links, k, known=n_blocks)
                if prefix is not None:
                    return prefix
        return None

    def _checkpoints(self, parent: BlockHash, rest: Sequence[int]) -> Iterator[BlockHeader]:
        headers = self._store.nearest(parent, Part.CHECKPOINT, rest)
        for header in sorted(headers, key=lambda h: len(h.link.tokens), reverse=True):
            own = header.link.tokens
            if len(own) <= len(rest) and own == tuple(rest[: len(own)]):
                yield header

    def _resume_at(
        self, checkpoint: BlockHeader, links: Sequence[BlockLink], k: int, *, known: int
    ) -> StoredPrefix | None:
        last = checkpoint.link
        chain = [*links[:k], last]
        window = tuple(
            BlockHeader(link, Part.WINDOW, self._layout.name)
            for link in window_links(self._layout, chain)
        )
        # A longer block holds the same keys and values for its first tokens.
        body = self._header(links[k]) if k < known else self._longer(last)
        if body is None:
            return None
        full = (*map(self._header, links[:k]), body)
        headers = (*full, *window, checkpoint)
        found = self._store.find([header.key for header in headers])
        if len(found) < len({header.key for header in headers}):
            return None
        return StoredPrefix(
            length=last.stop,
            full=full,
            window=window,
            checkpoint=checkpoint,
            known=known * BLOCK_TOKENS,
            end=MatchEnd.NO_CHECKPOINT if known * BLOCK_TOKENS > last.stop else MatchEnd.MISSING,
            found=found,
        )

    def _longer(self, link: BlockLink) -> BlockHeader | None:
        tail, n_tokens = self._tail(link.parent, link.tokens)
        return tail if n_tokens == len(link.tokens) else None

    def _tail(self, parent: BlockHash, rest: Sequence[int]) -> tuple[BlockHeader | None, int]:
        """Return the block after `parent` that shares most tokens with `rest`, and their number."""
        rest = rest[:BLOCK_TOKENS]
        if not rest:
            return None, 0
        best: tuple[BlockHeader | None, int] = None, 0
        for header in self._store.nearest(parent, Part.FULL, rest):
            shared = common_prefix(header.link.tokens, rest)
            if shared > best[1]:
                best = header, shared
        return best

    def _header(self, link: BlockLink) -> BlockHeader:
        return BlockHeader(link, Part.FULL, self._layout.name)


def _hash_before(scope: Scope, links: Sequence[BlockLink], block: int) -> BlockHash:
    return links[block - 1].hash if block else scope.root


_THREADS = 8
"""The maximum number of prompts to look up at the same time."""
_SECONDS = 2.0
"""The seconds that a request waits for its look-up; a long prompt waits longer."""
_TOKENS_PER_SECOND = 10_000
"""The assumed tokens per second of prefill, for the time limit of a look-up."""


class Discovery:
    """Asks a slow tier for the blocks of a model. Thread-safe."""

    def __init__(
        self,
        model: BatchBackend,
        store: StorePort,
        remote: LookUpPort,
        *,
        seconds: float = _SECONDS,
    ) -> None:
        self._layout = model.layout()
        self._spec = model.cache_spec()
        self._namespace = namespace_of(model.model_id, self._layout.name)
        self._store = store
        self._remote = remote
        self._lookup = PrefixLookup(store, self._layout)
        self._seconds = seconds
        self._threads = FairThreads(_THREADS, "look-up")

    def begin(self, agent_id: str, tenant: str, tokens: Sequence[int]) -> Future[None]:
        """Start `look_up` on another thread; return its future."""
        look_up = partial(self.look_up, agent_id, tenant, tokens)
        return self._threads.submit(tenant, look_up, is_short=True)

    async def wait(self, agent_id: str, tenant: str, tokens: Sequence[int]) -> None:
        """Wait for a look-up, at most until the look-up's time limit."""
        begun = asyncio.wrap_future(self.begin(agent_id, tenant, tokens))
        with suppress(TimeoutError):
            await asyncio.wait_for(begun, max(self._seconds, len(tokens) / _TOKENS_PER_SECOND))

    def close(self) -> None:
        """End the threads after the look-ups in progress."""
        self._threads.close()

    def look_up(self, agent_id: str, tenant: str, tokens: Sequence[int]) -> None:
        """Fetch the slow tier's index entries for an agent and its prompt. Raises no error."""
        reusable = tokens[: self._spec.reusable(len(tokens) - 1)]
        scope = self._scope(agent_id, tenant)
        chain, known = self._chain(scope, reusable)
        if known is not None and known.length + BLOCK_TOKENS > len(reusable):
            return
        self._remote.look_up_agent(scope, agent_id)
        salted = self._scope(agent_id, tenant)
        if salted.root != scope.root:
            scope = salted
            chain, known = self._chain(scope, reusable)
        start = 0 if known is None else known.known // BLOCK_TOKENS
        self._remote.look_up(scope, chain, self._layout, start)

    def _chain(
        self, scope: Scope, tokens: Sequence[int]
    ) -> tuple[list[BlockLink], StoredPrefix | None]:
        chain = list(scope.chain(tokens))
        full = [link for link in chain if link.is_full]
        return chain, self._lookup.find(scope, full, tokens)

    def _scope(self, agent_id: str, tenant: str) -> Scope:
        scope = Scope(self._namespace, tenant_tag(self._store.secret, tenant))
        manifest = self._store.agents.manifest(scope, agent_id)
        salt = b"" if manifest is None else manifest.scope.salt
        return replace(scope, salt=salt) if salt else scope
