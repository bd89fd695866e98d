"""`Marks`: where two prompts part, as near as an eighth, and whether one goes on from the other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.application.agents.prompt_digests import marked, marks_of


def prompt(common: int, n: int, seed: int) -> tuple[int, ...]:
    """`n` tokens, of which the first `common` are the same for every `seed`."""
    return (*range(common), *(seed * 100_000 + at for at in range(n - common)))


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000))
def test_where_two_prompts_part(common: int, more: int, others: int) -> None:
    one = marks_of(prompt(common, common + more, 1))
    other = marks_of(prompt(common, common + others, 2))
    found = one.common(other)
    assert found == other.common(one) <= common
    assert common - found <= common // 8


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 255, 256, 257, 5000])
def test_which_beginnings_are_the_same(n: int) -> None:
    before = marks_of(prompt(n, n, 1))
    later, beginnings = marked(prompt(n, n + 100, 2), [n, n + 7, n + 101])
    assert beginnings[n] == before.whole
    assert beginnings[n + 7] != before.whole
    assert n + 101 not in beginnings
    assert later.n_tokens == n + 100
    assert later == marks_of(prompt(n, n + 100, 2))
    changed, beginnings = marked((*prompt(n - 1, n - 1, 1), 777_777, 5), [n])
    assert beginnings[n] != before.whole
    assert changed.common(before) <= n - 1


def test_a_long_prompt_takes_no_more_than_two_kilobytes() -> None:
    assert len(marks_of(range(1_000_000)).marks) < 2000


def test_an_empty_prompt_has_nothing_in_common() -> None:
    assert marks_of(()).common(marks_of((1, 2))) == 0
