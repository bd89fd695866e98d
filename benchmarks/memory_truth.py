"""What the engine accounts for against what the system counts, as caches fill.

One process: a base is measured before the model is loaded, then everything that is accounted for is
added: weights, blocks in the pool and the memory tier. What was freed and not returned, which a
server returns before it gives up anything else, makes a difference: it is measured by returning
it. Run: python -m benchmarks.memory_truth [--output DIR]; fails above 5 %.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX

from benchmarks.soak import Row
from experiments.harness.document import Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from semantic.adapters.mlx.device import give_memory_back, memory_in_use, read_device
from semantic.bootstrap import App, build_engine
from semantic.composition.engine_settings import Settings
from tests.support.model_folder import write_model

QUESTION = "Is what the engine accounts for what the system counts?"
CRITERION = (
    "at every moment base, weights, pool and memory tier together differ by at most 5 % from the "
    "process' memory as the system counts it, once what was freed is returned to the system"
)
MOST_DIFFERENCE = 0.05
AGENTS, TOKENS, EVERY = 32, 1500, 8
POOL_BYTES, TIER_BYTES = 512 << 20, 384 << 20
SIZES = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}


class Account:
    """The engine's own figures beside the system's."""

    def __init__(self, base: int, app: App) -> None:
        self._base = base
        self._app = app
        self._weights = read_device().used_bytes
        self.rows: list[Row] = []

    def take(self, moment: str) -> None:
        """Add a row."""
        (tier,) = self._app.store.stats()
        parts = {
            "base": self._base,
            "weights": self._weights,
            "pool": self._app.pool.used_bytes,
            "tier": tier.n_bytes,
        }
        freed = memory_in_use()
        give_memory_back()
        measured, accounted = memory_in_use(), sum(parts.values())
        difference = round((measured - accounted) / measured, 4)
        row: Row = {"moment": moment, "measured": measured, "accounted": accounted}
        self.rows.append({**row, **parts, "freed": freed - measured, "difference": difference})


def turn(app: App, agent: int, round_: int) -> None:
    """One answer to a prompt of an agent's own."""
    prompt = [(agent * 31 + i * i * 7 + i) % app.model.vocab_size for i in range(TOKENS)]
    prompt += [(round_ + i) % app.model.vocab_size for i in range(20 * round_)]
    app.engine.submit(f"agent-{agent}", prompt, max_tokens=4)
    for _ in app.engine.step():
        pass


def run() -> Result:
    """Two rounds of all agents, then caches are given up."""
    parameters: dict[str, Scalar] = {
        "agents": AGENTS,
        "tokens": TOKENS,
        "pool_bytes": POOL_BYTES,
        "tier_bytes": TIER_BYTES,
    }
    model = "a llama with 16 KiB of keys and values a token"
    started = Run.start("memory_truth", QUESTION, model=model, parameters=parameters, seed=0)
    with TemporaryDirectory(prefix="semantic-benchmark-") as folder:
        wide = write_model(Path(folder) / "model", "qwen3_coder", **SIZES)
        settings = Settings(str(wide), pool_bytes=POOL_BYTES, memory_bytes=TIER_BYTES)
        warm = build_engine(settings)  # libraries, kernels and threads that stay
        turn(warm, 0, 0)
        warm.engine.close()
        del warm
        give_memory_back()
        base = memory_in_use() - read_device().used_bytes
        app = build_engine(settings)
        account = Account(base, app)
        account.take("loaded")
        for round_ in range(2):
            for agent in range(AGENTS):
                turn(app, agent, round_)
                if (agent + 1) % EVERY == 0:
                    account.take(f"round {round_ + 1}, agent {agent + 1}")
        app.engine.evict_idle(POOL_BYTES // 2)
        account.take("half of the pool evicted")
        app.engine.close()
    worst = max(account.rows, key=lambda row: abs(float(str(row["difference"]))))
    found = abs(float(str(worst["difference"])))
    verdict = Verdict(CRITERION, MOST_DIFFERENCE, found, passed=found <= MOST_DIFFERENCE)
    summary: dict[str, Scalar] = {
        "worst": found,
        "worst_moment": str(worst["moment"]),
        "most_freed_share": round(
            max(float(str(row["freed"])) / float(str(row["measured"])) for row in account.rows), 4
        ),
    }
    return started.finish(account.rows, summary, verdict)


def main() -> int:
    """Run it; 1 when the criterion is missed. Writes a result only with `--output`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    result = run()
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        result.write(options.output / "memory_truth.json")
    for row in result.samples:
        print(json.dumps(dict(row)))
    print(json.dumps(result.summary, indent=2))
    return int(not result.verdict.passed)


if __name__ == "__main__":
    raise SystemExit(main())
