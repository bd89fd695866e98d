"""`Identity`: names that no two agents share, whatever clients call sessions and agents."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from semantic.domain.identity import MAX_TAG_LENGTH, Identity, is_tag, name_of

TAGS = st.text(st.sampled_from("ab/~%2Fx5"), min_size=1, max_size=6).filter(is_tag)


def test_names_are_readable() -> None:
    assert Identity("3f2c", "claude-code").name == "claude-code/3f2c"
    assert Identity("3f2c", "claude-code", "a1").name == "claude-code/3f2c/a1"
    assert Identity("3f2c").name == "session/3f2c"
    assert Identity("3f2c").numbered(1) == "session/3f2c"
    assert Identity("3f2c").numbered(12) == "session/3f2c~12"


@given(TAGS, st.none() | TAGS, TAGS, st.none() | TAGS, st.integers(1, 99), st.integers(1, 99))
@example("a/b", None, "a", "b", 1, 1)
@example("a~2", None, "a", None, 1, 2)
def test_two_agents_never_have_one_name(
    session: str, agent: str | None, other: str, other_agent: str | None, n: int, m: int
) -> None:
    one, two = Identity(session, "c", agent), Identity(other, "c", other_agent)
    same = (session, agent, n) == (other, other_agent, m)
    assert (one.numbered(n) == two.numbered(m)) is same
    assert two.number(one.numbered(n)) == (n if (session, agent) == (other, other_agent) else None)


@pytest.mark.parametrize(
    "name", ["session/a~", "session/a~1", "session/a~02", "session/a~x", "session/a~²", "session/b"]
)
def test_what_is_not_numbered_so(name: str) -> None:
    assert Identity("a").number(name) is None
    assert Identity("a").number("session/a~" + "9" * 5000) is None


@pytest.mark.parametrize(
    "tag", ["/" * MAX_TAG_LENGTH, "ä" * MAX_TAG_LENGTH, "~%" * (MAX_TAG_LENGTH // 2)]
)
def test_names_have_an_end(tag: str) -> None:
    assert is_tag(tag)
    assert len(name_of("claude-code", tag, tag)) <= 240
    assert name_of("c", tag) != name_of("c", tag[1:] + "x")


@pytest.mark.parametrize(
    "tag", ["", "x" * (MAX_TAG_LENGTH + 1), "a\nb", "\x1b[31m", "\ud800", "\u202e", None, 3, ["a"]]
)
def test_what_is_no_tag(tag: object) -> None:
    assert not is_tag(tag)
