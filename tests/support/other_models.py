"""Configurations of tiny models with states, latent keys and lists of caches, by module of mlx-lm.

What the models have in common is given by `build`. Knows no weights.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Final, Protocol, cast

from mlx.nn.layers.base import Module

VOCAB: Final = 96

_COMMON: Final[dict[str, object]] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "head_dim": 8,
}
_LATENT: Final[dict[str, object]] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
}

OTHER_MODELS: Final[dict[str, dict[str, object]]] = {
    "deepseek_v3": _LATENT,
    "glm_moe_dsa": _LATENT
    | {
        "index_head_dim": 8,
        "index_n_heads": 4,
        "index_topk": 128,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "longcat_flash": _LATENT
    | {
        "ffn_hidden_size": 64,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 16,
        "num_layers": 2,
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "zero_expert_num": 2,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "kimi_linear": _LATENT
    | {
        "model_max_length": 8192,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_expert_group": 1,
        "num_shared_experts": 1,
        "linear_attn_config": {
            "kda_layers": [1],
            "full_attn_layers": [2],
            "num_heads": 4,
            "head_dim": 8,
            "short_conv_kernel_size": 4,
        },
    },
    "qwen3_next": {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [],
        "moe_intermediate_size": 16,
        "partial_rotary_factor": 0.5,
        "full_attention_interval": 2,
    },
    "nemotron_h": {
        "mamba_proj_bias": False,
        "conv_kernel": 4,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "layers_block_type": ["mamba", "attention"],
    },
    "mamba": {
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    "rwkv7": {
        "norm_eps": 1e-5,
        "a_low_rank_dim": 4,
        "v_low_rank_dim": 4,
        "gate_low_rank_dim": 4,
        "decay_low_rank_dim": 4,
    },
}


class _Arguments(Protocol):
    def from_dict(self, params: Mapping[str, object]) -> object: ...


class _Architecture(Protocol):
    Model: Callable[[object], Module]
    ModelArgs: _Arguments


WIDE: Final[dict[str, object]] = {"head_dim": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 64}
"""Sizes with which heads, latents and their rope keys have 64 numbers."""


def build(name: str, changes: Mapping[str, object] | None = None) -> Module:
    """The model of that module, as mlx-lm draws it."""
    found = cast(_Architecture, importlib.import_module(f"mlx_lm.models.{name}"))
    given = {**_COMMON, **OTHER_MODELS[name], "model_type": name, **(changes or {})}
    return found.Model(found.ModelArgs.from_dict(given))
