"""The two processes of `restart`: one saves an agent and ends, the other resumes it.

Run: python -m benchmarks.restarted save FOLDER | come-back FOLDER ROUND. The second prints JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
from mlx.nn.layers.base import Module

from benchmarks import stored
from benchmarks.rig import Rig
from experiments import subjects
from semantic.adapters.stores.background import BackgroundStore
from semantic.adapters.stores.disk.store import DiskStore

LENGTH, NEW_TOKENS = 2000, (1, 8, 64)
PROMPT = tuple(7919 * i % 40961 for i in range(LENGTH))
_QUEUE_BYTES = 1 << 30


def save(folder: Path) -> None:
    """The agent prefills its prompt, generates one token, and the process shuts down cleanly."""
    rig = Rig.build(load_model(), store=open_store(folder), model_id=stored.MODEL_ID)
    rig.engine.submit("ann", PROMPT, max_tokens=1)
    for _ in rig.engine.step():
        pass
    rig.engine.close()


def come_back(folder: Path, number: int) -> None:
    """With the model loaded: the store is opened and the agent's first token waited for.

    Each time with other new tokens and an empty pool, then once without a store.
    """
    model = load_model()
    Rig.build(model).first_token("warm", PROMPT[:64])
    for i, new in enumerate(NEW_TOKENS):
        begin = time.perf_counter()
        store = open_store(folder)
        opened = time.perf_counter() - begin
        rig = Rig.build(model, store=store, model_id=stored.MODEL_ID)
        found = rig.first_token("ann", _prompt(number, i))
        rig.engine.close()
        _print(
            new_tokens=new,
            open_ms=1e3 * opened,
            ttft_ms=1e3 * found.ttft,
            step_ms=1e3 * found.step,
            token=found.token,
        )
    cold = Rig.build(model).first_token("ann", _prompt(number, 0))
    _print(new_tokens=0, ttft_ms=1e3 * cold.ttft, step_ms=1e3 * cold.step, token=cold.token)


def load_model() -> Module:
    """SmolLM2-135M's shape with weights spread so that its answers differ from each other."""
    return subjects.load("smollm2-135m-shape").model


def open_store(folder: Path) -> BackgroundStore:
    """The agent's store, written in the background."""
    return BackgroundStore(DiskStore.open(folder, stored.ROOM), _QUEUE_BYTES)


def _prompt(number: int, i: int) -> tuple[int, ...]:
    """The agent's history and a new question."""
    return (*PROMPT, *[1000 + number * len(NEW_TOKENS) + i] * NEW_TOKENS[i])


def _print(**found: float) -> None:
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "save":
        save(Path(sys.argv[2]))
    else:
        come_back(Path(sys.argv[2]), int(sys.argv[3]))
