"""AgentCaches: an agent's cache between its requests, idle in the pool or saved in the store.

Knows the block allocator and the prefix store; not running requests.
"""

from __future__ import annotations

import threading

from semantic.application.cache.block_allocator import BlockAllocator
from semantic.application.cache.prefix_store import PrefixStore
from semantic.application.request import Reuse
from semantic.domain.errors import InvalidRequestError
from semantic.domain.stored import Manifest


class AgentCaches:
    """The agents of one engine. `lock` guards the allocator."""

    def __init__(
        self, allocator: BlockAllocator, prefixes: PrefixStore | None, lock: threading.RLock
    ) -> None:
        self._allocator = allocator
        self._prefixes = prefixes
        self._lock = lock

    def manifest(self, agent_id: str, tenant: str) -> Manifest | None:
        """The manifest saved after the agent's last turn, or None."""
        return None if self._prefixes is None else self._prefixes.manifest(agent_id, tenant)

    def recall(self, agent_id: str, tenant: str) -> Reuse:
        """What the agent has cached, for a new request. May read from disk."""
        manifest = self.manifest(agent_id, tenant)
        with self._lock:
            history = self._allocator.idle_tokens(agent_id, tenant)
        if history is None and manifest is not None:
            history = manifest.token_ids
        return Reuse(history=history, manifest=manifest)

    def forget(self, agent_id: str, tenant: str) -> bool:
        """Drop the agent's idle cache and its manifest; False if it has neither."""
        with self._lock:
            dropped = self._allocator.drop_idle(agent_id, tenant)
        saved = self._prefixes is not None and self._prefixes.forget(agent_id, tenant)
        return saved or dropped

    def fork(self, agent_id: str, new_agent_id: str, tenant: str) -> None:
        """Share everything that `agent_id` has cached with a new agent.

        Raises InvalidRequestError if `agent_id` is unknown or `new_agent_id` exists.
        """
        if not new_agent_id or self.recall(new_agent_id, tenant).history is not None:
            raise InvalidRequestError(f"fork: expected a new agent's name, got {new_agent_id!r}")
        known = self.recall(agent_id, tenant)
        if known.history is None:
            raise InvalidRequestError(f"fork: there is no agent {agent_id!r}")
        if self._prefixes is not None:
            self._prefixes.share_salt(agent_id, new_agent_id, tenant)
            if known.manifest is not None:
                self._prefixes.fork(known.manifest, new_agent_id)
        with self._lock:
            self._allocator.fork(agent_id, new_agent_id, tenant)
