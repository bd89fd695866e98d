"""Tiny random-weight models of the architectures that must be exact, on the real mlx-lm.

Weights are drawn with a fixed seed and a spread wide enough that the likeliest token is clear
and answers do not fall into a loop at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_map_with_path
from mlx_lm.models import gemma3_text, gpt_oss, llama, qwen2, qwen2_moe, qwen3

import semantic.adapters.mlx  # noqa: F401  loads OpenBLAS before MLX

VOCAB = 96


def _llama() -> Module:
    return llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=32,
            num_hidden_layers=3,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=VOCAB,
            rope_theta=10000.0,
            tie_word_embeddings=True,
        )
    )


def _qwen2() -> Module:
    return qwen2.Model(
        qwen2.ModelArgs(
            model_type="qwen2",
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=1,
            rms_norm_eps=1e-6,
            vocab_size=VOCAB,
            tie_word_embeddings=False,
        )
    )


def _qwen3() -> Module:
    return qwen3.Model(
        qwen3.ModelArgs(
            model_type="qwen3",
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-6,
            vocab_size=VOCAB,
            max_position_embeddings=8192,
            rope_theta=1e6,
            head_dim=16,
            tie_word_embeddings=True,
        )
    )


def _gemma3(window: int) -> Module:
    return gemma3_text.Model(
        gemma3_text.ModelArgs(
            model_type="gemma3_text",
            hidden_size=32,
            num_hidden_layers=4,
            intermediate_size=64,
            num_attention_heads=4,
            head_dim=16,
            rms_norm_eps=1e-6,
            vocab_size=VOCAB,
            num_key_value_heads=1,
            query_pre_attn_scalar=16,
            sliding_window=window,
            sliding_window_pattern=2,
        )
    )


def _gpt_oss() -> Module:
    return gpt_oss.Model(
        gpt_oss.ModelArgs(
            model_type="gpt_oss",
            num_hidden_layers=4,
            num_local_experts=4,
            num_experts_per_tok=2,
            vocab_size=VOCAB,
            rms_norm_eps=1e-5,
            hidden_size=32,
            intermediate_size=32,
            head_dim=16,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=128,
            rope_theta=10000,
        )
    )


def _qwen2_moe() -> Module:
    return qwen2_moe.Model(
        qwen2_moe.ModelArgs(
            model_type="qwen2_moe",
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=64,
            num_attention_heads=4,
            num_experts_per_tok=2,
            num_experts=6,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            rms_norm_eps=1e-6,
            vocab_size=VOCAB,
            num_key_value_heads=4,
            tie_word_embeddings=True,
        )
    )


def _quantized() -> Module:
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=VOCAB,
            tie_word_embeddings=False,
        )
    )
    randomize(model)
    quantize(model, group_size=64, bits=4)
    return model


_BUILDERS: dict[str, Callable[[], Module]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3": functools.partial(_gemma3, 300),
    "gpt_oss": _gpt_oss,
    "moe": _qwen2_moe,
    "quantized": _quantized,
}

ARCHITECTURES = tuple(_BUILDERS)


# How much wider than usual a weight is drawn. Attention has to be sharp and to outweigh the
# token itself: in a model drawn evenly the next token hardly depends on what came before, and a
# cache could be wrong without anybody noticing.
_GAIN = {
    "q_proj": 3.0,
    "k_proj": 3.0,
    "q_norm": 2.0,
    "k_norm": 2.0,
    "v_proj": 2.0,
    "o_proj": 2.0,
    "embed_tokens": 0.5,
}


def randomize(model: Module) -> None:
    """Draw all weights anew, the same each time."""
    mx.random.seed(7)

    def draw(path: str, weight: mx.array) -> mx.array:
        noise = mx.random.normal(weight.shape)
        gain = next((g for name, g in _GAIN.items() if name in path), 1.0)
        if weight.ndim < 2:
            return mx.multiply(mx.add(weight, 0.1 * noise), gain)
        return mx.multiply(noise, gain * 1.5 / weight.shape[-1] ** 0.5)

    model.update(tree_map_with_path(draw, _parameters(model)))


def _parameters(model: Module) -> dict[str, object]:
    return cast(Callable[[], dict[str, object]], model.parameters)()


@functools.cache
def tiny_model(name: str) -> Module:
    """The model of that architecture; the same object each time."""
    model = _BUILDERS[name]()
    if name != "quantized":
        randomize(model)
    model.eval()
    mx.eval(_parameters(model))
    return model
