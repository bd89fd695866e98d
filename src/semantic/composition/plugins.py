"""Finds parts of the server and of the fleet whose packages are installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, cast

from semantic.domain.errors import OperatorError

if TYPE_CHECKING:
    from semantic.ports.ranks import PlacementPort, Places

_RANK = "MLX_RANK"

COMMANDS: Final = ("semantic_server.cli.server_commands", "semantic_fleet.cli.fleet_commands")
"""The modules that have a `TABLE` of commands."""

OPENERS: Final[Mapping[str, tuple[str, str]]] = {
    "remote store": ("semantic_fleet.fleet_store", "FleetStore"),
    "kv_events": ("semantic_fleet.fleet_store", "open_publisher"),
    "ranks": ("semantic_fleet.ranks.launched", "placed"),
}
"""The module and the name of each opener, such as an `OpensShared`."""


def tables() -> list[object]:
    """Return the commands of each installed package."""
    return [import_module(name).TABLE for name in COMMANDS if _is_installed(name)]


def opener(kind: str) -> object:
    """Return the opener of `kind`. Raises OperatorError if its package is missing."""
    module, name = OPENERS[kind]
    if not _is_installed(module):
        raise OperatorError(f"cannot use {kind}: its package is missing; install semantic-engine")
    found: object = getattr(import_module(module), name)
    return found


def placement(
    environment: Mapping[str, str], secret: Callable[[], bytes | None]
) -> PlacementPort | None:
    """Return this process's rank among the processes that `mlx.launch` started. Without
    `mlx.launch`, returns None. Raises the same errors as `Places`."""
    if _RANK not in environment:
        return None
    return cast("Places", opener("ranks"))(environment, secret)


def _is_installed(module: str) -> bool:
    return find_spec(module.partition(".")[0]) is not None
