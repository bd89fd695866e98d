"""Chunk sizes on simulated machines: running agents keep talking."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from semantic.application.engine.prefill_budget import PrefillBudget

TARGET = 0.25
MUCH = 1_000_000


@dataclass
class Machine:
    """Prefills `rate` tokens per second, slower with the tokens before; decodes in `decode` s.

    A chunk has a fixed cost besides. At `half_at` tokens the rate has fallen to a half.
    """

    rate: float
    decode: float
    half_at: float = float("inf")
    overhead: float = 0.002

    def prefill(self, n: int, at: int) -> float:
        return self.overhead + n / self.rate * (1 + at / self.half_at) if n else 0.0

    def run(
        self,
        budget: PrefillBudget,
        prompt: int,
        *,
        decoding: bool = True,
        concurrent: bool = False,
    ) -> list[float]:
        """Compute a prompt beside running agents; seconds of each step."""
        gaps = []
        at = 0
        while at < prompt:
            left = prompt - at
            n = min(budget.next_chunk(left, decoding=decoding, concurrent=concurrent), left)
            seconds = self.prefill(n, at) + self.decode * decoding
            budget.observe(n, seconds, decoding=decoding)
            gaps.append(seconds)
            at += n
        return gaps

    def talk(self, budget: PrefillBudget, steps: int) -> None:
        for _ in range(steps):
            budget.observe(0, self.decode, decoding=True)


MACHINES = [
    Machine(5000, 0.015),
    Machine(900, 0.05),
    Machine(300, 0.08),
    Machine(2000, 0.03, half_at=4000),
    Machine(700, 0.02, half_at=2000, overhead=0.02),
]


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def test_the_first_chunk_cannot_hurt() -> None:
    assert PrefillBudget(smallest=16).next_chunk(MUCH, decoding=True, concurrent=False) == 64
    assert (
        PrefillBudget(smallest=16, largest=20).next_chunk(MUCH, decoding=False, concurrent=False)
        == 20
    )
    assert PrefillBudget().rate is None


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
    gaps = machine.run(budget, 12_000)
    assert percentile(gaps, 0.5) > 0.6 * TARGET


@pytest.mark.parametrize("rate", [200.0, 1000.0, 4000.0])
def test_chunks_converge_to_what_fits_the_target(rate: float) -> None:
    machine = Machine(rate, 0.05, overhead=0.0)
    budget = PrefillBudget(TARGET, largest=100_000)
    machine.talk(budget, 3)
    machine.run(budget, int(rate * 4))
    assert budget.rate == pytest.approx(rate)
    fits = rate * (TARGET - 0.05)
    assert 0.7 * fits <= budget.next_chunk(MUCH, decoding=True, concurrent=False) <= fits


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
    before = budget.next_chunk(MUCH, decoding=True, concurrent=False)
    Machine(2000, 0.2).talk(budget, 8)
    assert budget.next_chunk(MUCH, decoding=True, concurrent=False) < before / 2


def test_while_nobody_decodes_chunks_may_take_longer() -> None:
    budget = PrefillBudget(TARGET, idle_gap=1.0, largest=100_000)
    Machine(1000, 0.0, overhead=0.0).run(budget, 3000, decoding=False)
    assert budget.next_chunk(MUCH, decoding=False, concurrent=False) == pytest.approx(850, abs=2)
    assert budget.next_chunk(MUCH, decoding=True, concurrent=False) == pytest.approx(212, abs=2)


@pytest.mark.parametrize("machine", [Machine(5, 0.5), Machine(1e9, 0.0)], ids=["slow", "fast"])
@pytest.mark.parametrize("decoding", [True, False])
def test_a_chunk_is_never_smaller_or_larger_than_allowed(machine: Machine, decoding: bool) -> None:
    budget = PrefillBudget(TARGET, smallest=16, largest=512)
    machine.talk(budget, 5)
    for _ in range(20):
        machine.run(budget, 300, decoding=decoding)
        assert 16 <= budget.next_chunk(MUCH, decoding=decoding, concurrent=False) <= 512


def test_the_end_of_a_prompt_does_not_pass_for_slowness() -> None:
    budget = PrefillBudget(TARGET)
    machine = Machine(2000, 0.02, overhead=0.02)
    machine.talk(budget, 3)
    machine.run(budget, 4000)
    rate = budget.rate
    assert rate is not None
    for n in (1, 3, 16):
        budget.observe(n, machine.prefill(n, 0) + machine.decode, decoding=True)
    assert budget.rate == rate


def test_a_clock_that_stood_still_teaches_nothing() -> None:
    budget = PrefillBudget(TARGET)
    budget.observe(100, 0.0, decoding=False)
    assert budget.rate is None
    budget.observe(100, 0.1, decoding=False)
    budget.observe(100, 0.0, decoding=False)
    assert budget.rate == pytest.approx(1000)


def test_an_idle_step_teaches_nothing() -> None:
    budget = PrefillBudget(TARGET)
    budget.observe(0, 5.0, decoding=False)
    budget.observe(200, 0.1, decoding=True)
    assert budget.rate == pytest.approx(2000)


@pytest.mark.parametrize("machine", MACHINES, ids=str)
@pytest.mark.parametrize("decoding", [True, False])
def test_in_company_a_long_prompt_holds_nobody_up(machine: Machine, decoding: bool) -> None:
    budget = PrefillBudget(TARGET)
    machine.talk(budget, 5)
    gaps = machine.run(budget, 9000, decoding=decoding, concurrent=True)
    smallest = machine.prefill(16, 9000) + machine.decode
    longest = max(smallest, min(TARGET, 4 * machine.decode) + machine.overhead)
    assert percentile(gaps[2:-1], 0.95) < 1.2 * longest


@pytest.mark.parametrize("decoding", [True, False])
def test_in_company_a_prompt_that_fits_into_one_step_has_it(decoding: bool) -> None:
    budget = PrefillBudget(TARGET, largest=100_000)
    machine = Machine(2000, 0.01, overhead=0.0)
    machine.talk(budget, 5)
    machine.run(budget, 3000, decoding=False)
    fits = budget.next_chunk(1, decoding=decoding, concurrent=True)
    assert fits == pytest.approx(2000 * (TARGET - 0.01 * decoding) * 0.85, abs=2)
    assert budget.next_chunk(fits, decoding=decoding, concurrent=True) == fits
    few = 2000 * (0.04 - 0.01 * decoding)
    assert budget.next_chunk(fits + 1, decoding=decoding, concurrent=True) == pytest.approx(
        few, abs=2
    )


def test_before_any_decode_step_a_chunk_in_company_takes_the_target_gap() -> None:
    budget = PrefillBudget(TARGET, idle_gap=1.0, largest=100_000)
    Machine(1000, 0.0, overhead=0.0).run(budget, 3000, decoding=False)
    assert budget.next_chunk(MUCH, decoding=False, concurrent=True) == pytest.approx(212, abs=2)
