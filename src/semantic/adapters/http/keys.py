"""API keys: who may come in, and whose name is kept of it. Knows no HTTP.

Only digests are kept, so that no key can be printed by mistake.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import Final

_TENANT: Final = b"semantic:tenant"
_TENANT_BYTES: Final = 16


class ApiKeys:
    """The keys that open a server. Without any, everybody is the tenant ""."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._tenants = {_digest(key): tenant_name(key) for key in keys}

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def tenant(self, presented: str) -> str | None:
        """The tenant whose key was presented; None for no key of ours.

        Takes as long for any key, right or wrong: all are compared, each in constant time.
        """
        digest = _digest(presented)
        found = None
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, digest):
                found = tenant
        return found


def tenant_name(key: str) -> str:
    """The name that stands for `key` in stores: the same after a restart, and never the key."""
    return hashlib.blake2b(
        key.encode(), digest_size=_TENANT_BYTES, person=_TENANT, usedforsecurity=True
    ).hexdigest()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
