"""Loads agents that another process saved and lets them go on, all in one batch.

Prints one JSON object per agent. Run: python -m ...continuing SUBJECT FOLDER NEW_TOKENS
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments import subjects
from experiments.exp_004_extraction import files
from semantic.adapters.mlx.layer_caches import LayerData
from semantic.application.batch_engine import BlockPoolBatchEngine
from semantic.application.resident_store import ResidentStore
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import CacheKey

BLOCKS = 20_000


@dataclass(frozen=True, slots=True)
class Continued:
    """What an agent wrote after it was loaded, and what loading found."""

    agent: str
    tokens: list[int]
    cached_tokens: int
    prompt_tokens: int
    load_ms: float
    digest: str


def main(subject_name: str, folder: str, new_tokens: int) -> None:
    """Every agent goes on from the last token it has."""
    backend = subjects.load(subject_name).backend
    pool = BlockPool[LayerData](backend.cache_spec(), total_blocks=BLOCKS)
    store = ResidentStore(pool)
    engine = BlockPoolBatchEngine(
        backend, subjects.TokenIds(), pool, backend.cache_spec(), store=store
    )
    loaded: dict[str, tuple[float, str]] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        begun = time.perf_counter()
        agent = files.load(path, pool)
        load_ms = 1000 * (time.perf_counter() - begun)
        loaded[agent.agent_id] = load_ms, files.digest(agent)
        store.put(CacheKey(backend.model_id, agent.agent_id), agent)
        engine.submit(agent.agent_id, agent.token_ids, max_tokens=new_tokens)
    for done in engine.step():
        continued = Continued(
            done.agent_id,
            list(done.tokens),
            done.cached_tokens,
            done.prompt_tokens,
            *loaded[done.agent_id],
        )
        print(json.dumps(asdict(continued)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
