"""A tiny model that two processes compute: this one is rank 0, and `python -m` of this file rank 1.

Both talk over MLX's ring backend on loopback. MLX has one such group in a process, so there is one
model for all tests of it.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.model.provider import wrapping
from semantic.adapters.mlx.ranks.following import follow
from semantic.adapters.mlx.ranks.group import Ranks
from semantic.adapters.mlx.ranks.leading import LeadingBackend
from semantic.adapters.mlx.ranks.shard import shard_model, shared_name
from semantic.ports.slices import at_once
from tests.support.tiny_models import tiny_model

ARCHITECTURE = "llama"
SIZE = 2
_HERE = "127.0.0.1"
_started: list[subprocess.Popen[bytes]] = []
"""Rank 1, which ends with this process."""


def hostfile(folder: Path) -> Path:
    """A file that names `SIZE` free ports of this machine."""
    sockets = [socket.create_server((_HERE, 0)) for _ in range(SIZE)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    path = folder / "hosts.json"
    path.write_text(json.dumps([[f"{_HERE}:{port}"] for port in ports]))
    return path


@functools.cache
def leading_backend(architecture: str = ARCHITECTURE) -> LeadingBackend:
    """Rank 0 of a tiny model, of one in a process; rank 1 runs until this process ends."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MLX_HOSTFILE"] = str(hostfile(Path(folder)))
        os.environ["MLX_RANK"] = "0"
        command = (sys.executable, "-m", "tests.support.two_ranks", architecture)
        _started.append(subprocess.Popen(command, env={**os.environ, "MLX_RANK": "1"}))
        try:
            backend = _shard(Ranks("ring", _HERE), architecture)
        finally:
            del os.environ["MLX_RANK"], os.environ["MLX_HOSTFILE"]
    assert isinstance(backend, LeadingBackend)
    return backend


def _shard(ranks: Ranks, architecture: str) -> MLXBackend:
    model = tiny_model.__wrapped__(architecture)  # another object than the other tests have
    shard_model(model, ranks)
    name = shared_name(f"tiny:{architecture}", "tiny", ranks)
    return at_once(wrapping(model, name, attention=None, calibration=lambda *_: None, ranks=ranks))


def _main() -> None:
    ranks = Ranks("ring", _HERE)
    follow(_shard(ranks, sys.argv[1]), ranks)


if __name__ == "__main__":
    _main()
