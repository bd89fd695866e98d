"""`python -m benchmarks [NAME ...]`: runs benchmarks and writes each result as JSON.

Results go to `benchmarks/results/NAME.json`, or to the folder of `--output DIR`, for instance to
keep another machine's beside them.
"""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path

from benchmarks import (
    adapters,
    cancelled,
    crowd,
    decode,
    engine_step,
    gap,
    growth,
    hostile,
    join,
    many_agents,
    model_swaps,
    moves,
    page_cost,
    replay,
    restart,
    restore,
    resume,
    saving,
    server,
    server_load,
    soak,
    ssd_wear,
    start,
    swap_soak,
    turns,
    upload_parts,
    uploads,
)

BENCHMARKS = {
    "adapters": adapters.run,
    "cancelled": cancelled.run,
    "crowd": crowd.run,
    "decode": decode.run,
    "engine_step": engine_step.run,
    "gap": gap.run,
    "growth": growth.run,
    "hostile": hostile.run,
    "join": join.run,
    "many_agents": many_agents.run,
    "model_swaps": model_swaps.run,
    "moves": moves.run,
    "page_cost": page_cost.run,
    "replay": replay.run,
    "restart": restart.run,
    "restore": restore.run,
    "resume": resume.run,
    "saving": saving.run,
    "server": server.run,
    "server_load": server_load.run,
    "soak": soak.run,
    "ssd_wear": ssd_wear.run,
    "start": start.run,
    "swap_soak": swap_soak.run,
    "turns": turns.run,
    "upload_parts": upload_parts.run,
    "uploads": uploads.run,
}
PLOTS = {"many_agents": many_agents.PLOTS, "server": server.PLOTS, "turns": turns.PLOTS}


def main() -> int:
    """Run the named benchmarks; returns 1 if one misses its criterion."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], default=[])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    missed = 0
    for name in arguments.names or BENCHMARKS:
        result = BENCHMARKS[name]()
        result.write(arguments.output / f"{name}.json")
        draw_plots(name, arguments.output)
        verdict = result.verdict
        print(json.dumps(result.summary, indent=2))
        print(
            f"{name}: {'passed' if verdict.passed else 'MISSED'}: {verdict.criterion}", flush=True
        )
        missed += not verdict.passed
    return int(missed > 0)


def draw_plots(name: str, folder: Path) -> None:
    """Plot the result beside its file, if matplotlib is installed."""
    if name in PLOTS and find_spec("matplotlib") is not None:
        from experiments.harness.plots import draw

        draw(folder / f"{name}.json", PLOTS[name])


if __name__ == "__main__":
    raise SystemExit(main())
