"""PrefillBudget: sizes the chunks of chunked prefill so that running requests keep decoding.

Learns what a pass over prompt tokens costs, a fixed part and a part per token, and how long a
decode step takes. Knows neither requests nor a clock.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import deque

from semantic.application.engine.memory_guard import Narrowing

_NEW_WEIGHT = 0.5
"""Weight of the newest measurement: chunks get slower towards the end of a long prompt, and a long
average would lag behind them."""
_MARGIN = 0.85
"""Part of the gap to plan for; the rest absorbs the error of the estimate."""
_FIRST_PASSES = 4
"""The rate may rise this often without averaging: the first chunks are too small to show it."""
_FIXED_SAMPLES = 8
"""The fixed cost is the median of that of the last this many small passes."""
_SMALL = 16
"""A pass of at most `largest / _SMALL` tokens shows the fixed cost, if its prompt ended there."""
_SIZES = tuple(size for k in range(4, 24) for size in (1 << k, 3 << (k - 1)))
"""Sizes of chunks that do not end a prompt. Few, so that the shapes of a forward pass recur: a
device may need longer to plan a new shape than to compute it."""


class PassCost:
    """Seconds of a forward pass over prompt tokens: `fixed`, and one part in `rate` per token.

    A pass has a fixed cost however few its tokens: weights to read, kernels to launch. Without
    it a small chunk would pass for a low rate, chunks would shrink, and the rate with them.
    """

    def __init__(self, largest: int) -> None:
        """`largest` is the maximum number of tokens of a pass."""
        self._small = max(1, largest // _SMALL)
        self._passes = 0
        self._samples: deque[float] = deque(maxlen=_FIXED_SAMPLES)
        self.fixed = 0.0
        self.rate: float | None = None  # tokens per second; None before the first pass

    def observe(self, n_tokens: float, seconds: float, *, limited: bool) -> None:
        """Learn from a pass over `n_tokens`; `limited`: there were more tokens to compute.

        A limited pass shows the rate even if it is small: a device that becomes slow makes chunks
        small, and that must not pass for a fixed cost.
        """
        if seconds <= 0:
            return
        self._passes += 1
        if self.rate is None:
            self.rate = n_tokens / seconds
        elif n_tokens <= self._small and not limited:
            self._learn_fixed(n_tokens, seconds, self.rate)
        else:
            # At least half of the time is taken for that of the tokens: a fixed cost that was
            # overestimated must not make the rate infinite.
            self._learn_rate(n_tokens / (seconds - min(self.fixed, seconds / 2)), self.rate)

    def _learn_fixed(self, n_tokens: float, seconds: float, rate: float) -> None:
        self._samples.append(max(0.0, seconds - n_tokens / rate))
        self.fixed = statistics.median(self._samples)
        if n_tokens / seconds > rate:
            self._learn_rate(n_tokens / seconds, rate)

    def _learn_rate(self, measured: float, rate: float) -> None:
        at_once = measured > rate and self._passes <= _FIRST_PASSES
        self.rate = measured if at_once else (1 - _NEW_WEIGHT) * rate + _NEW_WEIGHT * measured


class PrefillBudget:
    """Sizes prefill chunks to bound the time between two tokens of a running request.

    `target_gap` is that bound, and also bounds a chunk while more requests are expected; `idle_gap`
    is the longest chunk of a request that is alone. Both in seconds; passes have `smallest` to
    `largest` tokens.

    The bound yields to progress: prompts get at least half of their share of the device, and a
    pass spends at least as long on its tokens as its fixed cost, up to half of the target gap.
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
        self._cost = PassCost(largest)
        self._decode_seconds = 0.0
        self._allowed = 0  # tokens, in the last step that had a pass
        self.narrowing: Narrowing | None = None
        """Of `largest`."""

    @property
    def rate(self) -> float | None:
        """Measured prompt tokens per second beside the fixed cost; None before the first chunk."""
        return self._cost.rate

    def tokens_left(
        self, n_prefilled: int, passes: int, *, decoding: int, prompts: int, concurrent: bool
    ) -> int:
        """How many prompt tokens one more pass of a step may have; may be 0.

        The step has computed `n_prefilled` tokens in `passes` passes. `decoding` requests decode
        in the same step, `prompts` requests have a prompt to compute; `concurrent`: more requests
        are expected.
        """
        self._allowed = self._total(passes + 1, decoding, prompts, concurrent=concurrent)
        if self.narrowing is not None:
            most = max(self._smallest, self.narrowing.of(self._largest))
            self._allowed = min(self._allowed, n_prefilled + most)
        return self._allowed - n_prefilled

    def _total(self, passes: int, decoding: int, prompts: int, *, concurrent: bool) -> int:
        """Prompt tokens that a step of `passes` passes may compute."""
        rate = self._cost.rate
        if rate is None:
            # No rate yet: a chunk small enough to be harmless measures it.
            return min(4 * self._smallest, self._largest)
        others = self._decode_seconds if decoding else 0.0
        fixed = passes * self._cost.fixed
        gap = self._target_gap if decoding or concurrent else self._idle_gap
        least = min(fixed, self._target_gap / 2)
        if decoding:
            share = prompts / (2 * (prompts + decoding))
            least = max(least, (others + fixed) * share / (1 - share))
        seconds = max(least, _MARGIN * (gap - others) - fixed)
        return max(self._smallest, min(self._largest, int(rate * seconds)))

    def observe(self, n_tokens: int, passes: int, seconds: float, *, decoding: bool) -> None:
        """Learn from a step of `passes` passes over `n_tokens` in `seconds`, decoding included.

        `decoding`: requests decoded in the same step.
        """
        if passes and n_tokens:
            own = seconds - (self._decode_seconds if decoding else 0.0)
            limited = 2 * n_tokens >= self._allowed
            self._cost.observe(n_tokens / passes, own / passes, limited=limited)
        elif decoding:
            old = self._decode_seconds
            self._decode_seconds = (
                seconds if old == 0.0 else (1 - _NEW_WEIGHT) * old + _NEW_WEIGHT * seconds
            )


def chunk_size(limit: int) -> int:
    """The size of a chunk of at most `limit` tokens that does not end its prompt.

    A power of two or three halves of one; `limit` itself below 16.
    """
    return _SIZES[bisect_right(_SIZES, limit) - 1] if limit >= _SIZES[0] else limit
