"""Suggests a known model name for an unknown name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def most_similar(name: str, known: Iterable[str]) -> str | None:
    """Return the most similar name in `known`, or None."""
    spelled: dict[str, str] = {}
    for one in known:
        if one != name:
            spelled |= {one.lower(): one, one.lower().rpartition("/")[2]: one}
    alike = get_close_matches(name.lower(), spelled, 1)
    return spelled[alike[0]] if alike else None


def unknown_model(name: str, known: Iterable[str], of: str = "this server") -> str:
    """Return the message for a client that requested an unknown model."""
    names = tuple(known)
    alike = most_similar(name, names)
    meant = "" if alike is None else f"; did you mean {alike}?"
    return f"there is no model {name[:200]!r}; {of} has: {', '.join(names)}{meant}"
