"""Fills a store with agents, as a process that has ended would leave them.

Keys and values are random, as in `rig`; the turn that saves them is real.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.rig import Rig

MODEL_ID = "benchmark"
"""Names the random weights of `shapes`, which are the same in every process."""
ROOM = 1 << 40
"""Bytes that a store may take which is not to be full."""


@contextmanager
def folder() -> Iterator[Path]:
    """Where a store can be opened; everything in it is gone afterwards."""
    with TemporaryDirectory(prefix="semantic-benchmark-") as parent:
        yield Path(parent) / "store"


def save_agent(rig: Rig, agent_id: str, n_tokens: int) -> tuple[int, ...]:
    """Let an agent of `n_tokens` end a turn of one token; returns the `n_tokens` ids."""
    tokens = rig.add_idle_agent(agent_id, n_tokens)
    rig.engine.submit(agent_id, (*tokens, 1), max_tokens=1)
    for _ in rig.engine.step():
        pass
    rig.engine.forget(agent_id)
    return tokens
