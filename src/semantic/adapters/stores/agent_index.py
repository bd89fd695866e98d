"""Agents of stores: AgentTable for memory, TierAgents for two tiers, QueuedAgents for a queue."""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TypeVar

from semantic.adapters.stores.write_queue import WriteQueue
from semantic.application.agents.footprint import walk
from semantic.domain.block_hash import BlockHash, BlockLink, Scope, pack_tokens, unpack_tokens
from semantic.domain.stored import AgentName, Manifest, Pinned, Place
from semantic.ports.store import AgentIndexPort

ENTRY_BYTES = 1024
"""The size of a block or manifest in bytes, without its body and tokens."""
TOKEN_BYTES = 48
"""Bytes counted for each token: an int and two pointers."""
LINK_BYTES = 640
"""The bytes counted for each block of a manifest."""
_CHARACTER_BYTES = 4

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class SavedAgent:
    """A manifest with packed tokens, and the blocks that hold its tokens."""

    bare: Manifest
    tokens: bytes
    chain: tuple[BlockHash, ...]
    last: tuple[BlockLink, ...]
    """The agent's last block; empty if the agent has no blocks."""

    @classmethod
    def of(cls, manifest: Manifest) -> SavedAgent:
        links = list(manifest.scope.chain(manifest.token_ids))
        tokens, chain = pack_tokens(manifest.token_ids), tuple(link.hash for link in links)
        return cls(replace(manifest, token_ids=()), tokens, chain, tuple(links[-1:]))

    @property
    def name(self) -> AgentName:
        return self.bare.scope, self.bare.agent_id

    @property
    def manifest(self) -> Manifest:
        return replace(self.bare, token_ids=unpack_tokens(self.tokens))

    @property
    def n_bytes(self) -> int:
        bare = self.bare
        texts = (bare.agent_id, bare.model, bare.parent or "", bare.note)
        n_bytes = ENTRY_BYTES + len(self.tokens) + LINK_BYTES * len(self.chain)
        n_bytes += TOKEN_BYTES * sum(len(link.tokens) for link in self.last)
        n_bytes += 3 * TOKEN_BYTES * len(bare.earlier)
        return n_bytes + _CHARACTER_BYTES * sum(map(len, texts))


class AgentTable:
    """The newest manifest of each agent. Not thread-safe."""

    def __init__(self) -> None:
        self.users: dict[BlockHash, dict[AgentName, None]] = {}
        """The agents that need a block, by the block's hash."""
        self._saved: dict[AgentName, SavedAgent] = {}
        self._listed: dict[Scope, list[Place]] = {}  # sorted
        self._names: dict[tuple[Scope, str], dict[str, None]] = {}  # agents' names, by parent

    def __len__(self) -> int:
        return len(self._saved)

    def __getitem__(self, agent: AgentName) -> SavedAgent:
        return self._saved[agent]

    def get(self, agent: AgentName) -> SavedAgent | None:
        """Return the agent's saved manifest and blocks, or None."""
        return self._saved.get(agent)

    def add(self, saved: SavedAgent) -> None:
        """Add a new agent."""
        bare, agent = saved.bare, saved.name  # one tuple for all blocks
        self._saved[agent] = saved
        insort(self._listed.setdefault(bare.scope, []), bare.place)
        if bare.parent is not None:
            self._names.setdefault((bare.scope, bare.parent), {})[bare.agent_id] = None
        for block in saved.chain:
            self.users.setdefault(block, {})[agent] = None

    def remove(self, saved: SavedAgent) -> None:
        """Remove a manifest that `add` has added."""
        bare, agent = saved.bare, saved.name
        del self._saved[agent]
        places = self._listed[bare.scope]
        del places[bisect_left(places, bare.place)]
        if bare.parent is not None:
            _discard(self._names, (bare.scope, bare.parent), bare.agent_id)
        for block in saved.chain:
            _discard(self.users, block, agent)

    def clear(self) -> None:
        for table in (self.users, self._saved, self._listed, self._names):
            table.clear()

    def scopes(self) -> Sequence[Scope]:
        return [scope for scope, places in self._listed.items() if places]

    def page(self, scope: Scope, limit: int, after: Place | None) -> Sequence[SavedAgent]:
        """See `AgentIndexPort.page`."""
        places = self._listed.get(scope, [])
        stop = len(places) if after is None else bisect_left(places, after)
        names = [name for _, name in reversed(places[max(0, stop - limit) : stop])]
        return [self._saved[scope, name.decode("utf-8", "surrogatepass")] for name in names]

    def child_agents(self, scope: Scope, parent: str) -> Sequence[str]:
        return sorted(self._names.get((scope, parent), ()))

    def users_of(self, hashes: Sequence[BlockHash]) -> Mapping[BlockHash, frozenset[AgentName]]:
        """See `AgentIndexPort.users`."""
        users = {one: self.users.get(one, {}) for one in hashes}
        return {one: frozenset(itertools.islice(some, 2)) for one, some in users.items()}


def _discard(groups: dict[K, dict[V, None]], group: K, member: V) -> None:
    # A chain may contain a block twice: the member may be missing.
    members = groups.get(group, {})
    members.pop(member, None)
    if not members:
        groups.pop(group, None)


@dataclass(frozen=True, slots=True)
class TierAgents:
    """The agents of two tiers. If both tiers have an agent, `cold` decides. Methods without a
    docstring: see `AgentIndexPort`."""

    _warm: AgentIndexPort
    _cold: AgentIndexPort
    _pins: AgentIndexPort

    def save(self, manifest: Manifest) -> bool:
        """See `AgentIndexPort.save`. Returns True if either tier accepts the manifest."""
        warm, cold = self._warm.save(manifest), self._cold.save(manifest)
        return warm or cold

    def manifest(self, scope: Scope, agent_id: str) -> Manifest | None:
        manifest = self._cold.manifest(scope, agent_id)
        return self._warm.manifest(scope, agent_id) if manifest is None else manifest

    def scopes(self) -> Sequence[Scope]:
        return list(dict.fromkeys([*self._warm.scopes(), *self._cold.scopes()]))

    def page(self, scope: Scope, limit: int, after: Place | None = None) -> Sequence[Manifest]:
        """See `AgentIndexPort.page`."""
        cold = ((one, True) for one in walk(self._cold, scope, limit, after))
        warm = ((one, False) for one in walk(self._warm, scope, limit, after))
        found: dict[str, Manifest] = {}
        for one, is_cold in heapq.merge(cold, warm, key=lambda one: one[0].place, reverse=True):
            name = one.agent_id
            if is_cold or (name not in found and self._cold.manifest(scope, name) is None):
                found[name] = one
            if len(found) == limit:  # check first: the next agent could need another page
                break
        return list(found.values())

    def child_agents(self, scope: Scope, parent: str) -> Sequence[str]:
        tiers = (self._warm, self._cold)
        return sorted({name for tier in tiers for name in tier.child_agents(scope, parent)})

    def users(self, hashes: Sequence[BlockHash]) -> Mapping[BlockHash, frozenset[AgentName]]:
        """See `AgentIndexPort.users`."""
        warm, cold = self._warm.users(hashes), self._cold.users(hashes)
        nothing: frozenset[AgentName] = frozenset()
        return {one: warm.get(one, nothing) | cold.get(one, nothing) for one in hashes}

    def remove(self, scope: Scope, agent_id: str) -> bool:
        warm, cold = self._warm.remove(scope, agent_id), self._cold.remove(scope, agent_id)
        return warm or cold

    def pinned(self, tenant: bytes) -> Pinned:
        return self._pins.pinned(tenant)


@dataclass(slots=True, eq=False)
class _Save:
    manifest: Manifest
    number: int = 0
    generation: int | None = None
    """The generation that the manifest will get, once a caller needs it."""

    @property
    def agent(self) -> AgentName:
        return self.manifest.scope, self.manifest.agent_id


class QueuedAgents:
    """The agents of a store behind a queue, including queued agents. Methods without a
    docstring: see `AgentIndexPort`."""

    def __init__(self, queue: WriteQueue, inner: AgentIndexPort, *, waits: bool) -> None:
        """If `waits` is true, `remove` waits for a running write of the agent."""
        self._queue = queue
        self._changed = queue.changed
        self._inner = inner
        self._waits = waits
        self._saves: OrderedDict[AgentName, _Save] = OrderedDict()

    def __len__(self) -> int:
        return len(self._saves)

    def save(self, manifest: Manifest) -> bool:
        """See `AgentIndexPort.save`. Returns True if the queue accepts the manifest."""
        save = _Save(manifest)
        with self._changed:
            if not self._queue.accepts():
                self._queue.counts["dropped manifests"] += 1
                return False
            older = self._saves.pop(save.agent, None)
            # While a `flush` waits, the older manifest stays queued: the flush waits for it.
            if older is not None and not self._queue.is_flushing:
                self._queue.take(older.number)
            self._saves[save.agent] = save
            write, ended = partial(self._write, save), partial(self._ended, save)
            save.number = self._queue.add(save, write, ended)
            return True

    def manifest(self, scope: Scope, agent_id: str) -> Manifest | None:
        with self._changed:
            save = self._saves.get((scope, agent_id))
        if save is None:
            return self._inner.manifest(scope, agent_id)
        return self._with_generation(save)

    def scopes(self) -> Sequence[Scope]:
        with self._changed:
            queued = [scope for scope, _ in self._saves]
        return list(dict.fromkeys([*queued, *self._inner.scopes()]))

    def page(self, scope: Scope, limit: int, after: Place | None = None) -> Sequence[Manifest]:
        saves = self._queued(scope)
        place = attrgetter("place")
        queued = sorted(map(self._with_generation, saves.values()), key=place, reverse=True)
        first = (one for one in queued if after is None or one.place < after)
        written = (
            one for one in walk(self._inner, scope, limit, after) if one.agent_id not in saves
        )
        merged = heapq.merge(first, written, key=place, reverse=True)
        return list(itertools.islice(merged, limit))

    def child_agents(self, scope: Scope, parent: str) -> Sequence[str]:
        queued = {name: save.manifest.parent for name, save in self._queued(scope).items()}
        written = (one for one in self._inner.child_agents(scope, parent) if one not in queued)
        return sorted({*written, *(name for name, of in queued.items() if of == parent)})

    def users(self, hashes: Sequence[BlockHash]) -> Mapping[BlockHash, frozenset[AgentName]]:
        """See `AgentIndexPort.users`. Queued manifests do not count yet."""
        return self._inner.users(hashes)

    def remove(self, scope: Scope, agent_id: str) -> bool:
        """See `AgentIndexPort.remove`."""
        agent = scope, agent_id
        with self._changed:
            was_queued = self._saves.pop(agent, None) is not None
            for number, job in self._queue.waiting():
                if isinstance(job, _Save) and job.agent == agent:
                    self._queue.take(number)
            self._changed.wait_for(lambda: not (self._waits and self._is_saving(agent)))
        return self._inner.remove(scope, agent_id) or was_queued

    def pinned(self, tenant: bytes) -> Pinned:
        """See `AgentIndexPort.pinned`. Queued manifests do not count yet."""
        return self._inner.pinned(tenant)

    def _queued(self, scope: Scope) -> Mapping[str, _Save]:
        with self._changed:
            return {name: save for (of, name), save in self._saves.items() if of == scope}

    def _with_generation(self, save: _Save) -> Manifest:
        with self._changed:
            generation = save.generation
        if generation is None:
            before = self._inner.manifest(*save.agent)
            with self._changed:
                # The thread may have written the manifest meanwhile; then `before` may be this
                # manifest.
                if save.generation is None:
                    save.generation = 1 + (before.generation if before else 0)
                generation = save.generation
        return replace(save.manifest, generation=generation)

    def _write(self, save: _Save) -> None:
        self._with_generation(save)
        self._queue.attempt(lambda: self._inner.save(save.manifest), "dropped manifests")
        if not self._waits and save.agent not in self._saves:  # removed meanwhile
            self._inner.remove(*save.agent)

    # Callers of the following methods hold `_changed`

    def _ended(self, save: _Save) -> None:
        if self._saves.get(save.agent) is save:
            del self._saves[save.agent]

    def _is_saving(self, agent: AgentName) -> bool:
        jobs = self._queue.current()
        return any(isinstance(job, _Save) and job.agent == agent for job in jobs)
