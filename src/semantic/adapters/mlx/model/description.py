"""Describes models before loading: their caches, their size and the form of their weights."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.utils import _get_classes as classes_of
from mlx_lm.utils import get_total_parameters, load_config
from safetensors import safe_open

from semantic.adapters.mlx.device import on_cpu
from semantic.adapters.mlx.kv_cache.model_spec import read_context, read_spec
from semantic.adapters.mlx.model.adapter import Adapter, apply_adapter, arrays_of, read_adapter
from semantic.adapters.mlx.model.fingerprint import file_states, weight_files
from semantic.adapters.mlx.model.provider import LOAD_ERRORS
from semantic.domain.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    SemanticError,
    UnsupportedModelError,
)
from semantic.domain.value_objects import LayerKind, LayerSpec, ModelCacheSpec, SamplingParams
from semantic.ports.serving import ModelDetails

_CONFIG = "config.json"
_GENERATION_CONFIG = "generation_config.json"
_MAX_CONFIG_BYTES = 1 << 22
_MAX_LAYERS = 2048
"""The maximum number of layers. Configurations are untrusted, and building layers is slow."""

_MAX_VOCABULARY = 1 << 31

_WIDTHS = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
_HALF = (mx.float16, mx.bfloat16)

CacheKind = Literal["full", "latent", "window", "state", "compressed"]


@dataclass(frozen=True, slots=True)
class CacheForm:
    """The form of some layers' caches, and the number of these layers. `window` is in tokens."""

    kind: CacheKind
    layers: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A model's size, caches and context on this device. `weights_bytes` is the weights' size."""

    model_type: str
    spec: ModelCacheSpec
    forms: tuple[CacheForm, ...]
    weights_bytes: int
    context_tokens: int | None
    vocab_size: int = _MAX_VOCABULARY
    adapter: Adapter | None = None


def describe(
    folder: Path, file_bytes: int | None = None, adapter: Path | None = None
) -> ModelDescription:
    """Describe the model in `folder`, with the adapter in the folder `adapter` if given.

    If `file_bytes` gives the size of the weight files, these files may be missing. Raises
    ModelNotFoundError for unusable files and UnsupportedModelError for an unsupported model.
    """
    config = read_config(folder)
    found = None if adapter is None else read_adapter(adapter)
    try:
        weights = _read_headers(folder)
        dtype = _dtype(config, weights)
        architecture, arguments = classes_of(config)
        model = cast(Module, architecture(arguments.from_dict(config)))
        model.set_dtype(mx.float32 if on_cpu() else dtype)
        spec = read_spec(model)
        if found is not None:
            apply_adapter(model, found)
    except SemanticError:
        raise
    except (*LOAD_ERRORS, SystemExit) as error:
        raise UnsupportedModelError(f"cannot build the model of {folder}: {error}") from error
    if spec is None:
        raise UnsupportedModelError(f"mlx-lm does not support the model in {folder}")
    return ModelDescription(
        str(config.get("model_type", "")),
        spec,
        _forms(spec, _text_value(config, "kv_lora_rank")),
        _bytes_of(weights) if file_bytes is None else _estimated(config, dtype, file_bytes),
        read_context(model),
        _vocabulary(config),
        found,
    )


def weights_bytes(folder: Path) -> int:
    """Return the bytes that the weights in `folder` take once loaded; 0 if unknown."""
    try:
        return _bytes_of(_read_headers(folder))
    except (*LOAD_ERRORS, OSError):
        return 0


def _vocabulary(config: Mapping[str, object]) -> int:
    found = _text_value(config, "vocab_size")
    return found if isinstance(found, int) and 0 < found < _MAX_VOCABULARY else _MAX_VOCABULARY


def read_config(folder: Path) -> dict[str, object]:
    """Return the configuration in `folder`. Raises ModelNotFoundError for an unreadable file."""
    path = folder / _CONFIG
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ModelNotFoundError(f"{path} is longer than {_MAX_CONFIG_BYTES} bytes")
        config: object = load_config(folder)
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"{folder} is not a model folder: it has no {_CONFIG}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelNotFoundError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise ModelNotFoundError(f"{path} must be a JSON object")
    if "model_type" not in config:
        raise ModelNotFoundError(f"{path} has no model_type: it is not a language model of mlx-lm")
    if "model_file" in config:
        raise UnsupportedModelError(
            f"{path} names a program of the model's own, which the engine does not run"
        )
    for name, value in (*config.items(), *_text_config(config).items()):
        if "layer" in name and isinstance(value, int) and value > _MAX_LAYERS:
            raise UnsupportedModelError(
                f"{path}: {name} must be at most {_MAX_LAYERS}, got {value}"
            )
    return config


def _read_headers(folder: Path) -> list[mx.array]:
    load = cast("Callable[[str], dict[str, mx.array]]", mx.load)
    return [weight for file in weight_files(folder) for weight in load(str(file)).values()]


def _dtype(config: Mapping[str, object], weights: list[mx.array]) -> mx.Dtype:
    counts = Counter(w.dtype for w in weights if mx.issubdtype(w.dtype, mx.floating))
    if counts:
        return counts.most_common(1)[0][0]
    named = _text_value(config, "dtype") or _text_value(config, "torch_dtype")
    return _WIDTHS.get(str(named).removeprefix("torch."), mx.bfloat16)


def _bytes_of(weights: list[mx.array]) -> int:
    """Return the bytes that the weights take once loaded. On a CPU 16-bit weights become fp32."""
    wide = on_cpu()
    return sum(w.size * 4 if wide and w.dtype in _HALF else w.nbytes for w in weights)


def _estimated(config: Mapping[str, object], dtype: mx.Dtype, file_bytes: int) -> int:
    quantized = any(_text_value(config, n) for n in ("quantization", "quantization_config"))
    return file_bytes * 2 if on_cpu() and dtype in _HALF and not quantized else file_bytes


def _forms(spec: ModelCacheSpec, rank: object) -> tuple[CacheForm, ...]:
    """Return the forms of all layers, most frequent first. `rank` is the width of a latent."""
    counts = Counter((_kind(layer, rank), layer.window) for layer in spec.layers)
    return tuple(CacheForm(kind, n, window) for (kind, window), n in counts.most_common())


def _kind(layer: LayerSpec, rank: object) -> CacheKind:
    if layer.kind is LayerKind.STATE:
        return "compressed" if layer.state_grows else "state"
    if layer.kind is LayerKind.SLIDING_WINDOW:
        return "window"
    return "latent" if rank in (layer.k_head_dim, layer.v_head_dim) else "full"


def _text_value(config: Mapping[str, object], name: str) -> object:
    return config.get(name) or _text_config(config).get(name)


def _text_config(config: Mapping[str, object]) -> Mapping[str, object]:
    found = config.get("text_config")
    return found if isinstance(found, dict) else {}


_HASH = "sha256:"


def read_details(model: Module, model_id: str, folder: Path) -> ModelDetails:
    """Return all details of `model` except the chat template's. Raises OSError without `folder`."""
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
        memory_bytes=sum(array.nbytes for array in arrays_of(model).values()),
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
    for path in weight_files(folder):
        with safe_open(path, framework="numpy") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a mapping
                yield str(weights.get_slice(name).get_dtype()).lower()


def _whole(value: object) -> int | None:
    return value if type(value) is int else None


def read_sampling(folder: Path) -> SamplingParams:
    """Return the default sampling in `generation_config.json`, or greedy if it is unusable."""
    try:
        given = json.loads((folder / _GENERATION_CONFIG).read_text())
    except (OSError, ValueError, RecursionError):
        return SamplingParams()
    if not isinstance(given, dict) or given.get("do_sample") is False:
        return SamplingParams()
    temperature, top_p, top_k = (given.get(name) for name in ("temperature", "top_p", "top_k"))
    if not isinstance(temperature, int | float):
        return SamplingParams()
    try:
        return SamplingParams(
            temperature=temperature,
            top_p=top_p if isinstance(top_p, int | float) else 1.0,
            top_k=top_k if isinstance(top_k, int) else 0,
        )
    except InvalidRequestError:
        return SamplingParams()
