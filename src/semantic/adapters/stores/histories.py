"""Drafts of a sequence's next tokens, from what the same tenant's agents read and wrote before.

One thread sorts the histories. Drafters read them without a lock, as a sorted part never changes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from semantic.adapters.stores.suffixes import END, LONGEST, SHORTEST, Match, Suffixes, Tokens
from semantic.domain.value_objects import BLOCK_TOKENS
from semantic.ports.generation import Draft, Drafter

BYTES_PER_TOKEN = 16
_SMALL, _RATIO = 1 << 16, 4
"""A tenant's newest part has at most `_SMALL` tokens. The middle one has at most a quarter of the
tokens of the oldest one, or as many as the newest."""
_MOST_PREDICTED = 8192
_KEPT = 0.75
"""The fraction of a history that remains when it becomes too long."""
_PRIORS = (0.3, 0.4, 0.55, 0.7, 0.85, 0.95)
"""The first estimates of the chance of a token after matches of 2, 4, 8, 16, 32 and 64 tokens."""
_NEW_WEIGHT = 0.05


class Chances:
    """How often the token after a match was the sequence's next token, by the match's length."""

    def __init__(self) -> None:
        self._known = list(_PRIORS)

    def of(self, n_tokens: int) -> float:
        return self._known[self._class(n_tokens)]

    def learn(self, n_tokens: int, *, hit: bool) -> None:
        at = self._class(n_tokens)
        self._known[at] += _NEW_WEIGHT * (hit - self._known[at])

    @staticmethod
    def _class(n_tokens: int) -> int:
        return min(max(0, n_tokens.bit_length() - 2), len(_PRIORS) - 1)


class _Parts(NamedTuple):
    """A tenant's sorted texts, from the oldest to the newest."""

    oldest: Suffixes = Suffixes(())
    middle: Suffixes = Suffixes(())
    newest: Suffixes = Suffixes(())

    @property
    def n_tokens(self) -> int:
        return sum(map(len, self))


class History:
    """The texts of a tenant. Only the sorting thread calls `add` and `forget_oldest`."""

    def __init__(self) -> None:
        self.parts = _Parts()
        self._known: set[int] = set()  # hashes of all blocks, each with the tokens before it

    def add(self, texts: Iterable[Sequence[int]]) -> None:
        """Sort the tokens of `texts` as far as they are new."""
        new = [self.parts.newest.text]
        for text in texts:
            if fresh := self._fresh(text):
                new += [np.asarray(fresh, np.int32), np.asarray([END], np.int32)]
        if len(new) == 1:
            return
        oldest, middle, newest = self.parts[0], self.parts[1], Suffixes(np.concatenate(new))
        if len(newest) > _SMALL:
            middle, newest = _joined(middle, newest), Suffixes(())
        if len(middle) > max(_SMALL, len(oldest) // _RATIO):
            oldest, middle = _joined(oldest, middle), Suffixes(())
        self.parts = _Parts(oldest, middle, newest)

    def forget_oldest(self, most: int) -> None:
        """Keep at most `most` tokens."""
        if self.parts.n_tokens > most:
            text = np.concatenate([part.text for part in self.parts])
            self.parts = _Parts(Suffixes(text[len(text) - int(most * _KEPT) :]))
            self._known.clear()

    def longest(self, before: Sequence[int]) -> Match | None:
        """Return the longest match with the end of `before`, and of equal ones the newest."""
        best = None
        for part in reversed(self.parts):
            found = part.longest(before)
            if found is not None and (best is None or found.n_tokens > best.n_tokens):
                best = found
        return best

    def _fresh(self, text: Sequence[int]) -> Sequence[int]:
        chain, stop = 0, len(text) - len(text) % BLOCK_TOKENS
        first = 0
        for at in range(0, stop, BLOCK_TOKENS):
            chain = hash((chain, *text[at : at + BLOCK_TOKENS]))
            if chain in self._known and first == at:
                first = at + BLOCK_TOKENS
            self._known.add(chain)
        return text[max(0, first - LONGEST) :] if first < len(text) else ()


def _joined(*parts: Suffixes) -> Suffixes:
    return Suffixes(np.concatenate([part.text for part in parts]))


class Histories:
    """A `DraftSource` in memory. Evicts the tenants' oldest tokens beyond `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._most_tokens = max_bytes // BYTES_PER_TOKEN
        self._by_tenant: OrderedDict[str, History] = OrderedDict()
        self._chances = Chances()
        # Texts to add, by tenant. None stands for the tenant's saved texts.
        self._waiting: deque[tuple[str, Sequence[int] | None]] = deque()
        self._saved: Callable[[str], Iterator[Sequence[int]]] = lambda _: iter(())
        self._changed = threading.Condition()
        self._busy = self._closed = False
        self._thread = threading.Thread(target=self._run, name="histories", daemon=True)
        self._thread.start()

    def drafter(self, tenant: str, tokens: Sequence[int], predicted: Sequence[int] = ()) -> Drafter:
        """See `DraftSource.drafter`. Uses at most the first 8,192 tokens of `predicted`."""
        return _Drafter(self._history(tenant), self._chances, tokens, predicted[:_MOST_PREDICTED])

    def add(self, tenant: str, tokens: Sequence[int]) -> None:
        """See `DraftSource.add`."""
        with self._changed:
            self._waiting.append((tenant, tokens))
            self._changed.notify_all()

    def recall(self, saved: Callable[[str], Iterator[Sequence[int]]]) -> None:
        """See `DraftSource.recall`."""
        self._saved = saved

    def forget(self, tenant: str) -> None:
        """See `DraftSource.forget`."""
        with self._changed:
            self._by_tenant.pop(tenant, None)

    @property
    def n_tokens(self) -> int:
        """The number of tokens in all histories."""
        with self._changed:
            return sum(one.parts.n_tokens for one in self._by_tenant.values())

    def wait(self) -> None:
        """Wait for the sorting of everything added so far."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._busy)

    def close(self) -> None:
        """See `DraftSource.close`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _history(self, tenant: str) -> History:
        with self._changed:
            if tenant not in self._by_tenant:
                self._by_tenant[tenant] = History()
                self._waiting.append((tenant, None))
                self._changed.notify_all()
            self._by_tenant.move_to_end(tenant)
            return self._by_tenant[tenant]

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                self._busy = True
                given = [self._waiting.popleft() for _ in range(len(self._waiting))]
            for tenant in dict.fromkeys(tenant for tenant, _ in given):
                history = self._history(tenant)
                texts = [text for one, text in given if one == tenant and text is not None]
                if (tenant, None) in given:
                    texts = [*self._saved_of(tenant), *texts]
                history.add(texts)
                history.forget_oldest(self._most_tokens)
            self._forget_tenants()

    def _saved_of(self, tenant: str) -> Sequence[Sequence[int]]:
        """Return the tenant's saved texts, oldest first, as many as a history may have."""
        found: list[Sequence[int]] = []
        n_tokens = 0
        for tokens in self._saved(tenant):
            found.append(tokens)
            n_tokens += len(tokens)
            if n_tokens > self._most_tokens or self._closed:
                break
        return found[::-1]

    def _forget_tenants(self) -> None:
        with self._changed:
            while self.n_tokens > self._most_tokens and len(self._by_tenant) > 1:
                self._by_tenant.popitem(last=False)


class _Own:
    """The predicted answer of a sequence, the last tokens of its prompt, and its answer so far."""

    def __init__(self, tokens: Sequence[int], predicted: Sequence[int]) -> None:
        self.text: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        for token in predicted:
            self.append(token)
        self.text += [END] * bool(predicted)
        self._first = len(self.text)  # of the prompt
        self.text += tokens[-LONGEST:]

    def append(self, token: int) -> None:
        if len(self.text) >= SHORTEST:
            self._after[tuple(self.text[-SHORTEST:])] = len(self.text)
        self.text.append(token)

    @property
    def last(self) -> Sequence[int]:
        """The last tokens, as many as a match may have."""
        return self.text[max(self._first, len(self.text) - LONGEST) :]

    def longest(self) -> tuple[int, int] | None:
        """Return the last place after the tokens that came last, and the length of the match."""
        text = self.text
        at = self._after.get(tuple(text[-SHORTEST:]))
        if at is None:
            return None
        n = SHORTEST
        while n < min(LONGEST, at) and text[at - n - 1] == text[-n - 1]:
            n += 1
        return at, n


class _Drafter:
    def __init__(
        self, history: History, chances: Chances, tokens: Sequence[int], predicted: Sequence[int]
    ) -> None:
        self._history, self._chances = history, chances
        self._own = _Own(tokens, predicted)
        self._text: Sequence[int] | Tokens = self._own.text
        self._at = 0  # in `_text`
        self._n_matched = SHORTEST if predicted else 0  # 0 if nothing matches

    def propose(self, most: int) -> Draft:
        """See `Drafter.propose`."""
        if not self._n_matched:
            self._find()
        if not self._n_matched:
            return Draft((), 0.0)
        tokens = [int(token) for token in self._text[self._at : self._at + most]]
        if END in tokens:
            del tokens[tokens.index(END) :]
        return Draft(tokens, self._chances.of(self._n_matched))

    def read(self, tokens: Sequence[int], _n_drafted: int) -> None:
        """See `Drafter.read`."""
        for token, expected in zip(tokens, self._expected(len(tokens)), strict=True):
            hit = bool(self._n_matched) and token == expected
            if self._n_matched and expected != END:
                self._chances.learn(self._n_matched, hit=hit)
            self._at, self._n_matched = self._at + 1, self._n_matched + 1 if hit else 0
            self._own.append(token)

    def _expected(self, n: int) -> Iterator[int]:
        for at in range(self._at, self._at + n):
            yield int(self._text[at]) if at < len(self._text) else END

    def _find(self) -> None:
        own, other = self._own.longest(), self._history.longest(self._own.last)
        if own is not None and (other is None or own[1] >= other.n_tokens):
            self._text, (self._at, self._n_matched) = self._own.text, own
        elif other is not None:
            self._text, self._at, self._n_matched = other
