"""`PromptDigests`: estimates of the common prefix of two prompts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.domain.prefix import digests_and_prefixes, digests_of


def prompt(common: int, n: int, seed: int) -> tuple[int, ...]:
    """`n` tokens, of which the first `common` are the same for every `seed`."""
    return (*range(common), *(seed * 100_000 + at for at in range(n - common)))


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000))
def test_where_two_prompts_part(common: int, more: int, others: int) -> None:
    one = digests_of(prompt(common, common + more, 1))
    other = digests_of(prompt(common, common + others, 2))
    found = one.common(other)
    assert found == other.common(one) <= common
    assert common - found <= common // 8


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 255, 256, 257, 5000])
def test_which_beginnings_are_the_same(n: int) -> None:
    before = digests_of(prompt(n, n, 1))
    later, beginnings = digests_and_prefixes(prompt(n, n + 100, 2), [n, n + 7, n + 101])
    assert beginnings[n] == before.whole
    assert beginnings[n + 7] != before.whole
    assert n + 101 not in beginnings
    assert later.n_tokens == n + 100
    assert later == digests_of(prompt(n, n + 100, 2))
    changed, beginnings = digests_and_prefixes((*prompt(n - 1, n - 1, 1), 777_777, 5), [n])
    assert beginnings[n] != before.whole
    assert changed.common(before) <= n - 1


def test_a_long_prompt_takes_no_more_than_two_kilobytes() -> None:
    assert len(digests_of(range(1_000_000)).prefixes) < 2000


def test_an_empty_prompt_has_nothing_in_common() -> None:
    assert digests_of(()).common(digests_of((1, 2))) == 0
