"""The engine's own Python per decode step, by the number of agents: everything but the backend.

The backend is a fake whose time is taken off. The tokenizer is a real one with a vocabulary of
128,000 byte-level tokens, and events go to queues of an event loop in another thread.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer as Fast
from tokenizers import decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from semantic.adapters.mlx.text.tokenizer import HuggingFaceTokenizer, MLXTokenizer
from semantic.application.engine.batch_engine import BlockPoolBatchEngine
from semantic.application.request import Phase
from semantic.application.serving import Arrivals, EventQueue
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import ModelCacheSpec, SampledToken
from semantic.ports.generation import EngineEvent
from tests.support.fake_backend import FULL, FakeBackend

QUESTION = "How long is the engine's own Python in a decode step?"
CRITERION = "128 agents: at most 0.5 ms per step, median, text and hand-over included"
MOST_MS, AGENTS = 0.5, (1, 8, 32, 128)
VOCAB, WARM, STEPS = 128_000, 20, 200
PROMPT = (1, 2, 3, 4)


class TimedBackend(FakeBackend):
    """Draws tokens at random, and counts the time of `decode`."""

    def __init__(self, spec: ModelCacheSpec) -> None:
        super().__init__(spec, vocab_size=VOCAB)
        self.seconds = 0.0

    def decode(self) -> list[SampledToken]:
        """See `BatchBackend.decode`."""
        begun = time.perf_counter()
        tokens = super().decode()
        self.seconds += time.perf_counter() - begun
        return tokens


def run() -> Result:
    """Measure for each number of agents."""
    started = Run.start(
        "engine_step",
        QUESTION,
        model="fake backend, byte-level tokenizer of 128,000 tokens",
        parameters={"steps": STEPS, "vocabulary": VOCAB},
        seed=0,
    )
    tokenizer = byte_level_tokenizer()
    with event_loop() as loop:
        samples: list[dict[str, Scalar]] = [
            {"agents": n, **measured} for n in AGENTS for measured in measure(n, tokenizer, loop)
        ]
    rows: list[Json] = [{"agents": n, **medians(samples, n)} for n in AGENTS]
    most = sum(medians(samples, AGENTS[-1]).values())
    verdict = Verdict(CRITERION, MOST_MS, round(most, 3), passed=most <= MOST_MS)
    return started.finish(samples, {"steps": rows}, verdict)


def measure(
    agents: int, tokenizer: MLXTokenizer, loop: asyncio.AbstractEventLoop
) -> Iterator[dict[str, float]]:
    """Milliseconds of each step: of the engine, and of handing its events over."""
    spec = ModelCacheSpec((FULL,))
    backend = TimedBackend(spec)
    pool = BlockPool(spec, 16 * agents)
    engine = BlockPoolBatchEngine(backend, tokenizer, pool, spec, max_batch=agents)
    arrivals = Arrivals(loop)
    queues = {
        engine.submit(f"agent-{i}", PROMPT, max_tokens=STEPS + WARM + 2 * agents): EventQueue(
            arrivals
        )
        for i in range(agents)
    }
    while any(request.phase is not Phase.DECODE for request in engine.requests):
        engine.step_once()
    for number in range(STEPS + WARM):
        backend.seconds = 0.0
        begun = time.perf_counter()
        events = engine.step_once()
        stepped = time.perf_counter()
        hand_over(events, queues)
        ended = time.perf_counter()
        if number >= WARM:
            engine_ms = 1000 * (stepped - begun - backend.seconds)
            yield {"engine_ms": engine_ms, "hand_over_ms": 1000 * (ended - stepped)}


def hand_over(events: Sequence[EngineEvent], queues: dict[str, EventQueue]) -> None:
    """What the engine's thread does with a step's events."""
    by_request: dict[str, list[EngineEvent]] = {}
    for event in events:
        by_request.setdefault(event.uid, []).append(event)
    for uid, own in by_request.items():
        queues[uid].put(own)


def medians(samples: Sequence[dict[str, Scalar]], agents: int) -> dict[str, float]:
    """The medians of the steps with `agents`."""
    own = [one for one in samples if one["agents"] == agents]
    return {
        name: round(statistics.median(float(str(one[name])) for one in own), 4)
        for name in ("engine_ms", "hand_over_ms")
    }


def byte_level_tokenizer() -> MLXTokenizer:
    """Tokens of one to eight letters, half of them after a space."""
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    texts: dict[str, int] = {}
    while len(texts) < VOCAB:
        word = "".join(draw.choices(letters, k=draw.randint(1, 8)))
        texts.setdefault("Ġ" * draw.randint(0, 1) + word, len(texts))
    fast = Fast(BPE(vocab=texts, merges=[]))
    fast.decoder = decoders.ByteLevel()
    make = cast("Callable[..., PreTrainedTokenizerFast]", PreTrainedTokenizerFast)
    wrapper = TokenizerWrapper(make(tokenizer_object=fast, eos_token="<|end|>"))  # noqa: S106
    return MLXTokenizer(cast(HuggingFaceTokenizer, wrapper))


@contextmanager
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop that runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
