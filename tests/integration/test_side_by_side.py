"""Prompts of models with states, prefilled in one pass: the logits that each has alone.

The rows are mlx-lm's models that tell padding by `lengths`, each kind of state once, and those that
do not, which compute equally many tokens of each.
"""

from __future__ import annotations

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
import mlx.core as mx
import pytest

from semantic.adapters.mlx.kv_cache.forms import choosing_pages
from semantic.adapters.mlx.kv_cache.model_spec import read_shapes, read_spec
from semantic.adapters.mlx.kv_cache.paged.attention import PortableAttention
from semantic.adapters.mlx.kv_cache.paged.layers import PagedLayers
from semantic.adapters.mlx.kv_cache.paged.side_by_side import Beside, compute_side_by_side
from semantic.adapters.mlx.kv_cache.probe import LogitsProbe
from semantic.ports.generation import at_once
from tests.zoo.folder import drawn

LENGTHS = (70, 37, 2, 15)
FIRST = (20, 20, 1, 7)
"""Tokens of each prompt, and of its first chunk."""


@pytest.mark.parametrize(
    ("row", "beside"),
    [
        ("qwen3_next", "padded"),
        ("granitemoehybrid", "padded"),
        ("falcon_h1", "padded"),
        ("nemotron_h", "even"),
    ],
)
def test_prompts_of_any_length_share_a_pass_where_the_model_knows_padding(
    row: str, beside: Beside
) -> None:
    model = drawn(row)
    model.set_dtype(mx.float32)
    spec = read_spec(model)
    assert spec is not None
    probe, shapes = LogitsProbe(model), read_shapes(model)
    form = at_once(choosing_pages(probe, spec, shapes, lambda _: PortableAttention()))
    assert form is not None
    layers = form.layers
    assert isinstance(layers, PagedLayers)
    assert layers.beside == beside
    if beside == "even":
        caches = [layers.empty(64) for _ in range(2)]
        with pytest.raises(ValueError, match="expected 3 tokens from each"):
            layers.chunk_layers([(caches[0], 3), (caches[1], 2)])
        return
    prompts = [[(7 * i * i + 11 * n) % 97 + 3 for i in range(n + 1)] for n in LENGTHS]
    caches = [layers.empty(256) for _ in prompts]
    for part in (
        [prompt[:n] for prompt, n in zip(prompts, FIRST, strict=True)],
        [prompt[n:-1] for prompt, n in zip(prompts, FIRST, strict=True)],
    ):
        chunks = list(zip(caches, part, strict=True))
        compute_side_by_side(model, layers.chunk_layers, chunks)
    for mine, prompt in zip(caches, prompts, strict=True):
        own = layers.empty(256)
        model(mx.array([prompt[:-1]]), cache=own)
        expected, found = (model(mx.array([prompt[-1:]]), cache=one) for one in (own, mine))
        assert mx.abs(found - expected).max() < 1e-4 * mx.abs(expected).max()
