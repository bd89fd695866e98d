"""One rank's shard of a model: made by mlx-lm, named after all ranks, and put behind a backend.

mlx-lm divides heads and hidden units; each rank computes a part of every layer, and sums of all
parts are the layer's output. Refuses what cannot be divided. Knows mlx-lm's models by their `shard`
and their configuration; not how ranks talk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.distributed import AllToShardedLinear, QuantizedAllToShardedLinear
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.kv_cache.forms import CacheForm
from semantic.adapters.mlx.ranks.group import Ranks, require_same
from semantic.adapters.mlx.ranks.leading import LeadingBackend
from semantic.adapters.mlx.sampling.grammar_compiler import GrammarCompiler
from semantic.domain.errors import UnsupportedModelError
from semantic.domain.identity import digest
from semantic.domain.value_objects import ModelCacheSpec

_HEADS = ("num_attention_heads", "num_key_value_heads")
_LATENT = "kv_lora_rank"
"""Of models whose keys and values of all heads are one latent, which every rank has."""

_WITHOUT_GRADIENTS: Mapping[type[Module], type[Module]] = {
    AllToShardedLinear: Linear,
    QuantizedAllToShardedLinear: QuantizedLinear,
}
"""Layers of which a rank has some rows, and those that compute the same but for gradients: as these
they are known to what joins the products of a step."""

_Shard = Callable[[mx.distributed.Group], None]


def shard_model(model: Module, ranks: Ranks) -> None:
    """Leave the part of `model` that this rank computes; its weights are not read yet.

    Raises UnsupportedModelError, on every rank, if mlx-lm cannot divide it so.
    """
    shard = cast("_Shard | None", getattr(model, "shard", None))
    if shard is None:
        raise UnsupportedModelError(
            f"mlx-lm cannot divide a {type(model).__module__.rpartition('.')[2]} among ranks: "
            "start it on one device"
        )
    for name, n_heads in _heads_of(model).items():
        if n_heads % ranks.size:
            raise UnsupportedModelError(
                f"{name} is {n_heads}: expected a number of ranks that divides it, got {ranks.size}"
            )
    shard(ranks.group)
    for module in cast("Callable[[], list[Module]]", model.modules)():
        module.__class__ = _WITHOUT_GRADIENTS.get(type(module), type(module))


def shared_name(name: str, files: str, ranks: Ranks) -> str:
    """The id of the model that all `ranks` compute, of which `name` is the one on this machine.

    Covers how every rank rounds, their order and their transport. `files` identifies what all must
    have in common: raises BackendError, on every rank, if they have not.
    """
    require_same(ranks.gather(digest("files-v1", files.encode())), "model, mlx or kind of device")
    names = ranks.gather(digest("rank-v1", name.encode()))
    kind = name[: name.rindex(":") + 1]
    return kind + digest("ranks-v1", ranks.transport.encode(), *names).hex()


def shard_backend(
    model: Module,
    model_id: str,
    spec: ModelCacheSpec,
    form: CacheForm,
    vocab_size: int,
    grammars: GrammarCompiler | None,
    ranks: Ranks,
) -> MLXBackend:
    """The backend of this rank. Raises UnsupportedModelError for a model of which ranks would not
    make the same calls, and BackendError if their caches differ in form."""
    if spec.reusable_tokens is not None:
        raise UnsupportedModelError(
            "this model computes other keys if a prompt is divided elsewhere: start it on one "
            "device"
        )
    layers = form.layers
    kind = f"{type(layers).__name__} {layers.ragged} {layers.together}"
    form_here = f"{kind} {form.codec.layout} {spec}"
    require_same(ranks.gather(digest("form-v1", form_here.encode())), "form of caches")
    if ranks.rank == 0:
        return LeadingBackend(model, model_id, spec, form, vocab_size, grammars, ranks)
    agree = ranks.from_first
    return MLXBackend(model, model_id, spec, form, vocab_size, grammars, None, agree)


def _heads_of(model: Module) -> Mapping[str, int]:
    """The numbers of heads that must be divisible."""
    arguments = getattr(model, "args", None)
    nested = getattr(arguments, "text_config", None)
    found: dict[str, int] = {}
    for source in (arguments, nested):
        get = (
            source.get
            if isinstance(source, Mapping)
            else lambda name, of=source: getattr(of, name, None)
        )
        names = _HEADS[:1] if get(_LATENT) else _HEADS
        found |= {name: n for name in names if isinstance(n := get(name), int)}
    return found
