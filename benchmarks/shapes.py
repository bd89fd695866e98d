"""Models of known shapes with random weights: speed does not depend on the weights' values."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import llama


def smollm2_135m() -> Module:
    """The shape of SmolLM2-135M: 30 layers, 9 heads, 3 KV heads, head_dim 64, fp32."""
    return _random(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=576,
            num_hidden_layers=30,
            intermediate_size=1536,
            num_attention_heads=9,
            num_key_value_heads=3,
            rms_norm_eps=1e-5,
            vocab_size=49152,
            rope_theta=100000.0,
            tie_word_embeddings=True,
        )
    )


def small(layers: int = 4) -> Module:
    """About the shape of the embedded model: 4 layers, 256 wide, fp32.

    With fewer layers a CPU takes prompts of tens of thousands of tokens in seconds.
    """
    return _random(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=256,
            num_hidden_layers=layers,
            intermediate_size=704,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=2048,
            rope_theta=10000.0,
            tie_word_embeddings=True,
        )
    )


LLAMA_VOCAB = 128256


def llama_8b(layers: int = 32) -> Module:
    """The shape of Llama 3.1 8B: 32 layers, 32 heads, 8 KV heads, head_dim 128, bf16."""
    return _random(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=4096,
            num_hidden_layers=layers,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
            rms_norm_eps=1e-5,
            vocab_size=LLAMA_VOCAB,
            rope_theta=500000.0,
            tie_word_embeddings=False,
        ),
        mx.bfloat16,
    )


def _random(args: llama.ModelArgs, dtype: mx.Dtype | None = None) -> Module:
    mx.random.seed(0)
    model = cast(Module, llama.Model(args))
    if dtype is not None:
        model.set_dtype(dtype)
    mx.eval(cast(Callable[[], dict[str, object]], model.parameters)())
    return model
