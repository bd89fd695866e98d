"""What is known of each agent between its requests: idle in the pool, saved in the store.

Knows the ledger and the archive; not requests that run.
"""

from __future__ import annotations

import threading

from semantic.application.cache.block_allocator import BlockAllocator
from semantic.application.cache.prefix_state import PrefixState
from semantic.application.cache.prefix_store import PrefixStore
from semantic.domain.errors import InvalidRequestError
from semantic.domain.stored import Manifest


class AgentCaches:
    """The agents of one engine. `lock` guards the ledger."""

    def __init__(
        self, ledger: BlockAllocator, archive: PrefixStore | None, lock: threading.RLock
    ) -> None:
        self._ledger = ledger
        self._archive = archive
        self._lock = lock

    def manifest(self, agent_id: str, tenant: str) -> Manifest | None:
        """The agent as it was saved after its last turn; None when it was not."""
        return None if self._archive is None else self._archive.manifest(agent_id, tenant)

    def recall(self, agent_id: str, tenant: str) -> PrefixState:
        """What a new request of the agent may go on from. May read from a disk."""
        manifest = self.manifest(agent_id, tenant)
        with self._lock:
            history = self._ledger.idle_tokens(agent_id, tenant)
        if history is None and manifest is not None:
            history = manifest.token_ids
        return PrefixState(history=history, manifest=manifest)

    def forget(self, agent_id: str, tenant: str) -> bool:
        """Drop the agent's idle cache and what was saved of it; False when there is neither."""
        with self._lock:
            dropped = self._ledger.drop_idle(agent_id, tenant)
        saved = self._archive is not None and self._archive.forget(agent_id, tenant)
        return saved or dropped

    def fork(self, agent_id: str, new_agent_id: str, tenant: str) -> None:
        """Let a new agent begin with all that `agent_id` has.

        Raises InvalidRequestError when `agent_id` is not known or `new_agent_id` is.
        """
        if not new_agent_id or self.recall(new_agent_id, tenant).history is not None:
            raise InvalidRequestError(f"fork: expected a new agent's name, got {new_agent_id!r}")
        known = self.recall(agent_id, tenant)
        if known.history is None:
            raise InvalidRequestError(f"fork: there is no agent {agent_id!r}")
        if self._archive is not None and known.manifest is not None:
            self._archive.fork(known.manifest, new_agent_id)
        with self._lock:
            self._ledger.fork(agent_id, new_agent_id, tenant)
