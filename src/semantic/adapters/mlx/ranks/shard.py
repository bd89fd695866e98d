"""One rank of a model: collective operations, and the rank's part of every layer.

A collective operation cannot be cancelled. A process that loses another rank therefore ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.distributed import AllToShardedLinear, QuantizedAllToShardedLinear
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

from semantic.adapters.mlx.ranks.shared_memory import MappedMemory
from semantic.domain.errors import BackendError, UnsupportedModelError
from semantic.domain.identity import digest
from semantic.ports.ranks import LinksPort, PlacementPort


class Ranks:
    """The processes that compute one model. All ranks must call its methods in the same order."""

    def __init__(self, placement: PlacementPort) -> None:
        """Meet the other ranks. Raises BackendError if they cannot be reached."""
        self.transport = placement.transport
        try:
            with placement.meeting():
                self.group = mx.distributed.init(strict=True, backend=self.transport)
        except (RuntimeError, ValueError) as error:
            raise BackendError(f"the ranks cannot meet over {self.transport}: {error}") from error
        self.rank, self.size = self.group.rank(), self.group.size()
        self.links: LinksPort = placement.connect(self, MappedMemory)

    def gather(self, data: bytes) -> list[bytes]:
        """Return the `data` of all ranks, by rank. All data must have equal length."""
        mine = mx.zeros((self.size, len(data)), mx.int32)
        mine[self.rank] = mx.array(list(data), mx.int32)
        found = mx.distributed.all_sum(mine, group=self.group)
        return [bytes(row) for row in cast(list[list[int]], found.tolist())]

    def all_found(self, found: bool) -> bool:
        """Return whether `found` is True on every rank."""
        n = mx.distributed.all_sum(mx.array(int(found)), group=self.group)
        return n.item() == self.size

    def from_first(self, tokens: mx.array) -> mx.array:
        """Return rank 0's sampled `tokens` on every rank, as a part of MLX's graph."""
        # Depends on this rank's tokens too, so that MLX first computes all of the model.
        mine = mx.array(int(self.rank == 0), tokens.dtype)
        return mx.distributed.all_sum(tokens * mine, group=self.group)


def require_same(found: Sequence[bytes], what: str) -> None:
    """Raise BackendError on every rank unless `found` is the same on all ranks."""
    for rank, one in enumerate(found):
        if one != found[0]:
            raise BackendError(f"rank {rank} has a different {what} than rank 0")


_HEADS = ("num_attention_heads", "num_key_value_heads")
_LATENT = "kv_lora_rank"
"""A field of models whose heads share one latent of keys and values."""

_WITHOUT_GRADIENTS: Mapping[type[Module], type[Module]] = {
    AllToShardedLinear: Linear,
    QuantizedAllToShardedLinear: QuantizedLinear,
}
"""Maps each class of divided layers to one that computes the same without gradients."""

_Shard = Callable[[mx.distributed.Group], None]


def shard_model(model: Module, ranks: Ranks) -> None:
    """Reduce `model` to this rank's part before its weights are read. Raises UnsupportedModelError
    if that is impossible."""
    shard = cast("_Shard | None", getattr(model, "shard", None))
    if shard is None:
        raise UnsupportedModelError(
            f"mlx-lm cannot divide a {type(model).__module__.rpartition('.')[2]} among ranks: "
            "start it on one device"
        )
    for name, n_heads in _heads_of(model).items():
        if n_heads % ranks.size:
            raise UnsupportedModelError(
                f"the number of ranks must divide {name} ({n_heads}), got {ranks.size}"
            )
    shard(ranks.group)
    for module in cast("Callable[[], list[Module]]", model.modules)():
        module.__class__ = _WITHOUT_GRADIENTS.get(type(module), type(module))


def shared_name(name: str, files: str, ranks: Ranks) -> str:
    """Return the id of the model that all `ranks` compute. Raises BackendError if the id `files`
    differs between ranks."""
    require_same(ranks.gather(digest("files-v1", files.encode())), "model, mlx or kind of device")
    names = ranks.gather(digest("rank-v1", name.encode()))
    kind = name[: name.rindex(":") + 1]
    return kind + digest("ranks-v1", ranks.transport.encode(), *names).hex()


def _heads_of(model: Module) -> Mapping[str, int]:
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
