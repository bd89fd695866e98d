"""How many connections there may be beside all other files that the process has open.

Knows the system's limit; not what a connection is for. A process that has no more room for files
can neither accept a connection, not even to refuse it, nor read what it has stored.
"""

from __future__ import annotations

import resource
from typing import Final

_OTHERS: Final = 256
"""Files beside connections: the model's, the store's, the log."""


def room_for(wanted: int) -> int:
    """How many of `wanted` connections the process has room for; raises its limit where it may.

    Where the limit is low, connections get half of it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _raised(soft, hard, wanted + _OTHERS)
    return wanted if limit is None else max(1, min(wanted, max(limit - _OTHERS, limit // 2)))


def _raised(soft: int, hard: int, needed: int) -> int | None:
    """The limit as it is now; None for none, or none that matters."""
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if wanted <= soft:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # some systems allow less than they say
        return soft
    return wanted
