"""Published configurations of five models, and the expected shapes of their caches.

Only fields that mlx-lm's classes read are included. `EXPECTED` was worked out by hand from these
configurations and mlx-lm's model files, not with the code under test. Imports nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Expected:
    """What a sequence's cache is, at 16 bit per number.

    `full_layers` and `window_layers` count layers; `bytes_per_token` is what each further token
    costs once the windows are full, `window_bytes` what full windows hold.
    """

    full_layers: int
    window_layers: int
    kv_heads: int
    head_dim: int
    window: int | None
    bytes_per_token: int
    window_bytes: int


CONFIGURATIONS: dict[str, dict[str, object]] = {
    "Gemma 3 12B": {
        "model_type": "gemma3",
        "vocab_size": 262208,
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "sliding_window": 1024,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    },
    "Llama 3.1 8B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    },
    "Qwen2.5 7B": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    },
    "Qwen1.5-MoE-A2.7B": {
        "model_type": "qwen2_moe",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    },
    "SmolLM2-135M": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
}

EXPECTED = {
    "Gemma 3 12B": Expected(8, 40, 8, 256, 1024, 65_536, 335_544_320),
    "Llama 3.1 8B": Expected(32, 0, 8, 128, None, 131_072, 0),
    "Qwen2.5 7B": Expected(28, 0, 4, 128, None, 57_344, 0),
    "Qwen1.5-MoE-A2.7B": Expected(24, 0, 16, 128, None, 196_608, 0),
    "SmolLM2-135M": Expected(30, 0, 3, 64, None, 23_040, 0),
}
