"""Runs held-out questions on the exported semantic-tiny with mlx-lm and records every answer.

Knows nothing of torch or of training. Decoding is greedy, in float32 on the CPU, and an answer
counts only if it equals the expected one in full. Run: python -m tools.tiny_model.evaluate
"""

import argparse
import ctypes
import json
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

with suppress(OSError):  # MLX for the CPU needs its symbols where it was not linked against it
    ctypes.CDLL("libopenblas.so.0", mode=ctypes.RTLD_GLOBAL)

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from mlx_lm.utils import load

from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from tools.tiny_model import trials
from tools.tiny_model.facts import KINDS
from tools.tiny_model.tokenizer import FOLDER
from tools.tiny_model.trials import BEHAVIOURS, DISTANCES, Trial, Values

RESULT = Path(__file__).parents[2] / "experiments" / "tiny_model_recall" / "result.json"
QUESTION = (
    "How often does semantic-tiny, run by mlx-lm, give the exact answer to a question about a fact "
    "stated 200, 1,000, 2,000 and 3,500 tokens earlier, for each of the eight kinds of fact?"
)
CRITERION = "the lowest share of exact answers over the 32 cells of kind and distance"
THRESHOLD = 0.98
MAX_ANSWER = 500
CHUNK = 256  # tokens read at a time; attention to one long chunk would cost twice as much
FAR = 7000


@dataclass(frozen=True, slots=True)
class Sample:
    """One question asked once. The trial's seed is held-out/evaluate/group/distance/index."""

    group: str
    topic: str
    asked_at: int | None
    index: int
    distance: int | None
    question: str
    expected: str
    said: str

    @property
    def exact(self) -> bool:
        return self.said == self.expected

    @property
    def cell(self) -> str:
        parts = (self.group, self.topic, self.asked_at)
        return "/".join(str(part) for part in parts if part is not None)

    def row(self) -> dict[str, Scalar]:
        """What cannot be drawn again from the seed; question and expected answer only of misses."""
        row: dict[str, Scalar] = {"cell": self.cell, "trial": self.index}
        if self.distance is not None:
            row["distance"] = self.distance
        row |= {"exact": self.exact, "said": self.said}
        return row if self.exact else row | {"question": self.question, "expected": self.expected}


class Respondent:
    """The model under test: answers questions behind a conversation it reads only once."""

    def __init__(self, folder: Path) -> None:
        model, tokenizer = load(str(folder))[:2]
        model.set_dtype(mx.float32)
        self.model = model
        self.tokenizer = tokenizer

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def rendered(self, messages: Iterable[tuple[str, str]], reply: bool) -> list[int]:
        chat = [{"role": role, "content": content} for role, content in messages]
        return list(
            self.tokenizer.apply_chat_template(
                chat, add_generation_prompt=reply, tokenize=True, return_dict=False
            )
        )

    def answers(self, trial: Trial) -> list[str]:
        """What the model says to each question."""
        shared = self.rendered(trial.messages, reply=False) if trial.messages else []
        cache = make_prompt_cache(self.model)
        for start in range(0, len(shared), CHUNK):
            self.model.model(mx.array(shared[start : start + CHUNK])[None], cache=cache)
            mx.eval([layer.state for layer in cache])
        said = []
        for question in trial.questions:
            prompt = self.rendered((*trial.messages, ("user", question.text)), reply=True)
            assert prompt[: len(shared)] == shared
            said.append(self.decoded(prompt[len(shared) :], cache))
            trim_prompt_cache(cache, cache[0].offset - len(shared))
        return said

    def decoded(self, tokens: list[int], cache: list[object]) -> str:
        said: list[int] = []
        steps = generate_step(
            mx.array(tokens), self.model, max_tokens=MAX_ANSWER, prompt_cache=cache
        )
        for token, _ in steps:
            if token in self.tokenizer.eos_token_ids:
                break
            said.append(int(token))
        return str(self.tokenizer.decode(said))


def asked(
    respondent: Respondent, group: str, distance: int | None, index: int, trial: Trial
) -> list[Sample]:
    return [
        Sample(
            group=group,
            topic=question.topic,
            asked_at=distance,
            index=index,
            distance=question.distance,
            question=question.text,
            expected=question.answer,
            said=said,
        )
        for question, said in zip(trial.questions, respondent.answers(trial), strict=True)
    ]


def recall(
    respondent: Respondent,
    group: str,
    distances: Iterable[int],
    repeats: int,
    values: Values | None,
) -> list[Sample]:
    samples: list[Sample] = []
    for distance in distances:
        for index in range(repeats):
            seed = f"evaluate/{group}/{distance}/{index}"
            trial = trials.recall_trial(seed, distance, respondent.count, values)
            samples += asked(respondent, group, distance, index, trial)
        print(f"{group} at {distance}: done", flush=True)
    return samples


def behaviour(respondent: Respondent, repeats: int) -> list[Sample]:
    return [
        sample
        for topic in BEHAVIOURS
        for index in range(repeats)
        for sample in asked(
            respondent, "behaviour", None, index, trials.behaviour_trial(topic, f"evaluate/{index}")
        )
    ]


def share(samples: Iterable[Sample]) -> str:
    hits = [sample.exact for sample in samples]
    return f"{sum(hits):,} of {len(hits):,}"


def table(samples: list[Sample]) -> list[Json]:
    """One row for each kind of fact, one column for each distance."""
    rows: list[Json] = []
    for kind in KINDS:
        row: dict[str, Json] = {"fact": kind.key}
        for distance in dict.fromkeys(sample.asked_at for sample in samples):
            cell = [s for s in samples if s.topic == kind.key and s.asked_at == distance]
            row[f"{distance:,} tokens"] = share(cell)
        rows.append(row)
    return rows


def lowest(samples: list[Sample]) -> float:
    """The share of exact answers in the worst cell."""
    cells: dict[str, list[bool]] = {}
    for sample in samples:
        cells.setdefault(sample.cell, []).append(sample.exact)
    return min(sum(hits) / len(hits) for hits in cells.values())


def summary(groups: Mapping[str, list[Sample]]) -> dict[str, Json]:
    """Each group's total and table, and the misses of the group that counts."""
    behaviours: list[Json] = [
        {"behaviour": topic, "exact": share(s for s in groups["behaviour"] if s.topic == topic)}
        for topic in BEHAVIOURS
    ]
    tables: dict[str, Json] = {
        name: behaviours if name == "behaviour" else table(samples)
        for name, samples in groups.items()
    }
    misses: list[Json] = [
        {
            "fact": sample.topic,
            "tokens": sample.asked_at,
            "expected": sample.expected,
            "said": sample.said,
        }
        for sample in groups["recall"]
        if not sample.exact
    ]
    totals: dict[str, Json] = {name: share(samples) for name, samples in groups.items()}
    return {"exact": totals, "lowest": lowest(groups["recall"]), "tables": tables, "misses": misses}


def compact(result: Result) -> str:
    """The result as JSON with each sample on one line."""
    document = json.loads(result.to_json())
    samples = ",\n".join(
        "    " + json.dumps(sample, ensure_ascii=False) for sample in document["samples"]
    )
    document["samples"] = []
    text = json.dumps(document, indent=2, ensure_ascii=False)
    return text.replace('"samples": []', f'"samples": [\n{samples}\n  ]', 1) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--repeats", type=int, default=50, help="trials per cell")
    given = parser.parse_args()
    few = max(1, given.repeats // 5)
    weights = (given.folder / "model.safetensors").read_bytes()
    parameters: dict[str, Scalar] = {
        "precision": "float32",
        "device": "cpu",
        "decoding": "greedy",
        "trials_per_cell": given.repeats,
        "trials_per_cell_of_other_tables": few,
        "trials_per_behaviour": given.repeats // 2,
        "weights_bytes": len(weights),
        "weights_sha256": sha256(weights).hexdigest(),
    }
    run = Run.start(
        "tiny-model-recall", QUESTION, model="semantic-tiny", parameters=parameters, seed=0
    )
    clock = time.monotonic()
    mx.set_default_device(mx.cpu)
    mx.random.seed(0)
    respondent = Respondent(given.folder)
    groups = {
        "recall": recall(respondent, "recall", DISTANCES, given.repeats, None),
        "behaviour": behaviour(respondent, given.repeats // 2),
        "unseen": recall(respondent, "unseen values", DISTANCES, few, trials.UNSEEN),
        "far": recall(respondent, "long context", (FAR,), few, None),
    }
    samples = [sample for group in groups.values() for sample in group]
    found = summary(groups)
    observed = round(lowest(groups["recall"]), 4)
    verdict = Verdict(CRITERION, THRESHOLD, observed, passed=observed >= THRESHOLD)
    result = run.finish([sample.row() for sample in samples], found, verdict)
    given.result.parent.mkdir(parents=True, exist_ok=True)
    given.result.write_text(compact(result), encoding="utf-8", newline="\n")
    for sample in samples:
        if not sample.exact:
            print(f"{sample.cell}: expected {sample.expected!r}, said {sample.said!r}")
    print(f"{found['exact']}\n{time.monotonic() - clock:.0f} s; {verdict}")


if __name__ == "__main__":
    main()
