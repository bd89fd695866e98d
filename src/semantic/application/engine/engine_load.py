"""How much an engine has to do, as whoever drives it sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from semantic.application.engine.fair_queue import FairQueue
from semantic.application.request import Request
from semantic.domain.services import BlockPool
from semantic.domain.stored import Tier


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """`queue` are requests without blocks, new or preempted, `active` those that have some;
    `preemptions` is how often a request was preempted, `restored_bytes` what was read from the
    store, since the engine was made. Queue, requests and pool are the engine's own, to be looked
    at only."""

    queue: FairQueue
    active: Sequence[Request]
    pool: BlockPool
    preemptions: int
    restored_bytes: Counter[Tier]

    @property
    def waiting(self) -> frozenset[str]:
        """The uids of requests without blocks."""
        return self.queue.uids

    @property
    def running(self) -> int:
        """How many requests have blocks."""
        return len(self.active)

    @property
    def requests(self) -> tuple[Request, ...]:
        """All requests that have not ended."""
        return (*self.queue, *self.active)
