"""Discovery: looks up what a slow tier has of a prompt, before its request is queued.

The engine asks the store's index between two steps, and never waits for a network. So this asks
first, on threads of its own; then the index knows. Knows tokens, chains and the ports; not
when a request runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial

from semantic.application.cache.prefix_lookup import PrefixLookup, StoredPrefix
from semantic.application.fair_threads import FairThreads
from semantic.domain.block_hash import BlockLink, Scope, namespace_of, tenant_tag
from semantic.domain.value_objects import BLOCK_TOKENS
from semantic.ports.generation import BatchBackend
from semantic.ports.store import CacheStorePort, LookUpPort

_THREADS = 8
"""Prompts that are looked up at a time."""
_SECONDS = 2.0
"""A request waits for its look-up at least so long."""
_TOKENS_PER_SECOND = 10_000
"""And for a long prompt as long as it takes to compute at this rate: more would be no gain."""


class Discovery:
    """Asks `remote`, a tier of `store`, for the blocks of one model. Thread-safe."""

    def __init__(
        self,
        model: BatchBackend,
        store: CacheStorePort,
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
        """`look_up` on another thread."""
        look_up = partial(self.look_up, agent_id, tenant, tokens)
        return self._threads.submit(tenant, look_up, is_short=True)

    async def wait(self, agent_id: str, tenant: str, tokens: Sequence[int]) -> None:
        """`begin`, and return when it has ended or is late. What a late one finds is for later
        requests; one that has not begun by then is not begun."""
        begun = asyncio.wrap_future(self.begin(agent_id, tenant, tokens))
        with suppress(TimeoutError):
            await asyncio.wait_for(begun, max(self._seconds, len(tokens) / _TOKENS_PER_SECOND))

    def close(self) -> None:
        """End the threads after the look-ups in progress."""
        self._threads.close()

    def look_up(self, agent_id: str, tenant: str, tokens: Sequence[int]) -> None:
        """Let the store know what the slow tier has of an agent and of its prompt `tokens`.

        Asks nothing if all but a block of the prompt is known already. Raises nothing; takes as
        long as some requests of the slow tier that follow one another.
        """
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
        """The blocks of `tokens`, and what is known to be stored of them."""
        chain = list(scope.chain(tokens))
        full = [link for link in chain if link.is_full]
        return chain, self._lookup.find(scope, full, tokens)

    def _scope(self, agent_id: str, tenant: str) -> Scope:
        """The scope of an agent's blocks: salted if it was imported."""
        scope = Scope(self._namespace, tenant_tag(self._store.secret, tenant))
        manifest = self._store.manifest(scope, agent_id)
        salt = b"" if manifest is None else manifest.scope.salt
        return replace(scope, salt=salt) if salt else scope
