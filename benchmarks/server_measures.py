"""Measurements of two servers, request by request, in turns.

Each function yields rows; rows of one measure and one round belong together. Knows no summary.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.server_client import Answer, Client, Message, RequestFailedError
from benchmarks.server_model import words
from benchmarks.server_process import ServerEndedError, ServerProcess
from experiments.harness.document import Scalar
from semantic import BlockPoolBatchEngine
from semantic.domain.value_objects import SamplingParams
from semantic.ports.generation import Tokenizer

MODEL_NAME = "default_model"
"""What mlx_lm.server calls the model that it was started with."""
OURS, THEIRS = "semantic", "mlx-lm"
_SETTLE = 0.1
"""Seconds for what a server does after an answer, as writing to its store."""
Row = dict[str, Scalar]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured. Prompts are in words of 1.4 tokens, answers in tokens."""

    rounds: int = 5
    prompt_words: int = 1400
    new_words: int = 30
    answer: int = 24
    long_words: int = 5900
    long_rounds: int = 3
    clients: tuple[int, ...] = (1, 4, 8)
    requests: int = 3
    throughput_rounds: int = 3
    agents: tuple[int, ...] = (4, 12, 32)
    agent_words: int = 300
    agent_turns: int = 3
    overhead_rounds: int = 30


QUICK = Sizes(
    rounds=2,
    prompt_words=300,
    long_words=1500,
    long_rounds=1,
    clients=(1, 4),
    requests=1,
    throughput_rounds=1,
    agents=(4, 12),
    agent_words=60,
    agent_turns=2,
    overhead_rounds=5,
)


@dataclass(frozen=True, slots=True)
class Side:
    """A server under test, as its clients see it."""

    process: ServerProcess

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def client(self) -> Client:
        return Client(self.process.port, MODEL_NAME)

    def start(self) -> float:
        """Start it and let it answer once; seconds to that answer's first text."""
        self.process.start()
        return self.client.ask(_question(words(8, "first")), 4).ttft


Sides = Sequence[Side]
Measure = Callable[[Side], Row]


def in_turns(sides: Sides, measure: str, number: int, take: Measure) -> Iterator[Row]:
    """One row a side; in odd rounds the other side is first. A side that fails says so in it.

    A server that has died is restarted for the next measure.
    """
    for side in sides if number % 2 == 0 else reversed(sides):
        row: Row = {"measure": measure, "side": side.name, "round": number}
        try:
            row |= take(side)
        except (RequestFailedError, ServerEndedError) as error:
            row["failed"] = str(error)[:300]
            if side.process.ended:
                row["failed"] = f"the server died: {side.process.last_words()}"[:300]
                side.start()
        yield row


class Conversations:
    """One conversation a round and a side: cold, the same again, the next turn, after a restart."""

    def __init__(self, sides: Sides, sizes: Sizes) -> None:
        self._sides, self._sizes = sides, sizes
        self._said: dict[tuple[str, int], list[Message]] = {}

    def measure(self) -> Iterator[Row]:
        """Time to first token in every situation."""
        for i in range(self._sizes.rounds):
            yield from in_turns(self._sides, "cold", i, partial(self._first, i))
            yield from in_turns(self._sides, "same again", i, partial(self._again, i))
            yield from in_turns(self._sides, "next turn", i, partial(self._next, i))

    def after_restart(self) -> Iterator[Row]:
        """End both servers, start them again and go on with every conversation."""
        for side in self._sides:
            side.process.stop()
        yield from in_turns(
            self._sides, "first request", 0, lambda side: {"ttft_ms": 1e3 * side.start()}
        )
        for i in range(self._sizes.rounds):
            yield from in_turns(self._sides, "after restart", i, partial(self._next, i))

    def _first(self, i: int, side: Side) -> Row:
        self._said[side.name, i] = _question(words(self._sizes.prompt_words, f"cold {i}"))
        return self._ask(side, i)

    def _again(self, i: int, side: Side) -> Row:
        return self._ask(side, i, keep=True)

    def _next(self, i: int, side: Side) -> Row:
        said = self._said[side.name, i]
        said += _question(words(self._sizes.new_words, f"next {i} {len(said)}"))
        return self._ask(side, i, keep=True)

    def _ask(self, side: Side, i: int, *, keep: bool = False) -> Row:
        said = self._said[side.name, i]
        answer = side.client.ask(said, self._sizes.answer)
        if keep:
            said.append({"role": "assistant", "content": answer.text})
        return _ttft_row(answer)


def throughput(sides: Sides, sizes: Sizes) -> Iterator[Row]:
    """Completion tokens per second, clients with prompts and answers of mixed lengths."""
    for i in range(sizes.throughput_rounds):
        for n in sizes.clients:
            yield from in_turns(
                sides,
                f"throughput, {n} client{'s' if n > 1 else ''}",
                i,
                partial(_throughput, sizes, n, i),
            )


def beside_long(sides: Sides, sizes: Sizes) -> Iterator[Row]:
    """A long prompt arrives: gaps of a stream that runs, then a short request behind it; and a
    short request with an empty queue."""
    for i in range(sizes.long_rounds):
        yield from in_turns(sides, "worst gap", i, partial(_worst_gap, sizes, i))
        yield from in_turns(sides, "short behind long", i, partial(_behind, sizes, i))
        yield from in_turns(sides, "short alone", i, partial(_short, f"short alone {i}"))


def taking_turns(sides: Sides, sizes: Sizes) -> Iterator[Row]:
    """The cached share of prompt tokens, of agents that take turns."""
    for n in sizes.agents:
        yield from in_turns(sides, f"cached share, {n} agents", 0, partial(_cached_share, sizes, n))


def overhead(
    side: Side, tokenizer: Tokenizer, engine: BlockPoolBatchEngine, sizes: Sizes
) -> Iterator[Row]:
    """The same request over HTTP and in this process: both with their prompt cached."""
    messages = _question(words(100, "overhead"))
    prompt = tokenizer.render_chat(messages)
    greedy = SamplingParams(temperature=0.0)

    def in_process() -> float:
        time.sleep(_SETTLE)
        begin = time.perf_counter()
        engine.submit("overhead", prompt, max_tokens=4, sampling=greedy)
        for _ in engine.step():
            pass
        return time.perf_counter() - begin

    def over_http() -> float:
        time.sleep(_SETTLE)
        return side.client.ask(messages, 4).seconds

    for warm in (in_process, over_http):
        warm()
    for i in range(sizes.overhead_rounds):
        if i % 2:
            http, alone = over_http(), in_process()
        else:
            alone, http = in_process(), over_http()
        yield {
            "measure": "overhead",
            "side": side.name,
            "round": i,
            "engine_ms": 1e3 * alone,
            "http_ms": 1e3 * http,
            "overhead_ms": 1e3 * (http - alone),
        }


def _throughput(sizes: Sizes, n: int, number: int, side: Side) -> Row:
    answers: list[Answer] = []
    failed: list[RequestFailedError] = []

    def talk(client: int) -> None:
        draw = random.Random(f"{number} {client}")
        for request in range(sizes.requests):
            text = words(draw.choice((20, 80, 300, 600)), f"mixed {number} {n} {client} {request}")
            try:
                answers.append(side.client.ask(_question(text), draw.choice((16, 32, 64))))
            except RequestFailedError as error:
                failed.append(error)

    begin = time.perf_counter()
    _together([threading.Thread(target=talk, args=(i,)) for i in range(n)])
    seconds = time.perf_counter() - begin
    if failed:
        raise failed[0]
    tokens = sum(answer.completion_tokens for answer in answers)
    return {"clients": n, "tokens": tokens, "tokens_per_second": tokens / seconds}


def _worst_gap(sizes: Sizes, number: int, side: Side) -> Row:
    """A stream runs; a long prompt arrives after 20 of its tokens and is answered."""
    running = threading.Event()
    over = threading.Event()
    streams: list[Answer] = []
    failed: list[RequestFailedError] = []

    def piece(n: int) -> bool:
        if n == 20:
            running.set()
        return over.is_set()

    def stream() -> None:
        text = words(20, f"stream {number}")
        try:
            while not over.is_set():
                streams.append(side.client.ask(_question(text), 1500, leave_when=piece))
        except RequestFailedError as error:
            failed.append(error)
            running.set()

    thread = threading.Thread(target=stream)
    thread.start()
    running.wait()
    try:
        sent = time.perf_counter()
        long = side.client.ask(_question(words(sizes.long_words, f"gap {number}")), 1)
    finally:
        over.set()
        thread.join()
    time.sleep(_SETTLE)
    if failed:
        raise failed[0]
    gaps = [gap for one in streams for gap in one.gaps(sent, sent + long.ttft)]
    calm = streams[0].gaps(end=sent)
    return {
        "prompt_tokens": long.prompt_tokens,
        "ttft_long_ms": 1e3 * long.ttft,
        "tokens_meanwhile": len(gaps),
        "worst_gap_ms": 1e3 * max(gaps),
        "median_gap_ms": 1e3 * statistics.median(gaps),
        "step_ms": 1e3 * statistics.median(calm),
    }


def _behind(sizes: Sizes, number: int, side: Side) -> Row:
    """A short request arrives shortly after a long one."""
    failed: list[RequestFailedError] = []

    def ask_long() -> None:
        try:
            side.client.ask(_question(words(sizes.long_words, f"behind {number}")), 1)
        except RequestFailedError as error:
            failed.append(error)

    thread = threading.Thread(target=ask_long)
    thread.start()
    time.sleep(_SETTLE)
    try:
        short = _short(f"short {number}", side)
    finally:
        thread.join()
    if failed:
        raise failed[0]
    return short


def _short(seed: str, side: Side) -> Row:
    time.sleep(_SETTLE)
    return _ttft_row(side.client.ask(_question(words(20, seed)), 16))


def _cached_share(sizes: Sizes, n: int, side: Side) -> Row:
    talks: list[list[Message]] = [[] for _ in range(n)]
    prompt = cached = 0
    for turn in range(sizes.agent_turns):
        for number, said in enumerate(talks):
            size = sizes.new_words if turn else sizes.agent_words
            said.extend(_question(words(size, f"agent {n} {number} {turn}")))
            answer = side.client.ask(said, sizes.answer)
            said.append({"role": "assistant", "content": answer.text})
            prompt += answer.prompt_tokens if turn else 0
            cached += answer.cached_tokens if turn else 0
    return {"agents": n, "prompt_tokens": prompt, "cached_share": cached / prompt}


def _ttft_row(answer: Answer) -> Row:
    return {
        "ttft_ms": 1e3 * answer.ttft,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
    }


def _question(text: str) -> list[Message]:
    return [{"role": "user", "content": f"Read this: {text}"}]


def _together(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
