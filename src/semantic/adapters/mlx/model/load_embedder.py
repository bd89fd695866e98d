"""Embedding models: mlx-lm's decoders and mlx-embeddings' encoders."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal, Protocol, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from semantic.adapters.mlx import extra_to_install
from semantic.adapters.mlx.device import on_cpu
from semantic.adapters.mlx.kv_cache.model_spec import read_context
from semantic.adapters.mlx.model.description import read_config, read_details
from semantic.adapters.mlx.model.fingerprint import fingerprint, only_weights
from semantic.adapters.mlx.model.provider import LOAD_ERRORS, load_tokenizer, reading_model
from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
from semantic.domain.errors import NotFiniteError, SemanticError, UnsupportedModelError
from semantic.ports.embedding import Embedder, Vector
from semantic.ports.generation import at_once
from semantic.ports.serving import ModelDetails

Pooling = Literal["last", "mean", "first"]

_DECLARED: Final[dict[str, Pooling]] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
}
_FILE: Final = Path("1_Pooling", "config.json")
_MODULES: Final = "modules.json"
_KNOWN_MODULES: Final = frozenset({"Transformer", "Pooling", "Normalize"})
_MAX_BYTES: Final = 1 << 20


def read_pooling(folder: Path, default: Pooling) -> Pooling:
    """Return the pooling that `folder` declares, else `default`. Raises UnsupportedModelError."""
    modules = _read(folder / _MODULES)
    kinds = (
        [str(one.get("type", "")) for one in modules if isinstance(one, dict)]
        if isinstance(modules, list)
        else []
    )
    for kind in kinds:
        if kind.rpartition(".")[2] not in _KNOWN_MODULES:
            raise UnsupportedModelError(f"{folder / _MODULES}: cannot compute {kind!r:.80}")
    declared = _read(folder / _FILE)
    if not isinstance(declared, dict):
        return default
    modes = [
        name for name, value in declared.items() if name.startswith("pooling_") and value is True
    ]
    if len(modes) != 1 or modes[0] not in _DECLARED:
        known = ", ".join(_DECLARED)
        raise UnsupportedModelError(f"{folder / _FILE}: expected one of {known}, got {modes}")
    return _DECLARED[modes[0]]


def pool(states: mx.array, positions: mx.array, lengths: mx.array, pooling: Pooling) -> mx.array:
    """Return the sum of each row's pooled states, (rows, width).

    `states` is (rows, columns, width), `positions` is (1, columns) and `lengths` is (rows,).
    """
    ends = lengths[:, None]
    match pooling:
        case "last":
            taken = positions == ends - 1
        case "first":
            taken = (positions == 0) & (ends > 0)
        case "mean":
            taken = positions < ends
    return mx.sum(states.astype(mx.float32) * taken.astype(mx.float32)[:, :, None], axis=1)


def vectors_of(sums: mx.array) -> tuple[Vector, ...]:
    """Return the rows of `sums`, (rows, width), scaled to length 1. Raises NotFiniteError."""
    norms = mx.linalg.norm(sums, axis=-1, keepdims=True)
    rows = sums / mx.maximum(norms, 1e-12)
    if not mx.all(mx.isfinite(rows)).item():
        raise NotFiniteError
    return tuple(array("f", row) for row in cast("list[list[float]]", rows.tolist()))


def read_length(folder: Path) -> int | None:
    """Return the limit that `folder` declares on a text's tokens, or None if it declares none."""
    found = _read(folder / "sentence_bert_config.json")
    most = found.get("max_seq_length") if isinstance(found, dict) else None
    return most if type(most) is int and most > 0 else None


def _read(path: Path) -> object:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UnsupportedModelError(f"{path} is longer than {_MAX_BYTES} bytes")
        found: object = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"cannot read {path}: {error}") from error
    return found


CHUNK_TOKENS: Final = 512
"""The number of tokens per chunk, over all rows of a batch."""

_DECODER_PROBE: Final = (1, 2, 3)

States = Callable[..., mx.array]
"""Takes token ids, (rows, columns), and caches. Returns states, (rows, columns, width)."""


class _Embedder:
    def __init__(self, tokenizer: MLXTokenizer, model_id: str, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._end = tuple(tokenizer.encode("", add_special_tokens=True))[-1:]
        self.model_id = model_id
        self.max_tokens = max_tokens
        self.max_characters = max_tokens * tokenizer.longest_token

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=True))


class DecoderEmbedder(_Embedder):
    """An `Embedder` over a decoder."""

    def __init__(
        self,
        model: Module,
        tokenizer: MLXTokenizer,
        model_id: str,
        pooling: Pooling,
        max_tokens: int,
    ) -> None:
        """Raise UnsupportedModelError if the model's states are not accessible."""
        super().__init__(tokenizer, model_id, max_tokens)
        self._model = model
        self._states = states_of(model)
        self._pooling = pooling
        self.dimensions = self._states(mx.array([_DECODER_PROBE])).shape[-1]

    def shortened(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """See `Embedder.shortened`. Keeps the token that ends every text."""
        if len(tokens) <= self.max_tokens:
            return tokens
        ends = self._end if tokens[-1:] == self._end else ()
        return (*tokens[: self.max_tokens - len(ends)], *ends)

    def start(self, batch: Sequence[tuple[int, ...]]) -> DecoderRun:
        return DecoderRun(self._states, make_prompt_cache(self._model), batch, self._pooling)


class DecoderRun:
    """An `EmbeddingRun` of a decoder."""

    def __init__(
        self,
        states: States,
        caches: Sequence[object],
        batch: Sequence[tuple[int, ...]],
        pooling: Pooling,
    ) -> None:
        longest = max(map(len, batch))
        self._states = states
        self._caches = caches
        self._ids = [(*row, *(0,) * (longest - len(row))) for row in batch]
        self._lengths = mx.array([len(row) for row in batch])
        self._pooling = pooling
        self._n_columns = max(1, CHUNK_TOKENS // len(batch))
        self._longest = longest
        self._begin = 0
        self._sum: mx.array | None = None

    def step(self) -> tuple[Vector, ...] | None:
        end = min(self._begin + self._n_columns, self._longest)
        ids = mx.array([row[self._begin : end] for row in self._ids])
        states = self._states(ids, cache=self._caches)
        positions = mx.arange(self._begin, end)[None, :]
        taken = pool(states, positions, self._lengths, self._pooling)
        self._sum = taken if self._sum is None else self._sum + taken
        mx.eval(self._sum, [getattr(cache, "state", []) for cache in self._caches])
        self._begin = end
        return None if end < self._longest else vectors_of(self._sum)


def states_of(model: Module) -> States:
    """Return a function that computes the states after a model's last norm. Raises
    UnsupportedModelError if they are not accessible."""
    inner = cast("States | None", getattr(model, "model", None))
    head = cast("Callable[[mx.array], mx.array] | None", getattr(model, "lm_head", None))
    embedding = getattr(inner, "embed_tokens", None)
    if head is None and embedding is not None:
        head = embedding.as_linear
    if inner is None or head is None:
        raise UnsupportedModelError(f"{type(model).__module__} has no states below its logits")
    ids = mx.array([_DECODER_PROBE])
    logits = cast(States, model)(ids)
    if not mx.allclose(head(inner(ids)), logits, rtol=1e-3, atol=1e-3).item():
        raise UnsupportedModelError(
            f"{type(model).__module__} does not compute its logits from its last states"
        )
    return inner


ENCODERS: Final = frozenset({"bert", "xlm_roberta"})
"""Supported types of encoders, with `-` written as `_`."""

_PACKAGE: Final = "mlx_embeddings"
_STEP_TOKENS: Final = 1024
"""The number of tokens in the rows of one step, including padding."""
_PROBE: Final = (5, 6, 7)


class _Output(Protocol):
    last_hidden_state: mx.array


def load_encoder(folder: Path) -> Module:
    """Return the encoder in `folder`. Raises UnsupportedModelError if mlx-embeddings is missing."""
    if find_spec(_PACKAGE) is None:
        raise UnsupportedModelError(
            f"the model in {folder} is an encoder. {extra_to_install('embeddings')}"
        )
    load = cast("Callable[..., Module]", vars(import_module(f"{_PACKAGE}.utils"))["load_model"])
    with only_weights(folder) as exact:
        model = load(exact, path_to_repo=str(folder))
    if on_cpu():
        model.set_dtype(mx.float32)
    return model


class EncoderEmbedder(_Embedder):
    """An `Embedder` over an encoder."""

    def __init__(
        self,
        model: Module,
        tokenizer: MLXTokenizer,
        model_id: str,
        pooling: Pooling,
        max_tokens: int,
        padding: int,
    ) -> None:
        """`padding` is the token that fills shorter rows. Raises UnsupportedModelError if the model
        does not return its states."""
        super().__init__(tokenizer, model_id, max_tokens)
        self._model = cast("Callable[..., _Output]", model)
        self._pooling: Pooling = pooling
        self._padding = padding
        states = self._states((_PROBE,))[0]
        if states.ndim != len(("rows", "columns", "width")):
            raise UnsupportedModelError("expected an encoder that returns the states of its tokens")
        self.dimensions = states.shape[-1]

    def shortened(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """See `Embedder.shortened`. Keeps the token that ends every text."""
        if len(tokens) <= self.max_tokens:
            return tokens
        return (*tokens[: self.max_tokens - len(self._end)], *self._end)

    def start(self, batch: Sequence[tuple[int, ...]]) -> EncoderRun:
        return EncoderRun(self, batch)

    def vectors(self, rows: Sequence[tuple[int, ...]]) -> tuple[Vector, ...]:
        """Return the vectors of `rows`, computed together."""
        states, lengths = self._states(rows)
        positions = mx.arange(states.shape[1])[None, :]
        return vectors_of(pool(states, positions, lengths, self._pooling))

    def _states(self, rows: Sequence[tuple[int, ...]]) -> tuple[mx.array, mx.array]:
        longest = max(map(len, rows))
        ids = mx.array([(*row, *(self._padding,) * (longest - len(row))) for row in rows])
        lengths = mx.array([len(row) for row in rows])
        mask = (mx.arange(longest)[None, :] < lengths[:, None]).astype(mx.float32)
        return self._model(ids, attention_mask=mask).last_hidden_state, lengths


class EncoderRun:
    """An `EmbeddingRun` of an encoder, which computes some rows in each step."""

    def __init__(self, embedder: EncoderEmbedder, batch: Sequence[tuple[int, ...]]) -> None:
        self._embedder = embedder
        self._batch = batch
        self._n_rows = max(1, _STEP_TOKENS // max(map(len, batch)))
        self._done: list[Vector] = []

    def step(self) -> tuple[Vector, ...] | None:
        first = len(self._done)
        self._done += self._embedder.vectors(self._batch[first : first + self._n_rows])
        return None if len(self._done) < len(self._batch) else tuple(self._done)


_MOST_TOKENS: Final = 1 << 15
"""The maximum number of tokens in a text, even if a model declares more."""


def load_embedder(folder: Path) -> tuple[Embedder, ModelDetails]:
    """Load the embedding model in `folder`. Raises ModelNotFoundError if the model does not load.
    Raises UnsupportedModelError if the engine cannot compute its vectors."""
    kind = str(read_config(folder).get("model_type", "")).replace("-", "_")
    load = _encoder if kind in ENCODERS else _decoder
    try:
        return load(folder)
    except SemanticError:
        raise
    except LOAD_ERRORS as error:
        raise UnsupportedModelError(f"cannot compute the model in {folder}: {error}") from error


def _decoder(folder: Path) -> tuple[Embedder, ModelDetails]:
    pooling = read_pooling(folder, default="last")
    read = at_once(reading_model(folder))
    most = _least(read_length(folder), read_context(read.model))
    name = f"{read.name}:{pooling}"
    embedder = DecoderEmbedder(read.model, read.tokenizer, name, pooling, most)
    return embedder, read_details(read.model, read.name, folder)


def _encoder(folder: Path) -> tuple[Embedder, ModelDetails]:
    pooling = read_pooling(folder, default="mean")
    model = load_encoder(folder)
    config = read_config(folder)
    tokenizer, padding = load_tokenizer(str(folder)), config.get("pad_token_id")
    padding = padding if type(padding) is int else 0
    # XLM-RoBERTa counts positions from its padding token's id on.
    shift = padding + 1 if "roberta" in str(config.get("model_type")) else 0
    positions = config.get("max_position_embeddings")
    context = positions - shift if type(positions) is int else None
    most = _least(read_length(folder), context)
    model_id = f"{fingerprint(folder)}:{version('mlx-embeddings')}"
    embedder = EncoderEmbedder(model, tokenizer, f"{model_id}:{pooling}", pooling, most, padding)
    return embedder, read_details(model, model_id, folder)


def _least(*limits: int | None) -> int:
    return min(one for one in (*limits, _MOST_TOKENS) if one is not None)
