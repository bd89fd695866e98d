"""Model folders: a small random model with the tokenizer and template of one of `FORMATS`."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from tests.support.chat_templates import FORMATS, load_format
from tests.support.tiny_models import randomize

_CONTEXT = 1 << 16


def small_model(folder: Path) -> Path:
    """A model in `folder`, written once, whose template renders tools and thoughts."""
    return folder if folder.exists() else write_model(folder, "qwen3_coder")


def write_model(folder: Path, name: str, **sizes: int) -> Path:
    """Write a model with the chat format `name` to `folder`; deterministic. `sizes` are fields of
    its configuration."""
    folder.mkdir()
    tokenizer = load_format(FORMATS[name], folder)
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": max(tokenizer.inner.get_vocab().values()) + 1,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": _CONTEXT,
        "eos_token_id": min(tokenizer.eos_token_ids),
        **sizes,
    }
    model = llama.Model(llama.ModelArgs.from_dict(config))
    randomize(model)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
