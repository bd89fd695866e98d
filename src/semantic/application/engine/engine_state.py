"""What an engine's thread shows of itself: its state, and figures for whoever watches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from semantic.domain.stored import Tier


class EngineState(StrEnum):
    """Where an engine's thread is."""

    LOADING = "loading"
    """The engine is being built; not before that are orders taken."""
    READY = "ready"
    REBUILDING = "rebuilding"
    """The engine failed and is built again; orders are taken and wait."""
    STOPPING = "stopping"
    """No more orders are taken; those that were go on, or are being cancelled."""
    STOPPED = "stopped"
    FAILED = "failed"
    """There is no engine, and there will be none."""

    @property
    def takes_orders(self) -> bool:
        return self in (EngineState.READY, EngineState.REBUILDING)

    @property
    def is_over(self) -> bool:
        return self in (EngineState.STOPPED, EngineState.FAILED)


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """Figures at one moment.

    `inbox` are orders that the engine does not know yet, `waiting` requests that it has and that
    hold no blocks. Of both, `queued` never ran, and may need `queued_bytes`. `pool_bytes` is the
    pool's limit. `preemptions`, `rebuilds` and `restored_bytes`, those read from each tier of the
    store, are counted from the start.
    """

    state: EngineState
    inbox: int = 0
    waiting: int = 0
    running: int = 0
    queued: int = 0
    queued_bytes: int = 0
    pool_used_bytes: int = 0
    pool_bytes: int = 0
    preemptions: int = 0
    rebuilds: int = 0
    restored_bytes: Mapping[Tier, int] = field(default_factory=dict)
