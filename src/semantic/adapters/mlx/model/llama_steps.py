"""Decode steps of models of Llama's form, with fewer kernels and less Python, over joined products.

Queries, keys and values are rotated together, the residual is added in the product, and what lies
between the attentions of two layers is one compiled function. The only module that knows how
mlx-lm writes a layer: it is used only where the source is what this was written after, and
`tests/integration/test_joined.py` fails when mlx-lm changes it.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Protocol, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.quantized import QuantizedLinear
from mlx_lm.models import llama, qwen2, qwen3
from mlx_lm.models.activations import swiglu

from semantic.adapters.mlx.kv_cache.attention_hook import scaled_dot_product_attention
from semantic.adapters.mlx.model.joined import MOST_ROWS, Product, join, product_of

SOURCES = {llama: "3b64e8867b964bf3", qwen2: "0bff50f95f2319ac", qwen3: "793252df6acb2d8a"}
"""mlx-lm's modules of this form: digests of the source that this was written after."""

_PARTS = ("Attention", "MLP", "TransformerBlock")
_MODELS = {llama: "LlamaModel", qwen2: "Qwen2Model", qwen3: "Qwen3Model"}

_DECODING = "_semantic_decoding_form"


class _Cache(Protocol):
    """What Llama calls of a batch's cache of one layer."""

    @property
    def offset(self) -> mx.array: ...

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]: ...

    def make_mask(self, N: int, return_array: bool, window_size: int | None) -> mx.array | None: ...


_Heads = tuple[mx.array, mx.array, mx.array]
"""Queries, keys and values, (rows, heads, 1, head_dim); the first two rotated."""

_Start = Callable[[mx.array, mx.array], tuple[mx.array, mx.array, mx.array, mx.array]]
_Between = Callable[[mx.array, mx.array, mx.array], tuple[mx.array, mx.array, mx.array, mx.array]]
_End = Callable[[mx.array, mx.array], mx.array]


def source_digest(module: ModuleType) -> str:
    """Of the source of a module's layers and of its model without the output layer."""
    source = "".join(inspect.getsource(getattr(module, n)) for n in (*_PARTS, _MODELS[module]))
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def shorten(model: Module, *, add_in_product: bool = True, compiled: bool = True) -> None:
    """Let a joined model decode with fewer kernels, if it is of a form that this knows."""
    inner = cast(Module, model.get("model"))
    known = next((one for one in SOURCES if type(inner) is getattr(one, _MODELS[one])), None)
    if known is None or source_digest(known) != SOURCES[known] or _is_special(inner):
        return
    layers = [_layer_of(layer, known, add_in_product) for layer in inner.layers]
    found = [layer for layer in layers if layer is not None]
    if len(found) < len(layers):
        return
    kind = type(inner)
    inner.__class__ = type(kind.__name__, (_Stepped, kind), {})
    inner.steps = _Steps(inner, found, compiled)


def shorten_here(model: Module) -> Module:
    """A model with joined products and short steps on a GPU; on a CPU the model itself.

    The same object each time for the same model. A CPU is bound by the products, and a joined one
    may round differently.
    """
    if mx.default_device() == mx.Device(mx.cpu):
        return model
    if _DECODING not in vars(model):
        joined = join(model)
        shorten(joined)
        vars(model)[_DECODING] = joined
    return cast(Module, vars(model)[_DECODING])


class _Layer:
    """One layer's computations before and after its attention."""

    def __init__(
        self, block: llama.TransformerBlock, heads: Product, gates: Product, add_in_product: bool
    ) -> None:
        self._block = block
        self._heads = heads
        self._gates = gates
        self._add_in_product = add_in_product
        self._norms = _head_norms(block.self_attn)

    def heads(self, h: mx.array, offset: mx.array) -> _Heads:
        """What attention gets, from the residual stream (rows, 1, features)."""
        attention = self._block.self_attn
        rows, n, n_kv = h.shape[0], attention.n_heads, cast(int, attention.n_kv_heads)
        product = self._heads(self._block.input_layernorm(h))
        product = product.reshape(rows, 1, n + 2 * n_kv, -1)
        v = product[:, :, n + n_kv :].swapaxes(1, 2)
        # Values as well, of which neither norm nor rotation is used: the product is contiguous,
        # queries and keys alone are not, and would be copied.
        if self._norms is not None:
            weights, eps = self._norms
            product = mx.fast.rms_norm(product, None, eps) * weights
        rotated = attention.rope(product.swapaxes(1, 2), offset=offset)
        return rotated[:, :n], rotated[:, n : n + n_kv], v

    def attend(self, heads: Sequence[mx.array], cache: _Cache, mask: mx.array | None) -> mx.array:
        """Attention, (rows, heads, 1, head_dim)."""
        q, k, v = heads
        k, v = cache.update_and_fetch(k, v)
        scale = self._block.self_attn.scale
        return scaled_dot_product_attention(q, k, v, cache=cache, scale=scale, mask=mask)

    def after(self, attended: mx.array, h: mx.array) -> mx.array:
        """The residual stream after the layer."""
        block = self._block
        flat = attended.swapaxes(1, 2).reshape(h.shape[0], 1, -1)
        h = self._added(h, flat, block.self_attn.o_proj)
        gate, up = mx.split(self._gates(block.post_attention_layernorm(h)), 2, axis=-1)
        return self._added(h, cast(mx.array, swiglu(gate, up)), block.mlp.down_proj)

    def _added(self, h: mx.array, x: mx.array, linear: Linear | QuantizedLinear) -> mx.array:
        """`h + linear(x)`, in one product where weights are not quantized."""
        if self._add_in_product and isinstance(linear, Linear) and "bias" not in linear:
            return mx.addmm(h, x, cast(mx.array, linear["weight"]).T)
        return h + cast(mx.array, linear(x))


class _Steps:
    """A decode step of one token per row."""

    def __init__(self, model: Module, layers: Sequence[_Layer], compiled: bool) -> None:
        self._layers = layers
        first, last = layers[0], layers[-1]

        def start(inputs: mx.array, offset: mx.array) -> tuple[mx.array, ...]:
            h = model.embed_tokens(inputs)
            return (h, *first.heads(h, offset))

        def end(attended: mx.array, h: mx.array) -> mx.array:
            return cast(mx.array, model.norm(last.after(attended, h)))

        def between(one: _Layer, following: _Layer) -> _Between:
            def run(attended: mx.array, h: mx.array, offset: mx.array) -> tuple[mx.array, ...]:
                h = one.after(attended, h)
                return (h, *following.heads(h, offset))

            return cast(_Between, made(run))

        made = cast("Callable[[object], object]", mx.compile if compiled else lambda call: call)
        self._start = cast(_Start, made(start))
        self._end = cast(_End, made(end))
        self._between = [between(one, two) for one, two in itertools.pairwise(layers)]

    def __call__(self, inputs: mx.array, caches: Sequence[_Cache]) -> mx.array:
        mask = caches[0].make_mask(1, return_array=False, window_size=None)
        h, *heads = self._start(inputs, caches[0].offset)
        for number, between in enumerate(self._between):
            attended = self._layers[number].attend(heads, caches[number], mask)
            h, *heads = between(attended, h, caches[number + 1].offset)
        return self._end(self._layers[-1].attend(heads, caches[-1], mask), h)


class _Stepped(Module):
    """A model without its output layer; before mlx-lm's class of it."""

    steps: _Steps

    def __call__(
        self,
        inputs: mx.array,
        cache: Sequence[_Cache] | None = None,
        input_embeddings: mx.array | None = None,
    ) -> mx.array:
        if input_embeddings is None and cache is not None and _one_each(inputs, cache):
            return self.steps(inputs, cache)
        theirs = cast("Callable[..., mx.array]", super().__call__)
        return theirs(inputs, cache, input_embeddings)


def _one_each(inputs: mx.array, caches: Sequence[_Cache]) -> bool:
    """Whether this is a decode step of a batch: all its caches have an array of positions."""
    one = inputs.shape[1] == 1 and inputs.shape[0] <= MOST_ROWS
    return one and isinstance(caches[0].offset, mx.array)


def _is_special(inner: Module) -> bool:
    """Whether a model has windows, or is one part of a model on several devices."""
    windows = getattr(inner, "swa_idx", None)
    return windows is not None or getattr(inner, "pipeline_size", 1) != 1


def _layer_of(block: Module, module: ModuleType, add_in_product: bool) -> _Layer | None:
    if type(block) is not module.TransformerBlock:
        return None
    heads, gates = product_of(block.self_attn.q_proj), product_of(block.mlp.gate_proj)
    if heads is None or gates is None:
        return None
    return _Layer(cast(llama.TransformerBlock, block), heads, gates, add_in_product)


def _head_norms(attention: Module) -> tuple[mx.array, float] | None:
    """Weights of the norms of all heads, values included, (heads, head_dim); None without norms."""
    q, k = attention.get("q_norm"), attention.get("k_norm")
    if not isinstance(q, RMSNorm) or not isinstance(k, RMSNorm):
        return None
    of_q, of_k = cast(mx.array, q["weight"]), cast(mx.array, k["weight"])
    n, n_kv = attention.n_heads, attention.n_kv_heads
    weights = mx.concatenate(
        [mx.stack([of_q] * n), mx.stack([of_k] * n_kv), mx.ones((n_kv, of_k.size), of_k.dtype)]
    )
    mx.eval(weights)
    return weights, q.eps
