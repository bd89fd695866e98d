"""Joins linear layers of a model that read the same input into one matrix product.

Fewer kernels make decode steps faster. No weight exists twice in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

Change = Callable[[Module], None]
"""Changes a module of a copy in place."""

JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of a module's linear layers that get the same input."""

MOST_ROWS = 256
"""The maximum number of tokens in a call that a joined product computes."""

_ARRAYS = ("weight", "scales", "biases", "bias")


def _keep(module: Module) -> None:
    """Leave `module` as it is."""


def join(model: Module, names: Sequence[Sequence[str]] = JOINED, change: Change = _keep) -> Module:
    """Return a model with joined products. It computes the same and shares `model`'s weights.

    `change` gets each module of the result.
    """
    return _copied(model, {}, names, change)


def share(model: Module, apart: Collection[str] = ()) -> Module:
    """Copy a tree of modules, but share modules without children, except those in `apart`."""
    modules = cast("Callable[[], list[tuple[str, Module]]]", model.named_modules)()
    same = {
        id(one): one
        for path, one in modules
        if path not in apart and not cast("Callable[[], dict[str, object]]", one.children)()
    }
    return _copied(model, same, (), _keep)


def computing(model: Module) -> list[Module]:
    """Return the modules that compute a step of `model`, each once. A joined product replaces the
    layers that it computes."""
    found: dict[int, Module] = {}
    for module in cast("Callable[[], list[Module]]", model.modules)():
        product = product_of(module)
        one = module if product is None else product.whole
        found[id(one)] = one
    return list(found.values())


def product_of(module: Module) -> Product | None:
    """Return the joined product that computes a linear layer; None if no product does."""
    return module.product if isinstance(module, _Takes) else None


class Product:
    """A matrix product for several linear layers with the same input."""

    def __init__(self, layers: Sequence[Linear | QuantizedLinear], change: Change) -> None:
        """Concatenate the weights of `layers`, which become views of the result."""
        sizes = [cast(mx.array, layer["weight"]).shape[0] for layer in layers]
        edges = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
        self._edges = edges[1:-1]
        first = layers[0]
        self.whole = _without_children(first)
        for name in _ARRAYS:
            if first.get(name) is None:
                continue
            joined = mx.concatenate([cast(mx.array, layer[name]) for layer in layers])
            mx.eval(joined)
            dict.__setitem__(self.whole, name, joined)
            views = [joined[start:stop] for start, stop in itertools.pairwise(edges)]
            mx.eval(views)
            for layer, view in zip(layers, views, strict=True):
                dict.__setitem__(layer, name, view)
        change(self.whole)
        self._input: mx.array | None = None
        self._parts: list[mx.array | None] = []
        self._apart = False

    def __call__(self, x: mx.array) -> mx.array:
        """Return the results of all layers, concatenated in order."""
        return cast("Callable[[mx.array], mx.array]", self.whole)(x)

    def part(self, number: int, x: mx.array) -> mx.array | None:
        """Return one layer's result; None if the product cannot compute it for this input."""
        if self._input is not x:
            self._apart |= self._input is not None
            self._input = None
            if self._apart:
                return None
            self._input, self._parts = x, list(mx.split(self(x), self._edges, axis=-1))
        found, self._parts[number] = self._parts[number], None
        if all(part is None for part in self._parts):
            self._input = None
        return found


class _Takes(Module):
    """A linear layer that takes its result from a joined product. Must come before mlx-lm's class
    among the bases."""

    product: Product
    number: int

    def __call__(self, x: mx.array) -> mx.array:
        n_tokens = x.size // x.shape[-1]
        found = self.product.part(self.number, x) if n_tokens <= MOST_ROWS else None
        apart = cast("Callable[[mx.array], mx.array]", super().__call__)
        return apart(x) if found is None else found


def _copied(
    module: Module, known: dict[int, Module], names: Sequence[Sequence[str]], change: Change
) -> Module:
    """Copy a tree of modules, joining products. The copy shares all arrays."""
    if id(module) in known:
        return known[id(module)]
    copy = known[id(module)] = _without_children(module)
    products = _join_in(module, names, change)
    for name, value in module.items():
        dict.__setitem__(copy, name, _copied_value(value, known, names, change))
    change(copy)
    for joined, product in products.items():
        for number, name in enumerate(joined):
            part = copy[name]
            part.__class__ = type("Part", (_Takes, type(part)), {})
            vars(part).update(product=product, number=number)
    return copy


def _copied_value(
    value: object, known: dict[int, Module], names: Sequence[Sequence[str]], change: Change
) -> object:
    if isinstance(value, Module):
        return _copied(value, known, names, change)
    if isinstance(value, list):
        return [_copied_value(one, known, names, change) for one in value]
    if isinstance(value, dict):
        return {name: _copied_value(one, known, names, change) for name, one in value.items()}
    return value


def _without_children(module: Module) -> Module:
    copy = dict.__new__(type(module))
    vars(copy).update(vars(module))
    return copy


def _join_in(
    module: Module, names: Sequence[Sequence[str]], change: Change
) -> dict[tuple[str, ...], Product]:
    found: dict[tuple[str, ...], Product] = {}
    for group in names:
        layers = [module.get(name) for name in group]
        if all(type(one) in (Linear, QuantizedLinear) for one in layers):
            linear = cast("list[Linear | QuantizedLinear]", layers)
            if len({_form(one) for one in linear}) == 1:
                found[tuple(group)] = Product(linear, change)
                mx.clear_cache()  # frees the separate weights
    return found


def _form(layer: Linear | QuantizedLinear) -> tuple[object, ...]:
    arrays = [
        (name, array.dtype, array.shape[1:])
        for name in _ARRAYS
        if (array := cast("mx.array | None", layer.get(name))) is not None
    ]
    how = [vars(layer).get(name) for name in ("group_size", "bits", "mode")]
    return (type(layer), *arrays, *how)
