"""`python -m benchmarks.gpu_replay SESSIONS`: `semantic serve` with and without drafts, real texts.

Replays recorded sessions of coding agents as chats. The server computes every step of a model with
random weights and then takes the recorded token (`benchmarks.forced_server`), so steps take their
usual time and drafts are as often right as with the model that wrote the answers. SESSIONS is a
gzipped file with a session of messages a line. Some clients at once each take one session after
the other; every round begins without histories and caches, as a tenant of its own.

`--tokenizer` is a `tokenizer.json` with ChatML's tokens and fewer than 128,256 tokens: with that of
`draft_acceptance` the figures are those of the same tokens. Without it the embedded model's is
used, whose tokens are shorter. `--checked K` adds rounds of one client in which each step checks K
tokens of a draft whatever they cost, from own text and from others'. `--bits` compares caches of 8
bits with those of 16, both with drafts. `--small` serves a tiny model on a CPU, and replays little
unless told how much. Prints a line of JSON for each round and writes
them all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory, mkdtemp
from typing import cast

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
from mlx.nn.layers.base import Module
from tokenizers import Tokenizer

from benchmarks import shapes
from benchmarks.draft_acceptance import SAME_TASK, WANTED
from benchmarks.gpu_drafts import LEAST
from benchmarks.gpu_server import POOL_GB, SMALL_POOL_GB, write_large_model
from benchmarks.recorded_talks import Exchange, Limits, Talk, talks_in, use_tokenizer
from benchmarks.server_client import Answer, Client, RequestFailedError
from benchmarks.server_measures import MODEL_NAME
from benchmarks.server_process import ServerProcess, semantic_server
from benchmarks.stall_watch import MARK
from experiments.harness.document import Json, Scalar
from experiments.harness.environment import ROOT
from experiments.harness.record import Run
from experiments.harness.result import Verdict
from tests.support.tiny_models import two_layers

QUESTION = (
    "How much sooner do agents get answers of real text with drafts, or with caches of 8 bits, "
    "through the server?"
)
CRITERION = (
    "all answers are the recorded ones; with drafts, or with 8 bits, at least 0.98 of the tokens "
    "per second without, for each number of clients; with a fixed number of drafts, if measured, "
    "the tokens per step of `draft_acceptance`"
)
CLIENTS = (1, 4, 8)
_BESIDE_POOL_GB = 32
"""For weights and steps. The default would follow what is free, and differ between servers."""
LIMITS, SMALL_LIMITS = Limits(sessions=14), Limits(2, 3, 40)
"""So that all rounds take some minutes. Of the last 14 sessions, eight solve the same task."""
TOLD = (MARK, "memory:")
"""Parts of the lines in a server's log that are worth printing."""
OFF, AUTO, EIGHT = "off", "auto", "8 bits"
FLAGS = {
    OFF: ("--drafts", "off"),
    AUTO: ("--drafts", "auto"),
    EIGHT: ("--drafts", "auto", "--kv-bits", "8", "--kv-bits-force"),
}
"""A server's options on each side. A model with random weights may miss the bounds of 8 bits."""
OWN, OTHERS = "own", "others"
"""The text from which drafts come: the session's own, or that of all sessions before."""


@dataclass(frozen=True)
class Round:
    """A number of clients with all sessions. With `own`, each session is a tenant."""

    side: str
    clients: int
    own: bool = False
    checked: int | None = None


@dataclass
class Replay:
    """A round: what clients asked, and what they got."""

    number: int
    plan: Round
    talks: Sequence[Talk]
    answers: list[list[Answer]] = field(default_factory=list)
    others: int = 0
    """Answers that are not the recorded ones."""
    refused: int = 0
    """Requests that a full queue refused, and that were sent again."""
    failures: list[str] = field(default_factory=list)

    def run(self, port: int) -> None:
        """Ask everything."""
        self.answers = [[] for _ in self.talks]
        waiting: SimpleQueue[int] = SimpleQueue()
        for at in range(len(self.talks)):
            waiting.put(at)
        clients = [
            threading.Thread(target=self._client, args=(port, waiting))
            for _ in range(self.plan.clients)
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join()

    def _client(self, port: int, waiting: SimpleQueue[int]) -> None:
        with suppress(Empty):
            while True:
                self._talk(port, waiting.get_nowait())

    def _talk(self, port: int, at: int) -> None:
        client = Client(port, MODEL_NAME, key_of(self.number, at if self.plan.own else None))
        for one in self.talks[at].exchanges:
            try:
                answer = self._ask(client, one)
            except RequestFailedError as error:
                self.failures.append(str(error)[:200])
                return
            self.answers[at].append(answer)
            self.others += answer.text != one.answer

    def _ask(self, client: Client, one: Exchange) -> Answer:
        """The answer, with the waits of a client that a full queue refused."""
        sent = time.perf_counter()
        while True:
            try:
                answer = client.ask(one.messages, len(one.tokens) + 1, seed=one.number)
            except RequestFailedError as error:
                if error.status != HTTPStatus.TOO_MANY_REQUESTS:
                    raise
                self.refused += 1
                time.sleep(1)
            else:
                answer.sent = sent
                return answer

    def figures(self) -> dict[str, Scalar]:
        """What all clients got."""
        answers = [one for talk in self.answers for one in talk]
        asked = sum(len(one.exchanges) for one in self.talks)
        found: dict[str, Scalar] = {
            "side": self.plan.side, "clients": self.plan.clients,
            "source": OWN if self.plan.own else OTHERS, "answers": asked,
            "as_recorded": len(answers) - self.others, "refused": self.refused,
        }  # fmt: skip
        if self.failures or not answers:
            return found | {"failure": (self.failures or ["no answer"])[0]}
        wall = max(one.ended for one in answers) - min(one.sent for one in answers)
        clients = min(self.plan.clients, len(self.talks))
        decoding = sum(one.ended - one.pieces[0] for one in answers)
        n_tokens = sum(one.completion_tokens for one in answers)
        accepted = sum(one.accepted_tokens for one in answers)
        return found | {
            "prompt_tokens": sum(one.prompt_tokens for one in answers),
            "cached_tokens": sum(one.cached_tokens for one in answers),
            "tokens": n_tokens,
            "accepted": accepted,
            "drafted": accepted + sum(one.rejected_tokens for one in answers),
            "tokens_per_step": per_step(answers),
            "decode_tok_s": round(clients * (n_tokens - len(answers)) / decoding, 1),
            "wall_s": round(wall, 2),
            "out_tok_s": round(n_tokens / wall, 1),
            "ttft_p50_s": round(statistics.median(one.ttft for one in answers), 4),
            "gap_max_ms": round(1e3 * max(max(one.gaps(), default=0.0) for one in answers), 1),
        }

    def same_task(self) -> list[float]:
        """Tokens per step of each session of the task with the most sessions."""
        task, _ = Counter(one.task for one in self.talks).most_common(1)[0]
        return [
            per_step(mine)
            for talk, mine in zip(self.talks, self.answers, strict=True)
            if talk.task == task
        ]


def per_step(answers: Sequence[Answer]) -> float:
    """Return the tokens that a step made."""
    n_tokens = sum(one.completion_tokens for one in answers)
    n_steps = n_tokens - sum(one.accepted_tokens for one in answers)
    return round(n_tokens / max(1, n_steps), 3)


def key_of(number: int, session: int | None) -> str:
    """Return the API key of a round, or of one of its sessions."""
    return f"round-{number}" + ("" if session is None else f"-session-{session}")


def tiny(tokenizer: Path | None, vocab: int) -> Module:
    """A model of two narrow layers for `vocab` tokens, or for those of another tokenizer."""
    if tokenizer is not None:
        vocab = Tokenizer.from_file(str(tokenizer)).get_vocab_size()
    return two_layers(vocab, head_dim=64)


@dataclass(frozen=True)
class Servers:
    """Starts servers of one model."""

    folder: Path
    model: Path
    talks: Sequence[Talk]
    end: int
    small: bool
    pool_gb: float
    stalls: float | None = None

    @contextmanager
    def serving(self, rounds: Sequence[Round]) -> Iterator[ServerProcess]:
        """A server for rounds that differ only in clients, ready."""
        one, n_talks = rounds[0], len(self.talks)
        name = one.side if one.checked is None else f"{one.side}-{one.checked}-{one.own}"
        own = Path(mkdtemp(prefix=f"{name}-", dir=self.folder))  # a side may serve twice
        answers = [
            [*exchange.tokens, self.end] for talk in self.talks for exchange in talk.exchanges
        ]
        (own / "answers.json").write_text(json.dumps(answers), encoding="utf-8")
        numbers = range(len(rounds) + 1)
        keys = [key_of(number, at) for number in numbers for at in (None, *range(n_talks))]
        (own / "keys").write_text("\n".join(keys), encoding="utf-8")
        (own / "keys").chmod(0o600)
        server = semantic_server(
            self.model, own, *FLAGS[one.side], "--api-key-file", str(own / "keys"),
            "--pool-gb", str(self.pool_gb), "--ram-gb", "2",
            "--served-model-name", MODEL_NAME, "--exact-batch", "on" if self.small else "auto",
            *(() if self.small else ("--memory-gb", str(self.pool_gb + _BESIDE_POOL_GB))),
            *(() if self.stalls is None else ("--log-level", "info")),
        )  # fmt: skip
        flags = ["-m", "benchmarks.forced_server", "--answers", str(own / "answers.json")]
        flags += ["--portable"] if self.small else []
        flags += [] if one.checked is None else ["--checked", str(one.checked)]
        flags += [] if self.stalls is None else ["--stalls", str(self.stalls)]
        server.command = [sys.executable, *flags, *server.command[3:]]
        paths = [server.environment["PYTHONPATH"], str(ROOT), os.environ.get("PYTHONPATH")]
        server.environment = {
            **server.environment,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }
        server.start()
        try:
            yield server
        finally:
            server.stop()
            for line in server.said():
                if any(one in line for one in TOLD):
                    print(line, flush=True)


def plans(
    clients: Sequence[int],
    checked: Sequence[int],
    repeated: int = 1,
    sides: tuple[str, str] = (OFF, AUTO),
) -> list[list[Round]]:
    """Return the rounds of each server. Sides that are `repeated` change places each time, as a
    machine's speed may change, and equal neighbours share a server."""
    order = [side for i in range(repeated) for side in sides[:: -1 if i % 2 else 1]]
    usual = [
        [Round(side, n) for _ in same for n in clients]
        for side, same in itertools.groupby(order)
        if clients
    ]
    fixed = [[Round(AUTO, 1, own, n)] for n in checked for own in (True, False)]
    return usual + fixed


def measured(
    servers: Servers, rounds: Sequence[Sequence[Round]]
) -> Iterator[tuple[dict[str, Scalar], list[float]]]:
    """The figures of each round, and the tokens per step of one task's sessions. First some
    answers that do not count: a device compiles."""
    for of_server in rounds:
        with servers.serving(of_server) as server:
            most = max(one.clients for one in of_server)
            first = [one._replace(exchanges=one.exchanges[:1]) for one in servers.talks[:most]]
            Replay(0, Round("warm-up", most), first).run(server.port)
            for number, one in enumerate(of_server, 1):
                replay = Replay(number, one, servers.talks)
                replay.run(server.port)
                line = replay.figures()
                if one.checked is not None:
                    line["checked"] = one.checked
                if "failure" in line:
                    line["log"] = server.last_words()
                yield line, replay.same_task()


def summary_of(
    samples: Sequence[Mapping[str, Scalar]], same_task: Sequence[Sequence[float]]
) -> dict[str, Json]:
    """All rounds, and what the second side gives to each number of clients."""
    lines: list[Json] = []
    for one, of_task in zip(samples, same_task, strict=True):
        lines.append({**one, "same_task": list(of_task)})
    return {"rounds": lines, "compared": [{**one} for one in compared(samples)]}


def compared(samples: Sequence[Mapping[str, Scalar]]) -> list[dict[str, float]]:
    """Return the figures of the second side relative to those of the first, by the number of
    clients."""
    usual = [one for one in samples if "checked" not in one and "failure" not in one]
    by_side: dict[tuple[Scalar, int], list[Mapping[str, Scalar]]] = {}
    for one in usual:
        by_side.setdefault((one["side"], cast(int, one["clients"])), []).append(one)

    def usual_of(name: str, rounds: Sequence[Mapping[str, Scalar]]) -> float:
        return statistics.median(cast(float, one[name]) for one in rounds)

    found: list[dict[str, float]] = []
    for (side, clients), mine in by_side.items():
        their = by_side.get((usual[0]["side"], clients))
        if side != usual[0]["side"] and their is not None:
            line: dict[str, float] = {"clients": clients}
            for name in ("decode_tok_s", "out_tok_s", "ttft_p50_s", "gap_max_ms"):
                ratio = usual_of(name, mine) / max(1e-9, usual_of(name, their))
                line[name] = round(ratio, 3)
            found.append(line)
    return found


def judge(
    samples: Sequence[Mapping[str, Scalar]],
    same_task: Sequence[Sequence[float]],
    clients: Sequence[int],
) -> Verdict:
    """The criterion, and what misses it."""
    missed: list[str] = []
    for one, of_task in zip(samples, same_task, strict=True):
        where = f"{one['side']}, {one['clients']} clients, {one['source']}"
        if one["as_recorded"] != one["answers"]:
            missed.append(f"{where}: {one['as_recorded']} of {one['answers']} answers")
        if "checked" in one and "failure" not in one:
            key = str(one["source"]), cast(int, one["checked"])
            steps = cast(float, one["tokens_per_step"])
            if steps < WANTED.get(key, 0.0):
                missed.append(f"{key[1]} drafts, {key[0]}: {steps} tokens per step")
            if key == (OTHERS, 4) and len(of_task) > 1 and min(of_task[1:]) < SAME_TASK:
                missed.append(f"same task: {min(of_task[1:])} tokens per step")
    found = {one["clients"]: one["decode_tok_s"] for one in compared(samples)}
    missed += [
        f"{n} clients: {found.get(n, 'no')} of the tokens per second"
        for n in clients
        if found.get(n, 0.0) < LEAST
    ]
    least: Scalar = min(found.values()) if found else "all of it"
    return Verdict(CRITERION, LEAST, "; ".join(missed) or least, passed=not missed)


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 when the criterion is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sessions", type=Path, help="recorded sessions")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json with ChatML's tokens")
    parser.add_argument("--most-sessions", type=int, help="the last ones")
    parser.add_argument("--turns", type=int, help="of each session")
    parser.add_argument("--tokens", type=int, help="of each answer")
    parser.add_argument("--clients", type=int, action="append", help="may be repeated")
    parser.add_argument("--repeated", type=int, default=1, help="rounds of each side")
    parser.add_argument("--checked", type=int, action="append", help="may be repeated")
    parser.add_argument(
        "--bits", action="store_true", help="caches of 8 bits beside 16, instead of drafts"
    )
    parser.add_argument("--only-checked", action="store_true", help="no other rounds")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--pool-gb", type=float, help="of the cache; 1 with --small, else 32")
    parser.add_argument("--stalls", type=float, help="print where servers stand still so long")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--folder", type=Path, help="for the model and the stores")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args(given)
    with TemporaryDirectory(dir=arguments.folder) as folder:
        return run(arguments, Path(folder))


def run(arguments: argparse.Namespace, folder: Path) -> int:
    """All rounds, with one server after the other."""
    small, layers = cast(bool, arguments.small), cast(int, arguments.layers)
    pool_gb = cast(float, arguments.pool_gb or (SMALL_POOL_GB if small else POOL_GB))
    clients = cast("list[int] | None", arguments.clients) or list(CLIENTS)
    clients = [] if arguments.only_checked else clients
    checked = cast("list[int] | None", arguments.checked) or []
    sides = (AUTO, EIGHT) if arguments.bits else (OFF, AUTO)
    rounds = plans(clients, checked, cast(int, arguments.repeated), sides)
    given = Limits(arguments.most_sessions, arguments.turns, arguments.tokens)
    usual = SMALL_LIMITS if small else LIMITS
    limits = Limits(*(one or other for one, other in zip(given, usual, strict=True)))
    model, end = folder / "model", 0
    file = cast("Path | None", arguments.tokenizer)
    build = partial(tiny, file) if small else lambda _: shapes.llama_8b(layers)
    write_large_model(model, build)
    if file is not None:
        end = use_tokenizer(model, file)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    talks = talks_in(cast(Path, arguments.sessions), tokenizer, limits)
    started = Run.start(
        "gpu_replay",
        QUESTION,
        model="tiny" if small else f"Llama 3.1 8B shape, {layers} layers, bf16",
        parameters={
            "sessions": len(talks), "vocabulary": tokenizer.get_vocab_size(), "small": small,
            "turns": limits.turns, "tokens": limits.tokens,
            "pool_gb": pool_gb,
        },
        seed=0,
    )  # fmt: skip
    samples: list[dict[str, Scalar]] = []
    same_task: list[list[float]] = []
    arguments.output.mkdir(parents=True, exist_ok=True)
    servers = Servers(folder, model, talks, end, small, pool_gb, arguments.stalls)
    for line, of_task in measured(servers, rounds):
        samples.append(line)
        same_task.append(of_task)
        print(json.dumps({**line, "same_task": of_task}), flush=True)
        verdict = judge(samples, same_task, clients)  # a rented machine may go away
        result = started.finish(samples, summary_of(samples, same_task), verdict)
        result.write(arguments.output / "gpu_replay.json")
    verdict = judge(samples, same_task, clients)
    print(f"{'passed' if verdict.passed else 'MISSED'}: {verdict.observed}")
    return int(not verdict.passed)


if __name__ == "__main__":
    raise SystemExit(main())
