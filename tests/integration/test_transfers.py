"""Bodies copied beside MLX are those that MLX gives, and pages stay still until they are copied.

The device is this machine's memory (`HostDriver`); `tests/gpu` has the copy engine itself.
"""

from __future__ import annotations

import threading

import mlx.core as mx
import pytest

from semantic.adapters.mlx.arrays import ordered_bytes_of
from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.cuda.copies import copies_rightly
from semantic.adapters.mlx.kv_cache import forms
from semantic.adapters.mlx.kv_cache.contiguous import block_memory
from semantic.adapters.mlx.kv_cache.paged.cache import PagedCache
from semantic.adapters.mlx.kv_cache.paged.layers import PagedLayers, _unshare
from semantic.adapters.mlx.kv_cache.paged.page_pool import PagePool
from semantic.adapters.mlx.transfers import HostMemory, Rows, Transfers
from semantic.adapters.stores.memory import MemoryStore
from semantic.application.cache.loading import Loader
from semantic.application.cache.prefix_lookup import PrefixLookup
from semantic.domain.block_hash import Part, Scope
from semantic.domain.errors import BackendError
from semantic.domain.stored import BlockHeader, StoredBlock
from semantic.domain.value_objects import SequenceId
from tests.support.bodies import bytes_of_body, exported, fill, put
from tests.support.host_driver import HostDriver
from tests.support.in_pages import tiny_backend
from tests.support.tiny_models import VOCAB

LENGTH = 700
RANGES = ((0, 256), (256, 512), (512, 700))
TOKENS = [(i * i * 7 + i * 3) % VOCAB for i in range(LENGTH)]


@pytest.fixture
def driver() -> HostDriver:
    return HostDriver()


def with_copies(
    architecture: str, monkeypatch: pytest.MonkeyPatch, driver: HostDriver
) -> MLXBackend:
    """A model in pages that are copied by `driver`."""
    transfers = Transfers(driver)
    monkeypatch.setattr(forms, "_PREPARED_PAGES", 0)
    monkeypatch.setattr(forms, "transfers_for", lambda _: transfers)
    return tiny_backend(f"{architecture} in pages", "tiny")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, driver: HostDriver) -> MLXBackend:
    return with_copies("llama", monkeypatch, driver)


@pytest.fixture(scope="module")
def plain() -> MLXBackend:
    """The same model without such copies."""
    return tiny_backend("llama in pages", "tiny")


def prefilled(model: MLXBackend) -> SequenceId:
    sequence = model.open(1024)
    model.prefill(sequence, TOKENS)
    return sequence


def pool_of(model: MLXBackend) -> PagePool:
    layers = model._layers
    assert isinstance(layers, PagedLayers)
    (pool,) = layers.pools
    return pool


def test_the_test_of_a_driver_passes_and_fails(driver: HostDriver) -> None:
    assert copies_rightly(driver)
    driver.broken = True
    assert not copies_rightly(driver)


def test_exported_bodies_are_those_that_mlx_gives(model: MLXBackend, plain: MLXBackend) -> None:
    ours, theirs = prefilled(model), prefilled(plain)
    for start, stop in RANGES:
        assert exported(model, ours, Part.FULL, start, stop) == exported(
            plain, theirs, Part.FULL, start, stop
        )


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_bodies_of_contiguous_caches_are_copied_as_they_were(
    architecture: str, monkeypatch: pytest.MonkeyPatch, driver: HostDriver
) -> None:
    plain = tiny_backend(architecture, "tiny")
    monkeypatch.setattr(forms, "transfers_here", lambda: Transfers(driver))
    model = tiny_backend(architecture, "tiny")
    parts = [part for part in (Part.FULL, Part.WINDOW) if plain.layout().bytes_per_token(part)]
    wanted = [(part, *RANGES[-1]) for part in parts]
    theirs = prefilled(plain)
    expected = [exported(plain, theirs, *one) for one in wanted]
    driver.gate.clear()
    ours = prefilled(model)
    bodies = [model.export_block(ours, *one) for one in wanted]
    model.prefill(ours, TOKENS[:40])  # over what a window held
    assert not driver.calls["to_host"]
    driver.gate.set()
    assert [bytes_of_body(body) for body in bodies] == expected
    assert driver.calls["to_host"] == len(wanted)


def test_without_copies_beside_mlx_only_the_tokens_of_a_body_are_moved_to_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_backend("llama", "tiny")
    sequence = prefilled(model)
    expected = exported(model, sequence, Part.FULL, *RANGES[-1])
    looked_at: list[int] = []

    def bytes_of(array: mx.array) -> memoryview:
        looked_at.append(array.nbytes)
        return ordered_bytes_of(array)

    monkeypatch.setattr(block_memory, "ordered_bytes_of", bytes_of)
    monkeypatch.setattr(block_memory, "on_cuda", lambda: True)
    assert exported(model, sequence, Part.FULL, *RANGES[-1]) == expected
    assert sum(looked_at) == len(expected)


def test_keys_and_values_of_two_widths_are_copied_both_ways(
    monkeypatch: pytest.MonkeyPatch, driver: HostDriver
) -> None:
    plain = tiny_backend("deepseek_v3 in pages", "tiny")
    model = with_copies("deepseek_v3", monkeypatch, driver)
    expected = [exported(plain, prefilled(plain), Part.FULL, *r) for r in RANGES]
    assert [exported(model, prefilled(model), Part.FULL, *r) for r in RANGES] == expected
    there = model.open(1024)
    fill(model.loading(there, Part.FULL, 0, LENGTH), expected)
    model.loaded(there, LENGTH, None)
    assert driver.calls["to_device"]
    assert [exported(model, there, Part.FULL, *r) for r in RANGES] == expected


def test_bodies_are_copied_on_other_threads(model: MLXBackend, driver: HostDriver) -> None:
    sequence = prefilled(model)
    driver.gate.clear()
    bodies = [model.export_block(sequence, Part.FULL, *r) for r in RANGES]
    assert not driver.calls["to_host"]
    assert not any(isinstance(body, bytes) for body in bodies)
    driver.gate.set()
    for body in bodies:
        assert not isinstance(body, bytes)
        assert len(body.wait()) == len(body)
    assert driver.calls["to_host"] == len(RANGES)
    assert threading.current_thread().name not in driver.copying_threads


def test_a_page_that_is_being_copied_is_not_reused(model: MLXBackend, driver: HostDriver) -> None:
    pool = pool_of(model)
    sequence = prefilled(model)
    expected = [exported(model, sequence, Part.FULL, *r) for r in RANGES]
    driver.gate.clear()
    bodies = [model.export_block(sequence, Part.FULL, *r) for r in RANGES]
    model.close(sequence)
    assert pool.n_used == len(RANGES)
    other = pool.take()
    assert other.index not in range(len(RANGES))
    driver.gate.set()
    assert [bytes_of_body(body) for body in bodies] == expected
    assert pool.n_used == 1


@pytest.mark.process
def test_a_full_pool_waits_for_copies_and_does_not_grow(
    model: MLXBackend, driver: HostDriver
) -> None:
    pool = pool_of(model)
    sequence = prefilled(model)
    n_pages = pool.n_pages
    driver.gate.clear()
    body = model.export_block(sequence, Part.FULL, 0, 256)
    model.close(sequence)
    held = [pool.take() for _ in range(n_pages - 1)]
    threading.Timer(0.05, driver.gate.set).start()
    held.append(pool.take())
    assert pool.n_pages == n_pages
    assert not isinstance(body, bytes)
    assert len(body.wait()) == len(body)
    held.append(pool.take())
    assert pool.n_pages > n_pages


@pytest.mark.process
@pytest.mark.parametrize(("n_free", "n_promised"), [(4, 0), (2, 1), (0, 0), (2, 2)])
def test_a_page_that_is_written_to_again_is_copied_first_or_waited_for(
    model: MLXBackend, driver: HostDriver, n_free: int, n_promised: int
) -> None:
    """The last block of an agent that comes back at once. A copy takes a free page, unless the
    agent needs it for its new tokens."""
    pool = pool_of(model)
    pool.grow(8)
    pages, sequence = pool.n_pages, prefilled(model)
    expected = exported(model, sequence, Part.FULL, 512, 700)
    driver.gate.clear()
    body = model.export_block(sequence, Part.FULL, 512, 700)
    cache = model.sequences()[0][0]
    assert isinstance(cache, PagedCache)
    table = cache.table
    held = [pool.take() for _ in range(pages - pool.n_used - n_free)]
    copies = n_free > n_promised
    if not copies:
        threading.Timer(0.05, driver.gate.set).start()
    before, capacity = table.refs[2].index, 256 * (len(table.refs) + n_promised)
    replaced = _unshare(table, LENGTH - 50, capacity)
    assert [(old.index, new.index) for old, new in replaced] == (
        [(before, table.refs[2].index)] if copies else []
    )
    table.reserve(capacity)
    del replaced, held
    driver.gate.set()
    assert bytes_of_body(body) == expected
    assert pool.n_pages == pages
    del table, cache
    model.close(sequence)


def test_memory_is_allocated_before_it_is_needed(driver: HostDriver) -> None:
    transfers = Transfers(driver)
    transfers.prepare(1000, 3)
    transfers._threads.shutdown()
    assert driver.calls == {"allocate": 3}
    held = [transfers.memory.take(1000) for _ in range(3)]
    assert driver.calls == {"allocate": 3}
    del held


def test_a_copy_that_fails_is_an_error_of_the_body_alone(
    model: MLXBackend, driver: HostDriver
) -> None:
    sequence = prefilled(model)
    driver.broken = True
    body = model.export_block(sequence, Part.FULL, 0, 256)
    assert not isinstance(body, bytes)
    with pytest.raises(OSError, match="injected"):
        body.wait()
    scope = Scope(bytes(32), bytes(32))
    (link,) = scope.chain(TOKENS[:256])
    header = BlockHeader(link, Part.FULL, model.layout().name)
    store = MemoryStore(1 << 30)
    store.put(StoredBlock(header, body))
    assert store.read(header) is None
    assert store.resident([header]) == {}


@pytest.mark.parametrize("good", [0, 256, 600, 700])
def test_loaded_bodies_are_in_the_pages(model: MLXBackend, plain: MLXBackend, good: int) -> None:
    theirs = prefilled(plain)
    bodies = [exported(plain, theirs, Part.FULL, *r) for r in RANGES]
    sequence = model.open(1024)
    fill(model.loading(sequence, Part.FULL, 0, LENGTH), bodies)
    model.loaded(sequence, good)
    assert model.length(sequence) == good
    for start, stop in RANGES:
        if start < good:
            cut = start, min(stop, good)
            found = exported(model, sequence, Part.FULL, *cut)
            assert found == exported(plain, theirs, Part.FULL, *cut)


def test_a_body_in_memory_goes_to_its_page_at_once(
    model: MLXBackend, plain: MLXBackend, driver: HostDriver
) -> None:
    theirs = prefilled(plain)
    bodies = [exported(plain, theirs, Part.FULL, *r) for r in RANGES]
    sequence = model.open(1024)
    put(model.loading(sequence, Part.FULL, 0, LENGTH), bodies)
    model.loaded(sequence, LENGTH)
    assert driver.calls["allocate"] == 0
    assert driver.calls["to_device"] == len(RANGES)
    assert [exported(model, sequence, Part.FULL, *r) for r in RANGES] == bodies


def test_a_target_that_is_too_short_for_its_body_is_refused(model: MLXBackend) -> None:
    sequence = model.open(256)
    (target,) = model.loading(sequence, Part.FULL, 0, 200)
    target.open()
    with pytest.raises(BackendError, match="does not hold 300 tokens"):
        target.close(300)


def test_a_sequence_can_be_closed_while_it_is_loaded(model: MLXBackend) -> None:
    pool = pool_of(model)
    sequence = model.open(1024)
    targets = model.loading(sequence, Part.FULL, 0, LENGTH)
    model.close(sequence)
    assert pool.n_used == len(targets)
    fill(targets, [b"\xff" * sum(map(len, target.open())) for target in targets])
    assert pool.n_used == 0


def test_restoring_uses_the_same_memory_again(
    model: MLXBackend, plain: MLXBackend, driver: HostDriver
) -> None:
    """Bodies of a store are restored group by group, on a thread of the loader."""
    store, layout = MemoryStore(1 << 30), model.layout()
    scope = Scope(bytes(32), bytes(32))
    sequence = prefilled(plain)
    links = list(scope.chain(TOKENS))
    for link in links:
        body = exported(plain, sequence, Part.FULL, link.start, link.stop)
        store.put(StoredBlock(BlockHeader(link, Part.FULL, layout.name), body))
    full = [link for link in links if link.is_full]
    prefix = PrefixLookup(store, layout).find(scope, full, TOKENS)
    assert prefix is not None
    store.resident = lambda headers: {}  # type: ignore[method-assign]  # noqa: ARG005  # as on disk
    loader = Loader(model, store)
    for _ in range(5):
        ours = model.open(1024)
        load = loader.begin(prefix, ours)
        loader.wait([load], 60)
        assert loader.finish(load).length == LENGTH
        model.close(ours)
    assert driver.calls["allocate"] == len(RANGES)
    assert all(name.startswith("load") for name in driver.copying_threads)
    loader.close()


def test_memory_is_retained_up_to_a_bound(driver: HostDriver) -> None:
    memory = HostMemory(driver, most_free_bytes=300)
    pieces = [memory.take(100) for _ in range(3)]
    part = pieces[0][:10]
    del pieces
    assert driver.calls == {"allocate": 3}
    again = [memory.take(100) for _ in range(2)]
    assert driver.calls == {"allocate": 3}
    del again, part
    assert driver.calls == {"allocate": 3, "free": 1}
    assert Rows(2, 3, 4).nbytes == 6


def test_memory_that_another_model_left_makes_room(driver: HostDriver) -> None:
    memory = HostMemory(driver, most_free_bytes=600)
    of_first = [memory.take(256) for _ in range(2)]
    del of_first
    for _ in range(3):
        of_second = [memory.take(100) for _ in range(4)]  # in pieces of 128
        del of_second
    assert driver.calls == {"allocate": 2 + 4, "free": 2}
    of_first = [memory.take(256) for _ in range(2)]
    del of_first
    assert driver.calls == {"allocate": 8, "free": 6}


@pytest.mark.parametrize("n_bytes", [1, 5, 4096, 4 << 20, (4 << 20) + 1, 33 << 20])
def test_pieces_have_the_size_that_is_asked_for_and_fit_again(
    driver: HostDriver, n_bytes: int
) -> None:
    memory = HostMemory(driver)
    for _ in range(2):
        assert len(memory.take(n_bytes)) == n_bytes
    assert driver.calls["allocate"] == 1


def test_without_such_memory_any_other_is_used(
    driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> int:
        raise MemoryError

    monkeypatch.setattr(driver, "allocate", fail)
    memory = HostMemory(driver)
    assert len(memory.take(100)) == 100
