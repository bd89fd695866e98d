"""Compares a model's extracted spec with the expected one. Knows no MLX."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from experiments.exp_001_model_specs.configurations import Expected
from experiments.harness.document import Scalar
from semantic.domain.value_objects import BLOCK_TOKENS, LayerKind, LayerSpec, ModelCacheSpec

EVERY_SIXTH_IS_FULL = 6
"""Gemma 3's pattern: five window layers, then a full one."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What `reading.py` prints: a model's layers, and what it took to read them."""

    layers: tuple[LayerSpec, ...]
    seconds: float
    weight_bytes: int
    mlx_peak_bytes: int
    rss_before_bytes: int
    rss_peak_bytes: int

    @classmethod
    def parse(cls, text: str) -> Reading:
        """The reading in a line of JSON."""
        fields = json.loads(text)
        layers = (
            LayerSpec(**{**layer, "kind": LayerKind(layer["kind"])})
            for layer in fields.pop("layers")
        )
        return cls(tuple(layers), **fields)


class Claim(NamedTuple):
    """A number of the plan, and the same number as the specs give it."""

    claim: str
    plan: int
    found: int


def expected_layer(expected: Expected, layer_id: int) -> LayerSpec:
    """Layer `layer_id` of a model, as worked out by hand."""
    full = expected.window is None or (layer_id + 1) % EVERY_SIXTH_IS_FULL == 0
    return LayerSpec(
        LayerKind.FULL if full else LayerKind.SLIDING_WINDOW,
        kv_heads=expected.kv_heads,
        k_head_dim=expected.head_dim,
        v_head_dim=expected.head_dim,
        itemsize=2,
        window=None if full else expected.window,
    )


def differences(name: str, expected: Expected, reading: Reading) -> Iterator[str]:
    """Each way in which what was read is not what is known, one line each."""
    wanted = expected.full_layers + expected.window_layers
    if len(reading.layers) != wanted:
        yield f"{name}: {len(reading.layers)} layers, expected {wanted}"
    for layer_id, layer in enumerate(reading.layers):
        if layer != expected_layer(expected, layer_id):
            yield f"{name}: layer {layer_id} is {layer}"
    numbers = {
        "bytes per token": (expected.bytes_per_token, bytes_per_token(reading)),
        "bytes of full windows": (expected.window_bytes, window_bytes(reading)),
    }
    for what, (known, found) in numbers.items():
        if known != found:
            yield f"{name}: {found} {what}, expected {known}"


def bytes_per_token(reading: Reading) -> int:
    """What one more token costs once the windows are full."""
    growing = (layer for layer in reading.layers if layer.window is None)
    return sum(layer.bytes_per_block for layer in growing) // BLOCK_TOKENS


def window_bytes(reading: Reading) -> int:
    """What the window layers must hold: exactly their windows."""
    return sum(
        layer.bytes_per_block // BLOCK_TOKENS * (layer.window or 0) for layer in reading.layers
    )


def window_room(reading: Reading) -> int:
    """What the engine reserves for them: whole blocks, with room to append."""
    return sum(
        layer.bytes_per_block * (layer.max_blocks or 0)
        for layer in reading.layers
        if layer.window is not None
    )


def sample(name: str, reading: Reading) -> dict[str, Scalar]:
    """A model as a row of the result."""
    windows = [layer for layer in reading.layers if layer.window is not None]
    first = reading.layers[0]
    return {
        "model": name,
        "layers": len(reading.layers),
        "window_layers": len(windows),
        "window": windows[0].window if windows else None,
        "kv_heads": first.kv_heads,
        "head_dim": first.k_head_dim,
        "bytes_per_token": bytes_per_token(reading),
        "bytes_per_block": first.bytes_per_block,
        "window_bytes": window_bytes(reading),
        "weight_bytes": reading.weight_bytes,
        "rss_peak_bytes": reading.rss_peak_bytes,
        "rss_before_bytes": reading.rss_before_bytes,
        "mlx_peak_bytes": reading.mlx_peak_bytes,
        "seconds": round(reading.seconds, 3),
    }


def claims(readings: Mapping[str, Reading]) -> list[Claim]:
    """The plan's statements about these models that a spec can check."""
    gemma = ModelCacheSpec(readings["Gemma 3 12B"].layers)
    windows = sum(kind is LayerKind.SLIDING_WINDOW for kind in gemma.layer_types)
    exact = sum(
        min(-(-8192 // BLOCK_TOKENS), -(-(layer.window or 8192) // BLOCK_TOKENS))
        for layer in gemma.layers
    )
    return [
        Claim("KV heads of Gemma 3 12B", 8, gemma.n_kv_heads),
        Claim("KV heads of Llama 3.1 8B", 4, readings["Llama 3.1 8B"].layers[0].kv_heads),
        Claim("KV heads of Qwen 2.5 7B", 4, readings["Qwen2.5 7B"].layers[0].kv_heads),
        Claim("layers of SmolLM2-135M", 30, len(readings["SmolLM2-135M"].layers)),
        Claim("layers of Gemma 3 12B", 48, gemma.n_layers),
        Claim("window layers of Gemma 3 12B", 40, windows),
        Claim("blocks of Gemma 3 12B that hold 8,192 tokens", 1536, exact),
    ]
