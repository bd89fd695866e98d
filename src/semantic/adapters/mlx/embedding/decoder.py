"""Embeddings of decoders that mlx-lm loads, such as Qwen3-Embedding: the states below their logits.

A batch is padded at its right end, which causal attention never looks at, and computed in chunks of
its columns over mlx-lm's own caches. Depends on the names of mlx-lm's models alone, and a model
whose logits are not those of the states that it would take is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from semantic.adapters.mlx.embedding.pooling import Pooling, pool, vectors_of
from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
from semantic.domain.errors import UnsupportedModelError
from semantic.ports.embedding import Vector

CHUNK_TOKENS: Final = 512
"""Tokens of one chunk, over all rows of a batch: what one step may delay answers by."""

_PROBE: Final = (1, 2, 3)

States = Callable[..., mx.array]
"""(token ids (rows, columns), caches) to states (rows, columns, width)."""


class DecoderEmbedder:
    """Implements `Embedder`."""

    def __init__(
        self,
        model: Module,
        tokenizer: MLXTokenizer,
        model_id: str,
        pooling: Pooling,
        max_tokens: int,
    ) -> None:
        """Raises UnsupportedModelError for a model without states that can be taken."""
        self._model = model
        self._tokenizer = tokenizer
        self._states = states_of(model)
        self._pooling = pooling
        self._end = tuple(tokenizer.encode("", add_special_tokens=True))
        self.model_id = model_id
        self.max_tokens = max_tokens
        self.max_characters = max_tokens * tokenizer.longest_token
        self.dimensions = self._states(mx.array([_PROBE])).shape[-1]

    def encode(self, text: str) -> tuple[int, ...]:
        """See `Embedder.encode`."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=True))

    def shortened(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """See `Embedder.shortened`. The token that ends every text stays."""
        if len(tokens) <= self.max_tokens:
            return tokens
        ends = self._end[-1:] if self._end and tokens[-1] == self._end[-1] else ()
        return (*tokens[: self.max_tokens - len(ends)], *ends)

    def start(self, batch: Sequence[tuple[int, ...]]) -> DecoderRun:
        """See `Embedder.start`."""
        return DecoderRun(self._states, make_prompt_cache(self._model), batch, self._pooling)


class DecoderRun:
    """Implements `EmbeddingRun`."""

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
        """See `EmbeddingRun.step`."""
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
    """The function that computes the states below a model's logits, after its last norm.

    Raises UnsupportedModelError unless the model's logits are those of these states.
    """
    inner = cast("States | None", getattr(model, "model", None))
    head = cast("Callable[[mx.array], mx.array] | None", getattr(model, "lm_head", None))
    embedding = getattr(inner, "embed_tokens", None)
    if head is None and embedding is not None:
        head = embedding.as_linear
    if inner is None or head is None:
        raise UnsupportedModelError(f"{type(model).__module__} has no states below its logits")
    ids = mx.array([_PROBE])
    logits = cast(States, model)(ids)
    if not mx.allclose(head(inner(ids)), logits, rtol=1e-3, atol=1e-3).item():
        raise UnsupportedModelError(
            f"{type(model).__module__} computes its logits from other states than its last ones"
        )
    return inner
