"""PrefillBudget: sizes the chunks of chunked prefill so that running requests keep decoding."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from semantic.application.engine.memory_guard import Narrowing

_NEW_WEIGHT = 0.5
"""The weight of the newest measurement. Chunks get slower towards the end of a long prompt."""
_MARGIN = 0.85
"""The fraction of the target gap to plan for."""
_FIRST_PASSES = 4
"""The number of first passes in which a higher rate counts at once."""
_FIXED_SAMPLES = 8
"""The number of recent small passes whose median is the fixed cost."""
_SMALL = 16
"""A pass of at most `largest / _SMALL` tokens shows the fixed cost."""
_ASSUMED_BESIDE = 0.25
"""The first estimate of the cost of another prompt's token, relative to a token alone."""
_FIRST_BESIDE = 3
"""The maximum number of other prompts in the first shared pass."""
_WORTH = 0.25
"""The fraction of a pass's time that a shared pass must save."""
_FORGOTTEN = 0.995
"""The factor for the cost of other prompts' tokens after each pass. The budget thus measures this
cost again."""
_SIZES = tuple(size for k in range(4, 24) for size in (1 << k, 3 << (k - 1)))
"""The possible sizes of chunks that do not end a prompt. A device may need long to plan for a new
shape."""

SIZES_BESIDE = (2, 3, 4, 6, 8, 12, *_SIZES)
"""The possible tokens per prompt in a pass over several prompts."""


class MeasuredPass(NamedTuple):
    """A pass over `n_tokens` of one prompt and `n_beside` tokens of other prompts."""

    n_tokens: int
    seconds: float
    allowed: int
    n_beside: int = 0


class SharedPass(NamedTuple):
    """A pass over several prompts, at most `width` tokens of each. All answers together begin
    `gained` seconds sooner."""

    width: int
    others: list[int]
    share: float
    gained: float


class PassCost:
    """The seconds of a pass over prompt tokens: `fixed`, plus `1 / rate` per token. A token of each
    further prompt costs `beside / rate`."""

    def __init__(self, largest: int) -> None:
        """`largest` is the maximum number of tokens in a pass."""
        self._small = max(1, largest // _SMALL)
        self._passes = 0
        self._samples: deque[float] = deque(maxlen=_FIXED_SAMPLES)
        self.fixed = 0.0
        self.rate: float | None = None  # tokens per second; None before the first pass
        self.beside = _ASSUMED_BESIDE
        self.most_beside = 0  # sequences next to one, in a pass

    def observe(
        self, n_tokens: float, seconds: float, *, limited: bool, n_beside: float = 0.0
    ) -> None:
        """Learn from a pass over `n_tokens` of a prompt and `n_beside` tokens of other prompts.
        `limited` says that more tokens remained to compute."""
        if seconds <= 0:
            return
        if n_beside and self.rate is not None:
            self.most_beside = max(self.most_beside, round(n_beside / n_tokens))
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
            # At least half of the time counts for the tokens: an overestimated fixed cost must not
            # make the rate infinite.
            self._learn_rate(n_tokens / (seconds - min(self.fixed, seconds / 2)), self.rate)

    def _learn_fixed(self, n_tokens: float, seconds: float, rate: float) -> None:
        self._samples.append(max(0.0, seconds - n_tokens / rate))
        self.fixed = statistics.median(self._samples)
        if n_tokens / seconds > rate:
            self._learn_rate(n_tokens / seconds, rate)

    def _learn_beside(self, n_tokens: float, n_beside: float, seconds: float, rate: float) -> None:
        if n_beside / rate < self.fixed:
            return  # the fixed cost hides the others' cost
        share = ((seconds - self.fixed) * rate - n_tokens) / n_beside
        if share > 1:  # the device is slower than the rate says
            self._learn_rate((n_tokens + n_beside) / (seconds - min(self.fixed, seconds / 2)), rate)
        self.beside += _NEW_WEIGHT * (min(1.0, max(0.0, share)) - self.beside)

    def _learn_rate(self, measured: float, rate: float) -> None:
        at_once = measured > rate and self._passes <= _FIRST_PASSES
        self.rate = measured if at_once else (1 - _NEW_WEIGHT) * rate + _NEW_WEIGHT * measured


class PrefillBudget:
    """Sizes prefill chunks. `target_gap` limits the time between two tokens of a running request.
    `idle_gap` limits the chunks of a lone request. Both are in seconds."""

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
        self.narrowing: Narrowing | None = None
        """Limits a pass's tokens when memory is short."""

    @property
    def rate(self) -> float | None:
        """The prompt tokens per second, without the fixed cost; None before the first chunk."""
        return self._cost.rate

    def seconds(self, n_tokens: int) -> float | None:
        """Return the seconds for `n_tokens` more prompt tokens; None before the first chunk."""
        rate = self._cost.rate
        return (
            None if rate is None else n_tokens / rate + self._cost.fixed * n_tokens / self.largest
        )

    def beside(self, chunks: Sequence[int], left: int, *, even: bool) -> SharedPass | None:
        """Return the pass over several prompts that saves most time, or None. If `even`, the pass
        has equally many tokens of each prompt."""
        rate = self._cost.rate
        if rate is None or len(chunks) <= 1:
            return None
        most = min(left, self.largest)
        widths = [width for width in SIZES_BESIDE if width <= (chunks[0] if even else most)]
        passes = (self._shared(width, chunks, most, rate, even=even) for width in widths)
        found = max(passes, key=lambda one: one.gained, default=None)
        worth = _WORTH * (self._cost.fixed + chunks[0] / rate)
        return found if found is not None and found.gained > worth else None

    def _shared(
        self, width: int, chunks: Sequence[int], most: int, rate: float, *, even: bool
    ) -> SharedPass:
        fixed, share = self._cost.fixed, self._cost.beside
        slot = share * width / rate
        gains = [
            (min(n, width) / rate + fixed * (1 if n <= width else width / most)) / 2 - slot
            for n in chunks[1:]
        ]
        paying = [
            (gain, i)
            for i, gain in enumerate(gains, 1)
            if gain > 0 and (not even or chunks[i] >= width)
        ]
        paying.sort(key=lambda one: -one[0])
        # Only a few prompts until a pass with some is measured: the assumption may be wrong.
        room = int((most / width - 1) / share) if share else len(paying)
        del paying[max(0, min(room, 2 * self._cost.most_beside + _FIRST_BESIDE)) :]
        first = chunks[0]
        lost = (width - first) / rate if width > first else fixed * (1 - width / first)
        gained = sum(gain for gain, _ in paying) - lost
        return SharedPass(width, sorted(i for _, i in paying), share, gained)

    @property
    def smallest(self) -> int:
        """The minimum number of tokens in a shortened pass."""
        return self._smallest

    @property
    def largest(self) -> int:
        """The maximum number of tokens in a pass now."""
        if self.narrowing is None:
            return self._largest
        return max(self._smallest, self.narrowing.of(self._largest))

    def tokens_left(
        self, n_prefilled: int, passes: int, *, decoding: int, prompts: int, concurrent: bool
    ) -> int:
        """Return the number of prompt tokens for one more pass of a step. It may be 0."""
        total = self._total(passes + 1, decoding, prompts, concurrent=concurrent)
        return min(total - n_prefilled, self.largest)

    def _total(self, passes: int, decoding: int, prompts: int, *, concurrent: bool) -> int:
        rate = self._cost.rate
        if rate is None:
            # Without a rate: measure it with a chunk small enough to be harmless.
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

    def observe(self, passes: Sequence[MeasuredPass], seconds: float, *, decoding: bool) -> None:
        """Learn from a step with `passes` that took `seconds`."""
        if passes:
            own = seconds - (self._decode_seconds if decoding else 0.0)
            rest = own - sum(one.seconds for one in passes)
            for i, one in enumerate(passes):
                self._cost.observe(
                    one.n_tokens,
                    one.seconds + (0.0 if i else rest),
                    limited=2 * one.n_tokens >= one.allowed,
                    n_beside=one.n_beside,
                )
        elif decoding:
            old = self._decode_seconds
            self._decode_seconds = (
                seconds if old == 0.0 else (1 - _NEW_WEIGHT) * old + _NEW_WEIGHT * seconds
            )


def chunk_size(limit: int) -> int:
    """Return the largest size in `_SIZES` up to `limit`. Below 16, return `limit`."""
    return _SIZES[bisect_right(_SIZES, limit) - 1] if limit >= _SIZES[0] else limit
