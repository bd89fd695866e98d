"""What a server shows of its engine and its stores, as figures of one moment."""

from __future__ import annotations

from dataclasses import dataclass

from semantic.application.engine.engine_state import EngineFigures
from semantic.domain.stored import StoreStats


@dataclass(frozen=True, slots=True)
class Figures:
    """The engine's figures, and those of each tier of its store."""

    engine: EngineFigures
    stores: tuple[StoreStats, ...] = ()
