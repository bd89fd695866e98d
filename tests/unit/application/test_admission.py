"""How much may wait, and when to come again."""

from __future__ import annotations

import pytest

from semantic.application.engine.admission import Admission, QueueLimits, limit_bytes
from semantic.domain.errors import InvalidRequestError, OverloadedError, TenantLimitError
from semantic.domain.prefix import digests_of
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import ModelCacheSpec
from tests.support.fake_backend import FULL, window
from tests.support.fake_clock import FakeClock

SPEC = ModelCacheSpec((FULL, window(256)))
BLOCK = SPEC.bytes_for(1)


def admission(
    clock: FakeClock, *, most: int = 3, most_bytes: int | None = None, columns: int = 10
) -> Admission:
    pool = BlockPool(SPEC, max_bytes=columns * BLOCK)
    return Admission(QueueLimits(most, most_bytes), pool, clock)


def refusal(of: Admission, n_tokens: int = 1) -> OverloadedError:
    with pytest.raises(OverloadedError) as raised:
        of.enter(object(), n_tokens)
    return raised.value


@pytest.mark.parametrize("limits", [(0, None), (1, 0)])
def test_a_queue_has_room_for_something(limits: tuple[int, int | None]) -> None:
    with pytest.raises(InvalidRequestError, match="must be at least 1, got 0"):
        QueueLimits(*limits)


def test_a_pool_of_bytes_and_a_pool_of_blocks_have_as_many_bytes_as_they_can_give() -> None:
    assert limit_bytes(BlockPool(SPEC, max_bytes=7)) == 7
    assert limit_bytes(BlockPool(SPEC, 20)) == 10 * BLOCK
    assert limit_bytes(BlockPool(SPEC, 20, max_bytes=5)) == 5


def test_only_so_many_may_wait() -> None:
    of = admission(FakeClock())
    for name in "abc":
        of.enter(name, 1)
    assert "the queue is full: it holds at most 3 requests" in str(refusal(of))
    assert (of.waiting, of.n_bytes) == (3, 3 * BLOCK)
    of.leave("b")
    of.enter("d", 1)
    assert of.waiting == 3


def test_only_so_many_bytes_may_be_waited_for() -> None:
    of = admission(FakeClock(), most=100, most_bytes=SPEC.bytes_for(600))
    of.enter("a", 500)
    refusal(of, 500)
    of.enter("b", 1 if SPEC.bytes_for(500) + BLOCK <= SPEC.bytes_for(600) else 0)
    assert of.n_bytes <= SPEC.bytes_for(600)


def test_without_a_limit_it_is_four_pools() -> None:
    of = admission(FakeClock(), most=1000, columns=5)
    for name in range(4 * 5):
        of.enter(name, 1)
    refusal(of)


def test_whatever_comes_alone_is_let_in() -> None:
    """The engine says then what could never fit; coming again would not help."""
    of = admission(FakeClock(), most_bytes=1)
    of.enter("a", 100_000)
    refusal(of)


def test_leaving_twice_is_leaving_once() -> None:
    of = admission(FakeClock())
    of.enter("a", 300)
    of.leave("a")
    of.leave("a")
    of.leave("b")
    assert (of.waiting, of.n_bytes) == (0, 0)


def test_when_to_come_again_follows_the_rate_of_those_who_left() -> None:
    clock = FakeClock()
    of = admission(clock, most=8, most_bytes=1000 * BLOCK)
    for name in range(8):
        of.enter(name, 1)
    assert refusal(of).retry_after == 10, "nothing is known yet"
    for name in range(3):
        clock.advance(7)
        of.leave(name)
        of.enter(f"next {name}", 1)
    assert refusal(of).retry_after == 7
    clock.advance(21)
    assert refusal(of).retry_after == 14, "none left since: it goes slower"


def test_who_wants_much_comes_later() -> None:
    clock = FakeClock()
    of = admission(clock, most=100, most_bytes=20 * BLOCK)
    for name in range(20):
        of.enter(name, 1)
    clock.advance(2)
    of.leave(0)
    clock.advance(2)
    of.leave(1)
    small, large = refusal(of, 256 * 20), refusal(of, 256 * 30)
    assert small.retry_after < large.retry_after <= 60


@pytest.mark.parametrize(("seconds", "told"), [(0.001, 1), (500.0, 60)])
def test_it_is_never_at_once_and_never_too_late(seconds: float, told: int) -> None:
    clock = FakeClock()
    of = admission(clock, most=2)
    of.enter("a", 1)
    of.enter("b", 1)
    clock.advance(seconds)
    of.leave("a")
    of.enter("c", 1)
    assert refusal(of).retry_after == told


def test_an_idle_time_is_not_a_slow_time() -> None:
    clock = FakeClock()
    of = admission(clock, most=2)
    of.enter("a", 1)
    of.leave("a")
    clock.advance(3600)
    for name in "bc":
        of.enter(name, 1)
    clock.advance(3)
    of.leave("b")
    of.enter("d", 1)
    assert refusal(of).retry_after == 3


def shared(most: int, most_bytes: int) -> Admission:
    limits = QueueLimits(most, most_bytes, shared=True)
    return Admission(limits, BlockPool(SPEC, max_bytes=10 * BLOCK), FakeClock())


def entered(of: Admission, tenant: str) -> int:
    """How many submissions of a tenant the queue takes."""
    for n in range(100):
        try:
            of.enter((tenant, n), 1, tenant)
        except TenantLimitError:
            return n
    raise AssertionError("no limit")


@pytest.mark.parametrize(("most", "most_bytes"), [(12, 1000 * BLOCK), (1000, 12 * BLOCK)])
def test_each_tenant_leaves_as_much_room_as_it_has(most: int, most_bytes: int) -> None:
    of = shared(most, most_bytes)
    assert [entered(of, tenant) for tenant in "abc"] == [6, 3, 1]
    of.leave(("a", 0))
    of.enter("again", 1, "c")


def test_the_room_of_a_tenant_names_only_its_own() -> None:
    of = shared(12, 1000 * BLOCK)
    entered(of, "a")
    entered(of, "b")
    with pytest.raises(TenantLimitError, match=r"3 of your requests \(.*\) are waiting") as raised:
        of.enter("one more", 1, "b")
    assert raised.value.retry_after == 10


def test_alone_a_tenant_may_fill_the_queue() -> None:
    of = admission(FakeClock())
    for name in "abc":
        of.enter(name, 1, "a")
    refusal(of)


def test_what_prompts_begin_with_counts_once() -> None:
    """16 forks of a long agent fit into the queue."""
    of = admission(FakeClock(), most=100, columns=10)
    parent = list(range(2560))
    for i in range(16):
        of.enter(f"fork {i}", 2570, "", digests_of([*parent, i]))
    assert of.n_bytes == SPEC.bytes_for(2570) + 15 * SPEC.bytes_for(10)
    of.leave("fork 0")
    before = of.n_bytes
    of.enter("other beginning", 2570, "", digests_of([7, *parent]))
    of.enter("other tenant", 2570, "b", digests_of([*parent, 1]))
    assert of.n_bytes == before + 2 * SPEC.bytes_for(2570)
    for i in range(16):
        of.leave(f"fork {i}")
    of.leave("other beginning")
    of.leave("other tenant")
    assert of.n_bytes == 0
