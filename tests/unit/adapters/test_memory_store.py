"""What the store in memory does beyond its contract: exact budgets, and who goes first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from semantic.adapters.stores.agent_index import ENTRY_BYTES, LINK_BYTES, TOKEN_BYTES
from semantic.adapters.stores.memory import MemoryStore
from semantic.domain.block_hash import Part
from semantic.domain.errors import InvalidRequestError
from semantic.domain.stored import Tier
from tests.support.file_memory import traced
from tests.support.store_blocks import SCOPE, block, blocks, chain, keys, manifest, saved_agents

BLOCK = 256 * 14 + 256 * TOKEN_BYTES + ENTRY_BYTES
"""What a full block counts."""


def manifest_bytes(agent_id: str, n_tokens: int) -> int:
    """Packed, but for the last block."""
    n_blocks, n_last = -(-n_tokens // 256), (n_tokens - 1) % 256 + 1
    of_tokens = 4 * n_tokens + TOKEN_BYTES * n_last
    return ENTRY_BYTES + of_tokens + LINK_BYTES * n_blocks + 4 * len(agent_id)


def there(store: MemoryStore, n_tokens: int, seed: int = 0) -> list[int]:
    """The positions, in blocks, that are kept of a chain."""
    links = chain(n_tokens, seed)
    found = store.find(keys(links))
    return [link.start // 256 for link in links if link.key(Part.FULL) in found]


def counts(store: MemoryStore) -> dict[str, int]:
    [tier] = store.stats()
    return {name: n for name, n in tier.counts.items() if n}


@pytest.mark.parametrize("max_bytes", [0, -5])
def test_a_store_without_room_is_refused(max_bytes: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"max_bytes must be at least 1, got {max_bytes}"):
        MemoryStore(max_bytes)


@pytest.mark.parametrize("secret", [b"", b"x" * 31, b"x" * 33])
def test_a_secret_of_another_length_is_refused(secret: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=f"secret must be 32 bytes, got {len(secret)}"):
        MemoryStore(1, secret=secret)


def test_a_secret_that_is_given_is_used() -> None:
    assert MemoryStore(1, secret=b"x" * 32).secret == b"x" * 32


def test_a_budget_is_used_to_the_last_byte() -> None:
    store = MemoryStore(3 * BLOCK + manifest_bytes("a", 768))
    assert [store.put(one) for one in blocks(chain(768))] == [True] * 3
    assert store.save(manifest("a", 768))
    [tier] = store.stats()
    assert (tier.tier, tier.n_blocks, tier.n_agents) == (Tier.MEMORY, 3, 1)
    assert tier.n_bytes == tier.max_bytes
    assert counts(store) == {"written": 3}


def test_one_byte_less_evicts_one_block() -> None:
    store = MemoryStore(3 * BLOCK + manifest_bytes("a", 768) - 1)
    for one in blocks(chain(768)):
        store.put(one)
    assert store.save(manifest("a", 768))
    assert there(store, 768) == [0, 1]
    assert counts(store) == {"written": 3, "evicted": 1}


def test_a_chain_longer_than_the_budget_keeps_its_head() -> None:
    store = MemoryStore(4 * BLOCK)
    assert [store.put(one) for one in blocks(chain(9 * 256))] == [True] * 4 + [False] * 5
    assert there(store, 9 * 256) == [0, 1, 2, 3]
    assert counts(store) == {"written": 4, "dropped": 5}


def test_what_was_refused_is_welcome_when_there_is_room() -> None:
    store = MemoryStore(5 * BLOCK)
    links = chain(6 * 256)
    store.put(blocks(chain(256, 1))[0])
    store.save(manifest("a", 256, 1, pinned=True))
    for one in blocks(links):
        store.put(one)
    assert there(store, 6 * 256) == [0, 1, 2]
    store.remove(SCOPE, "a")
    for one in blocks(links):
        store.put(one)
    assert there(store, 6 * 256) == [0, 1, 2, 3, 4]


def test_a_block_whose_beginning_lies_elsewhere_is_kept() -> None:
    store = MemoryStore(2 * BLOCK)
    for seed in range(3):
        assert [store.put(one) for one in blocks(chain(768, seed)[1:])] == [True, True]
        assert there(store, 768, seed) == [1, 2]


def test_a_chain_that_was_never_touched_goes_tail_first_too() -> None:
    store = MemoryStore(4 * BLOCK)
    for one in blocks(chain(4 * 256)):
        store.put(one)
    for seed, left in ((1, [0, 1, 2]), (2, [0, 1]), (3, [0]), (4, [])):
        assert store.put(blocks(chain(256, seed))[0])
        assert there(store, 4 * 256) == left


def test_of_what_was_used_together_the_first_is_kept_longest() -> None:
    store = MemoryStore(3 * BLOCK)
    together = [chain(256, seed)[0] for seed in range(3)]
    for one in blocks(together):
        store.put(one)
    store.touch(keys(together))
    for seed, left in ((3, 2), (4, 1), (5, 0)):
        assert store.put(blocks(chain(256, seed))[0])
        assert [bool(there(store, 256, kept)) for kept in range(3)] == [i < left for i in range(3)]


def test_parts_of_no_use_without_a_block_go_before_it() -> None:
    store = MemoryStore(3 * BLOCK)
    first, second = chain(512)
    store.put(block(first))
    store.put(block(first, Part.CHECKPOINT))
    store.put(block(second))
    store.touch([second.key(Part.FULL), first.key(Part.CHECKPOINT)])
    assert store.put(blocks(chain(256, 1))[0])
    assert set(store.find([*keys([first, second]), first.key(Part.CHECKPOINT)])) == {
        first.key(Part.FULL),
        first.key(Part.CHECKPOINT),
    }


def test_a_checkpoint_goes_without_what_follows_its_block() -> None:
    first, second = chain(512)
    state = block(first, Part.CHECKPOINT)
    store = MemoryStore(3 * BLOCK)
    for one in (state, block(first), block(second)):
        assert store.put(one)
    store.touch(keys([first, second]))
    assert store.put(blocks(chain(256, 1))[0])
    assert store.find([state.header.key]) == {}
    assert there(store, 512) == [0, 1]


def test_nothing_is_evicted_for_what_cannot_fit_beside_pins() -> None:
    store = MemoryStore(4 * BLOCK + manifest_bytes("a", 768))
    for one in blocks(chain(768)):
        store.put(one)
    assert store.save(manifest("a", 768, pinned=True))
    assert store.put(blocks(chain(256, 1))[0])
    [large] = blocks(chain(256, 2), Part.WINDOW)
    assert len(large.body) > 256 * 14
    assert not store.put(large)
    assert there(store, 256, 1) == [0]
    assert counts(store) == {"written": 4, "dropped": 1}
    [tier] = store.stats()
    assert tier.pinned_bytes == 3 * BLOCK + manifest_bytes("a", 768)


def test_a_block_that_two_agents_pinned_stays_until_both_let_go() -> None:
    store = MemoryStore(BLOCK + 2 * manifest_bytes("a", 256))
    store.put(blocks(chain(256))[0])
    store.save(manifest("a", 256, pinned=True))
    store.save(manifest("b", 256, pinned=True))
    other = blocks(chain(256, 1))[0]
    assert not store.put(other)
    assert store.remove(SCOPE, "a")
    assert not store.put(other)
    assert there(store, 256) == [0]
    assert store.remove(SCOPE, "b")
    assert store.put(other)


def test_a_manifest_that_does_not_fit_leaves_the_older_one() -> None:
    store = MemoryStore(manifest_bytes("a", 300))
    assert store.save(manifest("a", 300))
    assert not store.save(manifest("a", 301))
    kept = store.manifest(SCOPE, "a")
    assert kept is not None
    assert len(kept.token_ids) == 300
    assert counts(store) == {"dropped manifests": 1}


def test_manifests_nobody_used_make_room_for_blocks() -> None:
    store = MemoryStore(2 * BLOCK)
    for i in range(100):
        assert store.save(manifest(f"agent {i}", 100))
    assert 0 < len(saved_agents(store)) < 10
    assert saved_agents(store)[0].agent_id == "agent 99"
    assert [store.put(one) for one in blocks(chain(512))] == [True, True]
    assert saved_agents(store) == []
    assert counts(store)["evicted manifests"] == 100


def test_what_a_manifest_pins_and_needs_ends_with_it() -> None:
    store = MemoryStore(1 << 20)
    for seed in range(3):
        for one in blocks(chain(300, seed)):
            store.put(one)
        store.save(manifest("a", 300, seed, pinned=True))
    store.remove(SCOPE, "a")
    assert not store._agents.users
    assert not store._pinned
    [tier] = store.stats()
    assert (tier.pinned_bytes, tier.n_agents, tier.n_blocks) == (0, 0, 6)


def test_closing_lets_go_of_all() -> None:
    store = MemoryStore(1 << 20)
    for one in blocks(chain(300)):
        store.put(one)
    store.save(manifest("a", 300))
    store.close()
    [tier] = store.stats()
    assert (tier.n_blocks, tier.n_bytes, tier.n_agents) == (0, 0, 0)


def test_release_evicts_the_least_recently_used_and_no_more_than_asked_for() -> None:
    store = MemoryStore(20 * BLOCK)
    for seed in (1, 2):
        assert all(store.put(one) for one in blocks(chain(768, seed)))
    assert store.release(1)
    assert (there(store, 768, 1), there(store, 768, 2)) == ([0, 1], [0, 1, 2])
    assert store.release(4 * BLOCK)
    assert (there(store, 768, 1), there(store, 768, 2)) == ([], [0])
    assert store.release(100 * BLOCK)
    assert store.stats()[0].n_bytes == 0
    assert not store.release(1)


def test_release_leaves_what_is_pinned() -> None:
    store = MemoryStore(20 * BLOCK)
    assert all(store.put(one) for one in blocks(chain(512)))
    assert store.save(manifest("a", 512, pinned=True))
    assert not store.release(20 * BLOCK)
    assert there(store, 512) == [0, 1]


def test_a_long_manifest_costs_what_it_is_counted_for() -> None:
    """A few bytes a token: many agents are known, however long they are."""
    store, n_tokens = MemoryStore(1 << 30), 20_000
    given = [manifest(f"agent {i}", n_tokens, seed=i) for i in range(3)]
    with traced(__file__) as taken:
        for one in given:
            assert store.save(one)
        n_bytes = taken()
    [tier] = store.stats()
    assert tier.n_bytes / 2 < n_bytes < tier.n_bytes < 3 * 8 * n_tokens
    assert [store.manifest(SCOPE, one.agent_id) for one in given] == [
        replace(one, generation=1) for one in given
    ]
