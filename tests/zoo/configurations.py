"""Configurations of tiny models, one for each module of `mlx_lm.models`, and of variants.

Sizes follow from the names of a module's arguments; `patches` has what a name does not say. A
module that needs an argument which has no value here raises `UnknownArgumentError` with its name.
Knows no weights and no folders.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Final, Protocol, cast

import mlx_lm.models
from mlx.nn.layers.base import Module

from tests.zoo.patches import PARTS, PATCHES, TEXT_OF, WINDOW, WITHOUT, Configuration, Json

VOCAB: Final = 2048
"""The vocabulary of the embedded tokenizer, which every model of the zoo gets."""
_CONTEXT: Final = 8192


class UnknownArgumentError(LookupError):
    """A module of mlx-lm has an argument without a default that no rule here gives a value to."""


class _ModelArgs(Protocol):
    def from_dict(self, params: Configuration) -> object: ...


class Architecture(Protocol):
    """A module of `mlx_lm.models` that has a model."""

    Model: Callable[[object], Module]
    ModelArgs: _ModelArgs


def _named(*values: tuple[str, Json]) -> dict[str, Json]:
    return {name: value for names, value in values for name in names.split()}


_SIZES: Final[Mapping[str, Json]] = _named(
    ("hidden_size hidden_dim d_model n_embd model_dim", 64),
    ("num_hidden_layers num_layers n_layer n_layers num_transformer_layers", 2),
    ("num_attention_heads num_heads n_head n_heads", 4),
    ("num_key_value_heads num_kv_heads n_kv_heads", 2),
    ("intermediate_size n_inner ffn_hidden_size", 128),
    ("shared_intermediate_size", 64),
    ("head_dim kv_channels v_head_dim qk_nope_head_dim rotary_dim", 16),
    ("qk_rope_head_dim", 8),
    ("kv_lora_rank q_lora_rank", 32),
    ("vocab_size num_vocab", VOCAB),
    ("max_position_embeddings n_positions n_ctx block_size model_max_length", _CONTEXT),
    ("rms_norm_eps layer_norm_eps norm_eps layer_norm_epsilon", 1e-5),
    ("rope_theta swa_rope_theta rotary_emb_base", 10000.0),
    ("query_pre_attn_scalar", 16),
    ("num_experts num_local_experts n_routed_experts moe_num_experts", 4),
    ("num_experts_per_tok num_experts_per_token moe_topk moe_k", 2),
    ("num_shared_experts n_shared_experts num_shared_expert", 1),
    ("n_group topk_group num_expert_group first_k_dense_replace moe_layer_freq", 1),
    ("moe_intermediate_size moe_shared_expert_intermediate_size", 32),
    ("shared_expert_intermediate_size expert_ffn_hidden_size", 32),
    ("sliding_window sliding_window_size attention_window_size window_size", WINDOW),
    ("sliding_window_pattern", 2),
    ("index_head_dim", 16),
    ("index_n_heads", 4),
    ("index_topk", 128),
    ("mamba_d_state linear_key_head_dim linear_value_head_dim", 16),
    ("mamba_d_conv conv_kernel linear_conv_kernel_dim", 4),
    ("linear_num_value_heads", 4),
    ("linear_num_key_heads", 2),
)
"""Arguments that mean the same in every module that has them."""

_USUAL: Final[Mapping[str, Json]] = _named(
    ("attention_bias mlp_bias use_bias conv_bias use_qkv_bias mamba_proj_bias", False),
    ("tie_word_embeddings linear_allow_neg_eigval", False),
    ("norm_topk_prob use_qk_norm qk_norm use_conv_bias", True),
    ("routed_scaling_factor logits_scaling residual_multiplier scale_emb", 1.0),
    ("embedding_multiplier", 1.0),
    ("attention_multiplier", 0.25),
    ("partial_rotary_factor", 0.5),
    ("scale_depth", 1.4),
    ("mlp_only_layers", []),
    ("rope_scaling", None),
    ("topk_method", "noaux_tc"),
    ("scoring_func", "sigmoid"),
    ("decoder_sparse_step group_norm_size", 1),
    ("layer_group_size", 2),
    ("conv_L_cache", 3),
    ("dim_model_base", 64),
)
"""Arguments that some modules require; where there is a default, it is kept."""


def modules() -> list[str]:
    """All modules of `mlx_lm.models`, models or not."""
    return sorted(one.name for one in pkgutil.iter_modules(mlx_lm.models.__path__))


def rows() -> list[str]:
    """The zoo: every module that can be computed here, and the variants."""
    variants = [name for name in PATCHES if "+" in name]
    return [*(name for name in modules() if name not in PARTS | WITHOUT.keys()), *sorted(variants)]


def module_of(row: str) -> Architecture:
    """The module of a row: the name before a "+"."""
    name = row.partition("+")[0]
    return cast(Architecture, importlib.import_module(f"mlx_lm.models.{name}"))


def configuration(row: str) -> Configuration:
    """What config.json of a row has. Raises UnknownArgumentError."""
    name = row.partition("+")[0]
    patch = _patch(row)
    known: Configuration = {"model_type": name, "vocab_size": VOCAB}
    if name in TEXT_OF:
        inner, _, arguments = TEXT_OF[name].partition(":")
        given = cast(Configuration, patch.pop("text_config", {}))
        theirs = _patch(inner) if inner != name else {}
        text = {"model_type": inner} | _arguments(inner, arguments, theirs | given)
        return known | patch | {"text_config": text}
    return _arguments(name, "ModelArgs", patch) | known


def _patch(row: str) -> Configuration:
    """The patches of a row's module and of its variant, text_config joined with text_config."""
    found = dict(PATCHES.get(row.partition("+")[0], {}))
    for name, value in PATCHES[row].items() if "+" in row else ():
        before = found.get(name)
        joined = isinstance(before, dict) and isinstance(value, dict) and name == "text_config"
        found[name] = before | value if joined else value  # type: ignore[operator]
    return found


def _arguments(module: str, of: str, patch: Configuration) -> Configuration:
    """Values of the dataclass `of` of a module."""
    found: Configuration = {}
    for field in dataclasses.fields(getattr(module_of(module), of)):
        required = field.default is field.default_factory is dataclasses.MISSING
        if field.name in patch or field.name == "model_type":
            continue
        if field.name in _SIZES:
            found[field.name] = _SIZES[field.name]
        elif required and field.name in _USUAL:
            found[field.name] = _USUAL[field.name]
        elif required:
            raise UnknownArgumentError(f"mlx_lm.models.{module} needs {field.name}")
    return found | patch
