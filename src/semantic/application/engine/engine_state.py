"""The state of an engine's thread, and figures of the engine and its stores for monitoring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from semantic.domain.stored import StoreStats, Tier


class EngineState(StrEnum):
    """The state of an engine's thread."""

    LOADING = "loading"
    """The thread builds the engine, and refuses submissions until it is ready."""
    READY = "ready"
    REBUILDING = "rebuilding"
    """The engine failed; the thread builds another and queues submissions."""
    STOPPING = "stopping"
    """The thread refuses submissions; earlier ones finish, or it cancels them."""
    STOPPED = "stopped"
    FAILED = "failed"
    """There is no engine, and there will be none."""

    @property
    def accepts_submissions(self) -> bool:
        return self in (EngineState.READY, EngineState.REBUILDING)

    @property
    def is_over(self) -> bool:
        return self in (EngineState.STOPPED, EngineState.FAILED)


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """Figures of an engine at one moment.

    `inbox` counts submissions that the engine has not validated yet, `waiting` its requests without
    blocks; among both, `queued` never ran and may need `queued_bytes`. `idle` counts agents with a
    cache in the pool and no request. `pool_bytes` is the pool's limit. `preemptions`,
    `rebuilds` and `restored_bytes` (by tier of the store) count from the start.
    """

    state: EngineState
    inbox: int = 0
    waiting: int = 0
    running: int = 0
    idle: int = 0
    queued: int = 0
    queued_bytes: int = 0
    pool_used_bytes: int = 0
    pool_bytes: int = 0
    preemptions: int = 0
    rebuilds: int = 0
    restored_bytes: Mapping[Tier, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Bytes that the process has, as the system counts them, and may have: now, which is less than
    `max_bytes` while the system is short of memory, and otherwise.

    `steps` are what pressure took and has not ended yet, in order; `counts` how often each was,
    since the start.
    """

    used_bytes: int
    limit_bytes: int
    max_bytes: int
    steps: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)


class MemoryLimit(Protocol):
    """The limit of the process' memory."""

    @property
    def memory(self) -> MemoryFigures | None:
        """Figures of the last measurement, None without a limit. Thread-safe."""
        ...

    async def look_at_memory(self) -> None:
        """Measure now, unless the guard did so lately: an idle thread does not measure."""
        ...

    async def limit_memory(self, n_bytes: int | None) -> MemoryFigures:
        """Set another limit, None for that of the start; return when the process has freed what
        exceeds it.

        Raises InvalidRequestError, with nothing changed, for a limit that the process cannot keep,
        or where it has none.
        """
        ...


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of the engine, and statistics of each tier of its store. With several models `engine`
    is the sum of their engines, and `models` has each loaded one. `memory` is that
    of the process, None without a limit."""

    engine: EngineFigures
    stores: tuple[StoreStats, ...] = ()
    models: Mapping[str, EngineFigures] = field(default_factory=dict)
    memory: MemoryFigures | None = None
