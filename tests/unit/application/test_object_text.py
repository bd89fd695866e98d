"""Objects in JSON as they are written: what is certain can be closed, and adds up to the whole."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from semantic.application.chat.object_text import MAX_DEPTH, ObjectText

_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)  # fmt: skip
_objects = st.dictionaries(st.text(max_size=3), _values, max_size=3)
_cuts = st.lists(st.integers(0, 400), max_size=5)


def pieces(text: str, at: list[int]) -> list[str]:
    places = [0, *sorted(place % (len(text) + 1) for place in at), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(places)]


def certain(read: ObjectText, parts: list[str]) -> str:
    return "".join(map(read.push, parts))


@given(_objects, st.booleans(), st.sampled_from([None, 2]), _cuts)
def test_an_object_is_returned_as_it_was_written(
    value: dict[str, object], escapes: bool, indent: int | None, at: list[int]
) -> None:
    text = json.dumps(value, ensure_ascii=escapes, indent=indent)
    read = ObjectText()
    assert certain(read, [*pieces(text, at), "}, and more"]) == text
    assert (read.is_closed, read.is_broken, read.n_taken) == (True, False, len(text))


@given(_objects, st.integers(0, 200), _cuts)
def test_what_is_certain_of_a_part_can_be_closed_and_parsed(
    value: dict[str, object], size: int, at: list[int]
) -> None:
    part = json.dumps(value)[:size]
    read = ObjectText()
    text = certain(read, pieces(part, at))
    assert text == part[: read.n_taken]
    assert not read.is_broken
    if read.is_closed:
        return
    assert isinstance(json.loads(text + read.closing()), dict)
    assert json.loads(text + read.closing("more", part))["more"] == part
    from_json(text or "{", allow_partial=True)


_SCRAPS = st.sampled_from(
    [*'{}[]:,"\\ \n\x07-.0e', "tru", "true", "NaN", "\\u", "d83d", "dc09", "a"]
)


@given(st.lists(_SCRAPS, max_size=14).map("".join), _cuts)
def test_any_text_gives_the_same_in_any_pieces(text: str, at: list[int]) -> None:
    text = "{" + text
    whole, parts = ObjectText(), ObjectText()
    returned = certain(whole, [text])
    assert certain(parts, pieces(text, at)) == returned
    assert (parts.is_closed, parts.is_broken) == (whole.is_closed, whole.is_broken)
    if whole.is_closed:
        assert isinstance(json.loads(returned), dict)
    else:
        assert isinstance(json.loads(returned + whole.closing()), dict)


@pytest.mark.parametrize(
    ("text", "returned"),
    [
        ("Oslo", ""),
        ("[1]", ""),
        ('{"a": Oslo}', "{"),
        ('{"a": 1, "b": NaN}', '{"a": 1'),
        ('{"a": 1, "b": 1e999}', '{"a": 1'),
        ('{"a": 1,}', '{"a": 1'),
        ('{"a": "x\\d"}', '{"a": "x'),
        ('{"a": ' + "[" * MAX_DEPTH, '{"a": ' + "[" * (MAX_DEPTH - 1)),
    ],
)
def test_what_is_no_json_is_not_certain(text: str, returned: str) -> None:
    read = ObjectText()
    assert read.push(text) == returned
    assert read.is_broken


def test_strings_are_such_as_every_client_reads() -> None:
    text = '{"a": "x\ny", "b": "\\ud800", "c": "\\ud83d\\udc09"}'
    read = ObjectText()
    returned = certain(read, list(text))
    assert read.is_closed
    assert from_json(returned) == {"a": "x\ny", "b": "\ufffd", "c": "\U0001f409"}
