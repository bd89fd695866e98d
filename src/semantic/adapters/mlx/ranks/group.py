"""One rank of a model: collective operations of MLX, and the connections beside them.

Collective operations cannot be cancelled, so a process whose peer is lost ends itself, as after a
crash: what is stored stays. Knows MLX's groups; not what is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx

from semantic.adapters.mlx.ranks.shared_memory import MappedMemory
from semantic.domain.errors import BackendError
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
