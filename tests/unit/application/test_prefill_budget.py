"""Chunk sizes on simulated machines: running agents keep talking, and prompts get on."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from semantic.application.engine.prefill_budget import (
    MeasuredPass,
    PassCost,
    PrefillBudget,
    chunk_size,
)

TARGET = 0.25


@dataclass
class Machine:
    """Prefills `rate` tokens per second, slower with the tokens before; decodes in `decode` s.

    A pass has a fixed cost of `overhead`, and one more of `shape` if its length and position are
    new. At `half_at` tokens the rate has fallen to a half.
    """

    rate: float
    decode: float
    half_at: float = float("inf")
    overhead: float = 0.002
    shape: float = 0.0
    shapes: set[tuple[int, int]] = field(default_factory=set, repr=False)

    def prefill(self, n: int, at: int) -> float:
        if not n:
            return 0.0
        new = self.shape if (n, at) not in self.shapes else 0.0
        self.shapes.add((n, at))
        return self.overhead + new + n / self.rate * (1 + at / self.half_at)

    def run(
        self, budget: PrefillBudget, prompt: int, *, decoding: int = 1, concurrent: bool = False
    ) -> list[float]:
        """Compute a prompt beside running agents; seconds of each step."""
        gaps = []
        at = 0
        while at < prompt:
            limit = left(budget, decoding=decoding, concurrent=concurrent)
            n = prompt - at if limit >= prompt - at else chunk_size(limit)
            seconds = self.prefill(n, at) + self.decode * (decoding > 0)
            budget.observe([MeasuredPass(n, seconds, limit)], seconds, decoding=decoding > 0)
            gaps.append(seconds)
            at += n
        return gaps

    def talk(self, budget: PrefillBudget, steps: int) -> None:
        for _ in range(steps):
            budget.observe([], self.decode, decoding=True)


MACHINES = [
    Machine(5000, 0.015),
    Machine(900, 0.05),
    Machine(300, 0.08),
    Machine(2000, 0.03, half_at=4000),
    Machine(700, 0.02, half_at=2000, overhead=0.02),
    Machine(35_000, 0.008, half_at=60_000, overhead=0.012),
]

GPU = Machine(35_000, 0.008, half_at=60_000, overhead=0.012, shape=0.06)
"""As measured on an H200 with a model of 8B; `shape` is what a plan of attention costs there."""


def left(
    budget: PrefillBudget, *, decoding: int = 1, concurrent: bool = False, prompts: int = 1
) -> int:
    """Tokens of the first pass of a step."""
    return budget.tokens_left(0, 0, decoding=decoding, prompts=prompts, concurrent=concurrent)


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def test_the_first_chunk_cannot_hurt() -> None:
    assert left(PrefillBudget(smallest=16)) == 64
    assert left(PrefillBudget(smallest=16, largest=20), decoding=0) == 20
    assert PrefillBudget().rate is None


def test_more_tokens_take_their_rate_and_a_share_of_a_pass() -> None:
    budget = PrefillBudget(largest=1000)
    assert budget.seconds(100) is None
    Machine(500, 0.0, overhead=0.0).run(budget, 4000, decoding=0)
    assert budget.seconds(100) == pytest.approx(0.2)
    for _ in range(8):
        budget.observe([MeasuredPass(10, 0.02 + 0.5, 1000)], 0.02 + 0.5, decoding=False)
    assert budget.seconds(100) == pytest.approx(0.2 + 0.05)


@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_the_gap_between_two_tokens_stays_near_the_target(machine: Machine) -> None:
    budget = PrefillBudget(TARGET)
    machine.talk(budget, 5)
    gaps = []
    for prompt in (6000, 500, 40, 9000, 100):
        gaps += machine.run(budget, prompt)
        machine.talk(budget, 3)
    assert percentile(gaps, 0.99) < 1.5 * TARGET


@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_the_gap_is_used_and_not_wasted(machine: Machine) -> None:
    budget = PrefillBudget(TARGET, largest=100_000)
    machine.talk(budget, 5)
    machine.run(budget, 12_000)
    gaps = machine.run(budget, 60_000)
    assert percentile(gaps, 0.5) > 0.5 * TARGET


@pytest.mark.parametrize("decoding", [0, 1, 7, 63])
def test_where_a_new_shape_costs_more_than_a_chunk_prompts_are_not_slowed_down(
    decoding: int,
) -> None:
    """The collapse: small chunks seem slow, so chunks get smaller, and none has a known shape."""
    budget = PrefillBudget(TARGET)
    GPU.shapes.clear()
    GPU.talk(budget, 10)
    for prompt in (1500, 1100, 1900, 8000, 1300):
        gaps = GPU.run(budget, prompt, decoding=decoding, concurrent=True)
        assert max(gaps) <= TARGET + GPU.shape
    gaps = GPU.run(budget, 32_000, decoding=decoding, concurrent=True)
    alone = sum(GPU.prefill(2048, at) + GPU.shape for at in range(0, 32_000, 2048))
    steps = len(gaps) * GPU.decode if decoding else 0.0
    assert sum(gaps) < 1.3 * (alone + steps)


@pytest.mark.parametrize("rate", [200.0, 1000.0, 4000.0])
def test_chunks_converge_to_what_fits_the_target(rate: float) -> None:
    machine = Machine(rate, 0.05, overhead=0.0)
    budget = PrefillBudget(TARGET, largest=10_000, smallest=1)
    machine.talk(budget, 3)
    for _ in range(3):
        machine.run(budget, int(rate * 4))
    assert budget.rate == pytest.approx(rate, rel=0.05)
    fits = rate * (TARGET - 0.05)
    assert 0.7 * fits <= left(budget) <= fits


def test_the_fixed_cost_of_a_pass_is_told_from_its_rate() -> None:
    cost = PassCost(2048)
    for n in (64, 512, 2048, 30, 40, 2000, 20, 50, 1500, 10):
        cost.observe(n, 0.012 + n / 35_000, limited=n > 1000)
    assert cost.fixed == pytest.approx(0.012, rel=0.2)
    assert cost.rate == pytest.approx(35_000, rel=0.2)


def test_a_fixed_cost_that_falls_is_forgotten() -> None:
    cost = PassCost(2048)
    for _ in range(20):
        cost.observe(1024, 0.5 + 0.1, limited=True)
        cost.observe(16, 0.5, limited=False)
    assert cost.fixed > 0.4
    for _ in range(20):
        cost.observe(16, 0.01, limited=False)
    assert cost.fixed < 0.02


def test_a_machine_that_becomes_slow_is_noticed_within_a_few_chunks() -> None:
    budget = PrefillBudget(TARGET)
    fast, slow = Machine(4000, 0.02), Machine(800, 0.02)
    fast.talk(budget, 3)
    fast.run(budget, 8000)
    gaps = slow.run(budget, 4000)
    assert max(gaps[4:]) < 1.5 * TARGET


def test_a_batch_that_becomes_slow_leaves_less_for_prompts() -> None:
    budget = PrefillBudget(TARGET)
    machine = Machine(2000, 0.02, overhead=0.0)
    machine.talk(budget, 3)
    machine.run(budget, 2000)
    before = left(budget)
    Machine(2000, 0.15).talk(budget, 8)
    assert left(budget) < before / 2


@pytest.mark.parametrize("decode", [0.2, 0.3, 1.0])
@pytest.mark.parametrize(("prompts", "decoding"), [(1, 7), (3, 5), (1, 1), (20, 1)])
def test_prompts_get_half_of_their_share_though_a_decode_step_takes_all_of_the_gap(
    decode: float, prompts: int, decoding: int
) -> None:
    machine = Machine(1000, decode, overhead=0.01)
    budget = PrefillBudget(TARGET, largest=100_000)
    machine.run(budget, 3000, decoding=0)
    machine.run(budget, 30, decoding=0)
    machine.talk(budget, 8)
    n = left(budget, decoding=decoding, prompts=prompts)
    own = n / machine.rate
    assert own / (own + machine.overhead + decode) > 0.45 * prompts / (prompts + decoding)


def test_while_nobody_decodes_chunks_may_take_longer() -> None:
    budget = PrefillBudget(TARGET, idle_gap=1.0, largest=10_000)
    Machine(1000, 0.0, overhead=0.0).run(budget, 6000, decoding=0)
    assert left(budget, decoding=0) == pytest.approx(850, abs=2)
    assert left(budget, decoding=0, concurrent=True) == pytest.approx(212, abs=2)
    assert left(budget) == pytest.approx(212, abs=2)


@pytest.mark.parametrize("machine", [Machine(5, 0.5), Machine(1e9, 0.0)], ids=["slow", "fast"])
@pytest.mark.parametrize("decoding", [1, 0])
def test_a_chunk_is_never_smaller_or_larger_than_allowed(machine: Machine, decoding: int) -> None:
    budget = PrefillBudget(TARGET, smallest=16, largest=512)
    machine.talk(budget, 5)
    for _ in range(20):
        machine.run(budget, 300, decoding=decoding)
        assert 16 <= left(budget, decoding=decoding) <= 512


def test_the_end_of_a_prompt_does_not_pass_for_slowness() -> None:
    budget = PrefillBudget(TARGET)
    machine = Machine(2000, 0.02, overhead=0.02)
    machine.talk(budget, 3)
    machine.run(budget, 4000)
    rate = budget.rate
    assert rate is not None
    for n in (1, 3, 16):
        seconds = machine.prefill(n, 0)
        budget.observe([MeasuredPass(n, seconds, 1000)], seconds + machine.decode, decoding=True)
    assert budget.rate == rate


def test_several_passes_of_a_step_have_a_fixed_cost_each() -> None:
    budget = PrefillBudget(TARGET)
    machine = Machine(5000, 0.02, overhead=0.03)
    machine.talk(budget, 3)
    machine.run(budget, 8000)
    machine.run(budget, 64)
    first = left(budget)
    second = budget.tokens_left(100, 1, decoding=1, prompts=2, concurrent=False)
    assert second == pytest.approx(first - 100 - 0.03 * 5000, rel=0.15)


def test_a_clock_that_stood_still_teaches_nothing() -> None:
    budget = PrefillBudget(TARGET)
    budget.observe([MeasuredPass(200, 0.0, 200)], 0.0, decoding=False)
    assert budget.rate is None
    budget.observe([MeasuredPass(200, 0.2, 200)], 0.2, decoding=False)
    budget.observe([MeasuredPass(200, 0.0, 200)], 0.0, decoding=False)
    assert budget.rate == pytest.approx(1000)


def test_an_idle_step_teaches_nothing() -> None:
    budget = PrefillBudget(TARGET)
    budget.observe([], 5.0, decoding=False)
    budget.observe([MeasuredPass(200, 0.1, 200)], 0.1, decoding=True)
    assert budget.rate == pytest.approx(2000)


def test_chunks_have_few_sizes_and_lose_less_than_a_third_by_it() -> None:
    sizes = {chunk_size(n) for n in range(16, 2049)}
    assert len(sizes) == 15
    assert all(2 * n / 3 - 1 <= chunk_size(n) <= n for n in range(1, 2049))


def test_what_was_left_of_a_step_shows_the_fixed_cost_and_not_the_rate() -> None:
    """Passes of 70 ms however small they are, as those of a shape that is new to a device."""
    budget = PrefillBudget(TARGET)
    cost = 0.07
    rates: list[float] = []
    for n in (64, 128, 192, 256):
        passes = [MeasuredPass(n, cost, n + 48), MeasuredPass(48, cost, n + 48)]
        budget.observe(passes, 2 * cost, decoding=False)
        assert budget.rate is not None
        rates.append(budget.rate)
    assert rates == sorted(rates)
    assert left(budget, decoding=0, concurrent=True) > 256
