"""A process whose agents run turns without end, on the embedded model and a disk store.

    python -m tests.support.durable_worker FOLDER SEED AGENT...

It loads the model, says "loaded", and opens the store when it reads a line; then it says what it
finds there, one JSON object a line, each turn that is asked for and that ended, and each flush that
begins. It ends when its input does. A turn is `safe` once the engine was flushed after it.
"""

from __future__ import annotations

import json
import random
import select
import sys
from collections.abc import Sequence
from pathlib import Path

from semantic import BlockPoolBatchEngine, CompletedGeneration
from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.model.provider import MLXModelProvider
from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
from semantic.bootstrap import App, assemble
from semantic.composition.engine_settings import Settings
from semantic.domain.value_objects import KvBits, ModelCacheSpec
from semantic.ports.generation import BatchBackend, Slices
from tests.support.always_read import always_read

MAX_TOKENS = 6
_VOCABULARY = 2048
_LONGEST = 700
_SYSTEM = tuple(i * i * 7 % _VOCABULARY for i in range(1, 300))

Engine = BlockPoolBatchEngine


class Loaded:
    """A provider of one model that is in memory already."""

    def __init__(self) -> None:
        self._provider = MLXModelProvider()
        self._model = self._provider.load_model()

    def load_model(
        self, model_id: str, adapter: Path | None = None, *, kv_bits: KvBits = 16
    ) -> tuple[MLXBackend, MLXTokenizer]:
        del model_id, adapter, kv_bits
        return self._model

    def load_in_slices(
        self,
        model_id: str,
        adapter: Path | None = None,
        max_bytes: int | None = None,
        *,
        kv_bits: KvBits = 16,
    ) -> Slices[tuple[MLXBackend, MLXTokenizer]]:
        del max_bytes, kv_bits
        yield None
        return self.load_model(model_id, adapter)

    def extract_spec(self, model: BatchBackend) -> ModelCacheSpec:
        return self._provider.extract_spec(model)


def say(**fields: object) -> None:
    """One line that is out when this returns."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def next_prompt(engine: Engine, agent: str, draw: random.Random) -> tuple[int, ...]:
    """What was saved of the agent and something more, or a beginning."""
    saved = engine.manifest(agent)
    more = tuple(draw.randrange(1, _VOCABULARY) for _ in range(draw.choice([1, 20, 130])))
    if saved is None or len(saved.token_ids) > _LONGEST:
        return (*_SYSTEM[: draw.choice([200, 256, 299])], *more)
    return (*saved.token_ids, *more)


def run(engine: Engine, agents: list[str], seed: int) -> None:
    """Turns of some of the agents at once, until there is no more input."""
    draw = random.Random(seed)
    while not select.select([sys.stdin], [], [], 0)[0]:
        prompts = {}
        for agent in draw.sample(agents, draw.randrange(1, len(agents) + 1)):
            prompt = next_prompt(engine, agent, draw)
            prompts[engine.submit(agent, prompt, max_tokens=MAX_TOKENS)] = prompt
            say(event="asked")
            for _ in range(draw.randrange(3)):
                report(engine.step_once(), prompts)
        while engine.has_work:
            report(engine.step_once(), prompts)
        if draw.random() < 0.7:
            say(event="flushing")
            engine.flush()
            say(event="safe")


def report(events: Sequence[object], prompts: dict[str, tuple[int, ...]]) -> None:
    """Say which turns ended."""
    for done in events:
        if isinstance(done, CompletedGeneration):
            assert done.error is None, done.error
            assert done.match is not None
            say(
                event="turn",
                agent=done.agent_id,
                prompt=prompts[done.uid],
                tokens=done.tokens,
                cached=done.cached_tokens,
                source=done.match.source,
            )


def main(folder: str, seed: str, *agents: str) -> None:
    """See the module."""
    provider = Loaded()
    say(event="loaded")
    sys.stdin.readline()
    settings = Settings(
        use_disk=True, store=Path(folder), disk_bytes=1 << 30, memory_bytes=1 << 20, pool_blocks=60
    )
    app: App = assemble(settings, provider)
    saved = {agent: app.engine.manifest(agent) for agent in agents}
    found = {
        agent: {"tokens": one.token_ids, "n_prompt": one.prompt_tokens}
        for agent, one in saved.items()
        if one is not None
    }
    say(event="opened", found=found)
    with always_read():
        run(app.engine, list(agents), int(seed))
    app.engine.flush()
    counts = [dict(stats.counts) for stats in app.store.stats()]
    app.engine.close()
    say(event="closed", damaged=sum(one["damaged"] for one in counts), counts=counts)


if __name__ == "__main__":
    main(*sys.argv[1:])
