"""Which batches decode padded: by their rows, by the form of the caches, by the device."""

from __future__ import annotations

import mlx.core as mx
import pytest

from semantic.adapters.mlx.batch import padded_batch
from semantic.adapters.mlx.batch.padded_batch import can_pad, even, padding_works, pads_here
from tests.support.in_pages import tiny_backend
from tests.support.tiny_models import tiny_model


@pytest.mark.parametrize(
    ("rooms", "padded"),
    [
        ([], False),
        ([256], False),
        ([256, 256], True),
        ([512, 512, 512, 512], True),
        ([512, 512, 512, 1024], False),  # 4,096 for 2,560
        ([512, 512, 1024, 1024, 1024, 1024], True),  # 6,144 for 5,120
        ([256, 256, 256, 256, 256, 256, 256, 4096], False),
    ],
)
def test_one_long_sequence_does_not_make_all_others_as_long(rooms: list[int], padded: bool) -> None:
    assert even(rooms) is padded


@pytest.mark.parametrize(
    ("name", "may"),
    [
        *dict.fromkeys(("llama", "qwen2", "moe", "quantized"), True).items(),
        *dict.fromkeys(("gemma3", "gpt_oss", "falcon_h1", "llama in pages"), False).items(),
    ],
)
def test_models_that_keep_every_token_in_caches_of_ours_may(name: str, may: bool) -> None:
    backend = tiny_backend(name)
    assert can_pad(backend.cache_spec(), backend._layers) is may


def test_nothing_is_padded_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    assert pads_here(tiny_model("llama")) is None


@pytest.mark.parametrize(("works", "pads"), [(True, even), (False, None)])
def test_on_a_gpu_models_are_that_answer_rightly_so(
    monkeypatch: pytest.MonkeyPatch, works: bool, pads: object
) -> None:
    monkeypatch.setattr(padded_batch, "on_cpu", lambda: False)
    monkeypatch.setattr(padded_batch, "padding_works", lambda _: works)
    assert pads_here(tiny_model("llama")) is pads


def test_padding_gives_the_right_answers_unless_its_mask_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama")
    assert padding_works(model)
    monkeypatch.setattr("mlx_lm.models.cache.BatchKVCache.make_mask", lambda *_, **__: None)
    assert not padding_works(model)
