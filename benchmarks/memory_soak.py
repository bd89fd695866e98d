"""Soak test of the memory limit: thousands of agents with long prompts, in a process that may have
little.

Run: python -m benchmarks.memory_soak [--minutes M] [--output DIR]. On Linux, where control groups
can be made, the server runs in one that kills it above the limit and a margin for what is not its
own: pages of files that are being written, tables of the kernel, sockets. Fails if an answer fails
for another reason than a 503, if the process had more than its limit, or grew after the warm-up.
"""

from __future__ import annotations

import os
import random
import statistics
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX

from benchmarks.server_process import ServerProcess, semantic_server
from benchmarks.soak import Question, Row, Soak, command
from experiments.exp_006_gather.scaling import fit
from experiments.harness.document import Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from semantic.adapters.mlx.device import anonymous_bytes
from tests.support.model_folder import write_model

QUESTION_ASKED = "Does a server keep to its memory with thousands of agents and long prompts?"
CRITERION = (
    "four clients, agents that come back among 5,000, one prompt in twenty of 2,000 to 8,000 "
    "tokens of 4 KiB each: no measurement of the process is above its limit, nothing kills it, "
    "all answers are whole or refused with a 503, and after a quarter of the time its median "
    "memory grows by at most 5 % of the limit"
)
MINUTES, CLIENTS, AGENTS = 60.0, 4, 5000
LIMIT_GB, MARGIN = 0.75, 1.1
RAM_GB, POOL_GB, DISK_GB = 0.25, 0.5, 2.0
"""Each budget fits, together they do not: what exceeds the limit must be given up."""
MOST_GROWTH = 0.05
_LONG_EVERY = 20
_EVERY_S = 0.1
_GIB = 1 << 30
_GROUPS = Path("/sys/fs/cgroup/memory")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Meter:
    """Looks at the memory of a process, ten times a second, until it is stopped."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.peak = 0
        self._recent: list[int] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def take(self) -> Row:
        """The median and the most since the last call."""
        recent, self._recent = self._recent or [0], []
        return {"bytes": int(statistics.median(recent)), "peak_bytes": max(recent)}

    def _run(self) -> None:
        while not self._stopped.wait(_EVERY_S):
            found = anonymous_bytes(str(self._server.pid))
            self._recent.append(found)
            self.peak = max(self.peak, found)


@contextmanager
def limited(server: ServerProcess, n_bytes: int) -> Iterator[tuple[ServerProcess, bool]]:
    """`server` in a control group of so many bytes, and whether there is one."""
    group = _GROUPS / f"semantic-soak-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(n_bytes))
    except OSError:
        yield server, False
        return
    enter = f'echo $$ > {group / "cgroup.procs"} && exec "$@"'
    try:
        yield replace(server, command=("sh", "-c", enter, "sh", *server.command)), True
    finally:
        with suppress(OSError):
            group.rmdir()


def question(draw: random.Random, number: int) -> Question:
    """A turn of one of the agents: each has its own text, and some come back to it."""
    agent = draw.randrange(AGENTS) if number > AGENTS else number
    own = random.Random(agent)
    is_long = own.randrange(_LONG_EVERY) == 0
    n_characters = own.randrange(2000, 8000) if is_long else own.randrange(100, 900)
    prompt = f"{agent} " + "".join(own.choices(_LETTERS, k=n_characters))
    body: dict[str, object] = {
        "model": "default",
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
    }
    return Question("/v1/completions", body, {"X-Agent-ID": f"agent-{agent}"})


def summarise(samples: Sequence[Row], failures: Sequence[str], peak: int) -> dict[str, Scalar]:
    """The peak, and what grew after the first quarter, as parts of the limit."""
    limit = LIMIT_GB * _GIB
    late = samples[len(samples) // 4 :]
    requests = [float(str(row["requests"])) for row in late]
    held = [float(str(row["bytes"])) for row in late]
    refused = [one for one in failures if ": 503 " in one]
    slope = fit(requests, held).slope if len(set(requests)) > 1 else 0.0
    return {
        "requests": int(requests[-1]),
        "refused": len(refused),
        "failed": len(failures) - len(refused),
        "peak_of_limit": round(peak / limit, 4),
        "median_of_limit": round(statistics.median(held) / limit, 4),
        "growth_of_limit": round(slope * (requests[-1] - requests[0]) / limit, 4),
    }


def run(minutes: float = MINUTES) -> Result:
    """Requests for so many minutes, then what the process had."""
    limit = int(LIMIT_GB * _GIB)
    parameters: dict[str, Scalar] = {
        "minutes": minutes,
        "clients": CLIENTS,
        "agents": AGENTS,
        "memory_gb": LIMIT_GB,
        "pool_gb": POOL_GB,
        "ram_gb": RAM_GB,
        "group_gb": round(LIMIT_GB * MARGIN, 3),
    }
    model = "a llama with 4 KiB of keys and values a token"
    started = Run.start("memory_soak", QUESTION_ASKED, model=model, parameters=parameters, seed=0)
    flags = [*("--memory-gb", LIMIT_GB, "--pool-gb", POOL_GB, "--ram-gb", RAM_GB)]
    flags += ["--disk-gb", DISK_GB, "--log-level", "info"]
    with TemporaryDirectory(prefix="semantic-benchmark-") as folder:
        sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}
        wide = write_model(Path(folder) / "model", "qwen3_coder", **sizes)
        server = semantic_server(wide, Path(folder) / "soak", *map(str, flags))
        with limited(server, int(limit * MARGIN)) as (process, in_group):
            process.start()
            try:
                with Meter(process) as meter:
                    soak = Soak(process, minutes, question, meter.take, clients=CLIENTS)
                    soak.run()
                killed = process.ended
            finally:
                process.stop()
        steps = [line for line in server.said() if "memory:" in line]
    summary = summarise(soak.samples, soak.failures, meter.peak)
    summary |= {"in_group": in_group, "killed": killed, "log_lines": len(steps)}
    growth, peak = float(str(summary["growth_of_limit"])), float(str(summary["peak_of_limit"]))
    passed = not killed and not summary["failed"] and peak <= 1 and growth <= MOST_GROWTH
    verdict = Verdict(CRITERION, 1.0, peak, passed=passed)
    for line in (*soak.failures[:3], *steps[:20]):
        print(line)
    return started.finish(soak.samples, summary, verdict)


def main() -> int:
    """Run it; 1 when the criterion is missed."""
    return command(__doc__, "memory_soak", run, MINUTES)


if __name__ == "__main__":
    raise SystemExit(main())
