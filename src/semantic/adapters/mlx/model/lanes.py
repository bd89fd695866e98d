"""Finds how many rows a decode step needs so that a row has the same bits beside any other rows.

At loading it computes a model's products and whole steps with several numbers of rows, and assumes
nothing about a device's kernels.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm, RMSNorm
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP
from mlx_lm.sample_utils import greedy_sampler

from semantic.adapters.mlx import DISTRIBUTION, blas_kernel
from semantic.adapters.mlx.arrays import ordered_bytes_of, token_ids
from semantic.adapters.mlx.batch.batch_rows import BatchRows
from semantic.adapters.mlx.batch.decode_batch import ContinuousBatch, NewSequence
from semantic.adapters.mlx.cuda.rows_product import MOST_ROWS
from semantic.adapters.mlx.device import on_cuda, read_device
from semantic.adapters.mlx.kernel_files import note, read_note, write_note
from semantic.adapters.mlx.kv_cache.forms import CacheForm, LayerCache
from semantic.adapters.mlx.kv_cache.paged.batch_metadata import RowSize, exact, row_size
from semantic.adapters.mlx.kv_cache.paged.layers import PagedLayers
from semantic.adapters.mlx.model.joined import computing
from semantic.adapters.mlx.model.row_layers import (
    add_to,
    adds,
    compute_only,
    divide,
    limits_rows,
    parts_of,
    use_rows_up_to,
)
from semantic.domain.identity import digest
from semantic.domain.value_objects import BLOCK_TOKENS, ExactBatch, Lane, SequenceId
from semantic.ports.generation import Slices, at_once

MOST_COST = 1.05
"""With "auto", the maximum time of a step of one request, relative to its time without a lane."""

_FEWEST = (1, 2, 4, 8)
"""Candidates for the fewest rows of a step."""

_REQUESTS = (1, 2, 4, 8, 16, 32)
"""The numbers of requests for which a step should cost little."""

_EXPERTS_PER_TOKEN = 8

_OUTPUTS, _MOST_DRAWS = 256, 8
"""The fewest outputs that a layer compares, in several draws of rows: two sums in other orders may
be equal by chance."""

_PLAIN = Linear | Embedding | RMSNorm | LayerNorm
_MATRIX = 2

_PROMPT = 2 * BLOCK_TOKENS + 88
"""The length, in tokens, of the sequence in compared steps."""

_COMPARED = (2, 3, 4, 8, 16, 32, 64)
_COMPARED_PART = 64
"""Compared steps have at most as many rows as have pages in 1/64 of the device's memory."""

_TIMES = 2
_TIMED_STEPS, _STEPS_AT_ONCE = 32, 8
"""Rounds, steps per round, and steps per measurement, as each step waits for an earlier one."""

_MOST_OUTSIDE = 16
"""Outside a lane, steps of more rows multiply plain weights with MLX's kernels, which take less
time."""
_MOST_PLAIN = 0.1
"""With "auto", the maximum part of these weights in a lane of more rows."""

_TOKEN = 1
"""A token of any vocabulary."""

# Errors of a layer whose call is unlike that of its base class. Whole steps compare it.
_UNKNOWN = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class RowClasses:
    """Numbers of rows in classes. In all batches of a class, a kind of layer gives a row the same
    bits."""

    layer: str
    n_bytes: int
    classes: tuple[tuple[int, ...], ...]

    def best(self, step: RowSize) -> tuple[float, tuple[int, ...]]:
        """Return the cost of the cheapest class for steps of `step(n)` rows, and the class."""
        return min((_cost(one, step), one) for one in self.classes)


def _cost(sizes: Sequence[int], step: RowSize) -> float:
    """Return the parts, of `sizes`, that a request needs in steps of a few requests, summed up."""
    total = 0.0
    for n_requests in _REQUESTS:
        n_rows = step(n_requests)
        parts = divide(n_rows, sizes)
        total += (len(parts) + (sum(parts) > n_rows)) / n_requests
    return total


@dataclass(frozen=True, slots=True)
class _Choice:
    """A lane, and the sizes of the parts in which kinds of layers compute steps, by their name."""

    lane: Lane
    parts: Mapping[str, Sequence[int]] = field(default_factory=dict)


class _Notes:
    """Keeps a model's choice for later processes: two loads must not choose differently."""

    def __init__(self, model: Module, probe: _Probe) -> None:
        names = Counter(_name_of(one) for one in computing(model) if _inputs_of(one, model))
        versions = [version("mlx"), version("mlx-lm")]
        with suppress(PackageNotFoundError):  # a source tree
            versions.append(version(DISTRIBUTION))
        what = [*versions, read_device().chip, blas_kernel(), probe.key, sorted(names.items())]
        self._size = probe.size
        self._path = note(f"lane-{digest('lane-v1', json.dumps(what).encode()).hex()[:32]}.json")

    def read(self) -> _Choice | None:
        """Return the kept choice; None if the file is missing or damaged."""
        with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
            known = json.loads(read_note(self._path))
            parts = {str(name): tuple(sizes) for name, sizes in known["parts"].items()}
            lane, possible = Lane(**known["lane"]), sizes_of(self._size)
            if lane.fewest not in _FEWEST or lane.most not in (None, *possible):
                return None
            if all(sizes and set(sizes) <= set(possible) for sizes in parts.values()):
                return _Choice(lane, parts)
        return None

    def write(self, choice: _Choice) -> None:
        """Keep `choice`."""
        write_note(self._path, asdict(choice))


def choosing_lane(form: CacheForm, mode: ExactBatch) -> Slices[Lane]:
    """Choose the lane of a model's decode steps, and make its layers keep to it. Yields after each
    forward pass."""
    probe = _Probe(form, mode)
    choice = _without_probe(form, mode)
    if choice is None:
        notes = _Notes(form.model, probe)
        choice = notes.read()
        if choice is None:
            choice = yield from probe.choosing()
            notes.write(choice)
    probe.apply(choice)
    return choice.lane


def row_classes(model: Module) -> Sequence[RowClasses]:
    """Compute each kind of layer of a loaded model with many numbers of rows."""
    size = row_size if on_cuda() else exact
    return at_once(_probing(model, sizes_of(size)))


def _without_probe(form: CacheForm, mode: ExactBatch) -> _Choice | None:
    layers: object = form.layers
    if not form.layers.together:
        return _Choice(Lane())  # each sequence has its own steps
    if mode == "off":
        return _Choice(Lane(problem="--exact-batch is off"))
    if mode == "auto" and not isinstance(layers, PagedLayers):
        return _Choice(Lane(problem="without pages, the rows of a batch are faster in one array"))
    if not all(form.layers.ragged):
        return _Choice(Lane(problem="mlx-lm's own caches hold the batch"))
    return None


def plain_part(model: Module) -> float:
    """Return the part of a step's weights that our kernel multiplies and that have 16 bits."""
    sizes = [(one, _n_bytes(one)) for one in computing(model) if _inputs_of(one, model)]
    plain = sum(n_bytes for one, n_bytes in sizes if limits_rows(one))
    return plain / max(1, sum(n_bytes for _, n_bytes in sizes))


class _Probe:
    def __init__(self, form: CacheForm, mode: ExactBatch) -> None:
        self._form = form
        self._mode = mode
        layers: object = form.layers
        self._pages = layers if isinstance(layers, PagedLayers) else None
        self.key = mode, self._pages is None
        self.size: RowSize = exact if self._pages is None else self._pages.costs.size
        few = mode == "auto" and plain_part(form.model) > _MOST_PLAIN
        self._most = _MOST_OUTSIDE if few else MOST_ROWS

    def choosing(self) -> Slices[_Choice]:
        """Choose by computing layers, and then steps. Yields after each pass."""
        kinds = yield from _probing(self._form.model, sizes_of(self.size, self._most))
        fewest = 1
        if self._pages is not None:
            fewest = _fewest(kinds, self.size)
        step = _at_least(fewest, self.size)
        best = {kind.layer: kind.best(step)[1] for kind in kinds}
        sizes = sizes_of(step, self._most)
        parts = {name: one for name, one in best.items() if not set(sizes) <= set(one)}
        choice = _Choice(Lane(fewest), parts)
        self.apply(choice)
        most = yield from self._comparing(sizes)
        if most < max(2, fewest):
            return _Choice(Lane(problem="steps round differently with each number of rows"))
        if self._mode == "auto" and (fewest > 1 or parts):
            cost = yield from self._costing(choice)
            if cost > MOST_COST:
                words = f"a step of one request would take {cost:.2f} times as long"
                return _Choice(Lane(problem=words))
        return replace(choice, lane=Lane(fewest, most, splits=self._mode == "on"))

    def apply(self, choice: _Choice) -> None:
        """Make steps and layers keep to the lane of `choice`."""
        if self._pages is not None:
            self._pages.pad_batches(_at_least(choice.lane.fewest, self.size))
        for layer in computing(self._form.model):
            use_rows_up_to(layer, _MOST_OUTSIDE if choice.lane.problem else self._most)
            sizes: tuple[int, ...] = ()
            if choice.parts and _inputs_of(layer, self._form.model) is not None:
                sizes = tuple(choice.parts.get(_name_of(layer), ()))
            if sizes or parts_of(layer):
                compute_only(layer, sizes, self._most)

    def _costing(self, choice: _Choice) -> Slices[float]:
        """Return a step's time in the lane relative to its time outside, for one sequence."""
        inside, outside = math.inf, math.inf
        for _ in range(_TIMES):
            self.apply(_Choice(Lane()))
            outside = min(outside, (yield from self._timing()))
            self.apply(choice)
            inside = min(inside, (yield from self._timing()))
        return inside / outside

    def _timing(self) -> Slices[float]:
        """Return the time of a step of one sequence, in seconds."""
        batch = ContinuousBatch(self._form.model, lane=Lane())
        history = [_TOKEN] * _PROMPT
        caches = self._prefilled()
        one = NewSequence(
            SequenceId(0), caches, _TOKEN, history, greedy_sampler, [], logprobs=False
        )
        batch.join([one])
        found = math.inf
        for _ in range(_TIMED_STEPS // _STEPS_AT_ONCE):
            began = time.perf_counter()
            for _ in range(_STEPS_AT_ONCE):
                batch.step()
            found = min(found, (time.perf_counter() - began) / _STEPS_AT_ONCE)
            yield None
        return found

    def _comparing(self, sizes: Sequence[int]) -> Slices[int]:
        """Return the largest of `sizes` up to which a sequence's logits have the same bits in the
        first and in the last row, and others' in all rows between."""
        found, expected = 0, b""
        for size in (1, *self._comparable(sizes)):
            batch = BatchRows(self._form.model, Lane())
            ends = [self._prefilled() for _ in range(min(size, 2))]
            others = [self._form.layers.empty(BLOCK_TOKENS) for _ in range(size - 2)]
            batch.join([ends[0], *others, *ends[1:]])
            for _ in range(2):  # the others have no states in the first step
                logits = batch.logits(mx.full((size,), _TOKEN, mx.uint32))
                mx.eval(logits, batch.states)
                yield None
            bits = [bytes(ordered_bytes_of(row)) for row in logits]
            expected = expected or bits[0]
            if {bits[0], bits[-1]} != {expected} or len(set(bits[1:-1])) > 1:
                return found
            found = max(found, size)
        return max(sizes)

    def _comparable(self, sizes: Sequence[int]) -> list[int]:
        """Return the sizes to compare, as memory permits."""
        page_bytes = self._form.spec.bytes_for(BLOCK_TOKENS)
        most = read_device().memory_bytes // _COMPARED_PART // page_bytes
        return [n for n in sizes if n in _COMPARED and n <= max(2, most)]

    def _prefilled(self) -> list[LayerCache]:
        caches = self._form.layers.empty(-(-_PROMPT // BLOCK_TOKENS) * BLOCK_TOKENS)
        self._form.model(token_ids([[_TOKEN] * _PROMPT]), cache=caches)
        mx.eval([cache.state for cache in caches])
        return caches


def sizes_of(size: RowSize, most: int = MOST_ROWS) -> list[int]:
    """Return the numbers of rows to which `size` maps 1 to `most` rows."""
    return sorted({size(n) for n in range(1, most + 1)})


def _at_least(fewest: int, size: RowSize) -> RowSize:
    return lambda n_rows: max(fewest, size(n_rows))


def _fewest(kinds: Sequence[RowClasses], size: RowSize) -> int:
    """Return the fewest rows of a step with which the layers' classes cost the least."""
    costs = {
        fewest: sum(one.n_bytes * one.best(_at_least(fewest, size))[0] for one in kinds)
        for fewest in _FEWEST
    }
    return min(costs, key=lambda fewest: (costs[fewest], fewest))


def _probing(model: Module, sizes: Sequence[int]) -> Slices[list[RowClasses]]:
    kinds: dict[str, RowClasses | None] = {}
    modules = computing(model)
    dtype = _dtype_of(modules)
    for layer in modules:
        make = _inputs_of(layer, model)
        if make is None or (name := _name_of(layer)) in kinds:
            continue
        kinds[name] = None
        with suppress(*_UNKNOWN):
            classes = _classes(layer, partial(make, dtype), sizes)
            kinds[name] = RowClasses(name, _n_bytes(layer), classes)
        yield None
    return [one for one in kinds.values() if one is not None]


def _classes(layer: Module, inputs: _Inputs, sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the classes of `sizes`. A size whose rows differ by their places is in no class."""
    found: dict[tuple[bytes, ...], list[int]] = {}
    with _whole(layer):
        draws = range(min(_MOST_DRAWS, -(-_OUTPUTS // _computed(layer, inputs(1, 0)).size)))
        for n in sizes:
            rows = [_one_of_all(layer, inputs(n, seed)) for seed in draws]
            known = tuple(bytes(ordered_bytes_of(row)) for row in rows if row is not None)
            if len(known) == len(draws):
                found.setdefault(known, []).append(n)
    return tuple(tuple(one) for one in found.values())


@contextmanager
def _whole(layer: Module) -> Iterator[None]:
    """Let `layer` compute steps of any number of rows in the `with` block."""
    parts = parts_of(layer)
    compute_only(layer, ())
    use_rows_up_to(layer, MOST_ROWS)
    try:
        yield
    finally:
        compute_only(layer, parts)


def _one_of_all(layer: Module, inputs: Sequence[mx.array]) -> mx.array | None:
    """Return the first row of `layer`'s result; None if the first row's input has other bits in
    other places."""
    n_rows = len(inputs[0])
    rows = _computed(layer, inputs)
    # A repeated row would be a view, which MLX multiplies row by row.
    same_rows = [mx.contiguous(mx.repeat(one[:1], n_rows, axis=0)) for one in inputs]
    alike = _computed(layer, same_rows)
    places = mx.concatenate([rows[:1], rows[-1:], alike])
    same = mx.array_equal(places, mx.repeat(rows[:1], n_rows + 2, axis=0), equal_nan=True)
    return rows[0] if same.item() else None


def _computed(layer: Module, inputs: Sequence[mx.array]) -> mx.array:
    if adds(layer):
        outputs = cast(mx.array, layer["weight"]).shape[0]
        return add_to(mx.zeros((len(inputs[0]), 1, outputs), inputs[0].dtype), layer, inputs[0])
    call = layer.as_linear if isinstance(layer, Embedding | QuantizedEmbedding) else layer
    found = cast("Callable[..., mx.array | tuple[mx.array, ...]]", call)(*inputs)
    if isinstance(found, mx.array):
        return found
    return mx.concatenate([one.astype(mx.float32) for one in found], axis=-1)


_Inputs = Callable[[int, int], list[mx.array]]
"""Makes the inputs of a number of rows from a seed. The first and the last row are equal."""


def _inputs_of(
    layer: Module, model: Module
) -> Callable[[mx.Dtype, int, int], list[mx.array]] | None:
    """Return a function that makes inputs of a type; None if `layer` has no product."""
    if isinstance(layer, SwitchGLU | SwitchMLP):
        one = _weights_of(layer)
        n_experts = cast(int, one.num_experts)
        n_chosen = min(_EXPERTS_PER_TOKEN, n_experts)
        return lambda dtype, n, seed: [
            _rows(n, one.input_dims, dtype, seed),
            _chosen(n, n_chosen, n_experts, seed),
        ]
    if isinstance(layer, Embedding | QuantizedEmbedding) and _has_head(model):
        return None
    if isinstance(layer, QuantizedLinear | QuantizedEmbedding):
        features = layer["weight"].shape[-1] * 32 // layer.bits
    elif "weight" in layer and (isinstance(layer, _PLAIN) or _is_router(layer)):
        features = layer["weight"].shape[-1]
    else:
        return None
    return lambda dtype, n, seed: [_rows(n, features, dtype, seed)]


def _is_router(layer: Module) -> bool:
    """Return whether `layer` is a class of mlx-lm that multiplies with its own weight."""
    is_named = type(layer).__name__.endswith(("Gate", "Router"))
    return is_named and cast(mx.array, layer["weight"]).ndim == _MATRIX


def _rows(n_rows: int, features: int, dtype: mx.Dtype, seed: int) -> mx.array:
    others, one = mx.random.split(mx.random.key(seed))
    rows = mx.random.normal((n_rows, 1, features), key=others).astype(dtype)
    rows[0] = rows[-1] = mx.random.normal((1, features), key=one).astype(dtype)
    return rows


def _chosen(n_rows: int, n_chosen: int, n_experts: int, seed: int) -> mx.array:
    scores = _rows(n_rows, n_experts, mx.float32, seed)
    return mx.argsort(scores, axis=-1)[..., :n_chosen].astype(mx.uint32)


def _name_of(layer: Module) -> str:
    weights = _weights_of(layer)
    weight = cast(mx.array, weights["weight"])
    size = " x ".join(map(str, weight.shape))
    words = [type(layer).__name__, size, str(weight.dtype).rpartition(".")[2]]
    if "scales" in weights:
        words[2:] = [f"{weights.bits} bits in groups of {weights.group_size}, {weights.mode}"]
    words += ["with a bias"] if "bias" in weights else []
    return " ".join(words + (["added"] if adds(layer) else []))


def _weights_of(layer: Module) -> Module:
    """Return the module with the weights of `layer`, of mixtures of experts the first."""
    if isinstance(layer, SwitchGLU):
        return cast(Module, layer.gate_proj)
    return cast(Module, layer.fc1) if isinstance(layer, SwitchMLP) else layer


def _n_bytes(layer: Module) -> int:
    return cast(mx.array, _weights_of(layer)["weight"]).nbytes


def _dtype_of(modules: Sequence[Module]) -> mx.Dtype:
    """Return the type of a step's rows: the type of the norms' weights."""
    norms = (one["weight"] for one in modules if isinstance(one, RMSNorm) and "weight" in one)
    return next((cast(mx.array, one).dtype for one in norms), mx.float32)


def _has_head(model: Module) -> bool:
    modules = cast("Callable[[], list[tuple[str, Module]]]", model.named_modules)()
    return any(path.rpartition(".")[2] == "lm_head" for path, _ in modules)
