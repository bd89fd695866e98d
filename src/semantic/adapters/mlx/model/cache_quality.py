"""Measures what caches of 8 bits do to a model's probabilities, over this package's source."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Protocol, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from semantic.adapters.mlx.arrays import token_ids
from semantic.adapters.mlx.kernel_files import note, read_note, write_note
from semantic.adapters.mlx.kv_cache.eight_bits import rounded
from semantic.adapters.mlx.kv_cache.model_spec import read_context
from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
from semantic.domain.identity import digest
from semantic.ports.generation import Slices

MOST_DIVERGENCE, LEAST_AGREEMENT = 0.01, 0.965
"""The bounds beyond which a model needs `--kv-bits-force`."""

TOKENS = 4096
_CHUNK = 64
"""Tokens between two steps of other models."""
_PIECE = 2000
"""Characters to tokenize at once: a tokenizer warns of a text that is longer than a context."""

Rounds = Callable[[mx.array], mx.array]
"""Rounds keys or values."""


@dataclass(frozen=True, slots=True)
class CacheQuality:
    """How a model's next token after each token of a text differs from that without rounding."""

    divergence: float
    """The mean Kullback-Leibler divergence, in nats."""
    largest: float
    """The largest divergence."""
    agreement: float
    """The share of tokens after which the likeliest token is the same."""
    n_tokens: int

    @property
    def is_good(self) -> bool:
        return self.divergence <= MOST_DIVERGENCE and self.agreement >= LEAST_AGREEMENT

    def __str__(self) -> str:
        return (
            f"a mean divergence of {self.divergence:.5f}, the same likeliest token after "
            f"{self.agreement:.1%} of {self.n_tokens} tokens"
        )


class _Evaluated(Protocol):
    @property
    def state(self) -> object: ...


def finding_quality(
    model: Module, name: str, tokenizer: MLXTokenizer, agree: Callable[[bool], bool] = bool
) -> Slices[CacheQuality]:
    """Return the quality that an earlier process noted for the model `name`, or measure it. Yields
    after each chunk. `agree` makes all ranks of a sharded model do the same."""
    path = note_of(name)
    known = _known(read_note(path))
    if agree(known is not None) and known is not None:
        return known
    tokens = text(tokenizer, min(TOKENS, read_context(model) or TOKENS))
    found = yield from measuring(model, tokens)
    write_note(path, asdict(found))
    return found


def note_of(name: str) -> Path | None:
    """Return the path of the note about the model `name`, as `kernel_files.note` does."""
    return note(f"kv8-{digest('kv8-v1', name.encode()).hex()[:32]}.json")


def _known(text: bytes) -> CacheQuality | None:
    with suppress(ValueError, TypeError, RecursionError):
        found = CacheQuality(**json.loads(text))
        values = astuple(found)
        if all(type(one) in (int, float) and math.isfinite(one) for one in values):
            return found
    return None


def measuring(
    model: Module, tokens: Sequence[int], rounds: Rounds = rounded
) -> Slices[CacheQuality]:
    """Compare the model with itself, with keys and values that `rounds` rounds, by default to 8
    bits. Yields after each chunk of a side."""
    sides = [make_prompt_cache(model), rounding(make_prompt_cache(model), rounds)]
    divergences: list[mx.array] = []
    same: list[mx.array] = []
    for at in range(0, len(tokens), _CHUNK):
        part, logits = token_ids([tokens[at : at + _CHUNK]]), []
        for caches in sides:
            logits.append(_log_probabilities(model(part, cache=caches)[0]))
            mx.eval(logits[-1], [one.state for one in caches])
            yield None
        right, found = logits
        divergences.append((mx.exp(right) * (right - found)).sum(axis=-1))
        same.append(mx.argmax(right, axis=-1) == mx.argmax(found, axis=-1))
        mx.eval(divergences[-1], same[-1])
    divergence = mx.concatenate(divergences)
    return CacheQuality(
        cast(float, divergence.mean().item()),
        cast(float, divergence.max().item()),
        cast(float, mx.concatenate(same).astype(mx.float32).mean().item()),
        len(tokens),
    )


def rounding(caches: Sequence[_Evaluated], rounds: Rounds = rounded) -> list[_Evaluated]:
    """Return caches of mlx-lm, with keys and values that `rounds` rounds as they enter."""
    for cache in caches:
        if isinstance(cache, KVCache | RotatingKVCache):
            cache.__class__ = _rounding_class(cast(type, type(cache)), rounds)
    return list(caches)


@functools.cache
def _rounding_class(own: type, rounds: Rounds) -> type:
    def update_and_fetch(
        self: object, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        held = (rounds(one) for one in (keys, values))
        found: tuple[mx.array, mx.array] = own.update_and_fetch(self, *held)  # type: ignore[attr-defined]
        return found

    return type(f"Rounding{own.__name__}", (own,), {"update_and_fetch": update_and_fetch})


def _log_probabilities(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def text(tokenizer: MLXTokenizer, n_tokens: int = TOKENS) -> list[int]:
    """Return tokens of source code, which agents read most."""
    sources = sorted(files("semantic.domain").iterdir(), key=lambda one: one.name)
    code = "".join(one.read_text("utf-8") for one in sources if one.name.endswith(".py"))
    found: list[int] = []
    for at in range(0, len(code), _PIECE):
        if len(found) >= n_tokens:
            break
        found += tokenizer.encode(code[at : at + _PIECE], add_special_tokens=not at)
    return found[:n_tokens]
