"""The model for server benchmarks: the embedded one in fp32, enlarged, and without EOS.

The added layers do not change the output, so it costs as much as a model of its size and its
answers are still those of a trained model: what a client sends back is tokenized as it was
generated. The EOS logit is kept at most at the mean, so each answer has the maximum length.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
import mlx.core as mx

from semantic.adapters.mlx.model.provider import find_folder

LAYERS, INTERMEDIATE, CONTEXT = 6, 1536, 16384
_SPECIAL = 4
"""The first ids: the end of a message, and the three roles."""
_COPIED = ("chat_template.jinja", "generation_config.json", "tokenizer.json")
_PLAIN = (
    "the fox sleeps near the old river and the small dog sings under a red tree but then one blue "
    "bird walks behind the new house where Ada and Ben like bread and milk while Ivy wants tea"
)


def words(n: int, seed: str) -> str:
    """A text of `n` words, 1.4 tokens each; another seed, another text from its start on."""
    draw = random.Random(seed)
    known = _PLAIN.split()
    return " ".join(draw.choice(known) for _ in range(n))


def write_model(folder: Path, layers: int = LAYERS) -> int:
    """Write the model to a new `folder`; returns how many parameters it has."""
    source = find_folder("semantic-tiny")
    folder.mkdir(parents=True)
    for name in _COPIED:
        shutil.copy(source / name, folder)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    had = config["num_hidden_layers"]
    config |= {
        "num_hidden_layers": layers,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokenizer["model_max_length"] = CONTEXT
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    weights = _wider(mx.load(str(source / "model.safetensors")))
    for layer in range(had, layers):
        weights |= _idle_layer(weights, layer)
    embeddings = weights["model.embed_tokens.weight"]
    usual = embeddings[_SPECIAL:]
    never = mx.repeat(usual.mean(axis=0, keepdims=True), _SPECIAL, axis=0)
    weights["lm_head.weight"] = mx.concatenate([never, usual])
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return sum(array.size for array in weights.values())


def _wider(loaded: object) -> dict[str, mx.array]:
    """The weights in fp32, their MLPs widened with zeros."""
    if not isinstance(loaded, dict):
        raise TypeError(f"expected named weights, got {type(loaded).__name__}")
    weights: dict[str, mx.array] = {}
    for name, array in loaded.items():
        weights[name] = array.astype(mx.float32)
        if ".mlp." in name:
            rows, columns = array.shape
            wide = [(0, 0), (0, INTERMEDIATE - columns)]
            if "down_proj" not in name:
                wide = [(0, INTERMEDIATE - rows), (0, 0)]
            weights[name] = mx.pad(weights[name], wide)
    return weights


def _idle_layer(weights: dict[str, mx.array], layer: int) -> dict[str, mx.array]:
    """The first layer again, with outputs of zero."""
    first, own = "model.layers.0.", f"model.layers.{layer}."
    found: dict[str, mx.array] = {}
    for name, array in weights.items():
        if name.startswith(first):
            silent = "o_proj" in name or "down_proj" in name
            found[own + name.removeprefix(first)] = mx.zeros_like(array) if silent else array
    return found
