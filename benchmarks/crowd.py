"""A server whose store has 100,000 agents: its start, pages of their list, and `/health`.

The same server starts with an empty store and with a full one, in turns; every start is asked for
`/health`, for pages from the first to the last, and for a chat. Run alone with another number:
python -m benchmarks.crowd 2000
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast
from urllib.parse import urlencode

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX

from benchmarks.growth import fill
from benchmarks.server_process import ServerProcess, semantic_server
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from experiments.harness.stats import percentile
from semantic import load

QUESTION = "Does a server notice that its store has 100,000 agents?"
MOST_START_S, MOST_PAGE_MS, MOST_HEALTH_MS = 2.0, 50.0, 300.0
CRITERION = (
    f"it starts at most {MOST_START_S:g} s later than with an empty store (medians), and then 99 "
    f"of 100 pages of the list, with and without a filter, take at most {MOST_PAGE_MS:g} ms and "
    f"no /health more than {MOST_HEALTH_MS:g} ms"
)
AGENTS, BLOCKS, ROUNDS, REPEATS, LONGEST = 100_000, 2, 3, 20, 1000
FILTERS: Mapping[str, Mapping[str, str | int]] = {
    "prefix": {"prefix": "agent-77"},
    "prefix of none": {"prefix": "nobody"},
    "pinned": {"pinned": "true"},
    "decoding": {"state": "decode"},
    "children": {"parent": "agent-77"},
}
PAGES = ("page", *FILTERS)
_MODEL = "semantic-tiny"
Row = dict[str, Scalar]


def run(agents: int = AGENTS) -> Result:
    """Starts in turns, and what each is asked."""
    parameters: dict[str, Scalar] = {"agents": agents, "blocks": BLOCKS, "rounds": ROUNDS}
    started = Run.start("crowd", QUESTION, model=_MODEL, parameters=parameters, seed=0)
    rows: list[Row] = []
    with TemporaryDirectory(prefix="semantic-benchmark-") as made:
        sides = {"empty": Path(made) / "empty", "full": Path(made) / "full"}
        begin = time.perf_counter()
        fill(sides["full"] / "store", load()[0], agents, BLOCKS)
        print(f"filled in {time.perf_counter() - begin:.0f} s", flush=True)
        for _ in range(ROUNDS):
            for side, folder in sides.items():
                rows.append({"side": side, **visit(semantic_server(_MODEL, folder))})
                print(json.dumps(rows[-1]), flush=True)
    summary = summarise(rows)
    passed = (
        summary["later_s"] <= MOST_START_S
        and all(summary[f"p99_{name}_ms"] <= MOST_PAGE_MS for name in PAGES)
        and summary["slowest_health_ms"] <= MOST_HEALTH_MS
        and summary["found"] >= agents
    )
    verdict = Verdict(CRITERION, MOST_START_S, summary["later_s"], passed=passed)
    shown: dict[str, Json] = {**summary}
    return started.finish(rows, shown, verdict)


def visit(server: ServerProcess) -> Row:
    """Start a server, ask it and stop it."""
    begin = time.perf_counter()
    server.start()
    row: Row = {"start_s": round(time.perf_counter() - begin, 2)}
    try:
        asking = Asking(HTTPConnection("127.0.0.1", server.port, timeout=60))
        asking.walk()
        for name, query in REPEATS * [*FILTERS.items()]:
            asking.list(name, query)
        chat: Json = {
            "model": _MODEL,
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 4,
        }
        asking.ask("chat", "POST", "/v1/chat/completions", chat)
        row |= {"found": asking.found, "rss_mb": round(server.resident_bytes() / 1e6, 1)}
        for what, taken in asking.taken.items():
            for name, percent in {"p50": 50, "p99": 99, "max": 100}.items():
                row[f"{what}_{name}_ms"] = round(percentile(taken, percent), 2)
        return row
    finally:
        server.stop()


class Asking:
    """A client of a server, and the milliseconds of what it asked."""

    def __init__(self, connection: HTTPConnection) -> None:
        self.taken: dict[str, list[float]] = {}
        self.found = 0
        self._connection = connection

    def walk(self) -> None:
        """All agents by the longest pages; a page of the default length and `/health` after each
        of them."""
        after: dict[str, str | int] = {}
        while True:
            found, has_more, last = self.list("longest page", after | {"limit": LONGEST})
            self.found += found
            self.list("page", after)
            self.ask("health", "GET", "/health")
            if not has_more:
                return
            after = {"after": last}

    def list(self, what: str, query: Mapping[str, str | int]) -> tuple[int, bool, str]:
        """How many agents a page has, whether more come, and the last one's id."""
        page = self.ask(what, "GET", "/v1/agents?" + urlencode(query))
        agents = cast(list[Json], page["data"])
        return len(agents), bool(page["has_more"]), str(page["last_id"])

    def ask(self, what: str, method: str, path: str, body: Json = None) -> dict[str, Json]:
        """The answer to a request."""
        begin = time.perf_counter()
        headers = {} if body is None else {"Content-Type": "application/json"}
        content = None if body is None else json.dumps(body)
        self._connection.request(method, path, content, headers)
        response = self._connection.getresponse()
        said = response.read()
        self.taken.setdefault(what, []).append(1e3 * (time.perf_counter() - begin))
        if response.status != HTTPStatus.OK:
            raise AssertionError(f"{path}: {response.status} {said[:200]!r}")
        return cast(dict[str, Json], json.loads(said))


def summarise(rows: Sequence[Row]) -> dict[str, float]:
    """What is later and slowest with all agents."""

    def of(side: str, name: str) -> list[float]:
        return [float(str(row[name])) for row in rows if row["side"] == side]

    def more(name: str) -> float:
        return statistics.median(of("full", name)) - statistics.median(of("empty", name))

    return {
        "found": min(of("full", "found")),
        "start_empty_s": statistics.median(of("empty", "start_s")),
        "start_full_s": statistics.median(of("full", "start_s")),
        "later_s": round(more("start_s"), 2),
        **{f"p99_{name}_ms": max(of("full", f"{name}_p99_ms")) for name in PAGES},
        "slowest_page_ms": max(of("full", "page_max_ms")),
        "slowest_longest_page_ms": max(of("full", "longest page_max_ms")),
        "slowest_health_ms": max(of("full", "health_max_ms")),
        "rss_more_mb": round(more("rss_mb"), 1),
    }


if __name__ == "__main__":
    print(json.dumps(run(*map(int, sys.argv[1:])).summary, indent=2))
