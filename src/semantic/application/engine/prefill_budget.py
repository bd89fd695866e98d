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
_ASSUMED_BESIDE = 0.25
"""What a token beside others is taken to cost, of one alone, before it is measured."""
_SLOWER_WEIGHT = 0.25
"""Weight of a measurement by which it costs more: the first passes of a shape take longer."""
_FORGOTTEN = 0.995
"""What the cost of tokens beside others counts less with each pass that has none: one that was
measured too high, while the device did something else, is measured again."""
_SIZES = tuple(size for k in range(4, 24) for size in (1 << k, 3 << (k - 1)))
"""Sizes of chunks that do not end a prompt. Few, so that the shapes of a forward pass recur: a
device may need longer to plan a new shape than to compute it."""

_SHORT_SIZES = (2, 3, 4, 6, 8, 12)


class PassCost:
    """Seconds of a forward pass over prompt tokens: `fixed`, and one part in `rate` per token.

    A pass has a fixed cost however few its tokens: weights to read, kernels to launch. Without
    it a small chunk would pass for a low rate, chunks would shrink, and the rate with them. A token
    computed beside one of another sequence costs `beside` of one alone.
    """

    def __init__(self, largest: int) -> None:
        """`largest` is the maximum number of tokens of a pass."""
        self._small = max(1, largest // _SMALL)
        self._passes = 0
        self._samples: deque[float] = deque(maxlen=_FIXED_SAMPLES)
        self.fixed = 0.0
        self.rate: float | None = None  # tokens per second; None before the first pass
        self.beside = _ASSUMED_BESIDE

    def observe(
        self, n_tokens: float, seconds: float, *, limited: bool, n_beside: float = 0.0
    ) -> None:
        """Learn from a pass over `n_tokens` of a sequence and `n_beside` of others beside them;
        `limited`: there were more tokens to compute.

        A limited pass shows the rate even if it is small: a device that becomes slow makes chunks
        small, and that must not pass for a fixed cost.
        """
        if seconds <= 0:
            return
        if n_beside and self.rate is not None:
            self._learn_beside(n_tokens, n_beside, seconds, self.rate)
            return
        self.beside *= _FORGOTTEN
        n_tokens += n_beside
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

    def _learn_beside(self, n_tokens: float, n_beside: float, seconds: float, rate: float) -> None:
        share = ((seconds - self.fixed) * rate - n_tokens) / n_beside
        if share > 1:  # the device is slower than the rate says
            self._learn_rate((n_tokens + n_beside) / (seconds - min(self.fixed, seconds / 2)), rate)
        more = min(1.0, max(0.0, share)) - self.beside
        self.beside += more * (_NEW_WEIGHT if more < 0 else _SLOWER_WEIGHT)

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

    def beside(self, n_tokens: int, n_sequences: int) -> float | None:
        """What a token costs beside others, of one alone, if `n_sequences` sequences get on sooner
        by computing `n_tokens` each in one pass; None if they do so one after the other.

        Together all end with the pass, one after the other after half of their passes on average.
        """
        cost, rate = self._cost, self._cost.rate
        if rate is None or n_sequences <= 1:
            return None
        more = (n_sequences - 1) * n_tokens / rate
        alone = cost.fixed + n_tokens / rate
        together = alone + cost.beside * more
        return cost.beside if together < alone * (n_sequences + 1) / 2 else None

    @property
    def smallest(self) -> int:
        """The fewest tokens that a pass is cut to."""
        return self._smallest

    @property
    def largest(self) -> int:
        """The most tokens of a pass, as narrowed."""
        if self.narrowing is None:
            return self._largest
        return max(self._smallest, self.narrowing.of(self._largest))

    def tokens_left(
        self, n_prefilled: int, passes: int, *, decoding: int, prompts: int, concurrent: bool
    ) -> int:
        """How many prompt tokens one more pass of a step may have; may be 0.

        The step has computed what costs as much as `n_prefilled` tokens in `passes` passes.
        `decoding` requests decode in the same step, `prompts` requests have a prompt to compute;
        `concurrent`: more requests are expected.
        """
        self._allowed = self._total(passes + 1, decoding, prompts, concurrent=concurrent)
        self._allowed = min(self._allowed, n_prefilled + self.largest)
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

    def observe(
        self, n_tokens: int, passes: int, seconds: float, *, decoding: bool, n_beside: int = 0
    ) -> None:
        """Learn from a step of `passes` passes over `n_tokens` in `seconds`, decoding included, and
        over `n_beside` of other sequences beside them.

        `decoding`: requests decoded in the same step.
        """
        if passes and n_tokens:
            own = seconds - (self._decode_seconds if decoding else 0.0)
            limited = 2 * n_tokens >= self._allowed
            self._cost.observe(
                n_tokens / passes, own / passes, limited=limited, n_beside=n_beside / passes
            )
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


def size_beside(limit: int, rest: int) -> int:
    """The size of chunks of at most `limit` tokens side by side, where one prompt has `rest` left.

    A power of two or three halves of one, for ends of prompts as well: of several prompts that end
    at different tokens each would have a shape of its own. Never leaves one token of `rest`.
    """
    sizes = (*_SHORT_SIZES, *_SIZES)
    fitting = [size for size in sizes if size <= min(limit, rest) and size != rest - 1]
    return fitting[-1] if fitting else 0
