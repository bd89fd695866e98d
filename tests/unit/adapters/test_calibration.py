"""Which batches decode padded: what follows from figures, who is measured, how that is done."""

from __future__ import annotations

import itertools

import mlx.core as mx
import pytest

from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.batch import padded_batch
from semantic.adapters.mlx.batch.padded_batch import (
    BATCHES,
    Calibration,
    PaddedLayer,
    StepTimes,
    calibrate,
    calibrate_here,
    choose_batching,
    padding_works,
)
from semantic.adapters.mlx.kv_cache.forms import CacheLayers
from semantic.adapters.mlx.model.provider import wrap_model
from tests.support.in_pages import tiny_backend
from tests.support.rig import cache_bytes
from tests.support.tiny_models import tiny_model

FASTER_FROM_4 = Calibration(
    (
        StepTimes(1, ragged_ms=10.0, padded_ms=11.0),
        StepTimes(2, ragged_ms=10.0, padded_ms=9.5),
        StepTimes(4, ragged_ms=10.0, padded_ms=9.0),
        StepTimes(8, ragged_ms=20.0, padded_ms=10.0),
    )
)


@pytest.mark.parametrize(
    ("ragged_ms", "padded_ms", "padded"),
    [(10.0, 20.0, False), (10.0, 9.1, False), (10.0, 9.0, True), (10.0, 1.0, True)],
)
def test_padding_is_chosen_only_when_it_is_clearly_faster(
    ragged_ms: float, padded_ms: float, padded: bool
) -> None:
    assert StepTimes(4, ragged_ms, padded_ms).padded is padded


@pytest.mark.parametrize(
    ("size", "padded"),
    [(0, False), (1, False), (2, False), (3, False), (4, True), (7, True), (8, True), (40, True)],
)
def test_a_size_between_two_is_as_the_smaller(size: int, padded: bool) -> None:
    assert FASTER_FROM_4.pads([256] * size) is padded


def test_batches_smaller_than_any_measured_are_not_padded() -> None:
    assert not Calibration((StepTimes(2, 10.0, 1.0),)).pads([256])


@pytest.mark.parametrize(
    ("rooms", "padded"),
    [
        ([512, 512, 512, 512], True),
        ([512, 512, 512, 1024], False),  # 4,096 for 2,560
        ([512, 512, 1024, 1024, 1024, 1024], True),  # 6,144 for 5,120
        ([256, 256, 256, 256, 256, 256, 256, 4096], False),
    ],
)
def test_one_long_sequence_does_not_make_all_others_as_long(rooms: list[int], padded: bool) -> None:
    assert FASTER_FROM_4.pads(rooms) is padded


# Who is measured


def measured(name: str) -> bool:
    calls: list[object] = []

    def note(model: object, layers: CacheLayers) -> Calibration:  # noqa: ARG001
        calls.append(model)
        return FASTER_FROM_4

    backend = tiny_backend(name)
    found = choose_batching(backend.model, backend.cache_spec(), backend._layers, note)
    assert (found is FASTER_FROM_4) == bool(calls)
    return bool(calls)


@pytest.mark.parametrize("name", ["llama", "qwen2", "moe", "quantized"])
def test_models_that_keep_every_token_in_caches_of_ours_are_measured(name: str) -> None:
    assert measured(name)


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "falcon_h1", "llama in pages"])
def test_windows_states_and_pages_are_not(name: str) -> None:
    assert not measured(name)


def test_nothing_is_measured_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padded_batch, "calibrate", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    backend = tiny_backend("llama")
    assert calibrate_here(backend.model, backend._layers) is None


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> MLXBackend:
    """A model of which `calibrate_here` believes that it is on a GPU."""
    backend = tiny_backend("llama")
    monkeypatch.setattr(padded_batch, "on_cpu", lambda: False)
    return backend


def test_on_a_gpu_it_is(monkeypatch: pytest.MonkeyPatch, on_a_gpu: MLXBackend) -> None:
    monkeypatch.setattr(padded_batch, "calibrate", lambda *_: FASTER_FROM_4)
    assert calibrate_here(on_a_gpu.model, on_a_gpu._layers) is FASTER_FROM_4


def test_a_model_that_answers_wrongly_when_padded_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, on_a_gpu: MLXBackend
) -> None:
    monkeypatch.setattr(padded_batch, "calibrate", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(padded_batch, "padding_works", lambda _: False)
    assert calibrate_here(on_a_gpu.model, on_a_gpu._layers) is None


def test_a_device_without_room_for_it_decodes_one_by_one(
    monkeypatch: pytest.MonkeyPatch, on_a_gpu: MLXBackend
) -> None:
    def no_room(*_: object) -> Calibration:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(padded_batch, "calibrate", no_room)
    assert calibrate_here(on_a_gpu.model, on_a_gpu._layers) is None


def test_padding_gives_the_right_answers_unless_its_mask_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama")
    assert padding_works(model)
    monkeypatch.setattr("mlx_lm.models.cache.BatchKVCache.make_mask", lambda *_, **__: None)
    assert not padding_works(model)


# How it is done


class Clock:
    """Each reading is later than the one before by one millisecond more."""

    def __init__(self) -> None:
        self._gaps = itertools.count()
        self._now = 0.0

    def __call__(self) -> float:
        self._now += next(self._gaps) / 1000
        return self._now


def test_each_size_is_measured_in_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    padded: list[int] = []
    pad = PaddedLayer.__init__

    def counted(layer: PaddedLayer, rows: list[object]) -> None:
        padded.append(len(rows))
        pad(layer, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(PaddedLayer, "__init__", counted)
    backend = wrap_model(tiny_model("llama"))
    mx.random.seed(5)
    expected = mx.random.uniform(shape=(4,)).tolist()
    mx.random.seed(5)
    found = calibrate(backend.model, backend._layers, Clock())
    assert padded == [size for size in BATCHES for _ in range(3)]  # of each layer, once
    # Ten steps of two readings each; the median is that of the last seven.
    middles = [2 * (10 * run + 6) + 1 for run in range(2 * len(BATCHES))]
    assert [(one.ragged_ms, one.padded_ms) for one in found.times] == [
        pytest.approx(pair) for pair in zip(middles[::2], middles[1::2], strict=True)
    ]
    assert tuple(one.batch for one in found.times) == BATCHES
    # No request's random numbers are others now, and no sequence is left.
    assert mx.random.uniform(shape=(4,)).tolist() == expected
    assert cache_bytes(backend) == 0
