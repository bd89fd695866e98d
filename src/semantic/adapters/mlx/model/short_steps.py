"""Decode steps with fewer kernels and less Python, for models built like Llama and Gemma 3.

Models with other source code stay unchanged. `tests/integration/test_joined.py` fails if mlx-lm
changes its code.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Protocol, cast

import mlx.core as mx
from mlx.nn.layers.activations import gelu_approx
from mlx.nn.layers.base import Module
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models import gemma3_text, llama, qwen2, qwen3
from mlx_lm.models.activations import swiglu

from semantic.adapters.mlx.arrays import Heads
from semantic.adapters.mlx.device import on_cpu, on_cuda
from semantic.adapters.mlx.kv_cache.attention_hook import scaled_dot_product_attention
from semantic.adapters.mlx.kv_cache.paged.cache import PagedBatch
from semantic.adapters.mlx.model.joined import MOST_ROWS, Product, join, product_of
from semantic.adapters.mlx.model.row_layers import add_to, let_add, use_rows

SOURCES = {
    llama: "3b64e8867b964bf3",
    qwen2: "0bff50f95f2319ac",
    qwen3: "793252df6acb2d8a",
    gemma3_text: "2bbb31d978efde65",
}
"""Digests of the source code of the mlx-lm modules that this module replaces."""

_MODELS = {
    llama: "LlamaModel",
    qwen2: "Qwen2Model",
    qwen3: "Qwen3Model",
    gemma3_text: "Gemma3Model",
}
_PARTS = ("Attention", "MLP", "TransformerBlock", "RMSNorm")

_DECODING = "_semantic_decoding_form"


class _Cache(Protocol):
    @property
    def offset(self) -> mx.array: ...

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]: ...

    def make_mask(self, N: int, return_array: bool, window_size: int | None) -> mx.array | None: ...


_Heads = tuple[mx.array, mx.array]
"""All heads of queries, keys and values, (rows, heads, 1, head_dim)."""

_Start = Callable[[mx.array, mx.array], tuple[mx.array, mx.array, mx.array]]
_Middle = Callable[[mx.array, mx.array, mx.array], tuple[mx.array, mx.array, mx.array]]
_End = Callable[[mx.array, mx.array], mx.array]


def source_digest(module: ModuleType) -> str:
    """Return a digest of the source code of the layers and the model in `module`."""
    parts = [getattr(module, name, None) for name in (*_PARTS, _MODELS[module])]
    source = "".join(inspect.getsource(part) for part in parts if part is not None)
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def shorten(model: Module, *, add_in_product: bool = True, compiled: bool = False) -> None:
    """Make a joined model decode with fewer kernels, if its source code is in `SOURCES`.

    `compiled` shortens a step by at most 7 %. But on a GPU each new batch size then takes 3 s at
    first.
    """
    for inner in cast("Callable[[], list[Module]]", model.modules)():
        known = next((one for one in SOURCES if type(inner) is getattr(one, _MODELS[one])), None)
        if known is not None and source_digest(known) == SOURCES[known] and _is_whole(inner):
            _shorten(inner, known, add_in_product=add_in_product, compiled=compiled)


def _shorten(inner: Module, known: ModuleType, *, add_in_product: bool, compiled: bool) -> None:
    layers = [_layer_of(layer, known, add_in_product) for layer in inner.layers]
    found = [layer for layer in layers if layer is not None]
    if len(found) < len(layers):
        return
    outside = _Outside(inner)
    if known is gemma3_text:
        _add_ones(inner)
        outside = _GemmaOutside(inner)
    for layer in found:
        layer.read_norms()
    kind = type(inner)
    inner.__class__ = type(kind.__name__, (_Stepped, kind), {})
    inner.steps = _Steps(outside, found, compiled=compiled)


def keep_long(model: Module) -> None:
    """Make `model` decode without joined products, because joining would copy shared weights."""
    vars(model)[_DECODING] = join(model, (), use_rows) if on_cuda() else model


def shorten_here(model: Module) -> Module:
    """On a GPU, return a model that decodes in short steps. On a CPU, return `model`."""
    if on_cpu():
        return model
    if _DECODING not in vars(model):
        joined = join(model, change=use_rows)
        shorten(joined)
        vars(model)[_DECODING] = joined
    return cast(Module, vars(model)[_DECODING])


class _Layer:
    def __init__(self, block: llama.TransformerBlock, heads: Product, gates: Product) -> None:
        self._block = block
        self._heads = heads
        self._gates = gates
        self._norms: tuple[mx.array, float] | None = None

    def read_norms(self) -> None:
        self._norms = _head_norms(self._block.self_attn)

    def heads(self, h: mx.array, offset: mx.array) -> _Heads:
        """Return attention's inputs. The residual stream `h` is (rows, 1, features)."""
        attention = self._block.self_attn
        rows, n, n_kv = h.shape[0], attention.n_heads, cast(int, attention.n_kv_heads)
        product = self._heads(self._block.input_layernorm(h))
        product = rotated = product.reshape(rows, n + 2 * n_kv, 1, -1)
        # Rotate the values too, but use them without norm and rotation: the product is contiguous,
        # while queries and keys alone would have to be copied.
        if self._norms is not None:
            weights, eps = self._norms
            rotated = mx.fast.rms_norm(product, None, eps) * weights
        return attention.rope(rotated, offset=offset), product

    def attend(self, heads: Sequence[mx.array], cache: _Cache, mask: mx.array | None) -> mx.array:
        rotated, product = heads
        attention = self._block.self_attn
        n, n_kv, scale = attention.n_heads, cast(int, attention.n_kv_heads), attention.scale
        q, k = Heads(rotated, 0, n), Heads(rotated, n, n_kv)
        v = Heads(product, n + n_kv, n_kv)
        if isinstance(cache, PagedBatch):
            return cache.attend(q, cache.update_and_fetch(k, v)[0], scale, None)
        keys, values = cache.update_and_fetch(k.view(), v.view())
        return scaled_dot_product_attention(
            q.view(), keys, values, cache=cache, scale=scale, mask=mask
        )

    def after(self, attended: mx.array, h: mx.array) -> mx.array:
        block = self._block
        flat = attended.swapaxes(1, 2).reshape(h.shape[0], 1, -1)
        h = add_to(h, block.self_attn.o_proj, flat)
        gate, up = mx.split(self._gates(block.post_attention_layernorm(h)), 2, axis=-1)
        return add_to(h, block.mlp.down_proj, cast(mx.array, swiglu(gate, up)))


class _GemmaLayer(_Layer):
    """Gemma's layer: norms on both sides of attention and of the gated MLP."""

    def after(self, attended: mx.array, h: mx.array) -> mx.array:
        block = cast(gemma3_text.TransformerBlock, self._block)
        out = block.self_attn.o_proj(attended.swapaxes(1, 2).reshape(h.shape[0], 1, -1))
        h = gemma3_text.clip_residual(h, block.post_attention_layernorm(out))
        gate, up = mx.split(self._gates(block.pre_feedforward_layernorm(h)), 2, axis=-1)
        out = block.mlp.down_proj(gelu_approx(gate) * up)
        return cast(mx.array, gemma3_text.clip_residual(h, block.post_feedforward_layernorm(out)))


class _Outside:
    def __init__(self, model: Module) -> None:
        self._model = model

    def embed(self, inputs: mx.array) -> mx.array:
        """Return the residual stream of token ids, (rows, 1)."""
        return cast(mx.array, self._model.embed_tokens(inputs))

    def norm(self, h: mx.array) -> mx.array:
        return cast(mx.array, self._model.norm(h))

    def masks(self, caches: Sequence[_Cache]) -> list[mx.array | None]:
        """Return each layer's mask. Call this before the step appends tokens."""
        mask = caches[0].make_mask(1, return_array=False, window_size=None)
        return [mask] * len(caches)


class _GemmaOutside(_Outside):
    """Gemma's parts outside its layers: scaled embeddings, and masks for layers with a window."""

    def embed(self, inputs: mx.array) -> mx.array:
        h = super().embed(inputs)
        return h * mx.array(self._model.args.hidden_size**0.5, mx.bfloat16).astype(h.dtype)

    def masks(self, caches: Sequence[_Cache]) -> list[mx.array | None]:
        pattern, window = self._model.sliding_window_pattern, self._model.window_size
        everything = caches[pattern - 1].make_mask(1, return_array=False, window_size=None)
        recent = None
        if pattern > 1:
            recent = caches[0].make_mask(1, return_array=False, window_size=window)
        return [everything if i % pattern == pattern - 1 else recent for i in range(len(caches))]


class _Between:
    def __init__(
        self,
        outside: _Outside,
        layers: Sequence[_Layer],
        made: Callable[[Callable[..., object]], Callable[..., object]],
    ) -> None:
        first, last = layers[0], layers[-1]

        def start(inputs: mx.array, offset: mx.array) -> tuple[mx.array, ...]:
            h = outside.embed(inputs)
            return (h, *first.heads(h, offset))

        def end(attended: mx.array, h: mx.array) -> mx.array:
            return outside.norm(last.after(attended, h))

        def between(one: _Layer, following: _Layer) -> _Middle:
            def run(attended: mx.array, h: mx.array, offset: mx.array) -> tuple[mx.array, ...]:
                h = one.after(attended, h)
                return (h, *following.heads(h, offset))

            return cast(_Middle, made(run))

        self.start = cast(_Start, made(start))
        self.end = cast(_End, made(end))
        self.middle = [between(one, two) for one, two in itertools.pairwise(layers)]


class _Steps:
    def __init__(self, outside: _Outside, layers: Sequence[_Layer], *, compiled: bool) -> None:
        self._outside = outside
        self._layers = layers
        compiler = cast("Callable[[Callable[..., object]], Callable[..., object]]", mx.compile)
        self._between = _Between(outside, layers, compiler if compiled else lambda call: call)

    def __call__(self, inputs: mx.array, caches: Sequence[_Cache]) -> mx.array:
        between = self._between
        masks = self._outside.masks(caches)
        h, *heads = between.start(inputs, caches[0].offset)
        for number, middle in enumerate(between.middle):
            attended = self._layers[number].attend(heads, caches[number], masks[number])
            h, *heads = middle(attended, h, caches[number + 1].offset)
        return between.end(self._layers[-1].attend(heads, caches[-1], masks[-1]), h)


class _Stepped(Module):
    """A model without its output layer. Must come before mlx-lm's class among the bases."""

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
    """Return whether this is a decode step of a batch."""
    one = inputs.shape[1] == 1 and inputs.shape[0] <= MOST_ROWS
    return one and isinstance(caches[0].offset, mx.array)


def _is_whole(inner: Module) -> bool:
    windows = getattr(inner, "swa_idx", None)
    return windows is None and getattr(inner, "pipeline_size", 1) == 1


def _layer_of(block: Module, module: ModuleType, add_in_product: bool) -> _Layer | None:
    if type(block) is not module.TransformerBlock:
        return None
    heads, gates = product_of(block.self_attn.q_proj), product_of(block.mlp.gate_proj)
    if heads is None or gates is None:
        return None
    if module is gemma3_text:
        return _GemmaLayer(cast(llama.TransformerBlock, block), heads, gates)
    if add_in_product:
        let_add(block.self_attn.o_proj)
        let_add(block.mlp.down_proj)
    return _Layer(cast(llama.TransformerBlock, block), heads, gates)


def _add_ones(inner: Module) -> None:
    """Replace Gemma's norms, which add 1 to their weights, with plain norms."""
    for module in cast("Callable[[], list[Module]]", inner.modules)():
        for name, norm in module.items():
            if type(norm) is gemma3_text.RMSNorm:
                weight = 1.0 + cast(mx.array, norm["weight"])
                mx.eval(weight)
                sum_norm = RMSNorm(weight.size, norm.eps)
                sum_norm.weight = weight
                dict.__setitem__(module, name, sum_norm)


def _head_norms(attention: Module) -> tuple[mx.array, float] | None:
    """Return the weights of all heads' norms, (heads, 1, head_dim), and their epsilon."""
    q, k = attention.get("q_norm"), attention.get("k_norm")
    if not isinstance(q, RMSNorm) or not isinstance(k, RMSNorm):
        return None
    of_q, of_k = cast(mx.array, q["weight"]), cast(mx.array, k["weight"])
    n, n_kv = attention.n_heads, attention.n_kv_heads
    weights = mx.concatenate(
        [mx.stack([of_q] * n), mx.stack([of_k] * n_kv), mx.ones((n_kv, of_k.size), of_k.dtype)]
    )[:, None]
    mx.eval(weights)
    return weights, q.eps
