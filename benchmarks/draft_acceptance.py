"""`python -m benchmarks.draft_acceptance TOKENIZER SESSIONS`: what drafts from histories are worth.

Replays recorded sessions with text through `Histories`, without a model: the recorded answers are
the answers. Tokens per step with drafts from a session's own text and from all earlier sessions,
and from a session that solved the same task; then the time of a draft and of a rebuild, and the
memory, at so many tokens of history. SESSIONS is a gzipped file with a session of messages a line,
TOKENIZER a `tokenizer.json`. Prints and writes JSON.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from tokenizers import Tokenizer

from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Verdict
from semantic.adapters.stores.histories import BYTES_PER_TOKEN, Histories
from semantic.adapters.stores.suffixes import Suffixes

QUESTION = "How many tokens of an agent's answer would a step make with drafts from histories?"
CRITERION = (
    "tokens per step at least 1.65 from own text (4 drafts), 2.2 (4) and 2.6 (16) with others'; "
    "of one task's sessions all but the first at least 3 (4); a draft within 0.1 ms, and 10 M "
    "tokens rebuilt within 60 s with 16 bytes each"
)
DRAFTS = (4, 16)
WANTED = {("own", 4): 1.65, ("others", 4): 2.2, ("others", 16): 2.6}
SAME_TASK, MOST_US, MOST_REBUILD_S = 3.0, 100.0, 60.0
HISTORY, QUERIES, CONTEXT, VOCAB = 10_000_000, 4000, 32, 50_000
ROOM = 1 << 30


class Part(NamedTuple):
    """Tokens that a session read or, if `answered`, wrote."""

    tokens: list[int]
    answered: bool


class Session(NamedTuple):
    """A recorded session."""

    task: str
    parts: list[Part]


@dataclass
class Count:
    """What some answers took."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def per_step(self) -> float:
        return round(self.tokens / max(1, self.steps), 3)


def sessions_in(path: Path, tokenizer: Tokenizer) -> Iterator[Session]:
    """The sessions of a recording."""

    def part_of(message: Mapping[str, object]) -> Part:
        encoded = tokenizer.encode(text_of(message), add_special_tokens=False)
        return Part(encoded.ids, message["role"] == "assistant")

    with gzip.open(path, "rt") as lines:
        for line in lines:
            one = json.loads(line)
            parts = [part_of(message) for message in one["messages"]]
            yield Session(one["session"].rpartition("/")[2], parts)


def text_of(message: Mapping[str, object]) -> str:
    """A message with its calls, as a template would write them."""
    text = str(message["content"] or "")
    for call in cast("list[dict[str, object]]", message.get("tool_calls", [])):
        written = {"name": call["name"], "arguments": call["arguments"]}
        text += f"\n<tool_call>{json.dumps(written)}</tool_call>"
    return text


def replayed(session: Session, histories: Histories, tenant: str, most: int) -> Count:
    """Every answer of a session in steps of one token and at most `most` drafts."""
    count = Count()
    context: list[int] = []
    for part in session.parts:
        if part.answered and part.tokens:
            histories.add(tenant, tuple(context))
            histories.wait()
            drafter = histories.drafter(tenant, context)
            at = 0
            while at < len(part.tokens):
                begun = time.perf_counter()
                drafts = drafter.propose(most).tokens
                n = 0
                left = part.tokens[at : at + len(drafts) + 1]
                while n < min(len(drafts), len(left) - 1) and drafts[n] == left[n]:
                    n += 1
                drafter.read(part.tokens[at : at + n + 1], len(drafts))
                count.seconds.append(time.perf_counter() - begun)
                at += n + 1
                count.steps += 1
                count.drafted += len(drafts)
            count.tokens += len(part.tokens)
        context += part.tokens
    histories.add(tenant, tuple(context))
    histories.wait()
    return count


def compared(sessions: Sequence[Session]) -> Iterator[dict[str, Scalar]]:
    """Tokens per step of each session, from its own text and with all earlier sessions."""
    for most in DRAFTS:
        for source in ("own", "others"):
            histories = Histories(ROOM)
            for number, session in enumerate(sessions):
                tenant = "" if source == "others" else str(number)
                count = replayed(session, histories, tenant, most)
                yield {
                    "source": source, "drafts": most, "task": session.task, "tokens": count.tokens,
                    "steps": count.steps, "drafted": count.drafted, "per_step": count.per_step,
                    "median_us": round(1e6 * statistics.median(count.seconds), 1),
                }  # fmt: skip
            histories.close()


def at_scale(n_tokens: int) -> dict[str, Scalar]:
    """The time of a draft and of sorting, and the bytes per token, with a history of that size."""
    draw = np.random.default_rng(0)
    text = (draw.zipf(1.3, n_tokens) % VOCAB).astype(np.int32)
    for at in range(0, n_tokens - 4000, 20_000):
        text[at + 2000 : at + 4000] = text[at : at + 2000]
    begun = time.perf_counter()
    tracemalloc.start()
    suffixes = Suffixes(text)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    seconds = time.perf_counter() - begun
    taken = []
    for at in draw.integers(CONTEXT, n_tokens, QUERIES).tolist():
        context = text[at - CONTEXT : at].tolist()
        if at % 2:
            context[-at % 7 - 1] = at % VOCAB
        begun = time.perf_counter()
        suffixes.longest(context)
        taken.append(time.perf_counter() - begun)
    return {
        "source": "scale", "tokens": n_tokens, "rebuild_s": round(seconds, 2),
        "bytes_per_token": round((kept + text.nbytes) / n_tokens, 2),
        "search_us": round(1e6 * statistics.median(taken), 1),
        "search_p99_us": round(1e6 * statistics.quantiles(taken, n=100)[98], 1),
    }  # fmt: skip


def summary_of(samples: Sequence[Mapping[str, Scalar]]) -> dict[str, Json]:
    """Tokens per step by source and number of drafts, and of the task with most sessions."""
    lines: list[Json] = []
    for source in ("own", "others"):
        for most in DRAFTS:
            mine = [one for one in samples if (one["source"], one.get("drafts")) == (source, most)]
            if mine:
                lines.append({"source": source, "drafts": most, **totals(mine)})
    found: dict[str, Json] = {"sessions": lines}
    for one in samples:
        if one["source"] == "scale":
            found["scale"] = cast("dict[str, Json]", dict(one))
    return found


def totals(mine: Sequence[Mapping[str, Scalar]]) -> dict[str, Json]:
    tokens, steps = (sum(cast(int, one[name]) for one in mine) for name in ("tokens", "steps"))
    task, n = Counter(str(one["task"]) for one in mine).most_common(1)[0]
    same: list[Json] = [one["per_step"] for one in mine if one["task"] == task]
    return {
        "per_step": round(tokens / max(1, steps), 3), "same_task": same, "sessions_of_task": n,
        "draft_us": statistics.median(cast(float, one["median_us"]) for one in mine),
    }  # fmt: skip


def judge(summary: Mapping[str, Json]) -> Verdict:
    """The criterion, and what misses it."""
    missed: list[str] = []
    for line in cast("list[dict[str, Json]]", summary["sessions"]):
        key = str(line["source"]), cast(int, line["drafts"])
        per_step = cast(float, line["per_step"])
        if per_step < WANTED.get(key, 0.0):
            missed.append(f"{key[0]}, {key[1]} drafts: {per_step} tokens per step")
        later = cast("list[float]", line["same_task"])[1:]
        if key == ("others", DRAFTS[0]) and later and min(later) < SAME_TASK:
            missed.append(f"same task: {min(later)} tokens per step")
        if cast(float, line["draft_us"]) > MOST_US:
            missed.append(f"{key[0]}: a draft takes {line['draft_us']} us")
    scale = cast("dict[str, float] | None", summary.get("scale"))
    if scale is not None:
        limits = (("search_us", MOST_US), ("rebuild_s", MOST_REBUILD_S))
        missed += [f"{name}: {scale[name]}" for name, most in limits if scale[name] > most]
        if scale["bytes_per_token"] > BYTES_PER_TOKEN + 0.01:
            missed.append(f"{scale['bytes_per_token']} bytes per token")
    return Verdict(CRITERION, SAME_TASK, "; ".join(missed) or "all of it", passed=not missed)


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 when the criterion is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("sessions", type=Path)
    parser.add_argument("--history", type=int, default=HISTORY)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args(given)
    n_history = cast(int, arguments.history)
    started = Run.start(
        "draft_acceptance",
        QUESTION,
        model="recorded answers",
        parameters={"history": n_history, "sessions": cast(Path, arguments.sessions).name},
        seed=0,
    )
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    sessions = list(sessions_in(arguments.sessions, tokenizer))
    samples = [*compared(sessions), at_scale(n_history)]
    summary = summary_of(samples)
    verdict = judge(summary)
    print(json.dumps(summary, indent=1))
    started.finish(samples, summary, verdict).write(arguments.output / "draft_acceptance.json")
    print(f"{'passed' if verdict.passed else 'MISSED'}: {verdict.observed}")
    return int(not verdict.passed)


if __name__ == "__main__":
    raise SystemExit(main())
