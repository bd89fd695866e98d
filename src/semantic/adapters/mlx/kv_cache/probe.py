"""Finds a model's layers that can use our caches, by computing a few tokens at loading."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from semantic.adapters.mlx.arrays import plain, token_ids
from semantic.adapters.mlx.device import on_cpu
from semantic.adapters.mlx.kv_cache import attention_hook
from semantic.adapters.mlx.kv_cache.contiguous.layers import ContiguousLayers, states_of
from semantic.adapters.mlx.kv_cache.merged import merge, merge_theirs, pad
from semantic.adapters.mlx.kv_cache.model_spec import narrowed, read_shapes, read_spec
from semantic.adapters.mlx.kv_cache.paged.attention import DecodeStep, PortableAttention
from semantic.adapters.mlx.kv_cache.paged.cache import PagedCache
from semantic.adapters.mlx.kv_cache.paged.layers import PagedLayers
from semantic.adapters.mlx.kv_cache.paged.page_pool import PageKind
from semantic.adapters.mlx.kv_cache.paged.side_by_side import compute_side_by_side
from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape
from semantic.domain.value_objects import BLOCK_TOKENS, ModelCacheSpec
from semantic.ports.generation import Slices, at_once

_Prompts = tuple[tuple[int, ...], ...]

# The first is short, so that wrong padding shows. The others exceed every narrowed limit, and their
# lengths are not multiples of a block.
_PROMPTS: _Prompts = (
    (3, 1, 4),
    (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6),
    (2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4, 5, 2, 3, 5, 3, 6, 0, 2, 8, 7, 4, 7, 1, 3),
)
_STEPS = ((2, 7, 1), (1, 8, 2), (2, 8, 1))
"""Tokens that follow the test's sequences; all are valid in any vocabulary."""

_EXACT = 1e-3
"""The largest accepted difference of logits on a CPU in fp32, relative to their norm."""

_ROUNDED = {mx.bfloat16: 5e-2}
_ROUNDED_LESS = 2e-2
"""The largest differences that count as rounding, for bf16 and for all other types."""

_TIMES_MLX_LM = 2.0
_MOST_ROUNDED = 0.4
"""The maximum difference that can count as rounding. Wrong attention differs by at least 0.8."""

_COPIES = 4
"""The number of copies of a sequence in the batch that measures prefill's rounding."""

_STRAYS = 3
"""1 in this many logit vectors is ignored, because rounding can change a token's expert."""

# Errors that a model raises if it uses a handle as an array.
_NOT_AN_ARRAY = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)


_Batch = Literal["padded", "unpadded", "copies"]


class _Evaluated(Protocol):
    @property
    def state(self) -> object: ...


class _Layers(Protocol):
    def empty(self, capacity: int) -> Sequence[_Evaluated]: ...


Agree = Callable[[bool], bool]
"""Takes this rank's finding; returns whether all ranks found True."""


class LogitsProbe:
    """Compares a batch's logits with the logits of the same sequences computed alone.

    On a GPU both differ by rounding. mlx-lm's own batch shows by how much.
    """

    def __init__(self, model: Module, decoding: Module | None = None, agree: Agree = bool) -> None:
        """`model` computes single sequences; `decoding`, if given, computes batches. `agree` makes
        all ranks of a sharded model reach the same result."""
        attention_hook.install(model)
        self.model = model
        self.agree = agree
        self.decoding = decoding or model
        self._alone: list[mx.array] | None = None
        self._yardsticks: dict[_Batch, float] = {}

    def accepts(self, layers: _Layers) -> bool:
        """Return whether a batch with these caches computes the right logits."""
        return at_once(self.comparing(layers))

    def comparing(self, layers: _Layers) -> Slices[bool]:
        """Like `accepts`, but yield after each forward pass."""
        try:
            found = yield from _batched(self.decoding, layers)
        except _NOT_AN_ARRAY:
            return False
        if self._alone is None:
            self._alone = yield from _solo(self.model)
        differences = self._differences(found)
        if self._exact:
            return self.agree(all(one <= _EXACT for one in differences))
        counted = _without_strays(differences)
        # NaN gives False. The yardstick needs a run, and is rarely needed.
        if self.agree(counted <= self._rounded):
            return True
        return self.agree(counted <= self._yardstick_for(layers))

    def accepts_padding(self) -> bool:
        """Return whether a batch with mlx-lm's own padded caches computes the right logits."""
        return self.accepts(_Padded(self.model))

    @contextlib.contextmanager
    def narrowed(self) -> Iterator[LogitsProbe | None]:
        """Yield a probe of the model with small windows, chunks and token budgets, valid in the
        `with` block. Yields None if the model has none of them."""
        with narrowed(self.model, self.decoding) as changed:
            yield LogitsProbe(self.model, self.decoding, self.agree) if changed else None

    def computing(self) -> Slices[bool]:
        """Return whether the model can compute single sequences. Yields after each forward pass."""
        try:
            self._alone = yield from _solo(self.model)
        except _NOT_AN_ARRAY:
            return False
        return True

    def _yardstick_for(self, layers: _Layers) -> float:
        if isinstance(layers, PagedLayers) and layers.beside != "alone":
            return self._yardstick_of("copies")
        # mlx-lm's padded batch cannot be its own yardstick, because padding may be the error.
        padded = isinstance(layers, ContiguousLayers) and not any(layers.ragged)
        return self._yardstick_of("unpadded" if padded else "padded")

    def _yardstick_of(self, batch: _Batch) -> float:
        """Return the largest error that rounding explains. mlx-lm's own batch shows it."""
        if batch not in self._yardsticks:
            try:
                self._yardsticks[batch] = _most_rounded(self._differences_of(batch))
            except _NOT_AN_ARRAY:
                self._yardsticks[batch] = 0.0
        return self._yardsticks[batch]

    def _differences_of(self, batch: _Batch) -> list[float]:
        model = self.model
        if batch == "copies":
            return self._differences(at_once(_solo(model, copies=_COPIES)))
        if batch == "padded":
            return self._differences(at_once(_batched(model, _Padded(model))))
        _, one, other = _PROMPTS
        alike = one, other[: len(one)]
        found = at_once(_batched(model, _Padded(model), alike))
        return _differences(found, at_once(_solo(model, alike)))

    @property
    def _solo(self) -> list[mx.array]:
        if self._alone is None:
            self._alone = at_once(_solo(self.model))
        return self._alone

    @property
    def _exact(self) -> bool:
        return self._solo[0].dtype == mx.float32 and on_cpu()

    @property
    def _rounded(self) -> float:
        return _ROUNDED.get(self._solo[0].dtype, _ROUNDED_LESS)

    def _differences(self, found: Sequence[mx.array]) -> list[float]:
        return _differences(found, self._solo)


def choosing_layers(
    probe: LogitsProbe, spec: ModelCacheSpec, shapes: Sequence[LayerShape | None]
) -> Slices[tuple[bool, ...] | None]:
    """Find the layers that can use our cache. Yields after each forward pass. Returns None if
    sequences cannot be batched."""
    with probe.narrowed() as narrow:
        small = None if narrow is None else read_spec(probe.model)
        if narrow is not None and small is not None and (yield from narrow.computing()):
            theirs = read_shapes(probe.model)
            usable = [own and one for own, one in zip(shapes, theirs, strict=True)]
            return (yield from _choosing(narrow, small, usable))
    return (yield from _choosing(probe, spec, shapes))


def _choosing(
    probe: LogitsProbe, spec: ModelCacheSpec, shapes: Sequence[LayerShape | None]
) -> Slices[tuple[bool, ...] | None]:
    model = probe.model

    def works(ragged: Sequence[bool]) -> Slices[bool]:
        return probe.comparing(ContiguousLayers(model, spec, shapes, ragged))

    everything = (True,) * spec.n_layers
    if (yield from works(everything)):
        return everything
    alone: list[bool] = []
    for layer, shape in enumerate(shapes):
        only = [i == layer for i in range(spec.n_layers)]
        alone.append(shape is not None and (yield from works(only)))
    for ragged in (tuple(alone), (False,) * spec.n_layers):
        if (yield from works(ragged)):
            return ragged
    return None


class _Padded:
    def __init__(self, model: Module) -> None:
        self._model = model

    def empty(self, capacity: int) -> list[_Evaluated]:  # noqa: ARG002
        return cast(list[_Evaluated], make_prompt_cache(self._model))


class AttentionUse(NamedTuple):
    """How a kind's layers call attention. `latent` is True if keys are latents."""

    n_heads: int
    sinks: frozenset[bool]  # True for calls with sinks, False for calls without
    latent: bool


def attention_use(
    model: Module, spec: ModelCacheSpec, kinds: Sequence[PageKind]
) -> list[AttentionUse]:
    """Return how the layers of each kind call attention, without computing anything."""
    attention_hook.install(model)
    recorders = [_Recorder() for _ in kinds]
    layers = PagedLayers(spec, kinds, recorders, states=states_of(model, spec))
    caches = layers.empty(BLOCK_TOKENS)
    with contextlib.suppress(*_NOT_AN_ARRAY):
        model(mx.zeros((1, 1), dtype=mx.int32), cache=[merge([cache]) for cache in caches])
    return [AttentionUse(one.n_heads, frozenset(one.sinks), one.latent) for one in recorders]


class _Recorder(PortableAttention):
    def __init__(self) -> None:
        self.n_heads = 0
        self.sinks: set[bool] = set()
        self.latent = False

    def attend(self, step: DecodeStep) -> mx.array:
        self.n_heads = step.q.shape[1]
        self.sinks.add(step.sinks is not None)
        self.latent |= step.rope is not None
        width = (step.k if self.latent else step.v).shape[3]
        return mx.zeros((*step.q.shape[:3], width), plain(step.q).dtype)


def _solo(
    model: Module, prompts: _Prompts = _PROMPTS, *, copies: int = 1
) -> Slices[list[mx.array]]:
    """Compute each sequence alone in mlx-lm's caches. Return each step's logits, (2, vocab)."""
    by_sequence: list[list[mx.array]] = []
    for row, prompt in enumerate(prompts):
        caches = make_prompt_cache(model)
        logits: list[mx.array] = []
        for tokens in (list(prompt), *([step[row]] for step in _STEPS)):
            logits.append(model(token_ids([tokens] * copies), cache=caches)[:1, -1])
            mx.eval(logits[-1])
            yield None
        by_sequence.append(logits[1:])
    return [mx.concatenate(list(step)) for step in zip(*by_sequence, strict=True)]


def _batched(
    model: Module, layers: _Layers, prompts: _Prompts = _PROMPTS
) -> Slices[list[mx.array]]:
    sequences = [layers.empty(BLOCK_TOKENS) for _ in prompts]
    if isinstance(layers, PagedLayers) and layers.beside != "alone":
        paged = cast("list[list[PagedCache]]", sequences)
        yield from _prefilled_side_by_side(model, layers, paged, prompts)
    else:
        for caches, prompt in zip(sequences, prompts, strict=True):
            model(token_ids([prompt]), cache=caches)
            mx.eval([cache.state for cache in caches])
            yield None
    ragged = getattr(layers, "ragged", (False,) * len(sequences[0]))
    batch = [
        merge(layer) if ours else merge_theirs(layer)
        for ours, layer in zip(ragged, zip(*sequences, strict=True), strict=True)
    ]
    n_rows = len(prompts)
    size = max(getattr(layer, "n_rows", n_rows) for layer in batch)
    for layer in batch:
        pad(layer, size)
    padding = [0] * (size - n_rows)
    steps = [token_ids([[*step[:n_rows], *padding]]).T for step in _STEPS]
    logits: list[mx.array] = []
    for step in steps:
        logits.append(model(step, cache=batch)[:n_rows, -1])
        mx.eval(logits[-1])
        yield None
    return logits


def _prefilled_side_by_side(
    model: Module, layers: PagedLayers, sequences: Sequence[Sequence[PagedCache]], prompts: _Prompts
) -> Slices[None]:
    lengths = sorted({len(prompt) for prompt in prompts})
    stops = lengths if layers.beside == "even" else [lengths[0] // 2, lengths[-1]]
    for at, stop in itertools.pairwise([0, *stops]):
        parts = [
            (caches, prompt[at:stop]) for caches, prompt in zip(sequences, prompts, strict=True)
        ]
        compute_side_by_side(model, layers.chunk_layers, [part for part in parts if part[1]])
        yield None


def _differences(found: Sequence[mx.array], alone: Sequence[mx.array]) -> list[float]:
    """Return the error of each logit vector in `found`, relative to the right vector's norm."""
    differences: list[float] = []
    for ours, theirs in zip(found, alone, strict=True):
        right = theirs.astype(mx.float32)
        apart = mx.linalg.norm(ours.astype(mx.float32) - right, axis=-1)
        differences += cast(list[float], (apart / mx.linalg.norm(right, axis=-1)).tolist())
    return differences


def _most_rounded(differences: Sequence[float]) -> float:
    theirs = _without_strays(differences)
    return min(_TIMES_MLX_LM * theirs, _MOST_ROUNDED) if theirs <= _MOST_ROUNDED else 0.0


def _without_strays(differences: Sequence[float]) -> float:
    """Return the mean of the smallest two thirds of `differences`."""
    if any(math.isnan(one) for one in differences):
        return math.nan
    return statistics.mean(sorted(differences)[: -(len(differences) // _STRAYS)])
