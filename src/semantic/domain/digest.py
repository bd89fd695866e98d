"""SHA-256 over several fields, each framed by its length, so that no two inputs collide."""

from __future__ import annotations

import hashlib


def digest(domain: str, *fields: bytes) -> bytes:
    """SHA-256 over `domain` and `fields`, each framed by its length: no two inputs collide."""
    hashed = hashlib.sha256()
    for field in (domain.encode(), *fields):
        hashed.update(len(field).to_bytes(8, "little"))
        hashed.update(field)
    return hashed.digest()
