"""Tiny random-weight models of the architectures that must be exact, on the real mlx-lm.

Weights are drawn with a fixed seed and a spread wide enough that the most likely token is clear
and answers do not loop at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.positional_encoding import RoPE
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_map_with_path
from mlx_lm.models import cache as mlx_caches
from mlx_lm.models import (
    falcon_h1,
    gemma3_text,
    gpt_oss,
    lfm2,
    llama,
    qwen2,
    qwen2_moe,
    qwen3,
    recurrent_gemma,
    stablelm,
)
from mlx_lm.models.base import scaled_dot_product_attention

import semantic.adapters.mlx  # noqa: F401  loads OpenBLAS before MLX
from tests.support import other_models
from tests.support.eight_bits import EIGHT, round_caches_of
from tests.support.other_models import OTHER_MODELS

VOCAB = other_models.VOCAB
_SEED = 7


def _llama(head_dim: int = 8) -> Module:
    return llama.Model(
        llama.ModelArgs(
            model_type="llama",
            head_dim=head_dim,
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


def _gemma3(window: int, head_dim: int = 16) -> Module:
    return gemma3_text.Model(
        gemma3_text.ModelArgs(
            model_type="gemma3_text",
            hidden_size=32,
            num_hidden_layers=4,
            intermediate_size=64,
            num_attention_heads=4,
            head_dim=head_dim,
            rms_norm_eps=1e-6,
            vocab_size=VOCAB,
            num_key_value_heads=1,
            query_pre_attn_scalar=16,
            sliding_window=window,
            sliding_window_pattern=2,
        )
    )


def _gpt_oss(head_dim: int = 16) -> Module:
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
            head_dim=head_dim,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=128,
            rope_theta=10000,
        )
    )


def _qwen2_moe(hidden_size: int = 32) -> Module:
    return qwen2_moe.Model(
        qwen2_moe.ModelArgs(
            model_type="qwen2_moe",
            hidden_size=hidden_size,
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


def two_layers(vocab: int, head_dim: int = 16) -> Module:
    """A llama of two narrow layers for `vocab` tokens, with random weights."""
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=head_dim,
            rms_norm_eps=1e-5,
            vocab_size=vocab,
            tie_word_embeddings=False,
        )
    )
    randomize(model)
    return model


def _quantized() -> Module:
    model = two_layers(VOCAB)
    quantize(model, group_size=64, bits=4)
    return model


_COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}


def _lfm2() -> Module:
    return lfm2.Model(
        lfm2.ModelArgs.from_dict(
            _COMMON
            | {
                "model_type": "lfm2",
                "norm_eps": 1e-5,
                "conv_bias": False,
                "conv_L_cache": 3,
                "block_dim": 32,
                "block_ff_dim": 64,
                "block_multiple_of": 8,
                "block_ffn_dim_multiplier": 1.0,
                "block_auto_adjust_ff_dim": False,
                "full_attn_idxs": [1, 3],
            }
        )
    )


def _recurrent_gemma() -> Module:
    return recurrent_gemma.Model(
        recurrent_gemma.ModelArgs.from_dict(
            _COMMON
            | {
                "model_type": "recurrent_gemma",
                "rms_norm_eps": 1e-5,
                "attention_bias": False,
                "conv1d_width": 4,
                "lru_width": 32,
                "attention_window_size": 300,
                "embeddings_scale_by_sqrt_dim": True,
                "logits_soft_cap": 30.0,
                "block_types": ["recurrent", "attention"],
                "_block_types": ["recurrent", "attention"],
            }
        )
    )


def _stablelm() -> Module:
    return stablelm.Model(
        stablelm.ModelArgs.from_dict(
            _COMMON
            | {
                "model_type": "stablelm",
                "use_qkv_bias": False,
                "partial_rotary_factor": 0.25,
                "layer_norm_eps": 1e-5,
                "norm_eps": 1e-5,
            }
        )
    )


def _falcon_h1() -> Module:
    return falcon_h1.Model(
        falcon_h1.ModelArgs.from_dict(
            _COMMON
            | {
                "model_type": "falcon_h1",
                "num_hidden_layers": 2,
                "head_dim": 8,
                "mamba_d_conv": 4,
                "mamba_d_head": 8,
                "mamba_d_ssm": 32,
                "mamba_d_state": 8,
                "mamba_expand": 1,
                "mamba_n_groups": 1,
                "mamba_n_heads": 4,
                "mamba_chunk_size": 16,
                "rms_norm_eps": 1e-5,
            }
        )
    )


class _Attention(Module):
    """One attention layer of 2 query heads and 1 KV head of 16."""

    def __init__(self) -> None:
        cast(Callable[[], None], super().__init__)()
        self.q_proj = Linear(32, 32, bias=False)
        self.k_proj = Linear(32, 16, bias=False)
        self.v_proj = Linear(32, 16, bias=False)
        self.o_proj = Linear(32, 32, bias=False)
        self.rope = RoPE(16)

    def __call__(self, x: mx.array, cache: mlx_caches.KVCache) -> mx.array:
        rows, n, _ = x.shape
        q = self.q_proj(x).reshape(rows, n, 2, 16).swapaxes(1, 2)
        k = self.k_proj(x).reshape(rows, n, 1, 16).swapaxes(1, 2)
        v = self.v_proj(x).reshape(rows, n, 1, 16).swapaxes(1, 2)
        mask = cache.make_mask(n, return_array=False, window_size=None)
        q, k = self.rope(q, offset=cache.offset), self.rope(k, offset=cache.offset)
        k, v = cache.update_and_fetch(k, v)
        k = self.seen(k)
        out = scaled_dot_product_attention(q, k, v, cache=cache, scale=0.25, mask=mask)
        return self.o_proj(out.swapaxes(1, 2).reshape(rows, n, -1))

    def seen(self, keys: mx.array) -> mx.array:
        """The keys that attention gets."""
        return keys


class _AddsToKeys(_Attention):
    """Computes with its keys by a function that takes arrays alone."""

    def seen(self, keys: mx.array) -> mx.array:
        return mx.add(keys, 0.0)


class _Windows(Module):
    """Layers with windows of several sizes; None is full attention. No model of mlx-lm has them."""

    def __init__(self, *windows: int | None, attention: type[_Attention] = _Attention) -> None:
        cast(Callable[[], None], super().__init__)()
        self.windows = windows
        self.embed_tokens = Embedding(VOCAB, 32)
        self.layers = [attention() for _ in windows]
        self.norms = [RMSNorm(32) for _ in windows]
        self.norm = RMSNorm(32)

    def make_cache(self) -> list[object]:
        return [
            mlx_caches.KVCache() if size is None else mlx_caches.RotatingKVCache(size)
            for size in self.windows
        ]

    def __call__(self, inputs: mx.array, cache: list[mlx_caches.KVCache]) -> mx.array:
        x = self.embed_tokens(inputs)
        for layer, norm, own in zip(self.layers, self.norms, cache, strict=True):
            x = x + layer(norm(x), own)
        return mx.matmul(self.norm(x), self.embed_tokens.weight.T)


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

_OTHERS: dict[str, Callable[[], Module]] = {
    "lfm2": _lfm2,
    "recurrent_gemma": _recurrent_gemma,
    "stablelm": _stablelm,
    "falcon_h1": _falcon_h1,
    "windows": functools.partial(_Windows, 300, 40, None, 300),
    "adds to keys": functools.partial(_Windows, None, None, attention=_AddsToKeys),
    "gemma3 narrow": functools.partial(_gemma3, 24),
    "gemma3 wide": functools.partial(_gemma3, 700),
    **{name: functools.partial(other_models.build, name) for name in OTHER_MODELS},
}
"""Models that need mlx-lm's own caches in some layer, keep other windows, or are refused."""

_WIDE: dict[str, Callable[[], Module]] = {
    "llama of 64": functools.partial(_llama, 64),
    "gemma3 of 64": functools.partial(_gemma3, 300, 64),
    "gpt_oss of 64": functools.partial(_gpt_oss, 64),
    "moe of 64": functools.partial(_qwen2_moe, 256),
    "deepseek_v3 of 64": functools.partial(other_models.build, "deepseek_v3", other_models.WIDE),
    "qwen3_next of 64": functools.partial(other_models.build, "qwen3_next", other_models.WIDE),
}
"""Models with heads of 64 numbers, the fewest that caches of 8 bits can have."""

_HALF = " bf16"


# How much wider than usual a weight is drawn. Attention has to be sharp and to outweigh the
# token itself: in a model drawn evenly the next token hardly depends on what came before, and a
# wrong cache would go unnoticed.
_GAIN = {
    "q_proj": 3.0,
    "k_proj": 3.0,
    "q_norm": 2.0,
    "k_norm": 2.0,
    "v_proj": 2.0,
    "o_proj": 2.0,
    "embed_tokens": 0.5,
}


def randomize(model: Module, seed: int = _SEED) -> None:
    """Draw all weights anew, the same each time for the same `model`."""
    mx.random.seed(seed)

    def draw(path: str, weight: mx.array) -> mx.array:
        noise = mx.random.normal(weight.shape)
        gain = next((g for name, g in _GAIN.items() if name in path), 1.0)
        if weight.ndim < 2:
            return mx.multiply(mx.add(weight, 0.1 * noise), gain)
        return mx.multiply(noise, gain * 1.5 / weight.shape[-1] ** 0.5)

    model.update(tree_map_with_path(draw, _parameters(model)))


def _parameters(model: Module) -> dict[str, object]:
    return cast(Callable[[], dict[str, object]], model.parameters)()


def build(name: str) -> Module:
    """The model of that architecture as mlx-lm draws it, not computed yet; the same each time."""
    # A Linear draws its bias when it is built, and `randomize` only adds to that.
    mx.random.seed(_SEED)
    return (_BUILDERS | _OTHERS | _WIDE)[name.removesuffix(EIGHT)]()


@functools.cache
def tiny_model(name: str) -> Module:
    """The model of that architecture, perhaps with " bf16"; the same object each time.

    Its weights are the same in every process, whatever was built before it. References of one with
    `EIGHT` have caches of 8 bits.
    """
    model = build(name.removesuffix(_HALF))
    if name != "quantized":
        randomize(model)
    if name.endswith(_HALF):
        model.set_dtype(mx.bfloat16)
    model.eval()
    mx.eval(_parameters(model))
    return round_caches_of(model) if name.endswith(EIGHT) else model
