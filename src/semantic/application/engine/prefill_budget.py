"""PrefillBudget: sizes the chunks of chunked prefill so that running requests keep decoding.

Learns two rates: seconds per decode step and prompt tokens per second. Knows neither requests nor
a clock.
"""

from __future__ import annotations

_NEW_WEIGHT = 0.5
"""Weight of the newest measurement: chunks get slower towards the end of a long prompt, and a long
average would lag behind them."""
_MARGIN = 0.85
"""Part of the gap to plan for; the rest absorbs the error of the estimate."""
_STEPS_WHEN_CONCURRENT = 4
"""Decode steps that a chunk of a long prompt may last while several requests are active: a request
that arrives meanwhile waits for half of it on average. A shorter chunk would slow down prompts."""


class PrefillBudget:
    """Sizes prefill chunks to bound the time between two tokens of a running request.

    `target_gap` is that bound, `idle_gap` the longest chunk while no request decodes, both in
    seconds; chunks have `smallest` to `largest` tokens. While several requests are active, so that
    another may arrive during a chunk, a prompt that does not fit into the target gap is computed
    in chunks of a few decode steps.
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

    def next_chunk(self, wanted: int, *, decoding: bool, concurrent: bool) -> int:
        """How many prompt tokens a step may compute when the next prompt would make it `wanted`.

        `decoding`: requests decode in the same step. `concurrent`: several requests are active.
        """
        others = self._decode_seconds if decoding else 0.0
        if not concurrent:
            gap = self._target_gap if decoding else self._idle_gap
            return self._tokens_in(_MARGIN * (gap - others))
        at_once = self._tokens_in(_MARGIN * (self._target_gap - others))
        if wanted <= at_once or not self._decode_seconds:
            return at_once
        patience = _STEPS_WHEN_CONCURRENT * self._decode_seconds
        return min(at_once, self._tokens_in(patience - others))

    def _tokens_in(self, seconds: float) -> int:
        """Prompt tokens that can be computed in `seconds`, within the limits of a chunk."""
        if self._rate is None:
            # No rate yet: a chunk small enough to be harmless measures it.
            return min(4 * self._smallest, self._largest)
        return max(self._smallest, min(self._largest, int(self._rate * seconds)))

    def observe(self, prompt_tokens: int, seconds: float, *, decoding: bool) -> None:
        """Learn from a step that computed `prompt_tokens` in `seconds`, decoding included.

        `decoding`: requests decoded in the same step.
        """
        if prompt_tokens == 0:
            if decoding:
                self._decode_seconds = self._blend(self._decode_seconds, seconds)
            return
        own = seconds - (self._decode_seconds if decoding else 0.0)
        if own > 0:
            measured = prompt_tokens / own
            # Fixed costs dominate a tiny chunk: it may raise the rate, not lower it.
            if self._rate is None or measured > self._rate or prompt_tokens > self._smallest:
                self._rate = measured if self._rate is None else self._blend(self._rate, measured)

    @staticmethod
    def _blend(old: float, new: float) -> float:
        return new if old == 0.0 else (1 - _NEW_WEIGHT) * old + _NEW_WEIGHT * new
