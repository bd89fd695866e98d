"""Load and crash test: clients connect and disconnect while the server is killed and restarted.

There are more agents than fit. Run: python -m benchmarks.server_load [--quick] [--output DIR];
fails if an invariant is violated.
"""

from __future__ import annotations

import argparse
import json
import operator
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX

from benchmarks import footprint
from benchmarks.server_client import Answer, Client, Message, RequestFailedError
from benchmarks.server_model import words
from benchmarks.server_process import ServerProcess, semantic_server
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from semantic import load
from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
from tests.support.reference import generate, logit_gap

QUESTION = "Does a server keep its word while clients come and go and it is killed?"
CRITERION = (
    "8 clients with 50 turns each, some of whom leave in the middle of an answer, and one SIGKILL: "
    "nobody else fails, every whole answer is plain mlx-lm's, pool, memory tier, folder and "
    "resident memory keep to their budgets; and 32 agents in turns with a pool for 8 find more "
    "than 85 % of their prompts cached"
)
LEAST_CACHED = 0.85
ROUNDING = 1e-3
"""Two scores nearer than this part of the largest may change places; see docs/performance.md."""
PROCESS_BYTES = 1 << 30
"""What the process may take beside pool and memory tier: interpreter, libraries, work memory."""
_BACK_SECONDS = 120.0
_LEAVES = 0.15
_ASKS = (
    "My name is {name} and I live in {city}.",
    "What is my name?",
    "Where do I live?",
    "What is {a} plus {b}?",
    "Repeat after me: {name} {city}",
    "Count from {a} to {b}.",
    "Tell me everything you know about me.",
    "Tell me a long story about a robot.",
)
LIMITS = (
    ("pool", "semantic_pool_used_bytes", "semantic_pool_max_bytes"),
    (
        "memory tier",
        'semantic_store_bytes{tier="memory"}',
        'semantic_store_max_bytes{tier="memory"}',
    ),
    ("disk tier", 'semantic_store_bytes{tier="disk"}', 'semantic_store_max_bytes{tier="disk"}'),
)
"""What is held to a budget, and the server's own figures of both."""
IN_MEMORY = ("pool", "memory tier")
Row = dict[str, Scalar]


@dataclass(frozen=True, slots=True)
class Shape:
    """How much is asked of the server, and what it may use: GiB, and blocks of one layer."""

    clients: int = 8
    turns: int = 50
    agents: int = 32
    agents_in_pool: int = 8
    rounds: int = 4
    first_words: int = 400
    max_tokens: int = 24
    pool_blocks: int = 160
    ram_gb: float = 0.03
    disk_gb: float = 1.0


QUICK = Shape(clients=3, turns=4, agents=6, agents_in_pool=2, rounds=2, first_words=200)


@dataclass(frozen=True, slots=True)
class Said:
    """A whole answer and what was asked."""

    messages: tuple[Message, ...]
    answer: Answer


@dataclass(slots=True)
class Found:
    """What a run gave. `failures` are those of clients who neither left nor were killed."""

    said: list[Said] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    over_budget: set[str] = field(default_factory=set)
    left: int = 0
    killed: int = 0
    wrong: list[str] = field(default_factory=list)
    ties: int = 0
    looks: int = 0
    most_resident: int = 0
    most_disk: int = 0
    cached_after_kill: list[float] = field(default_factory=list)


class Load:
    """One server and the clients that it has."""

    def __init__(self, shape: Shape, folder: Path) -> None:
        self.shape, self.found = shape, Found()
        self._folder = folder
        self._lock = threading.Lock()
        self._up = threading.Event()
        self._done = 0
        self.server = self._server("load", shape.pool_blocks)

    def run(self) -> Found:
        """All turns of all clients, and a SIGKILL after half of them."""
        self.server.start()
        self._up.set()
        over = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(self.server, over))
        clients = [
            threading.Thread(target=self._talk, args=(i,)) for i in range(self.shape.clients)
        ]
        try:
            for thread in (watcher, *clients):
                thread.start()
            self._kill_in_the_middle(clients)
            for thread in clients:
                thread.join()
        finally:
            over.set()
            watcher.join()
            self.server.stop()
        return self.found

    def cached_share(self, pool_blocks: int) -> float:
        """Of the prompts of agents who take turns, the share that was cached after the first."""
        server = self._server("agents", pool_blocks)
        server.start()
        over = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(server, over))
        watcher.start()
        try:
            return self._rounds(Client(server.port))
        except RequestFailedError as error:
            self.found.failures.append(f"an agent: {error}")
            return 0.0
        finally:
            over.set()
            watcher.join()
            server.stop()

    def check_answers(self, backend: MLXBackend, tokenizer: MLXTokenizer) -> None:
        """Compare every whole answer with plain mlx-lm's to the same messages."""
        for one in self.found.said:
            prompt = tokenizer.render_chat(one.messages)
            eos = tokenizer.eos_token_ids
            tokens = generate(backend.model, prompt, self.shape.max_tokens, eos)
            plain = [token for token in tokens if token not in eos]
            if tokenizer.decode(plain) == one.answer.text:
                continue
            if self._is_tie(backend, tokenizer, [*prompt], tokens, one.answer.text):
                self.found.ties += 1
            else:
                expected = tokenizer.decode(plain)
                self.found.wrong.append(f"{len(prompt)} tokens: {one.answer.text!r}, {expected!r}")

    def _is_tie(
        self,
        backend: MLXBackend,
        tokenizer: MLXTokenizer,
        prompt: list[int],
        tokens: list[int],
        text: str,
    ) -> bool:
        """Whether an answer leaves the right one between two tokens that are equally good."""
        given = [*tokenizer.encode(text), *sorted(tokenizer.eos_token_ids)]
        for i, (right, other) in enumerate(zip(tokens, given, strict=False)):
            if right != other:
                gap = logit_gap(backend.model, [*prompt, *tokens[:i]], (right, other))
                return gap < ROUNDING
        return False

    def _server(self, name: str, pool_blocks: int) -> ServerProcess:
        flags = ("--pool-blocks", pool_blocks, "--ram-gb", self.shape.ram_gb)
        disk = ("--disk-gb", self.shape.disk_gb)
        texts = [str(value) for value in (*flags, *disk)]
        return semantic_server("semantic-tiny", self._folder / name, *texts, name=name)

    # Clients

    def _talk(self, number: int) -> None:
        draw = random.Random(number)
        messages: list[Message] = []
        for turn in range(self.shape.turns):
            ask = draw.choice(_ASKS).format(
                name=f"Ada{number}", city=f"Oslo{turn}", a=draw.randrange(50), b=draw.randrange(50)
            )
            messages.append({"role": "user", "content": ask})
            leave = draw.randrange(1, 6) if draw.random() < _LEAVES else None
            answer = self._ask(number, messages, leave)
            with self._lock:
                self._done += 1
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer.text})

    def _ask(self, number: int, messages: Sequence[Message], leave: int | None) -> Answer | None:
        """The answer; None for one who left. Asks again if the server was killed meanwhile."""
        deadline = time.monotonic() + _BACK_SECONDS
        agent = f"client-{number}" if number % 2 else None
        while True:
            self._up.wait(_BACK_SECONDS)
            starts = self.server.starts
            try:
                answer = Client(self.server.port).ask(
                    messages,
                    self.shape.max_tokens,
                    agent=agent,
                    leave_when=None if leave is None else partial(operator.eq, leave),
                )
            except RequestFailedError as error:
                hit = starts != self.server.starts or not self._up.is_set()
                if not hit or time.monotonic() > deadline:
                    with self._lock:
                        self.found.failures.append(f"client {number}: {error}")
                    return None
                continue
            with self._lock:
                return self._note(messages, answer, starts)

    def _note(self, messages: Sequence[Message], answer: Answer, starts: int) -> Answer | None:
        if answer.finish is None:
            self.found.left += 1
            return None
        self.found.said.append(Said(tuple(messages), answer))
        if starts > 1 and len(self.found.cached_after_kill) < self.shape.clients:
            share = answer.cached_tokens / max(1, answer.prompt_tokens)
            self.found.cached_after_kill.append(share)
        return answer

    def _kill_in_the_middle(self, clients: Sequence[threading.Thread]) -> None:
        half = self.shape.clients * self.shape.turns // 2
        while self._done < half and any(thread.is_alive() for thread in clients):
            time.sleep(0.005)
        self._up.clear()
        self.server.kill()
        self.server.start()
        self.found.killed += 1
        self._up.set()

    def _rounds(self, client: Client) -> float:
        prompt = cached = 0
        talks: list[list[Message]] = [[] for _ in range(self.shape.agents)]
        for turn in range(self.shape.rounds):
            for number, messages in enumerate(talks):
                text = words(12 if turn else self.shape.first_words, f"{number} {turn}")
                messages.append({"role": "user", "content": f"Read this: {text}"})
                answer = client.ask(messages, self.shape.max_tokens, agent=f"agent-{number}")
                messages.append({"role": "assistant", "content": answer.text})
                self.found.said.append(Said(tuple(messages[:-1]), answer))
                prompt += answer.prompt_tokens if turn else 0
                cached += answer.cached_tokens if turn else 0
        return cached / prompt

    # Budgets

    def _watch(self, server: ServerProcess, over: threading.Event) -> None:
        while not over.wait(0.25):
            if not server.ended:
                self._look(server)

    def _look(self, server: ServerProcess) -> None:
        found, store = self.found, server.log.parent / "store"
        client = Client(server.port)
        try:
            client.get(server.probe)
            figures = read_metrics(client.get("/metrics"))
        except RequestFailedError:
            return  # just killed, or loading
        resident, disk = server.resident_bytes(), footprint.disk_bytes(store)
        found.most_resident = max(found.most_resident, resident)
        found.most_disk = max(found.most_disk, disk)
        found.looks += 1
        most = PROCESS_BYTES
        for what, used, limit in LIMITS:
            if used not in figures or limit not in figures:
                found.over_budget.add(f"{what}: no figures")
            elif figures[used] > figures[limit]:
                found.over_budget.add(what)
            if what in IN_MEMORY:
                most += int(figures.get(limit, 0))
        if disk > self.shape.disk_gb * (1 << 30):
            found.over_budget.add("folder")
        if resident > most:
            found.over_budget.add("resident memory")


def pool_for(backend: MLXBackend, tokenizer: MLXTokenizer, shape: Shape) -> int:
    """Blocks that hold so many agents' conversations as `shape` says, at their longest."""
    text = words(shape.first_words + 12 * (shape.rounds - 1), "size")
    n_tokens = len(tokenizer.encode(text)) + shape.rounds * (shape.max_tokens + 16)
    return shape.agents_in_pool * sum(backend.cache_spec().blocks_for(n_tokens))


def read_metrics(text: str) -> dict[str, float]:
    """Prometheus' text by name; of labels only the tier is kept, as in `name{tier="disk"}`."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            bare, _, labels = name.partition("{")
            found[name if labels.startswith("tier=") else bare] = float(value)
    return found


def violations(found: Found, share: float) -> list[str]:
    """What was promised and not kept, one line each; none when all is well."""
    lines = [f"failed: {line}" for line in found.failures]
    lines += [f"wrong answer: {line}" for line in found.wrong]
    lines += [f"over budget: {what}" for what in sorted(found.over_budget)]
    if not found.said or not found.looks:
        lines.append(f"{len(found.said)} answers and {found.looks} looks at the server's figures")
    if found.killed != 1 or not found.cached_after_kill:
        lines.append("no client was answered after the kill")
    if share <= LEAST_CACHED:
        lines.append(f"cached share {share:.3f}: expected more than {LEAST_CACHED}")
    return lines


def run(shape: Shape | None = None) -> Result:
    """The load, then the agents, then every answer against mlx-lm's."""
    shape = shape or Shape()
    parameters: dict[str, Scalar] = {**asdict(shape)}
    started = Run.start(
        "server_load", QUESTION, model="semantic-tiny", parameters=parameters, seed=0
    )
    backend, tokenizer = load()
    with TemporaryDirectory(prefix="semantic-benchmark-") as folder:
        one = Load(shape, Path(folder))
        found = one.run()
        share = one.cached_share(pool_for(backend, tokenizer, shape))
        one.check_answers(backend, tokenizer)
    broken = violations(found, share)
    after = found.cached_after_kill
    summary: dict[str, Json] = {
        "whole_answers": len(found.said),
        "wrong": len(found.wrong),
        "ties": found.ties,
        "failed": len(found.failures),
        "left": found.left,
        "kills": found.killed,
        "cached_after_kill": round(sum(after) / max(1, len(after)), 4),
        "agents_cached_share": round(share, 4),
        "looks_at_budgets": found.looks,
        "most_resident_mb": round(found.most_resident / 1e6, 1),
        "most_disk_mb": round(found.most_disk / 1e6, 1),
        "violations": [*broken],
    }
    samples: list[Row] = [
        {
            "prompt_tokens": said.answer.prompt_tokens,
            "cached_tokens": said.answer.cached_tokens,
            "completion_tokens": said.answer.completion_tokens,
            "ttft_ms": round(1e3 * said.answer.ttft, 2) if said.answer.pieces else None,
            "ms": round(1e3 * said.answer.seconds, 2),
        }
        for said in found.said
    ]
    verdict = Verdict(CRITERION, 0, len(broken), passed=not broken)
    return started.finish(samples, summary, verdict)


def main() -> int:
    """Run it; 1 when something was violated. A quick run writes no result without `--output`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small shape, a minute")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    result = run(QUICK if options.quick else None)
    folder = options.output or (None if options.quick else Path(__file__).parent / "results")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        result.write(folder / "server_load.json")
    print(json.dumps(result.summary, indent=2))
    return int(not result.verdict.passed)


if __name__ == "__main__":
    raise SystemExit(main())
