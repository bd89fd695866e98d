"""Adapters that mlx-lm trained for a model: low-rank layers (LoRA, DoRA), or replaced weights.

`tests/integration/test_adapters.py` fails if mlx-lm changes how it stores or applies them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from safetensors import SafetensorError, safe_open

from semantic.adapters.mlx.device import on_cpu
from semantic.adapters.mlx.model.joined import share
from semantic.domain.errors import ModelNotFoundError

CONFIG = "adapter_config.json"
WEIGHTS = "adapters.safetensors"

Kind = Literal["lora", "dora", "full"]

_MAX_CONFIG_BYTES = 1 << 20
_LARGEST_NUMBER = 1e30
"""The largest number accepted in a configuration."""
_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_HALF = (mx.float16, mx.bfloat16)
_ELSEWHERE = {
    "adapter_model.safetensors": "an adapter of PEFT",
    "adapter_model.bin": "an adapter of PEFT, pickled",
    "adapters.npz": "an adapter of an old mlx-lm",
}


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter with valid files. Its low-rank layers are the model's last `layers` layers, or all
    layers if `layers` is negative. `n_bytes` is the adapter's size in memory."""

    folder: Path
    kind: Kind
    layers: int
    parameters: Mapping[str, object]
    shapes: Mapping[str, tuple[int, ...]]
    n_bytes: int

    @property
    def words(self) -> str:
        """A description of the adapter, such as "LoRA of rank 8"."""
        if self.kind == "full":
            return f"{len(self.shapes)} weights of its own"
        name = {"lora": "LoRA", "dora": "DoRA"}[self.kind]
        return f"{name} of rank {self.parameters['rank']}"


def adapter_files(folder: Path) -> tuple[Path, Path]:
    return folder / CONFIG, folder / WEIGHTS


def read_adapter(folder: Path) -> Adapter:
    """Return the adapter in `folder`, reading only headers. Raises ModelNotFoundError if there is
    no adapter."""
    _require_files(folder)
    config = _Config(folder / CONFIG)
    kind = config.kind()
    shapes, n_bytes = _read_headers(folder / WEIGHTS)
    if kind == "full":
        return Adapter(folder, kind, 0, {}, shapes, n_bytes)
    return Adapter(folder, kind, config.layers(), config.parameters(), shapes, n_bytes)


def apply_adapter(model: Module, adapter: Adapter) -> Module:
    """Return a copy of `model` with the adapter applied, sharing unchanged arrays. Raises
    ModelNotFoundError if the adapter is for another model."""
    replaced = {name.rpartition(".")[0] for name in adapter.shapes}
    adapted = share(model, replaced if adapter.kind == "full" else ())
    base = arrays_of(adapted)
    if adapter.kind == "full":
        expected = {name: base[name] for name in adapter.shapes if name in base}
    else:
        _add_layers(adapted, adapter)
        known = {id(array) for array in base.values()}
        found = arrays_of(adapted)
        expected = {name: array for name, array in found.items() if id(array) not in known}
    _require_fits(adapter, expected)
    load = cast("Callable[[str], dict[str, mx.array]]", mx.load)
    weights = load(str(adapter.folder / WEIGHTS))
    wide = on_cpu()  # like the model's own weights
    given = [
        (name, array.astype(mx.float32) if wide and array.dtype in _HALF else array)
        for name, array in weights.items()
    ]
    cast("Callable[..., object]", adapted.load_weights)(given, strict=False)
    cast("Callable[[], object]", adapted.eval)()  # switches dropout off
    return adapted


def arrays_of(model: Module) -> dict[str, mx.array]:
    """Return all arrays of a model, by their paths."""
    parameters = cast("Callable[[], object]", model.parameters)()
    return dict(cast("list[tuple[str, mx.array]]", tree_flatten(parameters)))


class _Config:
    """Checks an adapter's configuration before mlx-lm gets it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            if path.stat().st_size > _MAX_CONFIG_BYTES:
                raise self._wrong(f"at most {_MAX_CONFIG_BYTES} bytes", "more")
            fields: object = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ModelNotFoundError(f"cannot read {path}: {error}") from error
        if not isinstance(fields, dict):
            raise self._wrong("a JSON object", fields)
        self._fields: dict[str, object] = fields

    def kind(self) -> Kind:
        given = self._fields.get("fine_tune_type", "lora")
        for one in cast("tuple[Kind, ...]", get_args(Kind)):
            if given == one:
                return one
        raise self._wrong("fine_tune_type to be lora, dora or full", given)

    def layers(self) -> int:
        """Return how many of the last layers have low-rank layers; negative for all layers."""
        given = self._fields.get("num_layers")
        if type(given) is not int:
            raise self._wrong("num_layers to be an integer", given)
        return given

    def parameters(self) -> dict[str, object]:
        given = self._fields.get("lora_parameters")
        if not isinstance(given, dict):
            raise self._wrong("lora_parameters to have rank, scale and dropout", given)
        rank, keys = given.get("rank"), given.get("keys")
        if type(rank) is not int or rank < 1:
            raise self._wrong("lora_parameters.rank to be at least 1", rank)
        scale = self._number(given.get("scale"), "lora_parameters.scale to be finite")
        dropout = self._number(given.get("dropout", 0.0), "lora_parameters.dropout to be below 1")
        if not 0 <= dropout < 1:
            raise self._wrong("lora_parameters.dropout to be below 1", dropout)
        if keys is not None and not _are_texts(keys):
            raise self._wrong("lora_parameters.keys to be names of layers", keys)
        return {"rank": rank, "scale": scale, "dropout": dropout, "keys": keys}

    def _number(self, given: object, expected: str) -> float:
        if isinstance(given, int | float) and abs(given) <= _LARGEST_NUMBER:
            return float(given)
        raise self._wrong(expected, given)

    def _wrong(self, expected: str, given: object) -> ModelNotFoundError:
        return ModelNotFoundError(f"{self._path}: expected {expected}, got {str(given)[:100]!r}")


def _are_texts(given: object) -> bool:
    return isinstance(given, list) and all(isinstance(one, str) for one in given)


def _require_files(folder: Path) -> None:
    missing = [path.name for path in adapter_files(folder) if not path.is_file()]
    if not missing:
        return
    if not folder.is_dir():
        raise ModelNotFoundError(f"no adapter folder {str(folder)!r}")
    if CONFIG in missing and (folder / "config.json").is_file():
        raise ModelNotFoundError(f"{folder} is a whole model: serve it with --model {folder}")
    kinds = [words for name, words in _ELSEWHERE.items() if (folder / name).is_file()]
    found = f"{folder} is {kinds[0]}" if kinds else f"{folder} has no {missing[0]}"
    raise ModelNotFoundError(f"{found}: expected an adapter of mlx-lm, {CONFIG} and {WEIGHTS}")


def _read_headers(path: Path) -> tuple[dict[str, tuple[int, ...]], int]:
    """Return the shapes of all arrays, and their total bytes. Raises ModelNotFoundError."""
    shapes: dict[str, tuple[int, ...]] = {}
    n_bytes = 0
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                part = file.get_slice(name)
                shapes[name], kind = tuple(part.get_shape()), str(part.get_dtype())
                if kind not in _BYTES:
                    raise ModelNotFoundError(f"{path}: {name[:100]} is {kind}, expected floats")
                n_bytes += math.prod(shapes[name]) * (4 if on_cpu() else _BYTES[kind])
    except (SafetensorError, OSError) as error:
        raise ModelNotFoundError(f"cannot read {path}: {error}") from error
    if not shapes:
        raise ModelNotFoundError(f"{path} has no arrays")
    return shapes, n_bytes


def _add_layers(model: Module, adapter: Adapter) -> None:
    from mlx_lm.tuner.utils import linear_to_lora_layers  # imports training code: only when needed

    use_dora = adapter.kind == "dora"
    try:
        linear_to_lora_layers(model, adapter.layers, dict(adapter.parameters), use_dora=use_dora)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        words = f"the adapter in {adapter.folder} does not fit the model: {error}"
        raise ModelNotFoundError(words) from error


def _require_fits(adapter: Adapter, expected: Mapping[str, mx.array]) -> None:
    shapes = {name: tuple(array.shape) for name, array in expected.items()}
    wrong = sorted(
        name
        for name in adapter.shapes.keys() | shapes.keys()
        if adapter.shapes.get(name) != shapes.get(name)
    )
    if not wrong:
        return
    name = wrong[0]
    words = [_shape_words(found.get(name)) for found in (shapes, adapter.shapes)]
    raise ModelNotFoundError(
        f"the adapter in {adapter.folder} is not one of this model: {len(wrong)} of "
        f"{len(adapter.shapes.keys() | shapes.keys())} arrays differ; {name[:200]}: expected "
        f"{words[0]}, got {words[1]}"
    )


def _shape_words(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else f"the shape {shape}"
