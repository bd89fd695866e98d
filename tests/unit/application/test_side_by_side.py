"""Prompts of models with states, computed side by side: sooner where that is cheaper, on a virtual
clock."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

import pytest

from semantic.application.engine.batch_engine import BlockPoolBatchEngine
from semantic.application.engine.prefill_budget import SIZES_BESIDE, MeasuredPass, PrefillBudget
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
    """An engine whose passes cost so much a token and besides; what clients see of it."""

    def __init__(
        self,
        cost_beside: float | None,
        *,
        seconds_per_token: float = 0.0007,
        seconds_per_pass: float = 0.01,
        seconds_per_shape: float = 0.0,
        pads: bool = True,
    ) -> None:
        self.clock = FakeClock()
        self.backend = FakeBackend(
            SPEC,
            clock=self.clock,
            seconds_per_token=seconds_per_token,
            seconds_per_pass=seconds_per_pass,
            seconds_per_shape=seconds_per_shape,
            cost_beside=cost_beside,
            pads_chunks=pads,
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


def mean_ttft(cost_beside: float | None, sizes: Sequence[int], *, pads: bool = True) -> float:
    served = Served(cost_beside, pads=pads)
    for _ in range(3):  # it has measured something
        served.run((64, 40, 90))
    return statistics.fmean(served.run(sizes))


@pytest.mark.parametrize("sizes", [LONG, SHORT], ids=["long", "short"])
@pytest.mark.parametrize("pads", [True, False], ids=["padded", "even"])
def test_first_tokens_come_sooner_where_tokens_beside_others_are_cheap(
    sizes: tuple[int, ...], pads: bool
) -> None:
    """0.08 is what an H200 was measured to take where states are computed token by token."""
    bound = 0.55 if pads else 0.65
    assert mean_ttft(0.08, sizes, pads=pads) < bound * mean_ttft(None, sizes)


@pytest.mark.parametrize("sizes", [LONG, SHORT], ids=["long", "short"])
@pytest.mark.parametrize("pads", [True, False], ids=["padded", "even"])
@pytest.mark.parametrize("cost", [0.5, 0.8, 1.0])
def test_first_tokens_come_no_later_where_they_are_not(
    cost: float, sizes: tuple[int, ...], pads: bool
) -> None:
    assert mean_ttft(cost, sizes, pads=pads) < 1.05 * mean_ttft(None, sizes)


def test_many_short_prompts_share_passes_where_a_pass_costs_most() -> None:
    """As on a GPU: 24 ms a pass, and 40,000 tokens a second besides, beside others as alone."""
    sizes = tuple(30 + i for i in range(32))
    alone, together = (
        Served(cost, seconds_per_token=1 / 40_000, seconds_per_pass=0.024) for cost in (None, 1.0)
    )
    for served in (alone, together):
        for _ in range(3):
            served.run((900, 40, 35, 50))
    assert statistics.fmean(together.run(sizes)) < 0.4 * statistics.fmean(alone.run(sizes))


def test_the_end_of_a_prompt_is_not_computed_beside_pieces_of_long_ones() -> None:
    served = Served(1.0, seconds_per_token=1 / 40_000, seconds_per_pass=0.024)
    for _ in range(3):
        served.run((900, 40, 35, 50))
    n_passes = served.backend.calls["prefill"], served.backend.calls["prefill_together"]
    served.run(tuple(1800 + 100 * i for i in range(6)))
    assert served.backend.calls["prefill_together"] == n_passes[1]


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
    assert len(served.backend.shapes) < 1.5 * known


def test_a_pass_that_fails_is_computed_one_after_the_other() -> None:
    served = Served(0.05)
    served.backend.fail_next("prefill_together")
    served.run(SHORT)
    assert served.backend.failures == 1


def learn(budget: PrefillBudget, n_tokens: int, seconds: float, n_beside: int = 0) -> None:
    budget.observe([MeasuredPass(n_tokens, seconds, 2048, n_beside)], seconds, decoding=False)


def test_what_tokens_cost_beside_others_is_measured() -> None:
    budget = PrefillBudget(TARGET)
    for _ in range(20):
        learn(budget, 256, 0.01 + 0.256)
        learn(budget, 2, 0.012)
    assert budget.beside([64], 2048, even=False) is None
    for _ in range(20):
        learn(budget, 64, 0.01 + 0.064 * (1 + 0.1 * 7), 64 * 7)
    found = budget.beside([64] * 8, 2048, even=False)
    assert found is not None
    assert (found.width, found.others) == (64, [1, 2, 3, 4, 5, 6, 7])
    assert found.share == pytest.approx(0.1, abs=0.03)
    for _ in range(40):
        learn(budget, 64, 0.01 + 0.064 * 8, 64 * 7)
    assert budget.beside([64] * 8, 2048, even=False) is None
    for _ in range(300):  # a cost that was too high is tried again
        learn(budget, 256, 0.01 + 0.256)
    assert budget.beside([64] * 8, 2048, even=False) is not None


@pytest.mark.parametrize("even", [True, False])
def test_a_shared_pass_fits_what_is_left(even: bool) -> None:
    budget = PrefillBudget(TARGET)
    for _ in range(20):
        learn(budget, 64, 0.01 + 0.064 * (1 + 0.2 * 31), 64 * 31)
        learn(budget, 256, 0.01 + 0.256)
    for left in (16, 100, 700, 2048):
        found = budget.beside([min(left, 40 + 9 * i) for i in range(64)], left, even=even)
        if found is not None:
            assert found.width in SIZES_BESIDE
            assert found.width * (1 + found.share * len(found.others)) <= left + found.width
            assert not even or found.width <= 40
