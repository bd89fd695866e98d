"""Asks the written semantic-tiny held-out questions through mlx-lm and records every answer.

It knows nothing of torch or of training. Decoding is greedy, in float32 on the CPU, and a full
answer counts only when it equals the expected one. Run: python -m tools.tiny_model.evaluate
"""

import argparse
import ctypes
import json
import platform
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

with suppress(OSError):  # MLX for the CPU needs its symbols where it was not linked against it
    ctypes.CDLL("libopenblas.so.0", mode=ctypes.RTLD_GLOBAL)

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from mlx_lm.utils import load

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


@dataclass(frozen=True, slots=True)
class Sample:
    """One question asked once."""

    group: str
    topic: str
    distance: int | None
    actual_distance: int | None
    prompt_tokens: int
    question: str
    expected: str
    observed: str
    exact: bool


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

    def answers(self, trial: Trial) -> list[tuple[int, str]]:
        """For each question: the length of its whole prompt, and what the model says."""
        shared = self.rendered(trial.messages, reply=False) if trial.messages else []
        cache = make_prompt_cache(self.model)
        if shared:
            mx.eval(self.model(mx.array(shared)[None], cache=cache))
        results = []
        for question in trial.questions:
            prompt = self.rendered((*trial.messages, ("user", question.text)), reply=True)
            assert prompt[: len(shared)] == shared
            said = self.decoded(prompt[len(shared) :], cache)
            trim_prompt_cache(cache, cache[0].offset - len(shared))
            results.append((len(prompt), said))
        return results

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


def asked(respondent: Respondent, group: str, distance: int | None, trial: Trial) -> list[Sample]:
    return [
        Sample(
            group=group,
            topic=question.topic,
            distance=distance,
            actual_distance=question.distance,
            prompt_tokens=length,
            question=question.text,
            expected=question.answer,
            observed=said,
            exact=said == question.answer,
        )
        for question, (length, said) in zip(trial.questions, respondent.answers(trial), strict=True)
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
            samples += asked(respondent, group, distance, trial)
        print(f"{group} at {distance}: done", flush=True)
    return samples


def behaviour(respondent: Respondent, repeats: int) -> list[Sample]:
    return [
        sample
        for topic in BEHAVIOURS
        for index in range(repeats)
        for sample in asked(
            respondent, "behaviour", None, trials.behaviour_trial(topic, f"evaluate/{index}")
        )
    ]


Share = tuple[int, int]  # exact answers, answers


def shares(samples: Iterable[Sample]) -> dict[str, Share]:
    """Exact and all answers by topic, and by distance where there is one."""
    found: dict[str, Share] = defaultdict(lambda: (0, 0))
    for sample in samples:
        key = sample.topic if sample.distance is None else f"{sample.topic}/{sample.distance}"
        exact, total = found[key]
        found[key] = (exact + sample.exact, total + 1)
    return dict(found)


def table(cells: dict[str, Share], distances: Iterable[int]) -> str:
    """Kinds of fact against distances, in Markdown."""
    columns = list(distances)
    lines = ["| fact | " + " | ".join(f"{distance:,} tokens" for distance in columns) + " |"]
    lines.append("| --- |" + " --: |" * len(columns))
    for kind in KINDS:
        row = [cells[f"{kind.key}/{distance}"] for distance in columns]
        lines.append(f"| {kind.key} | " + " | ".join(f"{a} of {b}" for a, b in row) + " |")
    return "\n".join(lines)


def printed(samples: list[Sample]) -> None:
    for group in dict.fromkeys(sample.group for sample in samples):
        chosen = [sample for sample in samples if sample.group == group]
        cells = shares(chosen)
        print(f"\n{group}\n")
        if group == "behaviour":
            print("| behaviour | exact |\n| --- | --: |")
            print("\n".join(f"| {topic} | {a} of {b} |" for topic, (a, b) in cells.items()))
        else:
            print(table(cells, dict.fromkeys(s.distance for s in chosen if s.distance)))
    print()
    for sample in [sample for sample in samples if not sample.exact][:40]:
        print(f"{sample.topic} {sample.distance}: {sample.question[-90:]!r}")
        print(f"    expected {sample.expected[:90]!r}, observed {sample.observed[:90]!r}")


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def document(
    samples: list[Sample], folder: Path, started: datetime, parameters: dict[str, int]
) -> dict[str, object]:
    main = [sample for sample in samples if sample.group == "recall"]
    lowest = min(exact / total for exact, total in shares(main).values())
    weights = folder / "model.safetensors"
    return {
        "schema": "semantic.result/1",
        "id": "tiny-model-recall",
        "question": QUESTION,
        "commit": git("rev-parse", "--verify", "--quiet", "HEAD") or None,
        "dirty": bool(git("status", "--porcelain")),
        "machine": {
            "system": platform.system(),
            "architecture": platform.machine(),
            "device": "cpu",
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("mlx", "mlx-lm", "transformers", "tokenizers")},
        },
        "model": {
            "name": "semantic-tiny",
            "bytes": weights.stat().st_size,
            "sha256": sha256(weights.read_bytes()).hexdigest(),
        },
        "parameters": {"precision": "float32", "decoding": "greedy", **parameters},
        "seed": "held-out/evaluate",
        "started_at": started.isoformat(timespec="seconds"),
        "samples": [asdict(sample) for sample in samples],
        "summary": {
            group: {
                key: {"exact": exact, "asked": total, "share": round(exact / total, 4)}
                for key, (exact, total) in shares(
                    sample for sample in samples if sample.group == group
                ).items()
            }
            for group in dict.fromkeys(sample.group for sample in samples)
        },
        "verdict": {
            "criterion": CRITERION,
            "threshold": THRESHOLD,
            "observed": round(lowest, 4),
            "passed": lowest >= THRESHOLD,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--repeats", type=int, default=50, help="trials per cell")
    parser.add_argument(
        "--beyond", type=int, default=7000, help="one distance more, reported apart"
    )
    given = parser.parse_args()
    started, clock = datetime.now(UTC), time.monotonic()
    mx.set_default_device(mx.cpu)
    mx.random.seed(0)
    respondent = Respondent(given.folder)
    few = max(1, given.repeats // 2)
    samples = recall(respondent, "recall", DISTANCES, given.repeats, None)
    samples += recall(respondent, "unseen values", DISTANCES, few, trials.UNSEEN)
    samples += recall(respondent, "long context", (given.beyond,), max(1, few // 2), None)
    samples += behaviour(respondent, given.repeats)
    printed(samples)
    result = document(samples, given.folder, started, {"trials_per_cell": given.repeats})
    given.result.parent.mkdir(parents=True, exist_ok=True)
    given.result.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(f"{time.monotonic() - clock:.0f} s; verdict {result['verdict']}")


if __name__ == "__main__":
    main()
