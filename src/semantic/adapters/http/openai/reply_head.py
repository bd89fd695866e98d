"""What every reply and chunk of a request has: its id, when it was made, and by what."""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from semantic.ports.serving import ServedModel

_COMPUTING: Final = ("semantic", "mlx", "mlx-lm")
"""Packages whose versions may change the last bits of a result."""


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """The same for all chunks of a reply. `created` is in seconds since 1970."""

    id: str
    created: int
    model: str
    fingerprint: str

    def body(self, kind: str) -> dict[str, object]:
        """The head as the beginning of a JSON object of this kind."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def new_head(prefix: str, model: ServedModel) -> ReplyHead:
    """A head with an id that nothing else has, beginning with `prefix`."""
    return ReplyHead(
        f"{prefix}-{secrets.token_hex(16)}", int(time.time()), model.id, _fingerprint(model.id)
    )


@lru_cache(maxsize=16)
def _fingerprint(model_id: str) -> str:
    """Differs where the same seed may give another answer: with the model and what computes it."""
    versions = (f"{name} {_version(name)}" for name in _COMPUTING)
    named = "\0".join((*versions, model_id)).encode("utf-8", "surrogatepass")
    return f"fp_{hashlib.sha256(named).hexdigest()[:10]}"


def _version(package: str) -> str:
    """Of an installed package; none for one that runs from its source."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
