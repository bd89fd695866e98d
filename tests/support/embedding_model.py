"""A small embedding model in a folder: a decoder whose texts end with a token of their own, and the
files that declare how its states become vectors."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from semantic.adapters.mlx.model.provider import find_folder
from tests.support.tiny_models import randomize

END = "<|end|>"
WIDTH = 32
CONTEXT = 2048

_TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json")


def write_embedding_model(folder: Path, pooling: str | None = "pooling_mode_lasttoken") -> Path:
    """Write a model of the form of Qwen3-Embedding to `folder`; deterministic.

    Without `pooling` its files declare none.
    """
    folder.mkdir(parents=True)
    vocabulary = write_tokenizer(folder)
    config = {
        "model_type": "qwen3",
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocabulary,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": CONTEXT,
    }
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    randomize(model)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if pooling is not None:
        declare(folder, pooling)
    return folder


def write_tokenizer(folder: Path) -> int:
    """The package's tokenizer, which ends every text; returns the size of its vocabulary."""
    package = find_folder("semantic-tiny")
    for name in _TOKENIZER_FILES:
        if (package / name).exists():
            (folder / name).write_bytes((package / name).read_bytes())
    tokenizer = Tokenizer.from_file(str(package / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    tokenizer.post_processor = TemplateProcessing(
        single=f"$A {END}", pair=f"$A {END} $B {END}", special_tokens=[(END, end)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return int(tokenizer.get_vocab_size())


def declare(folder: Path, pooling: str) -> None:
    """Write the files of sentence-transformers with the mode `pooling`."""
    (folder / "1_Pooling").mkdir(exist_ok=True)
    declared = {"word_embedding_dimension": WIDTH, pooling: True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(declared), encoding="utf-8")
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [{"idx": i, "type": f"sentence_transformers.models.{k}"} for i, k in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
