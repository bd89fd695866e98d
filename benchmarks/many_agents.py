"""Many more agents than fit in memory or on disk: all are answered, and nothing grows."""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
import mlx.core as mx

from benchmarks import footprint, stored
from experiments.exp_006_gather.scaling import fit
from experiments.harness.document import Json, Scalar
from experiments.harness.plots import Plot
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from experiments.reference import greedy
from semantic import BlockPool, BlockPoolBatchEngine, CompletedGeneration, load
from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
from semantic.adapters.stores.background import BackgroundStore
from semantic.adapters.stores.disk.store import DiskStore
from semantic.adapters.stores.memory import MemoryStore
from semantic.adapters.stores.tiered import TieredStore

QUESTION = "Do 500 agents get right answers when there is room in memory for 20, on disk for 150?"
CRITERION = (
    "500 agents, 3 turns each in random order: every request ends with stop or length, answers "
    "drawn at random equal mlx-lm's own without any cache, the folder never takes more than its "
    "budget, and once it is nearly full the median resident memory of the last third of the turns "
    "is at most 1.05 x that of the first"
)
AGENTS, TURNS, AT_ONCE, ANSWER, CHECKED = 500, 3, 8, 16, 24
FIRST_WORDS, MORE_WORDS = 130, 20
POOL_AGENTS, DISK_AGENTS, WARM_BYTES = 20, 150, 16 << 20
MLX_CACHE_BYTES = 64 << 20
"""Limit of MLX's cache of freed memory, which is otherwise the machine's memory."""
FULL, MOST_GROWTH = 0.95, 1.05
PLOTS = (
    Plot(
        "many_agents.svg",
        "500 agents, room for 20 in memory and 150 on disk",
        x="turn",
        y="mb",
        series="what",
        x_label="turns answered",
        y_label="MB",
    ),
)
SENTENCES = (
    "the fox sleeps near the old river and the small dog sings under a red tree but then one blue "
    "bird walks behind the new house where Ada and Ben like bread and milk while Ivy wants tea"
)
Row = dict[str, Scalar]


@dataclass(slots=True)
class Talk:
    """One agent's conversation on its client's side: all tokens so far."""

    agent: str
    history: array[int] = field(default_factory=lambda: array("I"))


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer to verify."""

    prompt: array[int]
    tokens: array[int]


class World:
    """An engine with little memory, and 500 agents."""

    def __init__(self, folder: Path) -> None:
        self.backend: MLXBackend
        self.tokenizer: MLXTokenizer
        self.backend, self.tokenizer = load()
        spec = self.backend.cache_spec()
        pool = BlockPool(spec, total_blocks=POOL_AGENTS * sum(spec.blocks_for(512)))
        per_agent = sum(layer.bytes_per_block for layer in spec.layers) * 3 // 2
        self.folder = folder
        self.disk_bytes = DISK_AGENTS * per_agent
        self.disk = DiskStore.open(folder, self.disk_bytes)
        self.store = TieredStore(
            MemoryStore(WARM_BYTES, secret=self.disk.secret), BackgroundStore(self.disk, WARM_BYTES)
        )
        self.engine = BlockPoolBatchEngine(
            self.backend, self.tokenizer, pool, spec, store=self.store, max_batch=AT_ONCE
        )
        self.samples: list[Row] = []
        self.checked: list[Answered] = []
        self._draw = random.Random(0)
        self._words = SENTENCES.split()
        self._talks = [Talk(f"agent-{i}") for i in range(AGENTS)]
        self._prompts: dict[str, array[int]] = {}
        self._chosen = set(self._draw.sample(range(AGENTS * TURNS), CHECKED))

    def run(self) -> None:
        """All turns in random order, eight at once; an agent waits for its own answer."""
        order = deque(talk for talk in self._talks for _ in range(TURNS))
        self._draw.shuffle(order)
        busy: dict[str, Talk] = {}
        while order or busy:
            for _ in range(len(order)):
                if len(busy) == AT_ONCE:
                    break
                talk = order.popleft()
                if talk.agent in busy:
                    order.append(talk)
                else:
                    busy[self._submit(talk)] = talk
            for event in self.engine.step_once():
                if isinstance(event, CompletedGeneration):
                    self._ended(busy.pop(event.agent_id), event)

    def close(self) -> None:
        """End the store's threads."""
        self.engine.close()

    def _submit(self, talk: Talk) -> str:
        words = MORE_WORDS if talk.history else FIRST_WORDS
        text = " ".join(self._draw.choice(self._words) for _ in range(words))
        said = self.tokenizer.render_chat([{"role": "user", "content": text}])
        prompt = talk.history + array("I", said)
        self._prompts[talk.agent] = prompt
        self.engine.submit(talk.agent, prompt, max_tokens=ANSWER)
        return talk.agent

    def _ended(self, talk: Talk, done: CompletedGeneration) -> None:
        number = len(self.samples)
        prompt, tokens = self._prompts.pop(talk.agent), array("I", done.tokens)
        if number in self._chosen:
            self.checked.append(Answered(prompt, tokens))
        self.samples.append(
            {
                "turn": number + 1,
                "history_tokens": len(talk.history),
                "reason": done.finish_reason,
                "source": "none" if done.match is None else str(done.match.source),
                "prompt_tokens": done.prompt_tokens,
                "cached_tokens": done.cached_tokens,
                "rss_bytes": footprint.resident_bytes(),
                "disk_bytes": footprint.disk_bytes(self.folder),
            }
        )
        talk.history = prompt + tokens


def run() -> Result:
    """All agents take their turns; then some answers are verified with plain mlx-lm."""
    started = Run.start(
        "many_agents",
        QUESTION,
        model="semantic-tiny",
        parameters={
            "agents": AGENTS,
            "turns": TURNS,
            "at_once": AT_ONCE,
            "answer_tokens": ANSWER,
            "pool_agents": POOL_AGENTS,
            "warm_bytes": WARM_BYTES,
            "checked": CHECKED,
            "mlx_cache_bytes": MLX_CACHE_BYTES,
        },
        seed=0,
    )
    mx.set_cache_limit(MLX_CACHE_BYTES)
    with stored.folder() as folder:
        world = World(folder)
        begin = time.perf_counter()
        world.run()
        seconds = time.perf_counter() - begin
        counts = world.disk.stats()[0].counts
        world.close()
    wrong = sum(not equal(world, answered) for answered in world.checked)
    summary = summarise(world, counts, wrong) | {"seconds": round(seconds, 1)}
    growth = float(str(summary["rss_growth"]))
    passed = (
        not summary["not_answered"]
        and not wrong
        and int(str(summary["most_disk_bytes"])) <= world.disk_bytes
        and growth <= MOST_GROWTH
    )
    verdict = Verdict(CRITERION, MOST_GROWTH, growth, passed=passed)
    return started.finish([*world.samples, *plotted(world)], summary, verdict)


def equal(world: World, answered: Answered) -> bool:
    """Whether plain mlx-lm, without a cache, gives the same answer."""
    eos = frozenset(world.tokenizer.eos_token_ids)
    cold = greedy(world.backend.model, answered.prompt, len(answered.tokens), eos)
    return cold.tokens == tuple(answered.tokens)


def summarise(world: World, counts: Mapping[str, int], wrong: int) -> dict[str, Json]:
    """Results of all turns."""
    samples = world.samples
    disk = [int(str(s["disk_bytes"])) for s in samples]
    filled = next(i for i, n_bytes in enumerate(disk) if n_bytes > FULL * world.disk_bytes)
    rss = [float(str(s["rss_bytes"])) for s in samples[filled:]]
    third = len(rss) // 3
    first, last = statistics.median(rss[:third]), statistics.median(rss[-third:])
    again = [s for s in samples if s["history_tokens"]]
    cached, known = (
        sum(int(str(s[key])) for s in again) for key in ("cached_tokens", "history_tokens")
    )
    slope = fit(range(len(rss)), rss).slope
    sources = [source_of(s) for s in again]
    return {
        "requests": len(samples),
        "not_answered": sum(s["reason"] not in ("stop", "length") for s in samples),
        "checked": len(world.checked),
        "wrong": wrong,
        "cached_percent_of_history": round(100 * cached / known, 1),
        "histories": {name: sources.count(name) for name in sorted(set(sources))},
        "turns_until_full": filled,
        "rss_first_third_mb": round(first / 1e6, 1),
        "rss_last_third_mb": round(last / 1e6, 1),
        "rss_growth": round(last / first, 4),
        "rss_slope_bytes_per_turn": round(slope, 1),
        "disk_budget_bytes": world.disk_bytes,
        "most_disk_bytes": max(disk),
        "most_disk_of_budget": round(max(disk) / world.disk_bytes, 4),
        "blocks_written": counts["written"],
        "blocks_evicted": counts["evicted"],
        "write_errors": counts["write_errors"],
        "damaged": counts["damaged"],
        "suspensions": world.engine.preemptions,
    }


def source_of(sample: Row) -> str:
    """Which tier held the history of a resumed agent; the last token is never cached."""
    whole = int(str(sample["cached_tokens"])) >= int(str(sample["history_tokens"])) - 1
    return f"from {sample['source']}" if whole else "computed again"


def plotted(world: World) -> Iterator[Row]:
    """A few points of the two curves, and the budget."""
    for sample in world.samples[:: max(1, len(world.samples) // 60)]:
        for what, n_bytes in (
            ("resident memory", sample["rss_bytes"]),
            ("store folder", sample["disk_bytes"]),
            ("its budget", world.disk_bytes),
        ):
            yield {"turn": sample["turn"], "what": what, "mb": int(str(n_bytes)) / 1e6}
