"""A tiny model that two processes compute: this one is rank 0, and `python -m` of this file rank 1.

Both talk on loopback over MLX's backend ring; over nccl if SEMANTIC_RANKS says so, on one GPU. MLX
has one such group in a process, so both compute one model after another: rank 1 reads their names.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from mlx.nn.layers.base import Module

from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.device import on_cpu
from semantic.adapters.mlx.kv_cache.forms import AttentionFor, find_kernels
from semantic.adapters.mlx.kv_cache.paged.attention import PortableAttention
from semantic.adapters.mlx.model.joined import join
from semantic.adapters.mlx.model.provider import wrapping
from semantic.adapters.mlx.model.short_steps import shorten
from semantic.adapters.mlx.ranks.following import follow
from semantic.adapters.mlx.ranks.leading import LeadingBackend
from semantic.adapters.mlx.ranks.shard import Ranks, shard_model, shared_name
from semantic.domain.value_objects import KvBits
from semantic.ports.generation import at_once
from semantic_fleet.ranks.launched import Grid
from tests.support.eight_bits import EIGHT
from tests.support.in_pages import SUFFIX
from tests.support.ports import HERE, free_port
from tests.support.tiny_models import tiny_model
from tests.zoo.folder import drawn

TRANSPORT: Final = os.environ.get("SEMANTIC_RANKS", "ring")
SIZE: Final = 2
PLACEMENT: Final = Grid(0, SIZE, SIZE, TRANSPORT, HERE)
"""Of either rank."""
WIDE: Final = "wide "
"""Begins the names of models with heads that a GPU has kernels for."""


def launched(folder: Path) -> list[dict[str, str]]:
    """What `mlx.launch` puts into the environment of each rank; files are in `folder`.

    Over nccl both ranks have the same GPU, which NCCL accepts of processes that it takes to be on
    different machines.
    """
    ports = [str(free_port()) for _ in range(SIZE)]
    if TRANSPORT == "nccl":
        shared = {
            "MLX_WORLD_SIZE": str(SIZE),
            "NCCL_HOST_IP": HERE,
            "NCCL_PORT": ports[0],
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
            "CUDA_VISIBLE_DEVICES": "0",
        }
        return [
            {**shared, "MLX_RANK": str(rank), "NCCL_HOSTID": f"rank {rank}"} for rank in range(SIZE)
        ]
    path = folder / "hosts.json"
    path.write_text(json.dumps([[f"{HERE}:{port}"] for port in ports]))
    return [{"MLX_HOSTFILE": str(path), "MLX_RANK": str(rank)} for rank in range(SIZE)]


class Pair:
    """Rank 1, which is ended with this process, and the model that both compute now."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            mine, theirs = launched(Path(folder))
            command = (sys.executable, "-m", "tests.support.two_ranks")
            self._other = subprocess.Popen(
                command, env={**os.environ, **theirs}, stdin=subprocess.PIPE, text=True
            )
            atexit.register(self._end)
            os.environ.update(mine)
            try:
                self._ranks: Ranks | None = Ranks(PLACEMENT)
            finally:
                for name in mine:
                    del os.environ[name]
        self._name = ""
        self._backend: LeadingBackend | None = None

    def model(self, name: str) -> LeadingBackend:
        """Rank 0 of the tiny model with that name, "llama in pages" is "llama" with pages; no other
        is computed any more."""
        if self._backend is None or name != self._name:
            if self._backend is not None and self._ranks is not None:
                self._ranks.links.finish()
                self._ranks = None
            self._say(name)
            backend = shard(name, self._ranks or Ranks(PLACEMENT))
            assert isinstance(backend, LeadingBackend)
            self._ranks, self._name, self._backend = backend.ranks, name, backend
        return self._backend

    def _end(self) -> None:
        self._other.kill()
        self._other.communicate()

    def _say(self, name: str) -> None:
        assert self._other.stdin is not None
        self._other.stdin.write(name + "\n")
        self._other.stdin.flush()


@functools.cache
def pair() -> Pair:
    """The only pair of this process."""
    return Pair()


def shard(name: str, ranks: Ranks) -> MLXBackend:
    """This rank's backend of a tiny model."""
    model = _model(name.removesuffix(SUFFIX))
    shard_model(model, ranks)
    named = shared_name(f"tiny:{name}", "tiny", ranks)
    attention = pages_here() if name.endswith(SUFFIX) else None
    bits: KvBits = 8 if EIGHT in name else 16
    form = wrapping(
        model, named, attention=attention, decoding=shortened, ranks=ranks, kv_bits=bits
    )
    backend = at_once(form)
    assert backend.in_pages == name.endswith(SUFFIX)
    assert not backend.in_pages or hasattr(backend.model.model, "steps")  # they are shortened
    return backend


def _model(name: str) -> Module:
    """Another object than other tests have."""
    if name.startswith(WIDE):
        return drawn(name.removeprefix(WIDE), wide=True)
    return tiny_model.__wrapped__(name)


def shortened(model: Module) -> Module:
    """The model as a GPU decodes with it."""
    joined = join(model)
    shorten(joined)
    return joined


def pages_here() -> AttentionFor:
    """This device's kernels; on a CPU the same in MLX's operations."""
    return (lambda _: PortableAttention()) if on_cpu() else find_kernels


def _main() -> None:
    ranks: Ranks | None = Ranks(PLACEMENT)
    for line in sys.stdin:
        ranks = ranks or Ranks(PLACEMENT)
        follow(shard(line.strip(), ranks), ranks)
        ranks = None


if __name__ == "__main__":
    _main()
