"""Finds out from the environment if `mlx.launch` started this process as one of several ranks."""

from __future__ import annotations

import faulthandler
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from semantic.domain.errors import InvalidRequestError

if TYPE_CHECKING:
    from semantic.ports.ranks import CollectivePort, MappedPort
    from semantic_fleet.ranks.links import Links

logger = logging.getLogger("semantic.server")

_STDERR = 2

_RANK = "MLX_RANK"
_RING, _NCCL, _JACCL = "MLX_HOSTFILE", "NCCL_HOST_IP", "MLX_JACCL_COORDINATOR"
_NCCL_SIZE, _JACCL_DEVICES = "MLX_WORLD_SIZE", "MLX_IBV_DEVICES"


@dataclass(frozen=True, slots=True)
class Grid:
    """Implements `PlacementPort`. `host` is the address of rank 0."""

    rank: int
    size: int
    here: int
    transport: str
    host: str
    secret: bytes = field(default=b"", repr=False)

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """See `PlacementPort.meeting`. A thread could not end the wait, because MLX may hold the
        interpreter's lock."""
        from semantic_fleet.ranks.links import JOIN_SECONDS

        logger.info("waiting at most %.0f s for all ranks, over %s", JOIN_SECONDS, self.transport)
        faulthandler.dump_traceback_later(JOIN_SECONDS, exit=True, file=_STDERR)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def connect(self, ranks: CollectivePort, mapped: Callable[[], MappedPort]) -> Links:
        """See `PlacementPort.connect`."""
        from semantic_fleet.ranks.links import Links

        return Links(ranks, self.host, self.secret, mapped)


def placed(environment: Mapping[str, str], secret: Callable[[], bytes | None]) -> Grid | None:
    """See `Places`."""
    grid = read_grid(environment)
    return None if grid is None else with_secret(grid, secret())


def read_grid(environment: Mapping[str, str]) -> Grid | None:
    """Return this process's rank, or None if it runs alone. Raises InvalidRequestError for an
    environment that `mlx.launch` does not make."""
    if _RANK not in environment:
        return None
    try:
        grid = _read(int(environment[_RANK]), environment)
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        raise InvalidRequestError(
            f"{_RANK} is set without its other variables ({error}): expected a start by "
            "`mlx.launch` with the backend ring, nccl or jaccl"
        ) from error
    return grid if grid.size > 1 else None


def with_secret(grid: Grid, secret: bytes | None) -> Grid:
    """Return `grid` with the ranks' secret. Raises InvalidRequestError if rank 0 has a network
    address and `secret` is None."""
    from semantic_server.http.settings import is_loopback

    if secret is not None:
        return replace(grid, secret=secret)
    if is_loopback(grid.host):
        return grid
    raise InvalidRequestError(
        f"rank 0 listens on {grid.host}, which other machines can reach: expected one "
        "--fleet-secret-file for every rank"
    )


def _read(rank: int, environment: Mapping[str, str]) -> Grid:
    if _NCCL in environment:
        size = int(environment[_NCCL_SIZE])
        return Grid(rank, size, 1, "nccl", environment[_NCCL])
    if _JACCL in environment:
        size = len(json.loads(Path(environment[_JACCL_DEVICES]).read_text()))
        return Grid(rank, size, 1, "jaccl", _address(environment[_JACCL]))
    text = Path(environment[_RING]).read_text().strip()
    ranks = json.loads(text) if text else [[]]
    hosts = [_address(one if isinstance(one, str) else one[0]) for one in ranks if one]
    here = hosts.count(hosts[rank]) if hosts else 1
    return Grid(rank, len(ranks), here, "ring", hosts[0] if hosts else "")


def _address(with_port: str) -> str:
    return with_port.rpartition(":")[0].strip("[]")
