"""One rank of a model: collective operations, and its shard, which mlx-lm makes.

Collective operations cannot be cancelled, so a process whose peer is lost ends itself, as after a
crash: what is stored stays. mlx-lm divides heads and hidden units; each rank computes a part of
every layer, and sums of all parts are the layer's output. Refuses what cannot be divided. Knows
mlx-lm's models by their `shard` and their configuration; not how ranks talk.
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
    """The processes that compute one model, seen from one of them. All call `gather`, `all_found`
    and `from_first` in the same order."""

    def __init__(self, placement: PlacementPort) -> None:
        """Meet the others. Raises BackendError if they cannot be reached."""
        self.transport = placement.transport
        try:
            with placement.meeting():
                self.group = mx.distributed.init(strict=True, backend=self.transport)
        except (RuntimeError, ValueError) as error:
            raise BackendError(f"the ranks cannot meet over {self.transport}: {error}") from error
        self.rank, self.size = self.group.rank(), self.group.size()
        self.links: LinksPort = placement.connect(self, MappedMemory)

    def gather(self, data: bytes) -> list[bytes]:
        """The `data` of all ranks by rank, of equal length each. No text and no object is read."""
        mine = mx.zeros((self.size, len(data)), mx.int32)
        mine[self.rank] = mx.array(list(data), mx.int32)
        found = mx.distributed.all_sum(mine, group=self.group)
        return [bytes(row) for row in cast(list[list[int]], found.tolist())]

    def all_found(self, found: bool) -> bool:
        """Whether every rank found so."""
        n = mx.distributed.all_sum(mx.array(int(found)), group=self.group)
        return n.item() == self.size

    def from_first(self, tokens: mx.array) -> mx.array:
        """The sampled `tokens` of rank 0, on every rank, as a part of the graph.

        Depends on the tokens of this rank, so that it comes after all of the model's operations.
        """
        mine = mx.array(int(self.rank == 0), tokens.dtype)
        return mx.distributed.all_sum(tokens * mine, group=self.group)


def require_same(found: Sequence[bytes], what: str) -> None:
    """Raise BackendError, the same on every rank, unless all ranks have the same `what`."""
    for rank, one in enumerate(found):
        if one != found[0]:
            raise BackendError(f"rank {rank} has another {what} than rank 0")


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
