"""`python -m benchmarks.gpu_drafts`: what checking drafts costs and gives on a GPU.

A model of a known shape with random weights, in pages. First whether answers whose steps check
drafts, right ones and wrong ones, have the bits that they have alone without drafts. Then tokens
per second of some agents with contexts of some length, without drafts and with drafts of which the
recorded part is right; and with drafts that are always wrong. Prints a line of JSON for each and
writes them all. `--only-answers` measures no speed. `--small` is a check for a CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX

from benchmarks import shapes
from benchmarks.gpu_lanes import Sides, small_model, texts
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Verdict
from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.stores.histories import Chances, Histories
from semantic.domain.value_objects import SampledToken, SamplingParams, SequenceId, whole_blocks
from semantic.ports.generation import Draft, Drafter
from tests.support.one_batch import same_bits
from tests.support.tiny_models import VOCAB

QUESTION = "Do drafts keep an answer's bits on a GPU, and how much sooner are its tokens?"
CRITERION = (
    "all answers have the bits that they have without drafts; with 2.2 tokens per step at 4 drafts "
    "one agent decodes 1.5 times as fast and four 1.25 times, with contexts of 2k and 32k tokens; "
    "with a text that no history has at least 0.98 times as fast"
)
CHANCE = 0.585
"""The chance of each draft after right ones with which 4 drafts give 2.2 tokens per step, as
recorded answers of agents do with all earlier sessions (`draft_acceptance.json`)."""
CHANCES: Mapping[str, float | None] = {"none": None, "usual": CHANCE, "wrong": 0.0, "drawn": None}
GREEDY, DRAWN = SamplingParams(logprobs=0), SamplingParams(temperature=1.0, seed=1, logprobs=0)
"""A greedy answer of random weights repeats itself. A drawn one has no text that a history has."""
_HISTORY = 1 << 20
_MATCH = 8
"""The length of the match that drafts seem to come from."""
FASTER = {1: 1.5, 4: 1.25}
MANY = (8, 32)
"""Agents of whom only a text that no history has is measured: their rows leave none for drafts."""
LEAST = 0.98
ANSWERS, ANSWER, LENGTHS, BESIDE = 24, 128, (40, 1500), 3
CONTEXTS, TOKENS, ROUNDS = (2048, 32768), 200, 2


class Known:
    """Drafts an answer that is known. Each draft after right ones is right with some chance."""

    def __init__(self, answer: Sequence[int], chance: float, draw: random.Random) -> None:
        self._answer, self._chance, self._draw = answer, chance, draw
        self._learned = Chances()
        self._at = self.n_checked = self.n_accepted = 0

    def propose(self, most: int) -> Draft:
        """See `Drafter.propose`."""
        drafts = list(self._answer[self._at : self._at + most])
        for at in range(len(drafts)):
            if self._draw.random() >= self._chance:
                drafts[at] += 1 if drafts[at] == 0 else -1
                break
        return Draft(drafts, self._learned.of(_MATCH))

    def read(self, tokens: Sequence[int], n_drafted: int, /) -> None:
        """See `Drafter.read`."""
        for at in range(min(n_drafted, len(tokens))):
            self._learned.learn(_MATCH, hit=at < len(tokens) - 1)
        self._at += len(tokens)
        self.n_checked += n_drafted
        self.n_accepted += min(n_drafted, len(tokens) - 1)


@dataclass(frozen=True)
class Asked:
    """A sequence's prompt, and its answer if it is known."""

    prompt: list[int]
    answer: Sequence[int] = ()


def decoded(
    backend: MLXBackend,
    asked: Sequence[Asked],
    n_tokens: int,
    drafts: Histories | float | None,
    params: SamplingParams = GREEDY,
) -> tuple[list[list[SampledToken]], float, list[Known]]:
    """Answers of `n_tokens` of all prompts together, the seconds for the later half of the tokens,
    and the drafters, which know the answers up to some chance."""
    draw = random.Random(1)
    said: dict[SequenceId, list[SampledToken]] = {}
    known: list[Known] = []
    for one in asked:
        sequence = backend.open(whole_blocks(len(one.prompt) + n_tokens + 64))
        *before, last = one.prompt
        for at in range(0, len(before), backend.best_chunk):
            backend.prefill(sequence, before[at : at + backend.best_chunk])
        drafter: Drafter | None = None
        if isinstance(drafts, float):
            known.append(drafter := Known(one.answer, drafts, draw))
        elif drafts is not None:
            drafter = drafts.drafter("", one.prompt)
        backend.start(sequence, last, before, params, 0, drafter)
        said[sequence] = []
    began, half = 0.0, len(asked) * n_tokens // 2
    count = 0
    while any(len(one) < n_tokens for one in said.values()):
        for token in backend.decode():
            if len(said[token.sequence]) < n_tokens:
                said[token.sequence].append(token)
                count += 1
                if count == half:
                    began = time.perf_counter()
    seconds = time.perf_counter() - began
    for sequence in said:
        backend.close(sequence)
    return list(said.values()), seconds, known


def equality(
    backend: MLXBackend, prompts: Sequence[list[int]], n_tokens: int
) -> Iterator[dict[str, Scalar]]:
    """How many answers with drafts have the bits that they have alone without."""
    alone = [decoded(backend, [Asked(prompt)], n_tokens, None)[0][0] for prompt in prompts]
    answers = [[*texts(one), *[0] * n_tokens] for one in alone]
    for n_beside in (0, BESIDE):
        same_tokens = same_all = checked = accepted = 0
        for at in range(0, len(prompts), n_beside + 1):
            group = range(at, min(at + n_beside + 1, len(prompts)))
            asked = [Asked(prompts[i], answers[i]) for i in group]
            said, _, known = decoded(backend, asked, n_tokens, CHANCE)
            checked += sum(one.n_checked for one in known)
            accepted += sum(one.n_accepted for one in known)
            for mine, i in zip(said, group, strict=True):
                same_tokens += texts(mine) == texts(alone[i])
                same_all += all(same_bits(mine, alone[i]))
        yield {
            "part": "answers", "beside": n_beside, "answers": len(prompts),
            "same_tokens": same_tokens, "same_bits": same_all, "checked": checked,
            "accepted": accepted,
        }  # fmt: skip


def speed(
    backend: MLXBackend, context: int, agents: int, n_tokens: int, vocab: int, rounds: int
) -> dict[str, Scalar]:
    """Tokens per second without drafts, with the usual ones and with wrong ones; then of a drawn
    text without drafts, and with histories, which do not have it. Many agents only draw."""
    draw = random.Random(2)
    prompts = [[draw.randrange(vocab - 1) for _ in range(context)] for _ in range(agents)]
    plain, _, _ = decoded(backend, [Asked(one) for one in prompts], n_tokens, None)
    asked = [
        Asked(prompt, [*texts(said), *[0] * n_tokens])
        for prompt, said in zip(prompts, plain, strict=True)
    ]
    histories = Histories(1 << 30)
    histories.add("", draw.choices(range(vocab), k=_HISTORY))
    histories.wait()
    names = () if agents in MANY else ("none", "usual", "wrong")
    turns = (*names, "drawn", "unknown", "unknown", "drawn")
    rates: dict[str, list[float]] = {name: [] for name in turns}
    per_step: list[float] = []
    for _ in range(rounds):
        for name in turns:
            source = histories if name == "unknown" else CHANCES[name]
            params = DRAWN if name in ("drawn", "unknown") else GREEDY
            _, seconds, known = decoded(backend, asked, n_tokens, source, params)
            rates[name].append(agents * n_tokens / 2 / seconds)
            if name == "usual":
                accepted = sum(one.n_accepted for one in known)
                per_step.append(agents * n_tokens / max(1, agents * n_tokens - accepted))
    histories.close()
    found = {name: statistics.median(each) for name, each in rates.items()}
    line: dict[str, Scalar] = {
        "part": "speed", "context": context, "agents": agents,
        **{f"{name}_tok_s": round(each, 1) for name, each in found.items()},
        **{f"{name}_over_none": round(found[name] / found["none"], 3) for name in names[1:]},
        "unknown_over_drawn": round(found["unknown"] / found["drawn"], 3),
    }  # fmt: skip
    if per_step:
        line["tokens_per_step"] = round(statistics.median(per_step), 2)
    return line


def judge(samples: Sequence[Mapping[str, Scalar]]) -> Verdict:
    """The criterion, and what misses it."""
    missed: list[str] = []
    for one in samples:
        if one["part"] == "answers" and one["same_bits"] != one["answers"]:
            missed.append(f"beside {one['beside']}: {one['same_bits']} of {one['answers']} equal")
        if one["part"] == "speed":
            where = f"{one['agents']} agents, {one['context']} tokens"
            faster = FASTER.get(cast(int, one["agents"]))
            if faster is not None and cast(float, one["usual_over_none"]) < faster:
                missed.append(f"{where}: {one['usual_over_none']} times as fast")
            if cast(float, one["unknown_over_drawn"]) < LEAST:
                missed.append(f"{where}: {one['unknown_over_drawn']} with an unknown text")
    return Verdict(CRITERION, LEAST, "; ".join(missed) or "all of it", passed=not missed)


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 when the criterion is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--bits", type=int, choices=(4, 16), default=16, help="of a weight")
    parser.add_argument("--answers", type=int, default=ANSWERS, help="prompts to answer")
    parser.add_argument("--only-answers", action="store_true", help="no speed")
    parser.add_argument("--only-many", action="store_true", help="no speed of few agents")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each speed")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args(given)
    small, layers = cast(bool, arguments.small), cast(int, arguments.layers)
    bits, rounds = cast(int, arguments.bits), cast(int, arguments.rounds)
    large = {4: shapes.llama_8b_4bit, 16: shapes.llama_8b}[bits]
    sides = Sides(small_model() if small else large(layers), small=small)
    vocab = VOCAB if small else shapes.LLAMA_VOCAB
    answers, n_tokens, lengths = (
        (3, 12, (5, 40)) if small else (cast(int, arguments.answers), ANSWER, LENGTHS)
    )
    contexts: Sequence[int]
    contexts, speed_tokens = ((64,), 16) if small else (CONTEXTS, TOKENS)
    started = Run.start(
        "gpu_drafts",
        QUESTION,
        model="tiny" if small else f"Llama 3.1 8B shape, {layers} layers, {bits} bits",
        parameters={
            "answers": answers,
            "tokens": n_tokens,
            "chance": CHANCE,
            "small": small,
            "rounds": rounds,
        },
        seed=0,
    )
    backend = sides.backend("on" if small or arguments.only_answers else "auto")
    plan = [
        (each, n)
        for each in contexts
        for n in (*FASTER, *(MANY if each == min(contexts) else ()))
        if not arguments.only_answers and (n in MANY or not arguments.only_many)
    ]
    sizes = [(max(lengths), BESIDE + 1), *plan]
    room, of = 2 * (speed_tokens + n_tokens), backend.cache_spec()
    backend.set_aside(max(n * of.bytes_for(whole_blocks(each + room)) for each, n in sizes))
    print(json.dumps({"lane": str(backend.lane), "problem": backend.drafts_problem}), flush=True)
    draw = random.Random(0)
    prompts = [
        [draw.randrange(vocab - 1) for _ in range(draw.randint(*lengths))] for _ in range(answers)
    ]
    samples: list[dict[str, Scalar]] = []
    arguments.output.mkdir(parents=True, exist_ok=True)

    def note(line: dict[str, Scalar]) -> None:
        """Print and write at once: a rented machine may go away."""
        samples.append(line)
        print(json.dumps(line), flush=True)
        summary = cast("dict[str, Json]", {"lines": list(samples)})
        started.finish(samples, summary, judge(samples)).write(arguments.output / "gpu_drafts.json")

    for line in equality(backend, prompts, n_tokens):
        note(line)
    for context, agents in plan:
        note(speed(backend, context, agents, speed_tokens, vocab, rounds))
    verdict = judge(samples)
    print(f"{'passed' if verdict.passed else 'MISSED'}: {verdict.observed}")
    return int(not verdict.passed)


if __name__ == "__main__":
    raise SystemExit(main())
