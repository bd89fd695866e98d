"""Models of known shapes with random weights: speed does not depend on the weights' values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten
from mlx_lm.models import (
    deepseek_v2,
    deepseek_v3,
    gemma3_text,
    gemma4_text,
    gpt_oss,
    llama,
    qwen3,
    qwen3_moe,
    qwen3_next,
)


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


def llama_8b(layers: int = 32, vocab: int = LLAMA_VOCAB, *, lazy: bool = False) -> Module:
    """The shape of Llama 3.1 8B: 32 layers, 32 heads, 8 KV heads, head_dim 128, bf16. The weights
    of a `lazy` model are not computed yet: some may be left out."""
    return _llama_3(layers, vocab, heads=32, hidden=4096, intermediate=14336, lazy=lazy)


def llama_70b(layers: int = 80, vocab: int = LLAMA_VOCAB, *, lazy: bool = False) -> Module:
    """The shape of Llama 3.1 70B: 80 layers, 64 heads, 8 KV heads, head_dim 128, bf16, of 131 GiB.
    See `llama_8b`."""
    return _llama_3(layers, vocab, heads=64, hidden=8192, intermediate=28672, lazy=lazy)


def _llama_3(
    layers: int, vocab: int, *, heads: int, hidden: int, intermediate: int, lazy: bool
) -> Module:
    return _random(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=hidden,
            num_hidden_layers=layers,
            intermediate_size=intermediate,
            num_attention_heads=heads,
            num_key_value_heads=8,
            rms_norm_eps=1e-5,
            vocab_size=vocab,
            rope_theta=500000.0,
            tie_word_embeddings=False,
        ),
        mx.bfloat16,
        lazy=lazy,
    )


def llama_8b_4bit(layers: int = 32) -> Module:
    """`llama_8b` with weights of 4 bits in groups of 64."""
    model = llama_8b(layers)
    quantize(model, group_size=64, bits=4)
    evaluate(model)
    return model


def qwen3_8b(layers: int = 36) -> Module:
    """The shape of Qwen3 8B: 36 layers, 32 heads, 8 KV heads, head_dim 128, bf16."""
    return _half(
        qwen3.Model(
            qwen3.ModelArgs(
                model_type="qwen3",
                hidden_size=4096,
                num_hidden_layers=layers,
                intermediate_size=12288,
                num_attention_heads=32,
                num_key_value_heads=8,
                head_dim=128,
                rms_norm_eps=1e-6,
                vocab_size=151936,
                max_position_embeddings=40960,
                rope_theta=1e6,
                tie_word_embeddings=False,
            )
        )
    )


def qwen3_30b_a3b(layers: int = 24) -> Module:
    """Half of the 48 layers of Qwen3 30B-A3B: 128 experts, 8 per token; 4 KV heads, bf16."""
    return _half(
        qwen3_moe.Model(
            qwen3_moe.ModelArgs(
                model_type="qwen3_moe",
                hidden_size=2048,
                num_hidden_layers=layers,
                intermediate_size=6144,
                num_attention_heads=32,
                num_experts=128,
                num_experts_per_tok=8,
                decoder_sparse_step=1,
                mlp_only_layers=[],
                moe_intermediate_size=768,
                rms_norm_eps=1e-6,
                vocab_size=151936,
                num_key_value_heads=4,
                head_dim=128,
                rope_theta=1e6,
                tie_word_embeddings=False,
                max_position_embeddings=40960,
                norm_topk_prob=True,
            )
        )
    )


def gemma3_12b(layers: int = 48) -> Module:
    """The shape of Gemma 3 12B: 48 layers, five of six with a window of 1,024, head_dim 256."""
    model = gemma3_text.Model(
        gemma3_text.ModelArgs(
            model_type="gemma3_text",
            hidden_size=3840,
            num_hidden_layers=layers,
            intermediate_size=15360,
            num_attention_heads=16,
            head_dim=256,
            vocab_size=262208,
            num_key_value_heads=8,
            query_pre_attn_scalar=256,
            sliding_window=1024,
            sliding_window_pattern=6,
            max_position_embeddings=131072,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
        )
    )
    model.sanitize({})  # ties input and output embeddings, as for weights without an output one
    return _half(model)


def gemma4_e2b(layers: int = 35) -> Module:
    """The shape of Gemma 4 E2B: 35 layers, four of five with a window of 512 and head_dim 256, the
    fifth with 512; one KV head, and 20 layers that read the caches of others."""
    shared = 20 if layers > 20 else 0
    args = gemma4_text.ModelArgs(num_hidden_layers=layers, num_kv_shared_layers=shared)
    return _half(gemma4_text.Model(args))


def gpt_oss_20b(layers: int = 24) -> Module:
    """The shape of gpt-oss 20B in bf16: 24 layers, half with a window of 128, sinks, 32 experts."""
    return _half(
        gpt_oss.Model(
            gpt_oss.ModelArgs(
                num_hidden_layers=layers,
                num_local_experts=32,
                rope_scaling={
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "original_max_position_embeddings": 4096,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                },
            )
        )
    )


_DEEPSEEK_V2_LITE: Mapping[str, object] = {
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
}


def deepseek_v2_lite(layers: int = 27) -> Module:
    """The shape of DeepSeek V2 Lite, bf16: keys of 192 and values of 128."""
    yarn = {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    }
    own = {"num_hidden_layers": layers, "rope_scaling": yarn}
    return _half(deepseek_v2.Model(deepseek_v2.ModelArgs.from_dict({**_DEEPSEEK_V2_LITE, **own})))


def latent(layers: int = 27) -> Module:
    """The shape of DeepSeek V2 Lite with V3's cache in mlx-lm: a latent and a rope key."""
    own = {"num_hidden_layers": layers, "max_position_embeddings": 32768}
    return _half(deepseek_v3.Model(deepseek_v3.ModelArgs.from_dict({**_DEEPSEEK_V2_LITE, **own})))


def qwen3_next_80b(layers: int = 12, vocab: int = 151936, experts: int = 512) -> Module:
    """The shape of Qwen3-Next 80B A3B, bf16: 3 of 4 layers keep a state; a quarter of its 48."""
    return _half(
        qwen3_next.Model(
            qwen3_next.ModelArgs(
                model_type="qwen3_next",
                hidden_size=2048,
                num_hidden_layers=layers,
                intermediate_size=5120,
                num_attention_heads=16,
                linear_num_value_heads=32,
                linear_num_key_heads=16,
                linear_key_head_dim=128,
                linear_value_head_dim=128,
                linear_conv_kernel_dim=4,
                num_experts=experts,
                num_experts_per_tok=10,
                decoder_sparse_step=1,
                shared_expert_intermediate_size=512,
                mlp_only_layers=[],
                moe_intermediate_size=512,
                rms_norm_eps=1e-6,
                vocab_size=vocab,
                num_key_value_heads=2,
                rope_theta=1e7,
                partial_rotary_factor=0.25,
                max_position_embeddings=32768,
                head_dim=256,
                full_attention_interval=4,
                norm_topk_prob=True,
            )
        )
    )


MODELS: dict[str, Callable[..., Module]] = {
    "llama-8b": llama_8b,
    "qwen3-8b": qwen3_8b,
    "gemma3-12b": gemma3_12b,
    "gemma4-e2b": gemma4_e2b,
    "gpt-oss-20b": gpt_oss_20b,
    "llama-8b-4bit": llama_8b_4bit,
    "qwen3-30b-a3b, 24 layers": qwen3_30b_a3b,
    "deepseek-v2-lite": deepseek_v2_lite,
    "latent, deepseek-v2-lite": latent,
    "hybrid, qwen3-next, 12 layers": qwen3_next_80b,
}
"""Takes the number of layers; the default is the model's own."""


def _random(args: llama.ModelArgs, dtype: mx.Dtype | None = None, *, lazy: bool = False) -> Module:
    mx.random.seed(0)
    model = cast(Module, llama.Model(args))
    if dtype is not None:
        model.set_dtype(dtype)
    if not lazy:
        evaluate(model)
    return model


def _half(model: object) -> Module:
    """The model in bf16, computed layer by layer: in fp32 it may not fit."""
    built = cast(Module, model)
    built.set_dtype(mx.bfloat16)
    evaluate(built)
    return built


def evaluate(model: Module) -> None:
    """Compute the weights, one by one."""
    for weight in cast("list[tuple[str, mx.array]]", tree_flatten(_parameters(model))):
        mx.eval(weight[1])


def _parameters(model: Module) -> dict[str, object]:
    return cast("Callable[[], dict[str, object]]", model.parameters)()
