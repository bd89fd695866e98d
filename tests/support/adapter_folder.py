"""Adapter folders as mlx-lm's trainer writes them, with random weights that change every answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model

_LEAVES = {"lora_a", "lora_b", "m"}
CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"


def write_adapter(
    folder: Path,
    base: Path,
    kind: str = "lora",
    *,
    rank: int = 4,
    seed: int = 1,
    keys: Sequence[str] | None = None,
) -> Path:
    """Write an adapter for the model in `base` to `folder`; deterministic."""
    folder.mkdir()
    parameters: dict[str, object] = {"rank": rank, "dropout": 0.1, "scale": 4.0, "keys": keys}
    config = {"fine_tune_type": kind, "num_layers": -1, "lora_parameters": parameters}
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    mx.save_safetensors(str(folder / WEIGHTS), _weights(base, kind, parameters, seed))
    return folder


def _weights(
    base: Path, kind: str, parameters: dict[str, object], seed: int
) -> dict[str, mx.array]:
    model = cast(Module, load_model(base)[0])
    names = set(_arrays(model))
    if kind == "full":
        trained = {one for one in names if ".mlp." in one}
    else:
        linear_to_lora_layers(model, -1, parameters, use_dora=kind == "dora")
        trained = {one for one in _arrays(model) if one.rpartition(".")[2] in _LEAVES}
    found = _arrays(model)
    keys = mx.random.split(mx.random.key(seed), len(trained))
    return {
        name: found[name] + 0.1 * mx.random.normal(found[name].shape, key=key)
        for name, key in zip(sorted(trained), keys, strict=True)
    }


def _arrays(model: Module) -> dict[str, mx.array]:
    parameters = cast("Callable[[], object]", model.parameters)()
    return dict(cast("list[tuple[str, mx.array]]", tree_flatten(parameters)))
