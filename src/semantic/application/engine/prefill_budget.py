"""PrefillBudget: sizes the chunks of chunked prefill so that running requests keep decoding. Learns
the cost of a pass over prompt tokens (a fixed part and a part per token), and the time of a decode
step. Knows nothing about requests or clocks."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from semantic.application.engine.memory_guard import Narrowing

_NEW_WEIGHT = 0.5
"""The weight of the newest measurement: chunks get slower towards the end of a long prompt, and an
average over many measurements would lag."""
_MARGIN = 0.85
"""The fraction of the target gap to plan for; the rest absorbs errors of the estimate."""
_FIRST_PASSES = 4
"""The number of first passes in which a higher rate counts at once, not only in the average: the
first chunks are too small to show the true rate."""
_FIXED_SAMPLES = 8
"""The number of recent small passes whose median is the fixed cost."""
_SMALL = 16
"""A pass of at most `largest / _SMALL` tokens shows the fixed cost if it ends its prompt."""
_ASSUMED_BESIDE = 0.25
"""The assumed cost, before any measurement, of a token in one pass with another prompt's tokens, as
a fraction of the cost of a token alone."""
_FIRST_BESIDE = 3
"""The most other prompts in the first shared pass; a later pass may have twice as many."""
_WORTH = 0.25
"""The fraction of a pass that a shared pass must save, since it has costs of its own."""
_FORGOTTEN = 0.995
"""The factor that each pass over a single prompt applies to the learned cost of other prompts'
tokens: if a busy device made this cost too high, the budget eventually measures the cost again."""
_SIZES = tuple(size for k in range(4, 24) for size in (1 << k, 3 << (k - 1)))
"""The sizes of chunks that do not end a prompt: only a few, so that the shapes of forward passes
recur, because a device may need longer to plan for a new shape than to compute it."""

SIZES_BESIDE = (2, 3, 4, 6, 8, 12, *_SIZES)
"""Possible limits on the tokens per prompt in a pass over several prompts."""


class MeasuredPass(NamedTuple):
    """A pass over `n_tokens` of one prompt and `n_beside` tokens of other prompts, padding
    included. Up to the end of the pass, the step could compute `allowed` tokens; the prompt may
    have had fewer."""

    n_tokens: int
    seconds: float
    allowed: int
    n_beside: int = 0


class SharedPass(NamedTuple):
    """A pass over several prompts, at most `width` tokens of each: the first prompt, and the
    prompts with the indices `others`. A token of a prompt in `others` costs `share` tokens of a
    lone prompt. In total, the prompts' answers begin `gained` seconds sooner."""

    width: int
    others: list[int]
    share: float
    gained: float


class PassCost:
    """Cost of a forward pass over prompt tokens in seconds: `fixed`, plus `1 / rate` per token.
    Without the fixed cost (weights to read, kernels to launch), a small chunk would look like a low
    rate, and chunks and rate would shrink together. If a pass has several prompts, a token of each
    further prompt costs `beside / rate`."""

    def __init__(self, largest: int) -> None:
        """`largest` is the most tokens of a pass."""
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
        """Learn from a pass over `n_tokens` of a sequence and `n_beside` other tokens;
        `limited` says that more tokens remained to compute. A small limited pass shows the rate,
        not the fixed cost, because chunks also become small on a slow device."""
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
    """Sizes prefill chunks to bound the time between two tokens of a running request. `target_gap`
    is that bound, and also limits a chunk while more requests may come; `idle_gap` limits a chunk
    of a lone request. Both gaps are in seconds. Passes have `smallest` to `largest` tokens. Prompts
    get at least half of their share of the device. The tokens of a pass take at least the pass's
    fixed cost or half of the target gap, whichever is less."""

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
        """The narrowing of a pass's tokens, which are at most `largest`."""

    @property
    def rate(self) -> float | None:
        """Prompt tokens per second, without the fixed cost; None before the first chunk."""
        return self._cost.rate

    def seconds(self, n_tokens: int) -> float | None:
        """Return the expected seconds for `n_tokens` more prompt tokens; None before the first
        chunk. Tokens that do not fill a pass bear only a part of its fixed cost, since the pass
        computes other tokens too."""
        rate = self._cost.rate
        return (
            None if rate is None else n_tokens / rate + self._cost.fixed * n_tokens / self.largest
        )

    def beside(self, chunks: Sequence[int], left: int, *, even: bool) -> SharedPass | None:
        """Return the pass over several prompts that saves most time; None if prompts should run one
        by one. Alone, the next pass over prompt i would have `chunks[i]` tokens, at most `left`.
        Every shared pass includes the first prompt; with `even`, all prompts have equally many
        tokens in the pass. A token of another prompt costs the measured share. Each other prompt
        saves its own pass, but gains only half of that time: all prompts in a shared pass end
        together, while prompts one by one would end halfway on average."""
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
        """Return a pass over at most `width` tokens of each of the prompts that gain time."""
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
        """The fewest tokens of a shortened pass."""
        return self._smallest

    @property
    def largest(self) -> int:
        """The most tokens that a pass may have after `narrowing`."""
        if self.narrowing is None:
            return self._largest
        return max(self._smallest, self.narrowing.of(self._largest))

    def tokens_left(
        self, n_prefilled: int, passes: int, *, decoding: int, prompts: int, concurrent: bool
    ) -> int:
        """Return the number of prompt tokens, possibly 0, that one more pass of a step may have.
        The step's `passes` passes have cost as much as `n_prefilled` tokens; `decoding` requests
        decode in the step, and `prompts` requests have a prompt to compute. `concurrent` says that
        more requests may come."""
        total = self._total(passes + 1, decoding, prompts, concurrent=concurrent)
        return min(total - n_prefilled, self.largest)

    def _total(self, passes: int, decoding: int, prompts: int, *, concurrent: bool) -> int:
        """Return the number of prompt tokens that a step of `passes` passes may compute."""
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
        """Learn from a step with `passes` that took `seconds` in total; `decoding` says that the
        step also decoded. Time outside passes and decoding counts for the first pass."""
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
    """Return the size of a chunk that does not end its prompt, at most `limit` tokens: a power of
    two, or one and a half times a power of two; `limit` itself if it is below 16."""
    return _SIZES[bisect_right(_SIZES, limit) - 1] if limit >= _SIZES[0] else limit
