"""Names of responses and of their items: nobody can guess one."""

from __future__ import annotations

import secrets
from typing import Final

_BYTES: Final = 24


def new_id(prefix: str) -> str:
    """An id that nothing else has, beginning with `prefix`: resp, msg, rs or fc."""
    return f"{prefix}_{secrets.token_hex(_BYTES)}"
