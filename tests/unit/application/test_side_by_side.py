"""Prompts of models with states, computed side by side: sooner where that is cheaper, on a virtual
clock."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

import pytest

from semantic.application.engine.batch_engine import BlockPoolBatchEngine
from semantic.application.engine.prefill_budget import PrefillBudget, size_beside
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import CompletedGeneration, ModelCacheSpec, TokenEvent
from tests.support.char_tokenizer import CharTokenizer
from tests.support.fake_backend import FULL, STATE, FakeBackend
from tests.support.fake_clock import FakeClock
from tests.unit.application.world import expected, text_of

SPEC = ModelCacheSpec((FULL, STATE))
TARGET = 0.25
LONG = tuple(700 + 37 * i for i in range(8))
SHORT = tuple(30 + 3 * i for i in range(24))


class Served:
    """An engine whose passes cost 0.7 ms a token and 10 ms besides; what clients see of it."""

    def __init__(self, cost_beside: float | None, seconds_per_shape: float = 0.0) -> None:
        self.clock = FakeClock()
        self.backend = FakeBackend(
            SPEC,
            clock=self.clock,
            seconds_per_token=0.0007,
            seconds_per_pass=0.01,
            seconds_per_shape=seconds_per_shape,
            cost_beside=cost_beside,
            joint_chunk=0,
        )
        self.engine: BlockPoolBatchEngine = BlockPoolBatchEngine(
            self.backend,
            CharTokenizer(),
            BlockPool(SPEC, 400),
            SPEC,
            budget=PrefillBudget(TARGET),
            max_batch=32,
            clock=self.clock,
        )
        self.tokens_at: dict[str, list[float]] = {}

    def ask(self, sizes: Sequence[int], n: int = 4, first: int = 0) -> list[str]:
        """A request of each size, with prompts that share nothing."""
        return [
            self.engine.submit(f"agent {seed}", text_of(seed, size), max_tokens=n)
            for seed, size in enumerate(sizes, first)
        ]

    def run(self, sizes: Sequence[int], n: int = 4) -> list[float]:
        """Seconds to the first token of each, all at once; answers are those of each alone."""
        begin = self.clock()
        uids = self.ask(sizes, n)
        done = self.finish()
        for uid, (seed, size) in zip(uids, enumerate(sizes), strict=True):
            assert done[uid].tokens == expected(SPEC, text_of(seed, size), n).tokens
        return [self.tokens_at[uid][0] - begin for uid in uids]

    def finish(self) -> dict[str, CompletedGeneration]:
        done: dict[str, CompletedGeneration] = {}
        while self.engine.has_work:
            for event in self.engine.step_once():
                if isinstance(event, TokenEvent):
                    self.tokens_at.setdefault(event.uid, []).append(self.clock())
                if isinstance(event, CompletedGeneration):
                    done[event.uid] = event
            self.engine.check_integrity()
        return done


def mean_ttft(cost_beside: float | None, sizes: Sequence[int]) -> float:
    served = Served(cost_beside)
    for _ in range(3):  # it has measured something
        served.run((64, 40, 90))
    return statistics.fmean(served.run(sizes))


@pytest.mark.parametrize("sizes", [LONG, SHORT], ids=["long", "short"])
def test_first_tokens_come_sooner_where_tokens_beside_others_are_cheap(
    sizes: tuple[int, ...],
) -> None:
    """0.08 is what an H200 was measured to take for Qwen3-Next's."""
    assert mean_ttft(0.08, sizes) < 0.55 * mean_ttft(None, sizes)


@pytest.mark.parametrize("sizes", [LONG, SHORT], ids=["long", "short"])
@pytest.mark.parametrize("cost", [0.5, 0.8, 1.0])
def test_first_tokens_come_no_later_where_they_are_not(cost: float, sizes: tuple[int, ...]) -> None:
    assert mean_ttft(cost, sizes) < 1.05 * mean_ttft(None, sizes)


@pytest.mark.parametrize("cost", [0.02, 0.3, 1.0])
def test_one_that_decodes_waits_no_longer_than_beside_single_prompts(cost: float) -> None:
    served = Served(cost)
    served.run((64, 40, 90))
    (talking,) = served.ask((20,), n=60, first=90)
    for _ in range(5):
        served.engine.step_once()
    served.ask(LONG, first=100)
    served.finish()
    gaps = [b - a for a, b in itertools.pairwise(served.tokens_at[talking])]
    assert max(gaps) < 2 * TARGET
    assert statistics.quantiles(gaps, n=10)[-1] < 1.3 * TARGET


def test_shapes_recur_whatever_the_lengths() -> None:
    served = Served(0.08, seconds_per_shape=0.3)
    served.run(LONG)
    known = len(served.backend.shapes)
    served.run(tuple(size + 5 for size in LONG))
    joint = {shape for shape in served.backend.shapes if 1 < shape[1] <= len(LONG)}
    assert len(served.backend.shapes) < 1.5 * known
    assert {n for n, _ in joint} <= {size_beside(n, n) for n in range(2, 2049)}


def test_a_pass_that_fails_is_computed_one_after_the_other() -> None:
    served = Served(0.05)
    served.backend.fail_next("prefill_together")
    served.run(SHORT)
    assert served.backend.failures == 1


@pytest.mark.parametrize("rest", range(2, 300))
def test_no_chunk_beside_others_leaves_one_token_of_the_first(rest: int) -> None:
    sizes = []
    while rest:
        sizes.append(size_beside(300, rest))
        rest -= sizes[-1]
    assert min(sizes) > 1
    assert sizes == sorted(sizes, reverse=True)


def test_what_tokens_cost_beside_others_is_measured() -> None:
    budget = PrefillBudget(TARGET)
    for _ in range(20):
        budget.tokens_left(0, 0, decoding=0, prompts=1, concurrent=False)
        budget.observe(256, 1, 0.01 + 0.256, decoding=False)
        budget.observe(2, 1, 0.012, decoding=False)
    assert budget.beside(64, 1) is None
    for _ in range(20):
        budget.observe(64, 1, 0.01 + 0.064 * (1 + 0.1 * 7), decoding=False, n_beside=64 * 7)
    assert budget.beside(64, 8) == pytest.approx(0.1, abs=0.03)
    for _ in range(40):
        budget.observe(64, 1, 0.01 + 0.064 * 8, decoding=False, n_beside=64 * 7)
    assert budget.beside(64, 8) is None
    for _ in range(300):  # a cost that was too high is tried again
        budget.observe(256, 1, 0.01 + 0.256, decoding=False)
    assert budget.beside(64, 8) is not None
