"""A safetensors file that holds bodies: one tensor of bytes each, in order, nothing between.

What the file's header must be follows from the list of bodies, byte for byte: a reader compares
and parses nothing. Knows no agents.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from semantic.adapters.exchange.document import BodyEntry

_LENGTH_BYTES = 8
_ALIGNMENT = 8


def container_header(bodies: Sequence[BodyEntry]) -> bytes:
    """Everything before the first body."""
    entries: dict[str, object] = {}
    at = 0
    for body in bodies:
        entries[body.name] = {
            "dtype": "U8",
            "shape": [body.n_bytes],
            "data_offsets": [at, at + body.n_bytes],
        }
        at += body.n_bytes
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text
