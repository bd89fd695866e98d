"""Bodies on the real arrays: where they lie, what stays in place, what hostile bytes can do."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import random
from collections.abc import Iterator
from typing import cast

import mlx.core as mx
import pytest

from semantic.adapters.mlx.arrays import array_from, bytes_of
from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.kv_cache.contiguous.cache import SequenceCache
from semantic.adapters.mlx.kv_cache.forms import LayerCache
from semantic.domain.block_hash import Part
from semantic.domain.errors import BackendError, CacheReconstructionError
from semantic.domain.value_objects import SamplingParams, SequenceId
from tests.support.bodies import exported
from tests.support.in_pages import tiny_backend
from tests.support.lanes import more

_TOKENS = [(i * i * 7 + i * 3) % 96 for i in range(900)]
_LENGTH = 330


def backend(architecture: str) -> MLXBackend:
    return tiny_backend(architecture, f"tiny:{architecture}")


def prefilled(model: MLXBackend, length: int = _LENGTH, capacity: int = 512) -> SequenceId:
    sequence = model.open(capacity)
    model.prefill(sequence, _TOKENS[:length])
    return sequence


def addresses(caches: list[LayerCache]) -> list[int]:
    """Where the keys and values of each layer lie."""
    return [
        ctypes.addressof(ctypes.c_char.from_buffer(bytes_of(array)))
        for cache in caches
        if isinstance(cache, SequenceCache)
        for array in (cache.buffer.k, cache.buffer.v)
    ]


# Where bytes lie


@pytest.mark.parametrize(
    "dtype", [mx.float32, mx.float16, mx.bfloat16, mx.int64, mx.bool_, mx.complex64]
)
@pytest.mark.parametrize("shape", [(2, 3, 4), (1,), (), (2, 0, 3)])
def test_bytes_become_the_same_array_again(dtype: mx.Dtype, shape: tuple[int, ...]) -> None:
    array = mx.random.normal(shape).astype(dtype)
    again = array_from(bytes_of(array), dtype, shape)
    assert again.dtype == dtype
    assert again.shape == shape
    assert mx.array_equal(again, array)


def test_a_view_writes_to_the_array() -> None:
    array = mx.zeros((1, 2, 4, 3), mx.bfloat16)
    bytes_of(array)[:2] = bytes_of(mx.array([1.5], mx.bfloat16))
    assert array[0, 0, 0].tolist() == [1.5, 0, 0]


def test_an_array_that_does_not_lie_in_one_piece_is_refused() -> None:
    with pytest.raises(BackendError, match="must be contiguous"):
        bytes_of(mx.zeros((4, 6)).swapaxes(0, 1))


def test_a_body_is_keys_then_values_head_by_head() -> None:
    model = backend("llama")
    sequence = prefilled(model)
    body = exported(model, sequence, Part.FULL, 256, 300)
    expected = b"".join(
        bytes(bytes_of(mx.contiguous(array[0, head, 256:300])))
        for cache in cast(list[SequenceCache], model.sequences()[0])
        for array in (cache.buffer.k, cache.buffer.v)
        for head in range(array.shape[1])
    )
    assert body == expected
    model.close(sequence)


@pytest.mark.parametrize(
    ("architecture", "groups", "others"),
    [
        ("llama", ([["2x(8+8) float32", [0, 1, 2]]], [], None), []),
        ("llama bf16", ([["2x(8+8) bfloat16", [0, 1, 2]]], [], None), []),
        ("gemma3", ([["1x(16+16) float32", [1, 3]]], [["1x(16+16) float32", [0, 2]]], 300), []),
        ("lfm2", ([["2x(8+8) float32", [1, 3]]], [], None), [["ArraysCache", [0, 2]]]),
        ("stablelm", ([["2x(8+8) float32", [0, 1, 2, 3]]], [], None), []),
        ("falcon_h1", ([["2x(8+8) float32", [1, 3]]], [], None), [["ArraysCache", [0, 2]]]),
        (
            "windows",
            ([["1x(16+16) float32", [2]]], [["1x(16+16) float32", [0, 3]]], 300),
            [["window 40", [1]]],
        ),
    ],
)
def test_the_layout_says_what_lies_where(
    architecture: str, groups: tuple[object, object, object], others: list[object]
) -> None:
    layout = backend(architecture).layout()
    full, window, size = groups
    assert json.loads(layout.name) == {
        "full": full,
        "window": window,
        "window_tokens": size,
        "checkpoint": others,
    }
    assert layout.window_tokens == size
    assert layout.needs_checkpoint == bool(window or others)


# What stays in place


@pytest.mark.parametrize("architecture", ["llama", "llama bf16"])
def test_bodies_land_where_the_cache_keeps_them_and_decoding_moves_nothing(
    architecture: str,
) -> None:
    model = backend(architecture)
    saved = prefilled(model)
    bodies = [exported(model, saved, Part.FULL, *r) for r in ((0, 256), (256, _LENGTH))]
    expected = decode(model, saved, 6)
    model.close(saved)
    sequence = model.open(512)
    views = [target.open() for target in model.loading(sequence, Part.FULL, 0, _LENGTH)]
    (caches,) = model.sequences()
    assert [len(target) for target in views[0]] == [
        256 * n_bytes for n_bytes in model.layout().full
    ]
    for targets, body, n in zip(views, bodies, (256, _LENGTH - 256), strict=True):
        read_file_into(body, [target[: len(target) // 256 * n] for target in targets])
    del views, targets
    model.loaded(sequence, _LENGTH)
    before = addresses(caches)
    assert decode(model, sequence, 6) == expected
    assert addresses(model.sequences()[0]) == before


def test_a_view_that_is_kept_costs_a_copy_and_no_token() -> None:
    model = backend("llama")
    expected = decode(model, prefilled(model), 6)
    saved = prefilled(model)
    bodies = [exported(model, saved, Part.FULL, *r) for r in ((0, 256), (256, _LENGTH))]
    sequence = model.open(512)
    views = [target.open() for target in model.loading(sequence, Part.FULL, 0, _LENGTH)]
    for targets, body, n in zip(views, bodies, (256, _LENGTH - 256), strict=True):
        read_file_into(body, [target[: len(target) // 256 * n] for target in targets])
    model.loaded(sequence, _LENGTH)
    assert decode(model, sequence, 6) == expected
    for target in itertools.chain(*views):
        target[:] = bytes(len(target))
    assert model.length(sequence) > _LENGTH


def read_file_into(body: bytes, targets: list[memoryview]) -> None:
    """As a store reads: straight from a file into memory."""
    descriptor = os.memfd_create("body") if hasattr(os, "memfd_create") else -1
    if descriptor < 0:
        pytest.skip("no anonymous files here")
    try:
        os.write(descriptor, body)
        assert os.preadv(descriptor, targets, 0) == len(body)
    finally:
        os.close(descriptor)


def decode(model: MLXBackend, sequence: SequenceId, n: int) -> list[int]:
    model.start(sequence, 5, _TOKENS[: model.length(sequence)], SamplingParams(), 0)
    said: list[int] = []
    while len(said) < n:
        said += [one.token for one in model.decode() if one.sequence == sequence]
    return said


def test_a_sequence_that_is_being_loaded_stays_where_it_is() -> None:
    model = backend("llama")
    sequence = model.open(512)
    views = model.loading(sequence, Part.FULL, 0, 300)
    with pytest.raises(BackendError, match="still loading"):
        model.reserve(sequence, 1024)
    with pytest.raises(BackendError, match="still loading"):
        model.prefill(sequence, [1])
    with pytest.raises(BackendError, match="still loading"):
        model.loading(sequence, Part.FULL, 0, 300)
    del views
    model.loaded(sequence, 0)
    model.reserve(sequence, 1024)


def test_a_sequence_of_a_failed_step_is_neither_paused_nor_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = backend("llama")
    sequence = prefilled(model)
    decode(model, sequence, 2)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("injected")

    with monkeypatch.context() as patched:
        patched.setattr(model._batch, "step", fail)
        with pytest.raises(BackendError, match="injected"):
            model.decode()
    with pytest.raises(BackendError, match="half written"):
        model.pause(sequence)
    with pytest.raises(BackendError, match="decoding"):
        exported(model, sequence, Part.FULL, 0, 256)
    model.close(sequence)


# Hostile checkpoints

_FURTHER = ["recurrent_gemma", "falcon_h1", "windows"]
_STATEFUL = ["gemma3", "lfm2", *_FURTHER]


def load_with(model: MLXBackend, bodies: tuple[list[bytes], list[bytes]], mark: bytes) -> None:
    """Load with checkpoint `mark`, decode a little, and close."""
    sequence = model.open(512)
    full, window = bodies
    try:
        for part, start, data in ((Part.FULL, 0, full), (Part.WINDOW, 256, window)):
            views = model.loading(sequence, part, start, _LENGTH) if data else []
            for target, n_bytes in zip(views, map(len, data), strict=True):
                assert sum(map(len, target.open())) >= n_bytes
            del views
        model.loaded(sequence, _LENGTH, mark)
        decode(model, sequence, 3)
    finally:
        model.close(sequence)


def saved_parts(model: MLXBackend) -> tuple[tuple[list[bytes], list[bytes]], bytes]:
    sequence = prefilled(model)
    ranges = [(0, 256), (256, _LENGTH)]
    full = [exported(model, sequence, Part.FULL, *each) for each in ranges]
    window = [exported(model, sequence, Part.WINDOW, 256, _LENGTH)]
    mark = model.export_checkpoint(sequence)
    model.close(sequence)
    return (full, window if model.layout().window else []), mark


def hostile_tables(mark: bytes) -> Iterator[bytes]:
    """`mark` with each value of its table replaced by others, arrays left as they are."""
    size = int.from_bytes(mark[:8], "little")
    table, rest = json.loads(mark[8 : 8 + size]), mark[8 + size :]
    replacements: list[object] = [
        *(None, True, -1, 0, 1, 7, 2**31, 2**63, 2**200, 1.5, "", "KVCache", "BatchKVCache"),
        *([], {}, [1], {"float32": [1]}, {"float32": [2**62, 2**62]}, {"float32": [-1, -4]}),
        *({"object": [1]}, {"float32": "x"}, {"float32": [1.0]}, {"float32": [True]}),
    ]

    def walk(value: object) -> Iterator[tuple[dict[str, object] | list[object], object]]:
        if isinstance(value, dict | list):
            keys: list[object] = list(value) if isinstance(value, dict) else [*range(len(value))]
            for key in keys:
                yield value, key
                yield from walk(value[key])  # type: ignore[call-overload]

    for place, key in list(walk(table)):
        old = place[key]  # type: ignore[index, call-overload]
        for new in replacements:
            if new == old and type(new) is type(old):
                continue
            place[key] = new  # type: ignore[index, call-overload]
            head = json.dumps(table).encode()
            yield len(head).to_bytes(8, "little") + head + rest
        place[key] = old  # type: ignore[index, call-overload]


@pytest.mark.parametrize("architecture", ["gemma3", "lfm2", *more(*_FURTHER)])
def test_a_table_that_lies_is_refused_before_memory_is_taken(architecture: str) -> None:
    model = backend(architecture)
    bodies, mark = saved_parts(model)
    load_with(model, bodies, mark)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    n_refused = 0
    for hostile in hostile_tables(mark):
        with pytest.raises(CacheReconstructionError):
            load_with(model, bodies, hostile)
        n_refused += 1
    assert n_refused > 50
    assert mx.get_peak_memory() - before < 8 << 20


@pytest.mark.parametrize("architecture", _STATEFUL)
def test_random_damage_is_refused_or_changes_numbers_only(architecture: str) -> None:
    model = backend(architecture)
    bodies, mark = saved_parts(model)
    draw = random.Random(3)
    size = 8 + int.from_bytes(mark[:8], "little")
    for _ in range(60):
        damaged = bytearray(mark)
        for _ in range(draw.randrange(1, 4)):
            damaged[draw.randrange(min(len(mark), size + 100))] = draw.randrange(256)
        try:
            load_with(model, bodies, bytes(damaged))
        except CacheReconstructionError:
            continue
    for cut in (*range(0, 64, 7), *(draw.randrange(len(mark)) for _ in range(20))):
        with pytest.raises(CacheReconstructionError):
            load_with(model, bodies, mark[:cut])


def test_a_table_nested_too_deep_is_refused() -> None:
    model = backend("lfm2")
    bodies, _ = saved_parts(model)
    head = b"[" * 100_000
    with pytest.raises(CacheReconstructionError, match="is not JSON"):
        load_with(model, bodies, len(head).to_bytes(8, "little") + head)


def test_another_models_checkpoint_is_refused() -> None:
    model, other = backend("lfm2"), backend("recurrent_gemma")
    bodies, _ = saved_parts(model)
    _, foreign = saved_parts(other)
    with pytest.raises(CacheReconstructionError, match="layout must be"):
        load_with(model, bodies, foreign)
