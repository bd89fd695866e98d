"""The memory of a running server: read, and its limit changed. Knows the route alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from semantic.adapters.clients.server_connection import (
    Reply,
    Upload,
    found_object,
    get,
    key_for,
    not_ours,
    send,
)

_PATH: Final = "/v1/memory"
_SECONDS: Final = 60.0

Document = Mapping[str, object]


def read_memory(url: str, key_variable: str) -> Document:
    """What the process of the server at `url` has and may have. Raises as `get`, and OperatorError
    or as `refusal` for another answer."""
    with get(url, _PATH, key_variable) as reply:
        return _found(reply)


def limit_memory(url: str, key_variable: str, limit_gb: float | None) -> Document:
    """Change its limit to so many GiB, None: that of its start; what it has then. Raises as
    `read_memory`."""
    body = json.dumps({"limit_gb": limit_gb}).encode()
    key = key_for(url, key_variable)
    with send(url, _PATH, key, Upload((body,), len(body), _SECONDS)) as reply:
        return _found(reply)


def _found(reply: Reply) -> Document:
    found = found_object(reply)
    if not isinstance(found, dict) or found.get("object") != "memory":
        raise not_ours(reply.base)
    return found
