"""Finds a model, loads it with mlx-lm and wraps it for the engine.

Knows folders, the hub's cache and how a model is named; not what it is used for.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import cast

import mlx.core as mx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load

from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.batch.calibration import CalibrationFor, calibrate_here, choose_batching
from semantic.adapters.mlx.kv_cache.forms import (
    AttentionFor,
    choose_pages,
    find_kernels,
    in_buffers,
)
from semantic.adapters.mlx.kv_cache.probe import choose_layers
from semantic.adapters.mlx.kv_cache.spec_reader import read_shapes, read_spec
from semantic.adapters.mlx.model.fingerprint import fingerprint
from semantic.adapters.mlx.sampling.grammar import Grammars
from semantic.adapters.mlx.text.tokenizer import HuggingFaceTokenizer, MLXTokenizer
from semantic.domain.errors import InvalidRequestError, ModelNotFoundError
from semantic.domain.value_objects import ModelCacheSpec
from semantic.ports.outbound import BatchBackend

EMBEDDED_MODEL = "semantic-tiny"
_MODELS = Path(__file__).parents[3] / "models"

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "*.txt"]

# What mlx-lm, transformers and the safetensors reader raise for a folder that is not a model.
_BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)


class MLXModelProvider:
    """Implements `ModelProviderPort`."""

    def load_model(self, model_id: str = EMBEDDED_MODEL) -> tuple[MLXBackend, MLXTokenizer]:
        """See `ModelProviderPort.load_model`.

        On a CPU the weights become fp32, the only type that is fast there.
        """
        folder = find_folder(model_id)
        try:
            loaded = load(str(folder))
            name = fingerprint(folder)
        except _BROKEN as error:
            raise ModelNotFoundError(f"cannot load the model in {folder}: {error}") from error
        model, tokenizer = cast(Module, loaded[0]), cast(HuggingFaceTokenizer, loaded[1])
        if mx.default_device() == mx.Device(mx.cpu):
            model.set_dtype(mx.float32)
        wrapped = MLXTokenizer(tokenizer)
        return wrap_model(model, name, wrapped), wrapped

    def extract_spec(self, model: BatchBackend) -> ModelCacheSpec:
        """See `ModelProviderPort.extract_spec`."""
        return model.cache_spec()


def wrap_model(
    model: Module,
    model_id: str | None = None,
    tokenizer: MLXTokenizer | None = None,
    *,
    attention: AttentionFor | None = find_kernels,
    calibration: CalibrationFor = calibrate_here,
) -> MLXBackend:
    """A backend for an mlx-lm model that is already in memory.

    Without a `model_id` it gets one of its own: no other model's cache will ever fit it. Answers
    can be held to a grammar only with the `tokenizer`. `attention` finds what computes over pages
    of a kind on this device; without it, or where it finds nothing, caches are not in pages. Then
    `calibration` finds which batches decode padded.
    """
    spec = read_spec(model)
    if spec is None:
        raise InvalidRequestError(f"expected an mlx-lm model, got {type(model).__name__}")
    shapes = read_shapes(model)
    forms = attention and choose_pages(model, spec, shapes, attention)
    if forms is None:
        forms = in_buffers(model, spec, shapes, choose_layers(model, spec, shapes))
    logits = model(mx.zeros((1, 1), dtype=mx.int32), cache=make_prompt_cache(model))
    model_id = model_id or f"unsaved:{uuid.uuid4().hex}"
    size = logits.shape[-1]
    grammars = None
    if tokenizer is not None:
        grammars = Grammars(tokenizer.inner, tokenizer.eos_token_ids, size)
    chosen = choose_batching(model, spec, forms.layers, calibration)
    return MLXBackend(model, model_id, spec, forms, size, grammars, chosen)


def find_folder(model_id: str) -> Path:
    """The folder that `model_id` names: the embedded model, a path, or a hub id.

    A hub id is looked up in the hub's local cache and downloaded only when it is not there and
    HF_HUB_OFFLINE is not set. Raises ModelNotFoundError.
    """
    if model_id == EMBEDDED_MODEL:
        return _MODELS / EMBEDDED_MODEL
    folder = Path(model_id).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelNotFoundError(f"{folder} is no model folder: it has no config.json")
        return folder
    if folder.exists() or model_id.count("/") != 1 or model_id.startswith((".", "/", "~")):
        raise ModelNotFoundError(
            f"no model folder {model_id!r}; expected a folder with config.json and "
            f"*.safetensors, a hub id like org/name, or {EMBEDDED_MODEL!r}"
        )
    return _hub_folder(model_id)


def _hub_folder(hub_id: str) -> Path:
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES, local_files_only=True))
    except HFValidationError as error:
        raise ModelNotFoundError(f"{hub_id!r} is not a hub id: {error}") from error
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelNotFoundError(
            f"{hub_id!r} is neither a folder nor in the hub's cache, "
            f"and it could not be downloaded: {reason}"
        ) from error
