"""What a module's configuration needs beyond what the names of its arguments say.

Three tables: `TEXT_OF`, `PATCHES` and `WITHOUT`. A new module of mlx-lm gets a line in one of them,
or none if names suffice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

Json = object
"""A value of a configuration."""

Configuration = dict[str, Json]

WINDOW: Final = 128
_LAYERS = 2

_ALTERNATING = ["sliding_attention", "full_attention"]
_LINEAR = ["linear_attention", "full_attention"]
_ROPE: Configuration = {"rope_type": "default", "rope_theta": 10000.0}
_ALL_KEYS: Configuration = {"num_key_value_heads": 4}
_SCALED_LATE: Configuration = {
    **_ROPE,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 8192,
}
_YARN: Configuration = {
    "rope_type": "yarn",
    "type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_KDA: Configuration = {
    "kda_layers": [1],
    "full_attn_layers": [2],
    "num_heads": 4,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
}
_SPARSE_BLOCKS: Configuration = {
    "sparse_num_index_heads": 2,
    "sparse_index_dim": 16,
    "sparse_block_size": 32,
    "sparse_topk_blocks": 4,
    "sparse_local_block": 1,
    "sparse_attention_freq": [0, 1],
}
_MAMBA: Configuration = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 1,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}

TEXT_OF: Final[Mapping[str, str]] = {
    "gemma3": "gemma3_text:ModelArgs",
    "gemma3n": "gemma3n:TextConfig",
    "gemma4": "gemma4_text:ModelArgs",
    "kimi_k25": "deepseek_v3:ModelArgs",
    "kimi_k3": "kimi_k3:TextArgs",
    "kimi_vl": "deepseek_v3:ModelArgs",
    "lfm2-vl": "lfm2:ModelArgs",
    "llama4": "llama4:TextArgs",
    "minimax_m3_vl": "minimax_m3_vl:TextArgs",
    "mistral3": "llama:ModelArgs",
    "muse_spark": "muse_spark:TextArgs",
    "pixtral": "llama:ModelArgs",
    "qwen2_vl": "qwen2:ModelArgs",
    "qwen3_5": "qwen3_5:TextModelArgs",
    "qwen3_5_moe": "qwen3_5:TextModelArgs",
    "qwen3_vl": "qwen3:ModelArgs",
    "qwen3_vl_moe": "qwen3_moe:ModelArgs",
}
"""Modules that put the language model's configuration into `text_config`, and its arguments."""

PATCHES: Final[Mapping[str, Configuration]] = {
    "afm7": {"num_layers": 3, "num_kv_reuse_layers": 1},
    "afmoe": {"layer_types": _ALTERNATING, "num_dense_layers": 1},
    "apertus": {"post_norm": False},
    "baichuan_m1": {"sliding_window_layers": [1], "conv_window": 2},
    "bailing_hybrid": _ALL_KEYS,
    "bailing_moe_linear": _ALL_KEYS,
    "bailing_moe_v3": {**_ALL_KEYS, "layer_group_size": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {
        **_ALL_KEYS,
        "topk_method": "greedy",
        "rope_scaling": {"factor": 1.0, "type": "yarn"},
    },
    "deepseek_v3": _ALL_KEYS,
    "deepseek_v32": _ALL_KEYS,
    "deepseek_v41": {
        "num_hidden_layers": 4,
        "compress_ratios": [0, 4, 4, 4],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3],
        "o_groups": 2,
        "o_lora_rank": 16,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 3,
        "rms_norm_eps": 1e-6,
        "index_topk": 32,
    },
    "ernie4_5_moe": {"moe_num_shared_experts": 1},
    "exaone4": {"sliding_window_pattern": "LG", "layer_types": _ALTERNATING, "rope_scaling": _ROPE},
    "exaone_moe": {"layer_types": _ALTERNATING, "is_moe_layer": [False, True]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64, "mamba_chunk_size": 16},
    "gear": {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "conv", "sliding_attention", "full_attention"],
    },
    "gemma3n": {
        "text_config": {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 2048,
            "hidden_size_per_layer_input": 16,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 30.0,
            "layer_types": _ALTERNATING * 2,
            "activation_sparsity_pattern": [0.0] * 4,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
        }
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": _ALTERNATING * 2,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 2048,
        "attention_k_eq_v": False,
    },
    "glm_moe_dsa": {**_ALL_KEYS, "rope_parameters": _ROPE},
    "glm4_moe_lite": _ALL_KEYS,
    "gpt_bigcode": {"num_key_value_heads": 1},
    "gpt_neox": {"rotary_pct": 0.5},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"]},
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "use_cla": False,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    },
    "hunyuan_v1_dense": {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_expand": 1,
    },
    "kimi_k3": {
        "text_config": {
            **_ALL_KEYS,
            "linear_attn_config": _KDA,
            "activation_situ_beta": 1.0,
            "activation_situ_linear_beta": 1.0,
            "q_lora_rank": None,
        }
    },
    "kimi_linear": {**_ALL_KEYS, "linear_attn_config": _KDA, "num_shared_experts": 1},
    "laguna": {"layer_types": _ALTERNATING},
    "lfm2": {
        "block_dim": 64,
        "block_ff_dim": 128,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1],
    },
    "lfm2_moe": {"use_expert_bias": True, "num_dense_layers": 1, "full_attn_idxs": [1]},
    "llama": {"sliding_window": None},
    "llama4": {
        "text_config": {
            "num_hidden_layers": 4,
            "attention_chunk_size": WINDOW,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 128,
        }
    },
    "llama4_text": {"intermediate_size_mlp": 128, "no_rope_layers": [1, 0]},
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "zero_expert_num": 2,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "longcat_flash_ngram": {
        "zero_expert_num": 2,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "ngram_vocab_size_ratio": 2,
    },
    "mamba": {"state_size": 16, "time_step_rank": 8, "intermediate_size": 128},
    "mamba2": {
        "state_size": 16,
        "n_groups": 1,
        "num_heads": 8,
        "time_step_rank": 8,
        "time_step_limit": [0.0, 100.0],
        "intermediate_size": 128,
    },
    "mellum": {
        "layer_types": _ALTERNATING,
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "layernorm_epsilon": 1e-5,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "swa_v_head_dim": 8,
        "v_head_dim": 8,
    },
    "minicpm3": {
        **_ALL_KEYS,
        "rope_scaling": {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4},
    },
    "minimax_m3_vl": {
        "text_config": {
            "sparse_attention_config": _SPARSE_BLOCKS,
            "dense_intermediate_size": 128,
            "moe_layer_freq": [0, 1],
            "rotary_dim": 8,
            "index_n_heads": 2,
            "index_head_dim": 16,
        }
    },
    "ministral3": {"layer_types": _ALTERNATING, "rope_parameters": _SCALED_LATE},
    "mistral3": {"text_config": {"model_type": "mistral", "sliding_window": None}},
    "mistral4": {**_ALL_KEYS, "rope_parameters": _SCALED_LATE},
    "muse_glimmer": {"layer_types": _ALTERNATING},
    "muse_spark": {
        "text_config": {
            "post_norm_eps": 1e-8,
            "rope_parameters": _ROPE,
            "layer_rope_theta": [10000.0] * _LAYERS,
            "layer_types": _ALTERNATING,
            "final_logit_softcapping": 20.0,
            "output_multiplier": 1.0,
            "moe_hidden_size": 64,
            "num_shared_experts": 0,
        }
    },
    "nanbeige": {"num_loops": 2},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.0}}]
        * _LAYERS
    },
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "layers_block_type": ["mamba", "attention", "moe"],
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    "olmo3": {"layer_types": _ALTERNATING},
    "olmo_hybrid": {"layer_types": _LINEAR, "linear_num_key_heads": 4},
    "openelm": {
        "ffn_dim_divisor": 8,
        "num_query_heads": [4] * _LAYERS,
        "num_kv_heads": [2] * _LAYERS,
        "ffn_multipliers": [2.0] * _LAYERS,
    },
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 128,
        "gegelu_limit": 20.0,
    },
    "phimoe": {
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [1.0] * 8,
            "short_mscale": 1.0,
            "long_mscale": 1.0,
        }
    },
    "pixtral": {"text_config": {"sliding_window": None}},
    "plamo": {"n_shared_head": 2},
    "plamo2": {"hidden_size_per_head": 16, "mamba_num_heads": 4, "mamba_step": 2},
    "qwen3": {"rope_theta": 10000.0},
    "qwen3_5": {"text_config": {"num_experts": 0, "full_attention_interval": 2}},
    "qwen3_5_moe": {"text_config": {"full_attention_interval": 2}},
    "qwen3_next": {"full_attention_interval": 2},
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "block_types": ["recurrent", "attention"],
    },
    "rwkv7": {
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "smollm3": {"sliding_window": None, "no_rope_layers": [1, 0]},
    "spark2_5": {
        "layer_types": _ALTERNATING,
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
    },
    "step3p5": {
        "num_attention_groups": 2,
        "layer_types": _ALTERNATING,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 32,
        "moe_layers_enum": "1",
    },
    # Variants: a row's module and what differs.
    "deepseek_v32+topk2048": {"index_topk": 2048},
    "gemma3_text+w1024": {"sliding_window": 1024},
    "gemma3_text+w512": {"sliding_window": 512},
    "granitemoehybrid+dense": {"num_local_experts": None, "num_experts_per_tok": None},
    "internlm2+dynamic128": {
        "max_position_embeddings": WINDOW,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    },
    "internlm3+dynamic128": {
        "max_position_embeddings": WINDOW,
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
    },
    "llama+llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "llama+window": {"sliding_window": WINDOW, "layer_types": _ALTERNATING},
    "minimax_m3_vl+all": {
        "text_config": {"sparse_attention_config": {**_SPARSE_BLOCKS, "sparse_topk_blocks": 64}}
    },
    "ministral3+scale64": {
        "layer_types": None,
        "rope_parameters": {**_SCALED_LATE, "original_max_position_embeddings": 64},
    },
    "mistral3+ministral": {
        "text_config": {
            "model_type": "ministral3",
            "rope_parameters": {**_SCALED_LATE, "original_max_position_embeddings": 64},
        }
    },
    "mistral3+window": {"text_config": {"sliding_window": WINDOW, "layer_types": _ALTERNATING}},
    "mistral4+scale64": {
        "rope_parameters": {**_SCALED_LATE, "original_max_position_embeddings": 64}
    },
    "nemotron_h+dense": {"layers_block_type": ["mamba", "mlp", "attention"]},
    "phi3+longrope64": {
        "max_position_embeddings": 8192,
        "original_max_position_embeddings": 64,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [1.0 + i / 4 for i in range(8)],
        },
    },
    "qwen3+yarn64": {"rope_scaling": _YARN},
    "qwen3_next+1in4": {"num_hidden_layers": 4, "full_attention_interval": 4},
    "smollm3+window": {"sliding_window": WINDOW, "layer_types": _ALTERNATING},
}
"""Arguments of a module, or of a variant "module+name", that its arguments' names do not give."""

PARTS: Final = frozenset(
    {
        *("activations", "base", "bitlinear_layers", "cache", "gated_delta", "mla", "pipeline"),
        *("rope_utils", "ssm", "switch_layers"),
    }
)
"""Modules of `mlx_lm.models` that other modules are made of: they have no model."""

WITHOUT: Final[Mapping[str, str]] = {
    "bitnet": "its layers are Metal kernels; it cannot be computed on a CPU",
    "gear": "mlx-lm's own generation fails: its mask reads the offset of a convolution's cache",
    "muse_spark": "its layers are Metal kernels; it cannot be computed on a CPU",
    "olmo": "needs the package ai2-olmo; OLMo 2 and 3 are modules of their own",
    "phi3small": "crashes the process on a CPU, in mlx-lm alone",
    "prism_hadamard_qwen35": "a packed form of Qwen3.5's weights, made by a tool of its own",
}
"""Models that mlx-lm cannot compute here, with the reason; a test holds it true."""
