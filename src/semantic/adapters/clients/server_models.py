"""Models of a running server: listed, loaded and unloaded.

Knows the routes; not when a server does either by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal
from urllib.parse import quote

from semantic.adapters.clients.server_connection import (
    Upload,
    found_object,
    get,
    key_for,
    not_ours,
    send,
)

_PATH: Final = "/v1/models"
_LOAD_SECONDS: Final = 3600.0
"""For a large model from a slow disk, or for the answers that run to end."""

Row = Mapping[str, object]


def list_models(url: str, key_variable: str) -> Sequence[Row]:
    """The names of the server at `url`, with what it says of each. Raises as `get`, and
    OperatorError or as `refusal` for another answer."""
    with get(url, _PATH, key_variable) as reply:
        found = found_object(reply)
        match found:
            case {"data": [*rows]} if all(isinstance(row, dict) and "id" in row for row in rows):
                return rows
        raise not_ours(reply.base)


def change_model(url: str, key_variable: str, name: str, action: Literal["load", "unload"]) -> Row:
    """Load or unload a model, and wait for it; what the server says of it then. Raises as
    `list_models`."""
    key = key_for(url, key_variable)
    path = f"{_PATH}/{quote(name, safe='/')}/{action}"
    with send(url, path, key, Upload((), 0, _LOAD_SECONDS)) as reply:
        found = found_object(reply)
        if not isinstance(found, dict) or "state" not in found:
            raise not_ours(reply.base)
        return found
