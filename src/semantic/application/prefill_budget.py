"""How many prompt tokens to compute next, so that running agents keep decoding.

Learns two rates from what it is told: seconds of a decode step and prompt tokens per second.
Knows neither requests nor a clock.
"""

from __future__ import annotations

_NEW_WEIGHT = 0.5
"""Weight of the newest measurement: chunks deep in a long prompt get slower one by one, and an
average over many would lag behind them."""
_MARGIN = 0.85
"""Part of the gap to plan for; the rest absorbs what a measurement of the past cannot know."""


class PrefillBudget:
    """Sizes prefill chunks to hold a gap between two tokens of the running agents.

    `target_gap` is the longest wait between two tokens to aim for, `idle_gap` the longest chunk
    while nobody decodes, both in seconds; chunks have `smallest` to `largest` tokens.
    """

    def __init__(
        self,
        target_gap: float = 0.25,
        idle_gap: float = 1.0,
        *,
        smallest: int = 16,
        largest: int = 2048,
    ) -> None:
        self._target_gap = target_gap
        self._idle_gap = idle_gap
        self._smallest = smallest
        self._largest = largest
        self._rate: float | None = None  # prompt tokens per second
        self._decode_seconds = 0.0

    @property
    def rate(self) -> float | None:
        """Measured prompt tokens per second, None before the first chunk."""
        return self._rate

    def next_chunk(self, *, decoding: bool) -> int:
        """Prompt tokens to compute in the next step."""
        if self._rate is None:
            # Nothing is known yet: a chunk that cannot hurt, and tells the rate.
            return min(4 * self._smallest, self._largest)
        seconds = self._target_gap - self._decode_seconds if decoding else self._idle_gap
        wanted = int(self._rate * seconds * _MARGIN)
        return max(self._smallest, min(self._largest, wanted))

    def observe(self, prompt_tokens: int, seconds: float, *, decoding: bool) -> None:
        """Learn from a step that computed `prompt_tokens` and took `seconds` in all.

        `decoding` says whether agents decoded in the same step.
        """
        if prompt_tokens == 0:
            if decoding:
                self._decode_seconds = self._blend(self._decode_seconds, seconds)
            return
        own = seconds - (self._decode_seconds if decoding else 0.0)
        if own > 0:
            measured = prompt_tokens / own
            # A tiny chunk is dominated by fixed costs: it may raise the rate, not lower it.
            if self._rate is None or measured > self._rate or prompt_tokens > self._smallest:
                self._rate = measured if self._rate is None else self._blend(self._rate, measured)

    @staticmethod
    def _blend(old: float, new: float) -> float:
        return new if old == 0.0 else (1 - _NEW_WEIGHT) * old + _NEW_WEIGHT * new
