"""`python -m benchmarks [NAME ...]`: runs benchmarks and writes each one's result as JSON.

A result goes to `benchmarks/results/NAME.json`; `--output DIR` puts it elsewhere, for instance
to keep another machine's beside it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks import decode, gap, join, resume

BENCHMARKS = {"decode": decode.run, "gap": gap.run, "join": join.run, "resume": resume.run}


def main() -> int:
    """Run the benchmarks asked for; 1 when one misses its criterion."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], default=[])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    missed = 0
    for name in arguments.names or BENCHMARKS:
        result = BENCHMARKS[name]()
        result.write(arguments.output / f"{name}.json")
        verdict = result.verdict
        print(json.dumps(result.summary, indent=2))
        print(
            f"{name}: {'passed' if verdict.passed else 'MISSED'}: {verdict.criterion}", flush=True
        )
        missed += not verdict.passed
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
