"""Embeddings of encoders (BERT, XLM-RoBERTa) that the package mlx-embeddings loads.

Its models compute the states of a padded batch; the pooling is the one that a model's files
declare, since its own is the mean for every model. Depends on the names in that package alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Protocol, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from semantic.adapters.mlx.device import on_cpu
from semantic.adapters.mlx.embedding.pooling import Pooling, pool, vectors_of
from semantic.adapters.mlx.missing import extra_to_install
from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
from semantic.domain.errors import UnsupportedModelError
from semantic.ports.embedding import Vector

ENCODERS: Final = frozenset({"bert", "xlm_roberta"})
"""The types of models whose states are taken here, with `-` as `_`."""

_PACKAGE: Final = "mlx_embeddings"
_STEP_TOKENS: Final = 1024
"""Tokens of the rows of one step, with what pads them: what it may delay answers by."""
_PROBE: Final = (5, 6, 7)


class _Output(Protocol):
    last_hidden_state: mx.array


class _Encoder(Protocol):
    """The part of the package's models that is used here."""

    def __call__(self, input_ids: mx.array, *, attention_mask: mx.array) -> _Output: ...


class _Utils(Protocol):
    """The part of the package that is used here."""

    def load_model(self, model_path: Path, *, path_to_repo: str) -> Module: ...


def load_encoder(folder: Path) -> Module:
    """The encoder in `folder`. Raises UnsupportedModelError if the package is not installed."""
    if find_spec(_PACKAGE) is None:
        raise UnsupportedModelError(
            f"the model in {folder} is an encoder. {extra_to_install('embeddings')}"
        )
    utils = cast(_Utils, import_module(f"{_PACKAGE}.utils"))
    model = utils.load_model(folder, path_to_repo=str(folder))
    if on_cpu():
        model.set_dtype(mx.float32)
    return model


class EncoderEmbedder:
    """Implements `Embedder`."""

    def __init__(
        self,
        model: Module,
        tokenizer: MLXTokenizer,
        model_id: str,
        pooling: Pooling,
        max_tokens: int,
        padding: int,
    ) -> None:
        """`padding` is the token that fills shorter rows. Raises UnsupportedModelError for a model
        that does not return the states of its tokens."""
        self._model = cast(_Encoder, model)
        self._tokenizer = tokenizer
        self._pooling: Pooling = pooling
        self._padding = padding
        self._end = tuple(tokenizer.encode("", add_special_tokens=True))[-1:]
        self.model_id = model_id
        self.max_tokens = max_tokens
        self.max_characters = max_tokens * tokenizer.longest_token
        states = self._states((_PROBE,))[0]
        if states.ndim != len(("rows", "columns", "width")):
            raise UnsupportedModelError("expected an encoder that returns the states of its tokens")
        self.dimensions = states.shape[-1]

    def encode(self, text: str) -> tuple[int, ...]:
        """See `Embedder.encode`."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=True))

    def shortened(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """See `Embedder.shortened`. The token that ends every text stays."""
        if len(tokens) <= self.max_tokens:
            return tokens
        return (*tokens[: self.max_tokens - len(self._end)], *self._end)

    def start(self, batch: Sequence[tuple[int, ...]]) -> EncoderRun:
        """See `Embedder.start`."""
        return EncoderRun(self, batch)

    def vectors(self, rows: Sequence[tuple[int, ...]]) -> tuple[Vector, ...]:
        """The vectors of `rows`, computed together."""
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
    """Implements `EmbeddingRun`: some rows in each step."""

    def __init__(self, embedder: EncoderEmbedder, batch: Sequence[tuple[int, ...]]) -> None:
        self._embedder = embedder
        self._batch = batch
        self._n_rows = max(1, _STEP_TOKENS // max(map(len, batch)))
        self._done: list[Vector] = []

    def step(self) -> tuple[Vector, ...] | None:
        """See `EmbeddingRun.step`."""
        first = len(self._done)
        self._done += self._embedder.vectors(self._batch[first : first + self._n_rows])
        return None if len(self._done) < len(self._batch) else tuple(self._done)
