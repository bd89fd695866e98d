"""What a loaded model is: its architecture, its size and how its weights are stored.

Knows mlx-lm's count of parameters and the names of its configurations; not who asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.utils import get_total_parameters, load_config
from safetensors import safe_open

from semantic.adapters.mlx.device import on_cpu
from semantic.adapters.mlx.model.fingerprint import file_states, weight_files
from semantic.adapters.mlx.model.provider import read_context
from semantic.ports.serving import ModelDetails

_HASH = "sha256:"


def read_details(model: Module, model_id: str, folder: Path) -> ModelDetails:
    """The details of `model`, which was loaded from `folder` and has the fingerprint `model_id`;
    not those of its chat template.

    Raises OSError if the folder is not there any more.
    """
    config = load_config(folder)
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else config
    files = file_states(folder)
    weights = [state for name, state in files.items() if name.endswith(".safetensors")]
    return ModelDetails(
        architecture=str(config.get("model_type", "")),
        parameters=get_total_parameters(model),
        stored_as=_stored_as(config.get("quantization") or text.get("quantization"), folder),
        digest=model_id.removeprefix(_HASH),
        file_bytes=sum(state.size for state in weights),
        memory_bytes=sum(array.nbytes for array in _arrays(model)),
        on_gpu=not on_cpu(),
        modified=max(state.mtime_ns for state in files.values()) / 1e9,
        trained_tokens=read_context(model),
        layers=_whole(text.get("num_hidden_layers")),
        width=_whole(text.get("hidden_size")),
    )


def _stored_as(quantization: object, folder: Path) -> str:
    if not isinstance(quantization, Mapping):
        kinds = Counter(_kinds_of_weights(folder))
        return kinds.most_common(1)[0][0] if kinds else ""
    mode = quantization.get("mode", "affine")
    return f"{quantization.get('bits')}bit" if mode == "affine" else str(mode)


def _kinds_of_weights(folder: Path) -> Iterator[str]:
    """The types of all weights in `folder`; only headers are read."""
    for path in weight_files(folder):
        with safe_open(path, framework="numpy") as weights:
            for name in weights.keys():  # noqa: SIM118 - it is no mapping
                yield str(weights.get_slice(name).get_dtype()).lower()


def _arrays(model: Module) -> Iterator[mx.array]:
    tree = cast("Callable[[], object]", model.parameters)()
    for _, array in cast("list[tuple[str, mx.array]]", tree_flatten(tree)):
        yield array


def _whole(value: object) -> int | None:
    return value if type(value) is int else None
