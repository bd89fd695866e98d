"""Loads agents that another process saved and continues them, all in one batch.

Prints one JSON object per agent. Run: python -m ...continuing WAY SUBJECT FOLDER NEW_TOKENS,
where WAY is "files" or "store".
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments import subjects
from experiments.exp_004_extraction import files
from semantic.application.agents.footprint import newest_first
from semantic.application.engine.batch_engine import BlockPoolBatchEngine
from semantic.composition.engine_settings import Settings
from semantic.composition.process_stores import open_store
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import CacheKey, CompletedGeneration, TokenEvent

BLOCKS = 20_000


@dataclass(frozen=True, slots=True)
class Continued:
    """What an agent wrote after it was loaded, and what loading found.

    `load_ms` is the time of reading a file; from the store, that to the agent's first token.
    """

    agent: str
    tokens: list[int]
    cached_tokens: int
    prompt_tokens: int
    load_ms: float
    digest: str


def from_files(subject_name: str, folder: str, new_tokens: int) -> None:
    """Continue each agent from its last token."""
    backend = subjects.load(subject_name).backend
    pool = BlockPool(backend.cache_spec(), total_blocks=BLOCKS)
    engine = BlockPoolBatchEngine(backend, subjects.TokenIds(), pool, backend.cache_spec())
    loaded: dict[str, tuple[float, str]] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        begun = time.perf_counter()
        agent = files.load(path, pool)
        load_ms = 1000 * (time.perf_counter() - begun)
        loaded[agent.agent_id] = load_ms, files.digest(agent)
        engine.idle_caches.put(CacheKey(backend.model_id, agent.agent_id), agent)
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


def from_store(subject_name: str, folder: str, new_tokens: int) -> None:
    """The same with the store alone: agents and their histories are read from it, too.

    What was loaded is compared in place when the answer is complete: the first tokens of
    the agent's cache, which nothing computed here.
    """
    backend = subjects.load(subject_name).backend
    pool = BlockPool(backend.cache_spec(), total_blocks=BLOCKS)
    store = open_store(Settings(use_disk=True, store=Path(folder)))
    engine = BlockPoolBatchEngine(
        backend, subjects.TokenIds(), pool, backend.cache_spec(), store=store
    )
    begun = time.perf_counter()
    for manifest in newest_first(store.agents):
        engine.submit(manifest.agent_id, manifest.token_ids, max_tokens=new_tokens)
    first: dict[str, float] = {}
    while engine.has_work:
        for event in engine.step_once():
            if isinstance(event, TokenEvent):
                first.setdefault(event.agent_id, 1000 * (time.perf_counter() - begun))
            if isinstance(event, CompletedGeneration) and event.blocks is not None:
                continued = Continued(
                    event.agent_id,
                    list(event.tokens),
                    event.cached_tokens,
                    event.prompt_tokens,
                    first[event.agent_id],
                    files.digest_of_first(event.blocks, event.cached_tokens),
                )
                print(json.dumps(asdict(continued)))
    engine.close()


WAYS = {"files": from_files, "store": from_store}

if __name__ == "__main__":
    WAYS[sys.argv[1]](sys.argv[2], sys.argv[3], int(sys.argv[4]))
