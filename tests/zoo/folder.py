"""Writes a row of the zoo as a model folder: its configuration, random weights, a tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step

from semantic.adapters.mlx.model.provider import find_folder
from tests.support.tiny_models import randomize
from tests.zoo.configurations import configuration, module_of

_TOKENIZER = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")
_SEED = 7
_WIDE = {"head_dim": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


def write_folder(row: str, folder: Path, *, wide: bool = False) -> Path:
    """Write the model of a row to a new `folder`; the same bytes each time. See `drawn`."""
    folder.mkdir(parents=True)
    source = find_folder("semantic-tiny")
    for name in _TOKENIZER:
        shutil.copy(source / name, folder)
    # The embedded model's end of a text: that of its tokenizer.
    known = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config = configuration(row) | {"eos_token_id": known["eos_token_id"]}
    if wide:
        config = _widened(config)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    parameters = cast("Callable[[], object]", drawn(row, wide=wide).parameters)()
    weights = dict(cast(list[tuple[str, mx.array]], tree_flatten(parameters)))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def drawn(row: str, *, wide: bool = False) -> Module:
    """The model of a row as mlx-lm builds it, with random weights; with heads as `wide` as a GPU's
    kernels for pages need."""
    architecture = module_of(row)
    mx.random.seed(_SEED)
    config = configuration(row)
    if wide:
        config = _widened(config)
    model = architecture.Model(architecture.ModelArgs.from_dict(config))
    randomize(model)
    return model


def _widened(config: Mapping[str, object]) -> dict[str, object]:
    return {
        name: _widened(value) if isinstance(value, dict) else _WIDE.get(name, value)
        for name, value in config.items()
    }


def alone(row: str) -> bool:
    """Whether mlx-lm generates with a row's model here; a crash of mlx-lm ends the process."""
    steps = generate_step(mx.arange(4, 704), drawn(row), max_tokens=2)
    return len(list(steps)) == 2
