"""Tiny models of mlx-lm whose caches or masks are unlike those of other models."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Final, Protocol, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

import semantic.adapters.mlx  # noqa: F401  loads OpenBLAS before MLX
from tests.support.tiny_models import VOCAB, randomize

WINDOW: Final = 40
_SEED = 9
"""With these weights answers depend on the prompt and do not loop at once."""

_COMMON: Final[Mapping[str, object]] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_WINDOWS: Final[Mapping[str, object]] = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
}
_MISTRAL_ROPE: Final[Mapping[str, object]] = {
    "rope_theta": 10000.0,
    "rope_type": "default",
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 4096,
}
_DYNAMIC: Final[Mapping[str, object]] = {"type": "dynamic", "rope_type": "dynamic", "factor": 4.0}

_CONFIGURATIONS: Final[Mapping[str, Mapping[str, object]]] = {
    "mistral3": {
        "text_config": {
            **_COMMON, **_WINDOWS, "model_type": "ministral3", "rope_parameters": _MISTRAL_ROPE
        }
    },
    "smollm3": {**_COMMON, **_WINDOWS},
    "plamo3": {**_COMMON, "window_size": WINDOW, "sliding_window_pattern": 2, "vocab_size": VOCAB},
    "gemma2": {**_COMMON, "query_pre_attn_scalar": 16.0},
    "gemma3n": {
        "text_config": {
            **_COMMON, **_WINDOWS, "model_type": "gemma3n", "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8,
            "rope_local_base_freq": 10000.0, "final_logit_softcapping": 30.0,
            "activation_sparsity_pattern": [0.0] * 4, "altup_num_inputs": 2,
            "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_active_idx": 0,
            "laurel_rank": 8,
        }
    },
    "plamo": {**_COMMON, "n_shared_head": 2},
    "plamo2": {
        **_COMMON, "hidden_size_per_head": 16, "mamba_num_heads": 4, "mamba_d_state": 8,
        "attention_window_size": WINDOW,
    },
    "gpt_bigcode": {
        "n_embd": 32, "n_layer": 3, "n_inner": 64, "n_head": 4, "n_positions": 4096,
        "layer_norm_epsilon": 1e-5, "vocab_size": VOCAB,
    },
    "afm7": {
        "vocab_size": VOCAB, "hidden_dim": 32, "num_layers": 3, "num_kv_reuse_layers": 2,
        "num_heads": 4, "num_kv_heads": 2,
    },
    "internlm2": {**_COMMON, "rope_scaling": _DYNAMIC, "max_position_embeddings": 128},
    "internlm3": {**_COMMON, "rope_scaling": _DYNAMIC, "max_position_embeddings": 128},
    "internlm3+4096": {**_COMMON, "rope_scaling": _DYNAMIC},
    "llama4": {
        "text_config": {
            **_COMMON, "model_type": "llama4_text", "attention_bias": False,
            "attention_chunk_size": 64, "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 64, "num_experts_per_tok": 1, "num_local_experts": 4,
            "rope_scaling": None, "use_qk_norm": True, "floor_scale": 64,
        }
    },
    "deepseek_v41": {
        **_COMMON, "num_hidden_layers": 4, "q_lora_rank": 16, "qk_rope_head_dim": 8,
        "o_groups": 2, "o_lora_rank": 16, "moe_intermediate_size": 32, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "rms_norm_eps": 1e-6, "sliding_window": 32,
        "compress_ratios": (0, 4, 4, 4), "kv_source_layer_ids": (1,),
        "index_source_layer_ids": (1, 3), "candidate_source_layer_id": 1,
        "candidate_topk_blocks": 4, "candidate_block_size": 2, "index_n_heads": 2,
        "index_head_dim": 32, "index_topk": 8, "head_dim": 32,
    },
    "minimax_m3_vl": {
        "text_config": {
            **_COMMON, "intermediate_size": 32, "dense_intermediate_size": 64,
            "shared_intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
            "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 16,
            "index_topk_blocks": 3, "moe_layer_freq": [0, 1, 1, 1],
            "sparse_attention_freq": [0, 1, 0, 1], "rotary_dim": 8,
        }
    },
}  # fmt: skip

UNUSUAL: Final = tuple(_CONFIGURATIONS)


class _ModelArgs(Protocol):
    def from_dict(self, params: Mapping[str, object]) -> object: ...


class _Architecture(Protocol):
    Model: Callable[[object], Module]
    ModelArgs: _ModelArgs


@functools.cache
def unusual_model(name: str) -> Module:
    """The tiny model of a module of mlx-lm, the name before a "+"; the same object each time."""
    architecture = name.partition("+")[0]
    module = cast(_Architecture, importlib.import_module(f"mlx_lm.models.{architecture}"))
    mx.random.seed(_SEED)
    given = {"model_type": architecture, **_CONFIGURATIONS[name]}
    model = module.Model(module.ModelArgs.from_dict(given))
    randomize(model, _SEED)
    model.eval()
    mx.eval(cast(Callable[[], object], model.parameters)())
    return model
