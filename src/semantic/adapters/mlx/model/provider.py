"""Model loading: finds a model's folder, loads it with mlx-lm and wraps it in a backend.

Loading works in slices, so that other models' steps can run between them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import cast
from weakref import WeakValueDictionary

import mlx.core as mx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as load_weights
from mlx_lm.utils import load_tokenizer as load_wrapped_tokenizer

from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.batch.padded_batch import PadsFor, can_pad, pads_here
from semantic.adapters.mlx.cuda import first_kernels, gated_delta
from semantic.adapters.mlx.cuda.depthwise import replace_depthwise
from semantic.adapters.mlx.device import on_cpu, on_cuda, read_device
from semantic.adapters.mlx.kernel_files import keep
from semantic.adapters.mlx.kv_cache.eight_bits import PACKED_BITS
from semantic.adapters.mlx.kv_cache.forms import (
    AttentionFor,
    choosing_contiguous,
    choosing_pages,
    find_kernels,
)
from semantic.adapters.mlx.kv_cache.model_spec import read_shapes, read_spec
from semantic.adapters.mlx.kv_cache.probe import LogitsProbe
from semantic.adapters.mlx.model.adapter import (
    CONFIG,
    adapter_files,
    apply_adapter,
    arrays_of,
    read_adapter,
)
from semantic.adapters.mlx.model.cache_quality import (
    LEAST_AGREEMENT,
    MOST_DIVERGENCE,
    finding_quality,
)
from semantic.adapters.mlx.model.fingerprint import (
    FileState,
    adapted_fingerprint,
    file_states,
    fingerprint,
    is_fingerprint,
    only_weights,
)
from semantic.adapters.mlx.model.joined import share
from semantic.adapters.mlx.model.lanes import choosing_lane
from semantic.adapters.mlx.model.short_steps import keep_long, shorten_here
from semantic.adapters.mlx.model.unusable_files import describe_gguf, find_problem, is_gguf
from semantic.adapters.mlx.prefill import first_chunks
from semantic.adapters.mlx.ranks.leading import shard_backend
from semantic.adapters.mlx.ranks.shard import Ranks, shard_model, shared_name
from semantic.adapters.mlx.sampling.grammar_compiler import GrammarCompiler
from semantic.adapters.mlx.text.tokenizer import HuggingFaceTokenizer, MLXTokenizer
from semantic.domain.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    SemanticError,
    UnsupportedModelError,
    WeightsTooLargeError,
)
from semantic.domain.value_objects import (
    BLOCK_TOKENS,
    ExactBatch,
    KvBits,
    ModelCacheSpec,
    SamplingParams,
    SequenceId,
)
from semantic.ports.generation import BatchBackend, Slices, at_once, done_at_once

EMBEDDED_MODEL = "semantic-tiny"
_MODELS = Path(__file__).parents[3] / "models"

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "*.txt"]
"""Patterns for a model's files on the hub."""

# The base class of the hub client's HTTP errors: httpx's or httpx2's, depending on the version.
_HTTP_ERROR = cast("type[Exception]", HfHubHTTPError.__bases__[0])

_SLICE_BYTES = 32 << 20
"""Bytes of weights to read between two steps of other models."""

# Errors that mlx-lm, transformers and the safetensors reader raise for unsuitable folders.
LOAD_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
    ImportError,
    ArithmeticError,
    AssertionError,
)


class _Reading:
    """Turn any loading error into ModelNotFoundError, with the file at fault or with `advice`. The
    tokenizers library raises bare `Exception`s and panics, and some modules of mlx-lm call exit."""

    def __init__(self, what: str, folder: Path, advice: str = "") -> None:
        self._folder = folder
        self._words = f"cannot load {what} in {folder}: "
        self._advice = advice

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if kind is None or issubclass(kind, SemanticError):
            return
        expected = kind is Exception or issubclass(kind, (*LOAD_ERRORS, SystemExit))
        if expected or kind.__module__ == "pyo3_runtime":
            reason = find_problem(self._folder) or f"{error}{self._advice}"
            raise ModelNotFoundError(f"{self._words}{reason}") from error


@dataclass(eq=False)
class Weights:
    """A model as it was read from files, with its tokenizer and its fingerprint."""

    model: Module
    tokenizer: MLXTokenizer
    name: str


_WEIGHTS = "_semantic_weights"
"""The attribute with which a model keeps its `Weights` alive."""


class MLXModelProvider:
    """A `ModelProviderPort` for mlx-lm's models. Models from the same files share their weights.

    If `any_chip`, model ids do not depend on this machine's chip.
    """

    def __init__(
        self,
        *,
        any_chip: bool = False,
        ranks: Callable[[], Ranks] | None = None,
        exact_batch: ExactBatch = "off",
        any_quality: bool = False,
    ) -> None:
        """`ranks` connects this process with the other ranks of a sharded model. If `any_quality`,
        caches of 8 bits may change a model's probabilities beyond their bounds."""
        self._exact_batch = exact_batch
        self._any_quality = any_quality
        self._any_chip = any_chip
        self._meet = ranks
        self.ranks: Ranks | None = None
        self._read: WeakValueDictionary[frozenset[tuple[str, FileState]], Weights] = (
            WeakValueDictionary()
        )

    def load_model(
        self, model_id: str = EMBEDDED_MODEL, adapter: Path | None = None, *, kv_bits: KvBits = 16
    ) -> tuple[MLXBackend, MLXTokenizer]:
        """See `ModelProviderPort.load_model`. On a CPU, weights become fp32."""
        return at_once(self.load_in_slices(model_id, adapter, kv_bits=kv_bits))

    def load_in_slices(
        self,
        model_id: str,
        adapter: Path | None = None,
        max_bytes: int | None = None,
        *,
        kv_bits: KvBits = 16,
    ) -> Slices[tuple[MLXBackend, MLXTokenizer]]:
        if type(kv_bits) is not int or kv_bits not in (PACKED_BITS, 16):
            raise InvalidRequestError(f"kv_bits must be 8 or 16, got {kv_bits!r:.20}")
        folder = find_folder(model_id)
        if self.ranks is None and self._meet is not None:
            self.ranks = self._meet()
        weights = yield from self._weights(folder, max_bytes)
        name, wrapped = weights.name, weights.tokenizer
        if adapter is None:
            model = share(weights.model)
        else:
            model, name = yield from adapting(weights.model, name, adapter)
        vars(model)[_WEIGHTS] = weights
        alike = self.ranks and self.ranks.links.computing("the choice of caches")
        try:
            with alike or nullcontext():
                backend = yield from wrapping(
                    model, name, wrapped, ranks=self.ranks, exact_batch=self._exact_batch,
                    kv_bits=kv_bits,
                )  # fmt: skip
                if kv_bits == PACKED_BITS and not self._any_quality:
                    yield from self._requiring_quality(model, name, wrapped)
            if self.ranks is None or not self.ranks.rank:  # the other ranks follow it
                yield from warming_up(backend, whole=not on_cpu())
        except SemanticError:
            raise
        except LOAD_ERRORS as error:
            raise UnsupportedModelError(
                f"cannot compute the model in {folder} on this device: {error} "
                f"(mlx-lm {version('mlx-lm')}; a newer version may compute it)"
            ) from error
        keep()
        return backend, wrapped

    def _requiring_quality(self, model: Module, name: str, tokenizer: MLXTokenizer) -> Slices[None]:
        agree = bool if self.ranks is None else self.ranks.all_found
        found = yield from finding_quality(model, name, tokenizer, agree)
        if not found.is_good:
            raise UnsupportedModelError(
                f"cannot use caches of 8 bits with this model: they give {found}, and may give "
                f"{MOST_DIVERGENCE} and {LEAST_AGREEMENT:.1%}; use 16 bits, or --kv-bits-force"
            )

    def _weights(self, folder: Path, max_bytes: int | None) -> Slices[Weights]:
        with _Reading("the model", folder):
            states = frozenset(file_states(folder).items())
        found = self._read.get(states)
        if found is None:
            shard = None if self.ranks is None else partial(shard_model, ranks=self.ranks)
            found = yield from reading_model(
                folder, any_chip=self._any_chip, max_bytes=max_bytes, shard=shard
            )
            if self.ranks is not None:
                files = fingerprint(folder, any_chip=True)
                found.name = shared_name(found.name, files, self.ranks)
            self._read[states] = found
        return found

    def extract_spec(self, model: BatchBackend) -> ModelCacheSpec:
        return model.cache_spec()


def reading_model(
    folder: Path,
    *,
    any_chip: bool = False,
    max_bytes: int | None = None,
    shard: Callable[[Module], None] | None = None,
) -> Slices[Weights]:
    """Read the model in `folder` in slices; on a CPU its weights become fp32.

    Raises WeightsTooLargeError if the weights exceed `max_bytes`. Raises ModelNotFoundError if the
    model does not load.
    """
    newer = "try a newer version or another conversion of the model"
    with (
        _Reading("the model", folder, f" (mlx-lm {version('mlx-lm')}; {newer})"),
        _unchanged(folder, lambda: file_states(folder)),
        ThreadPoolExecutor(2, thread_name_prefix="fingerprint") as beside,
    ):
        naming: Future[object] = beside.submit(fingerprint, folder, any_chip=any_chip)
        with only_weights(folder) as exact:
            read = load_weights(exact, lazy=True)
        model, config = cast("tuple[Module, Mapping[str, object]]", read)
        yield None
        reading: Future[object] = beside.submit(_tokenizer_in, folder, config.get("eos_token_id"))
        if shard is not None:
            shard(model)
        if on_cpu():
            model.set_dtype(mx.float32)
        if 2 * _require_room(model, folder, max_bytes) > read_device().memory_bytes:
            first_kernels.wait()  # memory may not hold these processes next to the weights
        yield from _evaluating(arrays_of(model).values())
        first_kernels.wait()
        yield reading
        tokenizer = cast(HuggingFaceTokenizer, reading.result())
        yield naming
        name = str(naming.result())
    return Weights(model, MLXTokenizer(tokenizer), name)


def adapting(model: Module, name: str, folder: Path) -> Slices[tuple[Module, str]]:
    """Return `model` with the adapter in `folder`, and its new id. Raises ModelNotFoundError."""
    files = adapter_files(folder)
    adapter = read_adapter(folder)
    with (
        _Reading("the adapter", folder),
        _unchanged(folder, lambda: {one.name: FileState.of(one) for one in files}),
        ThreadPoolExecutor(1, thread_name_prefix="fingerprint") as beside,
    ):
        naming: Future[object] = beside.submit(adapted_fingerprint, name, files)
        adapted = apply_adapter(model, adapter)
        yield from _evaluating(arrays_of(adapted).values())
        yield naming
        found = str(naming.result())
    keep_long(adapted)
    return adapted, found


@contextmanager
def _unchanged(folder: Path, states: Callable[[], Mapping[str, FileState]]) -> Iterator[None]:
    """Raise ModelNotFoundError if any file changes before the `with` block ends."""
    before = states()
    yield
    if changed := {name for name, _ in before.items() ^ states().items()}:
        raise ModelNotFoundError(
            f"cannot load {folder}: {', '.join(sorted(changed))} changed while it "
            "was loading; load it when its files are complete"
        )


def wrapping(
    model: Module,
    model_id: str | None = None,
    tokenizer: MLXTokenizer | None = None,
    *,
    attention: AttentionFor | None = find_kernels,
    pads: PadsFor = pads_here,
    decoding: Callable[[Module], Module] = shorten_here,
    ranks: Ranks | None = None,
    exact_batch: ExactBatch = "off",
    kv_bits: KvBits = 16,
) -> Slices[MLXBackend]:
    """Create a backend for an mlx-lm model in memory. Works in slices of a few steps.

    If `model_id` is None, the model gets a random id, so no stored cache matches it. Structured
    output needs the `tokenizer`. Raises InvalidRequestError if `model` is not an mlx-lm model, and
    UnsupportedModelError if its caches cannot have `kv_bits`.
    """
    spec = read_spec(model)
    if spec is None:
        raise InvalidRequestError(f"expected an mlx-lm model, got {type(model).__name__}")
    if on_cuda():
        gated_delta.install()
        replace_depthwise(model)
    shapes = read_shapes(model)
    agree = bool if ranks is None else ranks.all_found
    form = None
    if attention is not None:
        probe = LogitsProbe(model, decoding(model), agree)
        form = yield from choosing_pages(probe, spec, shapes, attention, kv_bits)
    if form is None:
        known = model_id if model_id is not None and is_fingerprint(model_id) else None
        probe = LogitsProbe(model, agree=agree)
        form = yield from choosing_contiguous(probe, spec, shapes, known, kv_bits)
    logits = model(mx.zeros((1, 1), dtype=mx.int32), cache=make_prompt_cache(model))
    model_id = model_id or f"unsaved:{uuid.uuid4().hex}"
    size = logits.shape[-1]
    grammars = None
    if tokenizer is not None:
        grammars = GrammarCompiler(tokenizer.inner, tokenizer.eos_token_ids, size)
    yield None
    if ranks is not None:
        return shard_backend(form, model_id, size, grammars, ranks)
    lane = yield from choosing_lane(form, exact_batch)
    padded = can_pad(spec, form.layers) and lane.problem and kv_bits != PACKED_BITS
    padding = pads(model) if padded else None
    backend = MLXBackend(form, model_id, size, grammars, padding, lane=lane)
    yield from first_chunks(model, form.layers, backend.best_chunk)
    return backend


wrap_model = done_at_once(wrapping)
"""Like `wrapping`, but in one call."""


def _require_room(model: Module, folder: Path, max_bytes: int | None) -> int:
    n_bytes = sum(weight.nbytes for weight in arrays_of(model).values())
    if max_bytes is not None and n_bytes > max_bytes:
        raise WeightsTooLargeError(
            f"the weights in {folder} take {n_bytes} bytes: expected at most {max_bytes}",
            n_bytes=n_bytes,
        )
    return n_bytes


def _evaluating(weights: Iterable[mx.array]) -> Slices[None]:
    group: list[mx.array] = []
    n_bytes = 0
    for weight in weights:
        group.append(weight)
        n_bytes += weight.nbytes
        if n_bytes >= _SLICE_BYTES:
            mx.eval(group)
            yield None
            group, n_bytes = [], 0
    mx.eval(group)
    yield None


def load_tokenizer(model_id: str) -> MLXTokenizer:
    """Return a model's tokenizer without loading its weights. Raises ModelNotFoundError."""
    folder = find_folder(model_id)
    with _Reading("the tokenizer", folder):
        return MLXTokenizer(_tokenizer_in(folder))


def _tokenizer_in(folder: Path, ends: object = None) -> HuggingFaceTokenizer:
    wrapped = load_wrapped_tokenizer(folder, eos_token_ids=ends)
    path = folder / "chat_template.json"
    if not wrapped.has_chat_template and path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        template = found.get("chat_template") if isinstance(found, dict) else None
        if not isinstance(template, str):
            raise ValueError(f"{path.name} must have a text chat_template")
        wrapped = load_wrapped_tokenizer(folder, {"chat_template": template}, eos_token_ids=ends)
    return cast(HuggingFaceTokenizer, wrapped)


def find_folder(model_id: str) -> Path:
    """Return the folder of the model `model_id`. Downloads the model if `model_id` is a hub id.
    Raises ModelNotFoundError."""
    return find_local(model_id) or _hub_folder(model_id)


def find_local(model_id: str) -> Path | None:
    """Return the folder of a local or embedded model; None for a hub id. Raises
    ModelNotFoundError."""
    if model_id == EMBEDDED_MODEL:
        return _MODELS / EMBEDDED_MODEL
    folder = Path(model_id).expanduser()
    if is_gguf(folder):
        raise ModelNotFoundError(describe_gguf(folder))
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            if (folder / CONFIG).is_file():
                words = f"{folder} is an adapter: expected --model BASE --adapter NAME={folder}"
                raise ModelNotFoundError(words)
            raise ModelNotFoundError(f"{folder} is not a model folder: it has no config.json")
        return folder
    if folder.exists() or model_id.count("/") != 1 or model_id.startswith((".", "/", "~")):
        raise ModelNotFoundError(
            f"no model folder {model_id!r}; expected a folder with config.json and "
            f"*.safetensors, a hub id like org/name, an alias or {EMBEDDED_MODEL!r}"
        )
    return None


def _hub_folder(hub_id: str) -> Path:
    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES, local_files_only=True))
    except HFValidationError as error:
        raise ModelNotFoundError(f"{hub_id!r} is not a hub id: {error}") from error
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, _HTTP_ERROR, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelNotFoundError(
            f"{hub_id!r} is neither a folder nor in the hub's cache, "
            f"and the hub did not deliver it: {reason}"
        ) from error


_ROWS = 9
"""The number of rows in the largest batch. Padded batches occur as it is not a power of two."""
_PROMPT = (1, 2, 3, 4)
_CHUNK = 640
"""The length, in tokens, of a prompt that is too long to be rows of a batch."""


def warming_up(backend: MLXBackend, *, whole: bool = True) -> Slices[None]:
    """Let some sequences join and leave a batch, so that a GPU compiles its kernels. Unless
    `whole`, run only one sequence."""
    *history, last = _PROMPT
    sequences: list[SequenceId] = []
    if whole:
        long = backend.open(_CHUNK)
        backend.prefill(long, [_PROMPT[0]] * _CHUNK)
        backend.close(long)
        yield None
    try:
        for _ in range(_ROWS if whole else 1):
            sequences.append(sequence := backend.open(BLOCK_TOKENS))
            backend.prefill(sequence, history)
            backend.start(sequence, last, history, SamplingParams(), 0)
            backend.decode()
            yield None
    finally:
        for sequence in sequences:
            backend.close(sequence)
            backend.decode()
