"""The copy engine itself: what it moves arrives, in whole pages and in parts of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.models import llama

from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.cuda.copies import CudaDriver, copies_rightly, transfers_here
from semantic.adapters.mlx.kv_cache import forms
from semantic.adapters.mlx.model.provider import wrap_model
from semantic.domain.block_hash import Part
from tests.gpu.test_kernels import small_latent
from tests.support.bodies import exported, fill
from tests.support.tiny_models import VOCAB, randomize

ON_CUDA = mx.default_device() != mx.Device(mx.cpu) and mx.cuda.is_available()
LENGTH = 700
RANGES = ((0, 256), (256, 512), (512, 700))

pytestmark = pytest.mark.skipif(not ON_CUDA, reason="needs CUDA")


def model() -> Module:
    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=256,
        num_hidden_layers=3,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
    )
    made = cast(Module, llama.Model(arguments))
    randomize(made)
    return made


def saved(backend: MLXBackend) -> list[bytes]:
    sequence = backend.open(1024)
    backend.prefill(sequence, [i % VOCAB for i in range(LENGTH)])
    bodies = [exported(backend, sequence, Part.FULL, *r) for r in RANGES]
    backend.close(sequence)
    return bodies


def test_the_driver_passes_its_test() -> None:
    assert copies_rightly(CudaDriver())
    assert transfers_here() is not None


@pytest.mark.parametrize("build", [model, small_latent])
def test_bodies_are_those_that_mlx_gives(build: object, monkeypatch: pytest.MonkeyPatch) -> None:
    made = cast(Callable[[], Module], build)
    backend = wrap_model(made(), "tiny")
    assert backend.in_pages
    bodies = saved(backend)
    sequence = backend.open(1024)
    fill(backend.loading(sequence, Part.FULL, 0, LENGTH), bodies)
    backend.loaded(sequence, LENGTH)
    assert [exported(backend, sequence, Part.FULL, *r) for r in RANGES] == bodies
    monkeypatch.setattr(forms, "transfers_for", lambda _: None)
    assert saved(wrap_model(made(), "tiny")) == bodies
