"""What an open page costs a busy server: tokens per second, and CPU time for each token.

Clients keep three requests decoding; phases with an open stream of the overview alternate with
phases without one, in one run of one server. The CPU time is that of the server's process, on
Linux; it depends less on what else the machine does than throughput.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.server_process import ServerProcess, semantic_server
from experiments.harness.document import Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict

QUESTION = "What does an open page cost a busy server?"
CRITERION = (
    "the server's CPU time for a generated token, median over pairs of phases with and without an "
    "open stream of the overview, grows by at most 1 %"
)
MOST = 0.01
CLIENTS, PAIRS, PHASE_SECONDS, WARM_SECONDS, ANSWER_TOKENS = 3, 8, 15.0, 10.0, 1500
_TIMEOUT = 120.0
Row = dict[str, Scalar]


class Client(threading.Thread):
    """Asks for one answer after another; counts the tokens that have arrived."""

    def __init__(self, port: int, number: int) -> None:
        super().__init__(daemon=True)
        self.tokens = 0
        self._port = port
        self._number = number

    def run(self) -> None:
        """Until the server ends."""
        turn = 0
        with suppress(OSError, HTTPException):
            while True:
                turn += 1
                self._ask(f"Client {self._number}, question {turn}. Write a long story.")

    def _ask(self, text: str) -> None:
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        with closing(HTTPConnection("127.0.0.1", self._port, timeout=_TIMEOUT)) as connection:
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body).encode(), headers)
            for line in connection.getresponse():
                self.tokens += b'"content"' in line


class Page(threading.Thread):
    """Reads the overview's stream, as an open page does, until it is closed."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.events = 0
        self._connection = HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT)
        self._is_closed = threading.Event()

    def run(self) -> None:
        """Until `close`."""
        self._connection.request("GET", "/v1/overview/stream")
        response = self._connection.getresponse()
        while not self._is_closed.is_set() and (line := response.readline()):
            self.events += line.startswith(b"event:")
        self._connection.close()

    def close(self) -> None:
        """End with the next event."""
        self._is_closed.set()
        self.join()


def phase(server: ServerProcess, clients: list[Client], *, with_page: bool) -> Row:
    """Figures of one phase."""
    page = Page(server.port) if with_page else None
    if page is not None:
        page.start()
    tokens, cpu, started = (
        sum(one.tokens for one in clients),
        server.cpu_seconds(),
        time.monotonic(),
    )
    time.sleep(PHASE_SECONDS)
    seconds = time.monotonic() - started
    n_tokens = sum(one.tokens for one in clients) - tokens
    cpu_seconds = server.cpu_seconds() - cpu
    if page is not None:
        page.close()
    return {
        "page": with_page,
        "events": 0 if page is None else page.events,
        "tokens_per_second": round(n_tokens / seconds, 2),
        "cpu_ms_per_token": round(1000 * cpu_seconds / n_tokens, 4),
    }


def run() -> Result:
    """Pairs of phases in alternating order."""
    started = Run.start(
        "page_cost",
        QUESTION,
        model="semantic-tiny",
        parameters={"clients": CLIENTS, "pairs": PAIRS, "phase_seconds": PHASE_SECONDS},
        seed=0,
    )
    samples: list[Row] = []
    with TemporaryDirectory() as folder:
        server = semantic_server("semantic-tiny", Path(folder))
        server.start()
        try:
            clients = [Client(server.port, number) for number in range(CLIENTS)]
            for one in clients:
                one.start()
            time.sleep(WARM_SECONDS)
            for pair in range(PAIRS):
                samples += (
                    {"pair": pair, **phase(server, clients, with_page=with_page)}
                    for with_page in (pair % 2 == 0, pair % 2 == 1)
                )
        finally:
            server.stop()
    cost = growth(samples, "cpu_ms_per_token")
    summary: Row = {
        "cpu_growth": round(cost, 4),
        "throughput_growth": round(growth(samples, "tokens_per_second"), 4),
    }
    return started.finish(samples, summary, Verdict(CRITERION, MOST, cost, passed=cost <= MOST))


def growth(samples: list[Row], name: str) -> float:
    """The median over the pairs of the figure with a page against that without, minus 1."""
    sides = {(one["pair"], one["page"]): float(str(one[name])) for one in samples}
    pairs = {pair for pair, _ in sides}
    return statistics.median(sides[pair, True] / sides[pair, False] for pair in pairs) - 1
