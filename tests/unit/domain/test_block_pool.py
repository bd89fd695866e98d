"""The pool's accounts: budgets, sharing, refusals that change nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from random import Random

import pytest

from semantic.domain.entities import BlockId, KVBlock
from semantic.domain.errors import IntegrityError, InvalidRequestError, PoolExhaustedError
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import BLOCK_TOKENS, LayerKind, LayerSpec, ModelCacheSpec
from tests.support.pools import available, holders

WIDE = LayerSpec(LayerKind.FULL, kv_heads=1, k_head_dim=2, v_head_dim=2, itemsize=1)
NARROW = LayerSpec(LayerKind.SLIDING_WINDOW, 1, 1, 1, itemsize=1, window=300)
SPEC = ModelCacheSpec((WIDE, NARROW))
WIDE_BYTES, NARROW_BYTES = 4 * BLOCK_TOKENS, 2 * BLOCK_TOKENS


def pool(total_blocks: int | None = 10, *, max_bytes: int | None = None) -> BlockPool:
    return BlockPool(SPEC, total_blocks, max_bytes=max_bytes)


def account(of: BlockPool, agents: Sequence[str] = ("a", "b")) -> object:
    """Everything that can be seen of a pool."""
    return (
        of.used_blocks,
        of.used_bytes,
        available(of),
        holders(of),
        [of.view(agent) for agent in agents],
    )


def stranger(number: int = 999) -> KVBlock:
    """A block that no pool ever gave."""
    return KVBlock(BlockId(number), 0)


# Budgets


@pytest.mark.parametrize(("blocks", "n_bytes"), [(None, None), (0, None), (None, 0), (-1, 5)])
def test_a_pool_without_a_budget_is_refused(blocks: int | None, n_bytes: int | None) -> None:
    with pytest.raises(InvalidRequestError, match=r"total_blocks|max_bytes"):
        BlockPool(SPEC, blocks, max_bytes=n_bytes)


def test_a_new_pool_is_empty() -> None:
    empty = pool(7)
    assert (empty.total_blocks, empty.max_bytes) == (7, None)
    assert (empty.used_blocks, empty.used_bytes, available(empty)) == (0, 0, 7)
    assert holders(empty) == ()


def test_blocks_of_each_layer_count_their_own_bytes() -> None:
    of = pool()
    of.allocate(2, 0, "a")
    of.allocate(3, 1, "a")
    view = of.view("a")
    assert view.blocks_per_layer == (2, 3)
    assert view.n_bytes == of.used_bytes == 2 * WIDE_BYTES + 3 * NARROW_BYTES
    assert available(of) == 5


def test_new_blocks_are_empty_and_know_their_layer() -> None:
    blocks = pool().allocate(2, 1, "a")
    assert [(b.layer_id, b.token_count, b.layer_data, b.start) for b in blocks] == [
        (1, 0, None, 0)
    ] * 2


def test_a_block_number_is_never_given_twice() -> None:
    of = pool(3)
    seen: list[BlockId] = []
    for _ in range(5):
        blocks = of.allocate(3, 0, "a")
        seen += [block.block_id for block in blocks]
        of.free(blocks, "a")
    assert len(set(seen)) == 15


def test_blocks_of_another_pool_are_strangers() -> None:
    ours, theirs = pool(), pool()
    blocks = theirs.allocate(1, 0, "a")
    ours.allocate(1, 0, "a")
    assert not ours.is_live(blocks)
    with pytest.raises(InvalidRequestError, match="cannot free block"):
        ours.free(blocks, "a")


def test_a_full_pool_says_what_it_has() -> None:
    of = pool(10)
    of.allocate(8, 0, "a")
    with pytest.raises(PoolExhaustedError, match=r"^Cannot allocate 3 blocks.*2 of 10"):
        of.allocate(3, 0, "b")


def test_a_byte_budget_counts_layers_by_size() -> None:
    of = pool(None, max_bytes=2 * WIDE_BYTES)
    of.allocate(3, 1, "a")
    assert available(of) == 0
    with pytest.raises(PoolExhaustedError, match=r"Cannot allocate 1 blocks \(1024 bytes\)"):
        of.allocate(1, 0, "a")
    of.allocate(1, 1, "a")
    assert of.used_bytes == of.max_bytes


def test_the_tighter_of_two_budgets_holds() -> None:
    assert available(pool(10, max_bytes=3 * WIDE_BYTES)) == 3
    assert available(pool(2, max_bytes=100 * WIDE_BYTES)) == 2


def test_a_refusal_is_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"^Cannot allocate 11 blocks"):
        pool(10).allocate(11, 0, "a")


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda of: of.allocate(-1, 0, "a"), id="negative"),
        pytest.param(lambda of: of.allocate(1, 2, "a"), id="unknown layer"),
        pytest.param(lambda of: of.allocate(1, -1, "a"), id="negative layer"),
        pytest.param(lambda of: of.allocate_layers([1], "a"), id="too few layers"),
        pytest.param(lambda of: of.allocate_layers([1, 1, 1], "a"), id="too many layers"),
        pytest.param(lambda of: of.allocate_layers([2, -1], "a"), id="one negative"),
        pytest.param(lambda of: of.allocate_layers([1, 10], "a"), id="too much"),
        pytest.param(lambda of: of.share([stranger()], "a"), id="share of a stranger"),
        pytest.param(lambda of: of.free([stranger()], "a"), id="free of a stranger"),
    ],
)
def test_a_refusal_changes_nothing(wrong: Callable[[BlockPool], object]) -> None:
    of = pool(10)
    of.allocate_layers([2, 1], "a")
    before = account(of)
    with pytest.raises((InvalidRequestError, PoolExhaustedError)):
        wrong(of)
    assert account(of) == before
    of.check_integrity()


def test_allocating_nothing_makes_nobody_a_holder() -> None:
    of = pool()
    assert of.allocate(0, 0, "a") == []
    of.share([], "b")
    assert holders(of) == ()


# Sharing and freeing


def test_a_shared_block_returns_with_its_last_holder() -> None:
    of = pool()
    blocks = of.allocate(3, 0, "a")
    of.share(blocks, "b")
    assert of.used_blocks == 3
    of.free(blocks, "a")
    assert of.used_blocks == 3
    assert of.is_live(blocks)
    of.free(blocks, "b")
    assert of.used_blocks == 0
    assert not of.is_live(blocks)


def test_an_agent_may_hold_a_block_twice() -> None:
    of = pool()
    blocks = of.allocate(1, 0, "a")
    of.share(blocks, "a")
    assert of.view("a").n_blocks == 1
    of.free(blocks, "a")
    assert of.is_live(blocks)
    of.free([*blocks], "a")
    assert not of.is_live(blocks)


def test_a_block_cannot_be_freed_more_often_than_held() -> None:
    of = pool()
    blocks = of.allocate(1, 0, "a")
    before = account(of)
    with pytest.raises(InvalidRequestError, match="agent 'a' does not hold it"):
        of.free([*blocks, *blocks], "a")
    assert account(of) == before


def test_a_block_cannot_be_freed_for_somebody_else() -> None:
    of = pool()
    blocks = of.allocate(2, 0, "a")
    with pytest.raises(InvalidRequestError, match="agent 'b' does not hold it"):
        of.free(blocks, "b")
    assert of.view("a").n_blocks == 2


def test_one_block_nobody_holds_stops_the_sharing_of_all() -> None:
    of = pool()
    blocks = of.allocate(2, 0, "a")
    with pytest.raises(InvalidRequestError, match="cannot share block 999: it has no holder"):
        of.share([*blocks, stranger()], "b")
    assert holders(of) == ("a",)


def test_only_the_sole_holder_is_exclusive() -> None:
    of = pool()
    blocks = of.allocate(2, 0, "a")
    assert of.is_exclusive(blocks, "a")
    assert not of.is_exclusive(blocks, "b")
    of.share(blocks[:1], "b")
    assert not of.is_exclusive(blocks, "a")
    assert of.is_exclusive(blocks[1:], "a")
    of.free(blocks[:1], "b")
    of.share(blocks[:1], "a")
    assert not of.is_exclusive(blocks, "a")


# Looking ahead


def test_what_would_be_evicted_counts_only_if_nobody_else_holds_it() -> None:
    of = pool(4)
    mine, shared = of.allocate(2, 0, "a"), of.allocate(2, 0, "a")
    of.share(shared, "b")
    of.mark_evictable([*mine, *shared], "a")
    assert not of.can_allocate([1, 0])
    assert of.can_allocate([2, 0], after_eviction=True)
    assert not of.can_allocate([3, 0], after_eviction=True)
    of.free(shared, "b")
    assert of.can_allocate([4, 0], after_eviction=True)
    of.unmark_evictable([*mine, *shared], "a")
    assert not of.can_allocate([1, 0], after_eviction=True)
    of.check_integrity()


def test_a_block_that_all_its_holders_would_free_counts_as_evictable() -> None:
    of = pool(2)
    both = of.allocate(2, 0, "a")
    of.share(both, "b")
    of.mark_evictable(both, "a")
    assert not of.can_allocate([1, 0], after_eviction=True)
    of.mark_evictable(both, "b")
    assert of.can_allocate([2, 0], after_eviction=True)


def test_evictable_bytes_count_too() -> None:
    of = pool(None, max_bytes=2 * WIDE_BYTES)
    wide = of.allocate(2, 0, "a")
    of.mark_evictable(wide[:1], "a")
    assert of.can_allocate([0, 2], after_eviction=True)
    assert not of.can_allocate([0, 3], after_eviction=True)


def test_evictable_blocks_that_are_freed_no_longer_count() -> None:
    of = pool(4)
    blocks = of.allocate(2, 0, "a")
    of.mark_evictable(blocks, "a")
    of.free(blocks, "a")
    of.unmark_evictable(blocks, "a")
    of.unmark_evictable([stranger()], "b")
    assert of.can_allocate([4, 0], after_eviction=True)
    assert not of.can_allocate([5, 0], after_eviction=True)
    of.check_integrity()


def test_a_holder_is_busy_unless_it_has_an_evictable_cache() -> None:
    of = pool()
    idle = of.allocate(1, 0, "a")
    busy = of.allocate(1, 0, "b")
    assert of.busy_holders() == ("a", "b")
    of.mark_evictable(idle, "a")
    assert of.busy_holders() == ("b",)
    of.unmark_evictable(idle, "a")
    of.free(busy, "b")
    assert of.busy_holders() == ("a",)
    assert holders(of) == ("a",)


def test_what_fits_alone_ignores_all_but_those_named() -> None:
    of = pool(6)
    of.allocate(4, 0, "a")
    of.allocate(2, 1, "b")
    assert of.fits_alone([3, 3])
    assert not of.fits_alone([4, 3])
    assert of.fits_alone([2, 2], beside=["b", "nobody"])
    assert not of.fits_alone([1, 2], beside=["a"])


def test_a_block_that_two_hold_counts_once_beside_both() -> None:
    of = pool(6)
    of.share(of.allocate(4, 0, "a"), "b")
    assert of.fits_alone([2, 0], beside=["a", "b"])


# Integrity


def _drop_reference(of: BlockPool) -> None:
    of._references.pop(next(iter(of._references)))


def _count_reference_twice(of: BlockPool) -> None:
    of._references[next(iter(of._references))] += 1


def _forget_holder(of: BlockPool) -> None:
    of._held["a"].popitem()


def _invent_layer(of: BlockPool) -> None:
    of._layer_of[BlockId(77)] = 0


def _miscount_bytes(of: BlockPool) -> None:
    of._used_bytes += 1


def _shrink_blocks(of: BlockPool) -> None:
    of._total_blocks = 1


def _shrink_bytes(of: BlockPool) -> None:
    of._max_bytes = 1


@pytest.mark.parametrize(
    ("corrupt", "complaint"),
    [
        (_drop_reference, "holders and references differ"),
        (_count_reference_twice, "holders and references differ"),
        (_forget_holder, "holders and references differ"),
        (_invent_layer, "layers are known for other blocks"),
        (_miscount_bytes, "used_bytes is 2561, blocks sum to 2560"),
        (_shrink_blocks, "more blocks in use than the budget"),
        (_shrink_bytes, "more bytes in use than the budget"),
    ],
)
def test_a_corrupt_account_is_noticed(corrupt: Callable[[BlockPool], None], complaint: str) -> None:
    of = pool(10, max_bytes=100 * WIDE_BYTES)
    of.allocate_layers([2, 1], "a")
    of.check_integrity()
    corrupt(of)
    with pytest.raises(IntegrityError, match=complaint):
        of.check_integrity()


def test_a_block_without_a_layer_is_an_integrity_error() -> None:
    of = pool()
    of.allocate(1, 0, "a")
    of._layer_of.clear()
    with pytest.raises(IntegrityError, match="layers are known for other blocks"):
        of.check_integrity()


# Threads


class Hammer:
    """One thread's share of the trouble: it knows what it holds."""

    def __init__(self, of: BlockPool, number: int) -> None:
        self.of = of
        self.me, self.shadow = f"agent-{number}", f"shadow-{number}"
        self.random = Random(number)
        self.mine: list[KVBlock] = []
        self.refusals = 0
        self.broken: list[Exception] = []

    def __call__(self) -> None:
        for _ in range(500):
            try:
                self.act()
                assert self.of.view(self.me).n_blocks == len(self.mine)
                assert self.of.is_exclusive(self.mine, self.me)
            except PoolExhaustedError:
                self.refusals += 1
            except (AssertionError, ValueError, KeyError, RuntimeError) as error:
                self.broken.append(error)
        self.of.free(self.mine, self.me)

    def act(self) -> None:
        match self.random.randrange(4):
            case 0:
                for blocks in self.of.allocate_layers([self.random.randrange(9), 1], self.me):
                    self.mine += blocks
            case 1:
                self.of.share(self.mine, self.shadow)
                self.of.free(self.mine, self.me)
                self.of.share(self.mine, self.me)
                self.of.free(self.mine, self.shadow)
            case 2 if self.mine:
                self.of.free([self.mine.pop()], self.me)
            case _ if len(self.mine) > 12:
                self.of.free(self.mine, self.me)
                self.mine.clear()


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads change places after every few instructions."""
    kept = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(kept)


@pytest.mark.process
@pytest.mark.usefixtures("eager_threads")
def test_eight_threads_leave_an_exact_balance() -> None:
    of = pool(16)
    hammers = [Hammer(of, number) for number in range(8)]
    threads = [threading.Thread(target=hammer) for hammer in hammers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [error for hammer in hammers for error in hammer.broken] == []
    assert sum(hammer.refusals for hammer in hammers), "never full: too mild a test"
    of.check_integrity()
    assert (of.used_blocks, of.used_bytes, holders(of)) == (0, 0, ())
    assert available(of) == 16
