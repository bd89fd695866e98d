"""Cost of continuing known tokens, by length of the history, beside rendering the history."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator

from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from semantic import load
from semantic.adapters.mlx.text.chat_format import MLXChatFormat
from semantic.application.chat.replay import Replay
from semantic.application.chat.turn_cache import TurnCache
from semantic.domain.chat import Chat, Message
from semantic.ports.generation import Tokenizer

QUESTION = "What does a request pay for going on in the tokens of a long history?"
CRITERION = "replay takes less than 5 ms per 10,000 tokens of history (median)"
MOST_MS = 5.0
LENGTHS = (10_000, 30_000, 100_000)
TURN_WORDS = 250
"""Words of a question; with its answer a turn has about 500 tokens."""
ROUNDS = 15
TENANT = ""
Row = dict[str, Scalar]


def run() -> Result:
    """Histories of three lengths: incremental and full rendering in turns."""
    started = Run.start(
        "replay",
        QUESTION,
        model="semantic-tiny (its tokenizer and template)",
        parameters={"lengths": ", ".join(map(str, LENGTHS)), "rounds": ROUNDS},
        seed=0,
    )
    rows = [row for length in LENGTHS for row in measured(length)]
    lines = [summary_of(length, rows) for length in LENGTHS]
    most = max(float(str(line["ms_per_10k"])) for line in lines)
    verdict = Verdict(CRITERION, MOST_MS, most, passed=most < MOST_MS)
    return started.finish(rows, {"histories": list[Json](lines)}, verdict)


def measured(length: int) -> Iterator[Row]:
    """Both ways for a history of about `length` tokens."""
    _, tokenizer = load()
    chat_format = MLXChatFormat(tokenizer)
    replay = Replay(chat_format, TurnCache(1 << 30), b"", tokenizer.eos_token_ids)
    chat, n_tokens = conversation(replay, tokenizer, length)
    for number in range(ROUNDS):
        for way in ("replayed", "rendered") if number % 2 else ("rendered", "replayed"):
            begin = time.perf_counter()
            if way == "replayed":
                replay.render(chat, TENANT)
            else:
                chat_format.render(chat)
            ms = 1e3 * (time.perf_counter() - begin)
            yield {"history": length, "tokens": n_tokens, "way": way, "ms": ms}


def conversation(replay: Replay, tokenizer: Tokenizer, length: int) -> tuple[Chat, int]:
    """A conversation whose last question is new, and the number of tokens before it."""
    draw = random.Random(0)
    messages: list[Message] = []
    n_tokens = 0
    while n_tokens < length:
        messages.append(Message("user", words(draw)))
        replayed = replay.render(Chat(tuple(messages)), TENANT)
        prompt = replayed.rendered.tokens
        answer = Message("assistant", words(draw))
        generated = tokenizer.encode(answer.content, add_special_tokens=False)
        replay.record(replayed, prompt, answer, generated)
        messages.append(answer)
        n_tokens = len(prompt) + len(generated)
    return Chat((*messages, Message("user", "And now?"))), n_tokens


def words(draw: random.Random) -> str:
    """A user's text for a turn."""
    return " ".join(
        "".join(draw.choices("abcdefghij", k=draw.randint(2, 7))) for _ in range(TURN_WORDS // 3)
    )


def summary_of(length: int, rows: list[Row]) -> dict[str, Json]:
    """A line of the table."""
    of = {
        way: [float(str(r["ms"])) for r in rows if r["history"] == length and r["way"] == way]
        for way in ("replayed", "rendered")
    }
    n_tokens = next(int(str(r["tokens"])) for r in rows if r["history"] == length)
    replayed = statistics.median(of["replayed"])
    return {
        "tokens": n_tokens,
        "replayed_ms": round(replayed, 2),
        "ms_per_10k": round(1e4 * replayed / n_tokens, 2),
        "rendered_ms": round(statistics.median(of["rendered"]), 1),
    }
