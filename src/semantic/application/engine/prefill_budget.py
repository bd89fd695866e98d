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
_STEPS_IN_COMPANY = 4
"""Decode steps that a step may last with a chunk of a long prompt while several requests are about:
who comes in the middle of it waits for two on average. Less would spend on decoding what prompts
wait for."""


class PrefillBudget:
    """Sizes prefill chunks to hold a gap between two tokens of the running agents.

    `target_gap` is the longest wait between two tokens to aim for, `idle_gap` the longest chunk
    while nobody decodes, both in seconds; chunks have `smallest` to `largest` tokens. In company,
    where somebody may come while a chunk is computed, a prompt that cannot be completed within
    the target gap gets chunks of a few decode steps only.
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

    def next_chunk(self, wanted: int, *, decoding: bool, company: bool) -> int:
        """How many prompt tokens the next step may compute if whose turn it is makes it `wanted`.

        `decoding` says whether agents decode in the same step, `company` whether several
        requests are about.
        """
        others = self._decode_seconds if decoding else 0.0
        if not company:
            gap = self._target_gap if decoding else self._idle_gap
            return self._tokens_in(_MARGIN * (gap - others))
        at_once = self._tokens_in(_MARGIN * (self._target_gap - others))
        if wanted <= at_once or not self._decode_seconds:
            return at_once
        patience = _STEPS_IN_COMPANY * self._decode_seconds
        return min(at_once, self._tokens_in(patience - others))

    def _tokens_in(self, seconds: float) -> int:
        """Prompt tokens that are computed in so much time, within the limits of a chunk."""
        if self._rate is None:
            # Nothing is known yet: a chunk that cannot hurt, and tells the rate.
            return min(4 * self._smallest, self._largest)
        return max(self._smallest, min(self._largest, int(self._rate * seconds)))

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
