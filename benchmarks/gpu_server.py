"""`python -m benchmarks.gpu_server`: `semantic serve` and `mlx_lm.server` on a GPU, in one run.

Both serve a model of the shape of Llama 3.1 8B with random bf16 weights, or of another `--shape`,
each in its own process, ours with its store on disk. Clients ask at once, with long and short
prompts, a second turn, and one with a very long prompt beside seven that decode. `--ranks` compares
ours on one device with ours divided among several instead. Takes some minutes; `--small` serves a
small model on any device. Prints a line per round and writes JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from benchmarks import shapes
from benchmarks.server_client import Answer, Client, Message, RequestFailedError
from benchmarks.server_measures import MODEL_NAME
from benchmarks.server_model import words, write_model
from benchmarks.server_process import ServerProcess, mlx_lm_server, semantic_server
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Verdict
from semantic.adapters.mlx.model.provider import find_folder

QUESTION = "What do many clients get from our server on a GPU, and what from mlx_lm.server?"
CRITERION = (
    "beside mlx_lm.server: with 8, 32 and 64 clients of long prompts a first token at least as "
    "soon (median) and 1.5 times the tokens per second; with 64 of short prompts half of the time "
    "and 1.5 times the tokens per second; an 8k prompt beside 7 who decode within 1 s and 32k "
    "within 4 s, no stream interrupted for more than 250 ms"
)
RANKS_QUESTION = "What do many clients get from a model that is divided among devices?"
RANKS_CRITERION = "with 32 clients of long prompts at least 0.9 of one device's tokens per second"
OURS, THEIRS, DIVIDED = "semantic", "mlx-lm", "semantic on ranks"
LONG_WORDS, SHORT_WORDS = (800, 1400), (25, 48)
SHAPES: Mapping[str, tuple[str, Callable[[int, int], Module], int]] = {
    "llama-8b": ("Llama 3.1 8B shape", shapes.llama_8b, 32),
    "hybrid": (
        "Qwen3-Next shape, a quarter of its layers and experts",
        functools.partial(shapes.qwen3_next_80b, experts=128),
        12,
    ),
}
"""What each is, its model with so many layers and tokens, and its layers."""
_NEVER = 4
"""The first ids end a message or name a role: never sampled, so that answers have full length."""
MOST_CONTEXT = 131072
POOL_GB, SMALL_POOL_GB = 32, 1
_COPIED = (
    "chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Round:
    """So many clients at once, each with a prompt of `words` and `max_tokens` new ones."""

    name: str
    clients: int
    words: tuple[int, int]
    max_tokens: int
    turns: int = 1


ROUNDS = (
    Round("1 long", 1, LONG_WORDS, 128),
    Round("8 long", 8, LONG_WORDS, 128, turns=2),
    Round("32 long", 32, LONG_WORDS, 128),
    Round("64 long", 64, LONG_WORDS, 128),
    Round("64 short", 64, SHORT_WORDS, 256),
)
SMALL_ROUNDS = (Round("4 long", 4, (200, 300), 16, turns=2), Round("8 short", 8, SHORT_WORDS, 16))
BESIDE = {"8k beside 7": 5800, "32k beside 7": 23200}
"""Words of the long prompt."""
MOST_TTFT = {"8k beside 7": 1.0, "32k beside 7": 4.0}
MOST_GAP_MS = 250.0


@dataclass(slots=True)
class Talk:
    """One client's conversation, and its answers."""

    messages: list[Message]
    answers: list[Answer] = field(default_factory=list)
    failure: str | None = None


def main() -> int:
    """Measure, print, write; 1 when the criterion is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--layers", type=int, help="instead of the shape's own")
    parser.add_argument("--small", action="store_true", help="a small model, few clients")
    parser.add_argument("--side", choices=[OURS, THEIRS], help="only this one")
    parser.add_argument("--ranks", type=int, help="compare with as many devices")
    parser.add_argument("--backend", default="nccl", help="of the ranks")
    parser.add_argument("--only", action="append", help="this round; may be repeated")
    parser.add_argument("--folder", type=Path, help="for the model and the store")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    with TemporaryDirectory(dir=arguments.folder) as folder:
        return run(arguments, Path(folder))


def run(arguments: argparse.Namespace, folder: Path) -> int:
    """All rounds with one server after the other: two do not fit the memory of one device."""
    rounds = SMALL_ROUNDS if arguments.small else ROUNDS
    what, build, layers = SHAPES[cast(str, arguments.shape)]
    layers = cast("int | None", arguments.layers) or layers
    ranks = cast("int | None", arguments.ranks)
    title = "gpu_server" if ranks is None else "gpu_server_ranks"
    parameters: dict[str, Scalar] = {"layers": layers, "rounds": ", ".join(r.name for r in rounds)}
    if ranks is not None:
        parameters |= {"ranks": ranks, "transport": cast(str, arguments.backend)}
    started = Run.start(
        title,
        QUESTION if ranks is None else RANKS_QUESTION,
        model="small" if arguments.small else f"{what}, {layers} layers",
        parameters=parameters,
        seed=0,
    )
    sides = [OURS, THEIRS if ranks is None else DIVIDED]
    decide = judge if ranks is None else judge_ranks
    if arguments.small:
        write_model(folder / "model")
    else:
        write_large_model(folder / "model", functools.partial(build, layers))
    samples: list[dict[str, Scalar]] = []
    arguments.output.mkdir(parents=True, exist_ok=True)

    def note(line: dict[str, Scalar]) -> None:
        """Print and write at once: a rented machine may go away."""
        samples.append(line)
        print(json.dumps(line), flush=True)
        summary: dict[str, Json] = {"rounds": compared(samples, sides)}
        result = started.finish(samples, summary, decide(samples))
        result.write(arguments.output / f"{title}.json")

    wanted = arguments.only or [*(one.name for one in rounds), *BESIDE]
    besides = {} if arguments.small else {name: n for name, n in BESIDE.items() if name in wanted}
    for name in [arguments.side] if arguments.side else sides:
        divided = (ranks, cast(str, arguments.backend)) if name == DIVIDED and ranks else None
        pool_gb = SMALL_POOL_GB if arguments.small else POOL_GB
        server = start(folder, name, note, pool_gb, divided)
        try:
            warm = talk(server, replace(rounds[0], name="warm-up", clients=2, max_tokens=24))
            note({"side": name, "round": "warm-up", **figures(warm)})
            for one in rounds:
                for line in measured(server, one) if one.name in wanted else ():
                    note({"side": name, **line})
            for title, n_words in besides.items():
                note({"side": name, "round": title, **beside(server, title, n_words)})
        finally:
            server.stop()
    verdict = decide(samples)
    print(f"{'passed' if verdict.passed else 'MISSED'}: {verdict.observed}")
    return int(not verdict.passed)


Note = Callable[[dict[str, Scalar]], None]
"""Takes a line of figures."""


def start(
    folder: Path, name: str, note: Note, pool_gb: int, divided: tuple[int, str] | None
) -> ServerProcess:
    """A server, ready; `divided` among ranks over MLX's backend of that name."""
    server = server_of(folder, name, pool_gb)
    if divided is not None:
        launch = str(Path(sys.executable).with_name("mlx.launch"))
        ranks = (launch, "-n", str(divided[0]), "--backend", divided[1], "--")
        server.command, server.is_group = (*ranks, *server.command), True
    begun = time.perf_counter()
    server.start()
    note({"side": name, "round": "start", "ready_s": round(time.perf_counter() - begun, 2)})
    return server


def server_of(folder: Path, name: str, pool_gb: int) -> ServerProcess:
    """A server of the model in `folder`, for many clients."""
    if name != THEIRS:
        server = semantic_server(
            folder / "model", folder / name, "--max-batch", "64", "--max-waiting", "256",
            "--pool-gb", str(pool_gb), "--ram-gb", "8", "--served-model-name", MODEL_NAME,
        )  # fmt: skip
    else:
        server = mlx_lm_server(folder / "model", folder / THEIRS, Path(sys.executable))
        server.command = [
            *server.command, "--decode-concurrency", "64", "--prompt-concurrency", "8",
        ]  # fmt: skip
    paths = [server.environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
    server.environment = {
        **server.environment,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    return server


def talk(server: ServerProcess, one: Round, talks: Sequence[Talk] = ()) -> list[Talk]:
    """A turn of every client, all at once."""
    talks = list(talks) or [Talk([]) for _ in range(one.clients)]
    low, high = one.words
    barrier = threading.Barrier(len(talks))

    def turn(number: int, mine: Talk) -> None:
        n = low + (high - low) * number // max(1, len(talks) - 1) if not mine.messages else 20
        text = words(n, f"{one.name} {number} {len(mine.messages)}")
        mine.messages.append({"role": "user", "content": text})
        barrier.wait()
        try:
            answer = Client(server.port, MODEL_NAME).ask(mine.messages, one.max_tokens)
        except RequestFailedError as error:
            mine.failure = str(error)
            return
        mine.messages.append({"role": "assistant", "content": answer.text})
        mine.answers.append(answer)

    threads = [threading.Thread(target=turn, args=pair) for pair in enumerate(talks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return talks


def measured(server: ServerProcess, one: Round) -> list[dict[str, Scalar]]:
    """The figures of each turn of a round."""
    lines: list[dict[str, Scalar]] = []
    talks: list[Talk] = []
    for turn in range(one.turns):
        talks = talk(server, one, talks)
        lines.append({"round": one.name + (", turn 2" if turn else ""), **figures(talks)})
    return lines


def figures(talks: Sequence[Talk]) -> dict[str, Scalar]:
    """What the clients got in their last turn."""
    answers = [one.answers[-1] for one in talks if one.answers and one.failure is None]
    found: dict[str, Scalar] = {"clients": len(talks), "failed": len(talks) - len(answers)}
    failures = [one.failure for one in talks if one.failure]
    if failures:
        found["failure"] = failures[0][:200]
    if not answers:
        return found
    wall = max(one.ended for one in answers) - min(one.sent for one in answers)
    ttft = sorted(one.ttft for one in answers)
    gaps = sorted(gap for one in answers for gap in one.gaps()) or [0.0]
    tokens = sum(one.completion_tokens for one in answers)
    return found | {
        "prompt_tokens": sum(one.prompt_tokens for one in answers),
        "cached_tokens": sum(one.cached_tokens for one in answers),
        "ttft_p50_s": round(statistics.median(ttft), 4),
        "ttft_max_s": round(ttft[-1], 4),
        "gap_p50_ms": round(1e3 * statistics.median(gaps), 2),
        "gap_max_ms": round(1e3 * gaps[-1], 1),
        "wall_s": round(wall, 3),
        "out_tok_s": round(tokens / wall, 1),
    }


def beside(server: ServerProcess, what: str, n_words: int) -> dict[str, Scalar]:
    """A very long prompt while seven others decode: its first token, and their longest gap."""
    others = [Talk([]) for _ in range(7)]
    one = Round(f"{what} others", 7, SHORT_WORDS, 1600 if n_words > 10_000 else 700)
    thread = threading.Thread(target=talk, args=(server, one, others))
    thread.start()
    time.sleep(2.0)
    reader = talk(server, Round(what, 1, (n_words, n_words), 8))[0]
    thread.join()
    failures = [talked.failure for talked in (*others, reader) if talked.failure]
    if failures:
        return {"failure": failures[0][:200]}
    answer = reader.answers[-1]
    gaps = [
        gap
        for other in others
        for gap in other.answers[-1].gaps(answer.sent, answer.sent + answer.ttft)
    ]
    calm = [gap for other in others for gap in other.answers[-1].gaps(0.0, answer.sent)]
    return {
        "prompt_tokens": answer.prompt_tokens,
        "ttft_p50_s": round(answer.ttft, 4),
        "gap_p50_ms": round(1e3 * statistics.median(gaps), 2),
        "gap_max_ms": round(1e3 * max(gaps), 1),
        "calm_ms": round(1e3 * statistics.median(calm), 2),
    }


def compared(
    samples: Sequence[dict[str, Scalar]], sides: Sequence[str] = (OURS, THEIRS)
) -> list[Json]:
    """Both sides of each round beside each other."""
    lines: list[Json] = []
    rounds = dict.fromkeys(str(one["round"]) for one in samples)
    for name in rounds:
        line: dict[str, Json] = {"round": name}
        for field_name in ("ttft_p50_s", "ttft_max_s", "gap_max_ms", "out_tok_s", "failed"):
            for side in sides:
                of = [one for one in samples if (one["side"], one["round"]) == (side, name)]
                line[f"{side} {field_name}"] = of[-1].get(field_name) if of else None
        if name not in ("start", "warm-up"):
            lines.append(line)
    return lines


def judge(samples: Sequence[dict[str, Scalar]]) -> Verdict:
    """The criteria, and those that are missed."""
    by_side = {(str(one["side"]), str(one["round"])): one for one in samples}
    missed: list[str] = []
    for one in ROUNDS[1:]:
        mine, their = by_side.get((OURS, one.name)), by_side.get((THEIRS, one.name))
        if mine is None or their is None or "ttft_p50_s" not in mine or "ttft_p50_s" not in their:
            missed.append(f"{one.name}: not measured")
            continue
        sooner = number(mine, "ttft_p50_s") / number(their, "ttft_p50_s")
        more = number(mine, "out_tok_s") / number(their, "out_tok_s")
        if sooner > (0.5 if one.words is SHORT_WORDS else 1.0):
            missed.append(f"{one.name}: the first token after {sooner:.2f} of mlx-lm's time")
        if more < 1.5:
            missed.append(f"{one.name}: {more:.2f} of mlx-lm's tokens per second")
    for what, most in MOST_TTFT.items():
        found = by_side.get((OURS, what))
        if found is None or "ttft_p50_s" not in found:
            missed.append(f"{what}: not measured")
        elif (
            float(found["ttft_p50_s"] or 0) > most or float(found["gap_max_ms"] or 0) > MOST_GAP_MS
        ):
            missed.append(f"{what}: {found['ttft_p50_s']} s, gap {found['gap_max_ms']} ms")
    return Verdict(CRITERION, 0, "; ".join(missed) or "all criteria met", passed=not missed)


def judge_ranks(samples: Sequence[dict[str, Scalar]]) -> Verdict:
    """The tokens per second of all ranks beside one device's."""
    rate = {
        str(one["side"]): number(one, "out_tok_s")
        for one in samples
        if one["round"] == "32 long" and "out_tok_s" in one
    }
    if rate.keys() != {OURS, DIVIDED}:
        return Verdict(RANKS_CRITERION, 0.9, "not measured", passed=False)
    ratio = rate[DIVIDED] / rate[OURS]
    return Verdict(RANKS_CRITERION, 0.9, round(ratio, 2), passed=ratio >= 0.9)


def number(line: dict[str, Scalar], name: str) -> float:
    """A figure of a round."""
    value = line[name]
    if not isinstance(value, int | float):
        raise TypeError(f"{name} is not a number: {value!r}")
    return value


def write_large_model(folder: Path, build: Callable[[int], Module]) -> None:
    """The shape that `build` makes for a number of tokens, with random weights, for the embedded
    model's tokenizer."""
    source = find_folder("semantic-tiny")
    folder.mkdir(parents=True)
    for name in _COPIED:
        shutil.copy(source / name, folder)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokenizer["model_max_length"] = MOST_CONTEXT
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    own = json.loads((source / "config.json").read_text(encoding="utf-8"))
    model = build(own["vocab_size"])
    config = {
        **{name: own[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        **dataclasses.asdict(model.args),
        "torch_dtype": "bfloat16",
        "max_position_embeddings": MOST_CONTEXT,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    parameters = cast(Callable[[], dict[str, object]], model.parameters)
    weights = cast(dict[str, mx.array], dict(tree_flatten(parameters())))
    head = weights["lm_head.weight"]
    weights["lm_head.weight"] = mx.concatenate([mx.zeros_like(head[:_NEVER]), head[_NEVER:]])
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    del model, weights, head, parameters
    gc.collect()
    mx.clear_cache()


if __name__ == "__main__":
    raise SystemExit(main())
