"""StepMemory: what a pass over prompt tokens takes for a moment, learned from those before it.

Knows tokens and bytes; neither models nor how much memory there is.
"""

from __future__ import annotations

from typing import NamedTuple

_FADE = 0.8
"""Weight of earlier measurements against the newest: the first passes have few tokens, and larger
ones do not share their fixed part."""


class _Measured(NamedTuple):
    """Bytes for each token of a pass that ended at `context`."""

    per_token: float
    context: int


class StepMemory:
    """Expects a pass to take what the last ones at a similar place of a prompt took per token.

    Further on in a prompt a token may take more, at most in proportion to those before it.
    """

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}  # by the power of two of the context

    def observe(self, n_tokens: int, context: int, n_bytes: int) -> None:
        """Record a pass over `n_tokens`, up to `context`, that took `n_bytes`; 0 without a
        measurement."""
        if n_tokens < 1 or n_bytes < 1:
            return
        place = context.bit_length()
        before = self._measured.get(place)
        per_token = n_bytes / n_tokens
        if before is not None:
            per_token = max(per_token, _FADE * before.per_token)
        self._measured[place] = _Measured(per_token, context)

    def expected(self, n_tokens: int, context: int) -> int:
        """Bytes of such a pass; 0 before the first."""
        place = context.bit_length()
        lower = [at for at in self._measured if at <= place]
        nearest = max(lower) if lower else min(self._measured, default=None)
        if nearest is None:
            return 0
        known = self._measured[nearest]
        return int(n_tokens * known.per_token * max(1.0, context / known.context))
