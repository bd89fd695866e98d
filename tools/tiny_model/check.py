"""Checks a trained semantic-tiny in torch: many held-out questions in little time.

An answer is exact if each of its tokens is the most likely one, which is greedy decoding. Knows
nothing of training; the evaluation through mlx-lm is the one that counts.
Run: python -m tools.tiny_model.check
"""

import argparse
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import torch

from tools.tiny_model import tokenizer as bpe
from tools.tiny_model import trials
from tools.tiny_model.dialogues import render
from tools.tiny_model.facts import KINDS
from tools.tiny_model.llama import Llama, Shape, load
from tools.tiny_model.trials import Trial

FAR = 7000
REPEATS = 400
BATCH_TOKENS = 131_072
MISSES_SHOWN = 40
GROUPS = {"listed and invented values": None, "unseen values": trials.UNSEEN}

tokenizer = cache(bpe.loaded)
Questions = list["Future[list[Case]]"]


@dataclass(frozen=True, slots=True)
class Case:
    """One whole conversation, of which the last tokens are the answer in question."""

    group: str
    topic: str
    distance: int | None
    tokens: list[int]
    answer: int


def count(text: str) -> int:
    return len(tokenizer().encode(text).ids)


def cases(group: str, distance: int | None, trial: Trial) -> list[Case]:
    shared = tokenizer().encode(render(list(trial.messages))).ids
    found = []
    for question in trial.questions:
        asked = tokenizer().encode(f"<|user|>{question.text}<|end|><|assistant|>").ids
        answer = tokenizer().encode(f"{question.answer}<|end|>").ids
        tokens = shared + asked + answer
        found.append(Case(group, question.topic, distance, tokens, len(answer)))
    return found


def recall_cases(group: str, distance: int, indices: Iterable[int]) -> list[Case]:
    found: list[Case] = []
    for index in indices:
        seed = f"check/{group}/{distance}/{index}"
        trial = trials.recall_trial(seed, distance, count, GROUPS[group])
        found += cases(group, distance, trial)
    return found


def behaviour_cases(topic: str, indices: Iterable[int]) -> list[Case]:
    drawn = (trials.behaviour_trial(topic, f"check/{index}") for index in indices)
    return [case for trial in drawn for case in cases("behaviour", None, trial)]


def order_questions(pool: ProcessPoolExecutor, repeats: int) -> Questions:
    """Starts the making of all questions; fewer where the table that counts is not concerned."""
    few = max(1, repeats // 4)
    ordered: Questions = []
    for group, values in GROUPS.items():
        for distance in (*trials.DISTANCES, FAR):
            number = few if values or distance == FAR else repeats
            for start in range(0, number, 25):
                indices = range(start, min(start + 25, number))
                ordered.append(pool.submit(recall_cases, group, distance, indices))
    for topic in trials.BEHAVIOURS:
        ordered.append(pool.submit(behaviour_cases, topic, range(few)))
    return ordered


def batches(chosen: list[Case]) -> Iterator[list[Case]]:
    """Cases of like length together, so that little is spent on padding."""
    batch: list[Case] = []
    for case in sorted(chosen, key=lambda case: len(case.tokens), reverse=True):
        if batch and len(batch[0].tokens) * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(case)
    yield batch


@torch.no_grad()
def wrong(model: Llama, chosen: list[Case], device: str) -> list[tuple[Case, list[int]]]:
    """The cases not answered exactly, with the likeliest token at each place of the answer."""
    half = torch.float16 if device == "cuda" else torch.bfloat16
    missed = []
    for batch in batches(chosen):
        width = len(batch[0].tokens)
        rows = [case.tokens + [0] * (width - len(case.tokens)) for case in batch]
        with torch.autocast(device, half):
            likeliest = model(torch.tensor(rows, device=device)).argmax(-1).cpu()
        for case, row in zip(batch, likeliest, strict=True):
            end = len(case.tokens) - 1
            guessed = row[end - case.answer : end].tolist()
            if guessed != case.tokens[-case.answer :]:
                missed.append((case, guessed))
    return missed


def report(model: Llama, questions: Questions, device: str) -> None:
    """The misses, then the tables, the one that counts last."""
    chosen = [case for future in questions for case in future.result()]
    missed = wrong(model, chosen, device)
    for case, guessed in missed[:MISSES_SHOWN]:
        expected = tokenizer().decode(case.tokens[-case.answer :])
        print(f"{case.topic} {case.distance}: {expected!r}, not {tokenizer().decode(guessed)!r}")
    lost = {id(case) for case, _ in missed}
    others = [case for case in chosen if case.group == "behaviour"]
    for topic in trials.BEHAVIOURS:
        print(share(topic, [case for case in others if case.topic == topic], lost), end="  ")
    print()
    for group in reversed(GROUPS):
        for distance in (*trials.DISTANCES, FAR):
            cell = [c for c in chosen if c.group == group and c.distance == distance]
            kinds = [share(k.key, [c for c in cell if c.topic == k.key], lost) for k in KINDS]
            print(f"{group} at {distance}: {'  '.join(kinds)}")


def share(name: str, cell: list[Case], lost: set[int]) -> str:
    return f"{name} {sum(id(case) not in lost for case in cell)}/{len(cell)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=bpe.FOLDER)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    model = Llama(Shape()).to(given.device)
    load(model, given.folder)
    with ProcessPoolExecutor(given.workers, mp_context=get_context("spawn")) as pool:
        report(model, order_questions(pool, given.repeats), given.device)


if __name__ == "__main__":
    main()
