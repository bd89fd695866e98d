"""Drafts come from the longest match in the same tenant's histories."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from semantic.adapters.stores.histories import Histories
from semantic.adapters.stores.suffixes import END, LONGEST, SHORTEST, Suffixes

TEXT = tuple(range(100, 160))


def longest_by_hand(text: Sequence[int], before: Sequence[int]) -> int:
    best = 0
    for at in range(len(text)):
        n = 0
        while n < min(LONGEST, len(before), at) and text[at - 1 - n] == before[-1 - n]:
            n += 1
        best = max(best, n)
    return best if best >= SHORTEST else 0


@pytest.mark.parametrize("n_kinds", [2, 3, 20])
def test_the_longest_match_is_found(n_kinds: int) -> None:
    draw = random.Random(n_kinds)
    for _ in range(200):
        text = [draw.randrange(n_kinds) for _ in range(draw.randint(1, 30))]
        before = [draw.randrange(n_kinds) for _ in range(draw.randint(0, 20))]
        found = Suffixes(text).longest(before)
        assert (0 if found is None else found.n_tokens) == longest_by_hand(text, before)


def test_of_equal_matches_the_last_one_counts() -> None:
    found = Suffixes([1, 2, 7, 1, 2, 8, 1, 2, 9, 1]).longest([1, 2])
    assert found is not None
    assert found.at == 8


def test_the_end_of_a_text_is_no_match() -> None:
    assert Suffixes([5, 1, 2, END]).longest([1, 2]) is None
    found = Suffixes([1, 2, 3, 4, 1, 2, END]).longest([7, 1, 2])
    assert found is not None
    assert found.at == 2


def test_a_match_of_many_is_found_among_thousands() -> None:
    draw = random.Random(0)
    text = [draw.randrange(3) for _ in range(5000)]
    for _ in range(50):
        at = draw.randrange(LONGEST, len(text) - 1)
        found = Suffixes(text[:4000]).longest(text[at - LONGEST : at])
        assert found is not None
        assert found.n_tokens >= 6


class Source:
    """Histories that end with the test."""

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        self.histories = Histories(max_bytes)

    def drafted(self, tenant: str, before: Sequence[int], most: int = 8) -> list[int]:
        self.histories.drafter(tenant, before)  # begins to read what is saved
        self.histories.wait()
        return list(self.histories.drafter(tenant, before).propose(most).tokens)


@pytest.fixture
def source() -> Iterator[Source]:
    made = Source()
    yield made
    made.histories.close()


def test_another_agents_text_goes_on(source: Source) -> None:
    source.histories.add("a", TEXT)
    assert source.drafted("a", (1, 2, 3, *TEXT[:5])) == list(TEXT[5:13])


def test_another_tenants_text_does_not(source: Source) -> None:
    source.histories.add("a", TEXT)
    assert source.drafted("b", TEXT[:5]) == []


def test_own_text_goes_on(source: Source) -> None:
    drafter = source.histories.drafter("a", (9, 9))
    drafter.read(TEXT, 0)
    drafter.read(TEXT[:3], 0)
    assert list(drafter.propose(4).tokens) == list(TEXT[3:7])


def test_a_draft_ends_with_its_text(source: Source) -> None:
    source.histories.add("a", TEXT)
    source.histories.add("a", range(500, 520))
    assert source.drafted("a", TEXT[-4:-2]) == list(TEXT[-2:])


def test_a_draft_goes_on_where_it_was_right(source: Source) -> None:
    source.histories.add("a", TEXT)
    source.histories.wait()
    drafter = source.histories.drafter("a", TEXT[:5])
    drafter.read(TEXT[5:9], 4)
    assert list(drafter.propose(3).tokens) == list(TEXT[9:12])
    before = drafter.propose(3).chance
    drafter.read((1,), 3)
    assert not drafter.propose(3).tokens
    drafter.read(TEXT[20:23], 0)
    assert list(drafter.propose(2).tokens) == list(TEXT[23:25])
    assert drafter.propose(2).chance < before


def test_a_predicted_answer_is_drafted_from_its_start_and_after_a_difference(
    source: Source,
) -> None:
    drafter = source.histories.drafter("a", (1, 2, 3), TEXT)
    assert list(drafter.propose(3).tokens) == list(TEXT[:3])
    drafter.read(TEXT[:3], 3)
    assert list(drafter.propose(2).tokens) == list(TEXT[3:5])
    drafter.read((7, *TEXT[10:12]), 1)
    assert list(drafter.propose(99).tokens) == list(TEXT[12:])


def test_a_predicted_answer_ends_before_the_prompt(source: Source) -> None:
    drafter = source.histories.drafter("a", (8, 9), TEXT[:4])
    drafter.read((TEXT[2], TEXT[3]), 0)
    assert not drafter.propose(9).tokens


def test_saved_texts_come_back(source: Source) -> None:
    source.histories.recall(lambda tenant: iter([TEXT] if tenant == "a" else []))
    assert source.drafted("a", TEXT[:5]) == list(TEXT[5:13])
    assert source.drafted("b", TEXT[:5]) == []


def test_what_is_forgotten_is_not_drafted(source: Source) -> None:
    source.histories.add("a", TEXT)
    assert source.drafted("a", TEXT[:5])
    source.histories.forget("a")
    assert source.drafted("a", TEXT[:5]) == []


def test_memory_is_bounded() -> None:
    small = Source(max_bytes=16 * 1000)
    draw = random.Random(0)
    texts = [[draw.randrange(1 << 17) for _ in range(300)] for _ in range(40)]
    for number, text in enumerate(texts):
        small.histories.add("a" if number % 2 else "b", text)
        small.histories.wait()
        assert small.histories.n_tokens <= 1000 + 301
    assert small.drafted("a", texts[-1][:5])
    assert not small.drafted("a", texts[1][:5])
    small.histories.close()


def test_a_prefix_is_kept_once(source: Source) -> None:
    draw = random.Random(0)
    shared = [draw.randrange(1 << 17) for _ in range(1024)]
    for agent in range(5):
        source.histories.add("a", [*shared, agent, agent + 1, agent + 2])
    source.histories.wait()
    assert source.histories.n_tokens < 1024 + 5 * 20
