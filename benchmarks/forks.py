"""`python -m benchmarks.forks`: a long agent, and 16 forks of it that answer at once.

Through `semantic serve` with its store on disk: one fork alone, 16 forks of one call, and 16 agents
with names of their own that only begin with the same messages. Then a checkpoint, `kill -9`, and 16
forks of the checkpoint. `--shape llama-8b` serves random bf16 weights of that shape, for a GPU;
otherwise the packaged model. Prints a line per round and writes JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast
from urllib.parse import quote

from benchmarks.gpu_server import OURS, SHAPES, server_of, write_large_model
from benchmarks.server_client import Answer, Client, Message
from benchmarks.server_measures import MODEL_NAME
from benchmarks.server_model import words
from benchmarks.server_process import ServerProcess, semantic_server
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Verdict

QUESTION = "What do 16 forks of a long agent cost, all at once?"
CRITERION = (
    "0 tokens of the parent's history computed again, in forks and after kill -9; one set of "
    "blocks for parent and forks; equal answers alone and at once; the last first token of 16 "
    "forks within 4 times (GPU), or 2 times (packaged model), of one fork's"
)
FORKS, ALONE, ANSWER = 16, 5, 48
TAIL_WORDS = 12
PER_WORD = 1.42
"""Tokens in a word of `words`."""
_MOST = {"packaged": 2.0}
_MOST_OTHERS = 4.0
_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Talk:
    """A server, and the conversation that the forks continue."""

    server: ServerProcess
    messages: Sequence[Message]

    def call(self, method: str, path: str, body: Json | None = None) -> dict[str, Json]:
        """The reply at a path below /v1/agents. Raises RuntimeError unless it is a success."""
        connection = HTTPConnection("127.0.0.1", self.server.port, timeout=_SECONDS)
        headers = {"Content-Type": "application/json"}
        try:
            sent = None if body is None else json.dumps(body)
            connection.request(method, f"/v1/agents{path}", sent, headers)
            reply = connection.getresponse()
            text = reply.read()
        finally:
            connection.close()
        if reply.status != 200:
            raise RuntimeError(f"{method} {path}: {reply.status} {text[:300]!r}")
        return cast("dict[str, Json]", json.loads(text))

    def ask(self, agent: str, tail: str) -> Answer:
        """The answer to the conversation and one more message."""
        asked = [*self.messages, {"role": "user", "content": words(TAIL_WORDS, tail)}]
        return Client(self.server.port, MODEL_NAME).ask(asked, ANSWER, agent=agent)

    def ask_all(self, agents: Sequence[str]) -> list[Answer]:
        """All agents' answers, asked at once; the number of an agent is its tail."""
        answers: dict[int, Answer] = {}
        barrier = threading.Barrier(len(agents))

        def ask(number: int, agent: str) -> None:
            barrier.wait()
            answers[number] = self.ask(agent, str(number))

        threads = [threading.Thread(target=ask, args=pair) for pair in enumerate(agents)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [answers[number] for number in range(len(agents))]

    def blocks(self, agents: Sequence[str]) -> set[str]:
        """The hashes of the agents' blocks."""
        found: set[str] = set()
        for agent in agents:
            chain = cast("list[dict[str, str]]", self.call("GET", f"/{quote(agent)}")["chain"])
            found |= {one["hash"] for one in chain}
        return found


def main() -> int:
    """Measure, print, write; 1 when the criterion is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, help="instead of the packaged model")
    parser.add_argument("--layers", type=int, help="instead of the shape's own")
    parser.add_argument("--tokens", type=int, default=7600, help="of the parent's history")
    parser.add_argument("--folder", type=Path, help="for the model and the store")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    with TemporaryDirectory(dir=arguments.folder) as folder:
        return run(arguments, Path(folder))


def run(arguments: argparse.Namespace, folder: Path) -> int:
    """All rounds with one server, which is killed once."""
    shape = cast("str | None", arguments.shape)
    if shape is None:
        what = "semantic-tiny"
        flags = ("--served-model-name", MODEL_NAME, "--max-batch", "32", "--pool-gb", "1")
        server = semantic_server(what, folder / OURS, *flags)
    else:
        what, build, layers = SHAPES[shape]
        layers = cast("int | None", arguments.layers) or layers
        write_large_model(folder / "model", functools.partial(build, layers))
        server = server_of(folder, OURS, 32)
        server.command = [*server.command, "--disk-gb", "24"]
        what = f"{what}, {layers} layers"
    name = "forks" if shape is None else f"forks_{shape.replace('-', '_')}"
    tokens = cast(int, arguments.tokens)
    started = Run.start(
        name,
        QUESTION,
        model=what,
        parameters={"tokens": tokens, "forks": FORKS, "tail_words": TAIL_WORDS},
        seed=0,
    )
    samples: list[dict[str, Scalar]] = []

    def note(line: dict[str, Scalar]) -> None:
        samples.append(line)
        print(json.dumps(line), flush=True)

    server.start()
    try:
        measure(server, int(tokens / PER_WORD), note)
    finally:
        server.stop()
    verdict = judge(samples, _MOST.get("packaged" if shape is None else shape, _MOST_OTHERS))
    arguments.output.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Json] = {"ratio": ratio(samples, "forks at once")}
    started.finish(samples, summary, verdict).write(arguments.output / f"{name}.json")
    print(f"{'passed' if verdict.passed else 'MISSED'}: {verdict.observed}")
    return int(not verdict.passed)


Note = Callable[[dict[str, Scalar]], None]
"""Takes a line of figures."""


def measure(server: ServerProcess, n_words: int, note: Note) -> None:
    """The rounds, each as a line."""
    first = [{"role": "user", "content": words(n_words, "parent")}]
    told = Client(server.port, MODEL_NAME).ask(first, 8, agent="parent")
    note({"round": "parent", "ttft_s": round(told.ttft, 4), "prompt_tokens": told.prompt_tokens})
    talk = Talk(server, [*first, {"role": "assistant", "content": told.text}])
    history = cast(int, talk.call("GET", "/parent")["tokens"])
    own = talk.blocks(["parent"])
    talk.call("POST", "/parent/checkpoints", {"name": "start"})

    lone = [f"one-{i}" for i in range(ALONE)]
    for agent in lone:  # apart, as the fork before would have shared its tail
        talk.call("POST", "/parent/fork", {"new_id": agent})
    alone = [talk.ask(agent, str(number)) for number, agent in enumerate(lone)]
    note({"round": "one fork", **figures(alone, history)})

    forks = [f"fork-{i}" for i in range(FORKS)]
    begun = time.perf_counter()
    talk.call("POST", "/parent/fork", {"new_ids": list(forks)})
    seconds = time.perf_counter() - begun
    new = talk.blocks(forks) - own
    together = talk.ask_all(forks)
    same = [one.text == other.text for one, other in zip(alone, together, strict=False)]
    more = {"fork_s": round(seconds, 4), "new_blocks": len(new), "equal": sum(same)}
    note({"round": "forks at once", **figures(together, history), **more})
    own_tails = len(talk.blocks(forks) - own)
    note({"round": "blocks", "parent": len(own), "forks beside": own_tails})

    unnamed = talk.ask_all([f"named-{i}" for i in range(FORKS)])
    note({"round": "other names at once", **figures(unnamed, history)})

    server.kill()
    server.start()
    again = [f"again-{i}" for i in range(FORKS)]
    talk.call("POST", "/parent/fork", {"new_ids": list(again), "checkpoint": "start"})
    note(
        {"round": "forks of the checkpoint after kill -9", **figures(talk.ask_all(again), history)}
    )


def figures(answers: Sequence[Answer], history: int) -> dict[str, Scalar]:
    """First tokens, and the tokens of the parent's history that were computed again."""
    first = min(one.sent for one in answers)
    return {
        "agents": len(answers),
        "ttft_p50_s": round(statistics.median(one.ttft for one in answers), 4),
        "last_s": round(max(one.pieces[0] for one in answers) - first, 4),
        "recomputed": sum(max(0, history - one.cached_tokens) for one in answers),
        "prompt_tokens": answers[0].prompt_tokens,
    }


def ratio(samples: Sequence[Mapping[str, Scalar]], name: str) -> float:
    """How much longer the last first token of a round takes than that of one fork."""
    by_round = {str(one["round"]): one for one in samples}
    last, one = by_round[name]["last_s"], by_round["one fork"]["ttft_p50_s"]
    if not isinstance(last, float) or not isinstance(one, float):
        raise TypeError("seconds must be numbers")
    return round(last / one, 2)


def judge(samples: Sequence[Mapping[str, Scalar]], most: float) -> Verdict:
    """The criterion, and what is missed."""
    by_round = {str(one["round"]): one for one in samples}
    missed = [
        f"{name}: {line['recomputed']} tokens computed again"
        for name, line in by_round.items()
        if line.get("recomputed") and "names" not in name
    ]
    forks = by_round["forks at once"]
    if forks["new_blocks"]:
        missed.append(f"forks: {forks['new_blocks']} blocks of their own")
    if forks["equal"] != ALONE:
        missed.append(f"forks: {forks['equal']} of {ALONE} answers are those of one alone")
    found = ratio(samples, "forks at once")
    if found > most:
        missed.append(f"forks: the last first token after {found} times one's")
    return Verdict(CRITERION, most, "; ".join(missed) or found, passed=not missed)


if __name__ == "__main__":
    raise SystemExit(main())
