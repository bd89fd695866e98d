"""Values in tags have the types that a schema says, and are what the model wrote."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.application.chat.argument_types import ArgumentTypes, any_json

SCHEMA: dict[str, object] = {
    "$defs": {
        "Page": {"type": "integer"},
        "Loop": {"$ref": "#/$defs/Loop"},
        "a/b~": {"enum": [1, 2]},
    },
    "properties": {
        "text": {"type": "string"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "nullable": {"type": "string", "nullable": True},
        "n": {"type": "integer"},
        "optional": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "listed": {"type": ["boolean", "null"]},
        "page": {"$ref": "#/$defs/Page"},
        "escaped": {"$ref": "#/$defs/a~1b~0"},
        "all": {"allOf": [{"type": "number"}, {"minimum": 1}]},
        "both": {"allOf": [{"type": "number"}, {"type": ["integer", "string"]}]},
        "x": {"type": "number"},
        "object": {"type": "object"},
        "array": {"type": "array"},
        "one": {"oneOf": [{"type": "integer"}, {"const": "all"}]},
        "words": {"enum": ["5", "all"]},
        "mixed": {"enum": ["a", 1, None]},
        "loop": {"$ref": "#/$defs/Loop"},
        "gone": {"$ref": "#/$defs/Nothing"},
        "free": {},
        "any": {"anyOf": [{"type": "integer"}, {}]},
    },
}
HUGE = "123456789012345678901234567890"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("text", "null", '"null"'),
        ("text", "  5\n", '"  5\\n"'),
        ("text", "", '""'),
        ("maybe", "null", "null"),
        ("maybe", "None", "null"),
        ("maybe", "5", '"5"'),
        ("maybe", " nullable", '" nullable"'),
        ("nullable", "null", "null"),
        ("n", "5", "5"),
        ("n", "\n5\n", "5"),
        ("n", HUGE, HUGE),
        ("n", "5.0", "5.0"),
        ("n", "5.5", '"5.5"'),
        ("n", "five", '"five"'),
        ("n", "null", '"null"'),
        ("n", "True", '"True"'),
        ("n", "0x10", "16"),
        ("optional", "5", "5"),
        ("optional", "null", "null"),
        ("listed", "False", "false"),
        ("listed", "true", "true"),
        ("listed", "1", '"1"'),
        ("page", "2", "2"),
        ("escaped", "2", "2"),
        ("all", "0.50", "0.50"),
        ("all", "1e5", "1e5"),
        ("both", "3", "3"),
        ("x", "7", "7"),
        ("x", "NaN", '"NaN"'),
        ("x", "1e999", '"1e999"'),
        ("object", '{"a": 1.10}', '{"a": 1.10}'),
        ("object", "{'a': True, 'b': null}", '{"a": true, "b": null}'),
        ("object", '{"a": "x\ny"}', '{"a": "x\\ny"}'),
        ("object", "[1]", '"[1]"'),
        ("object", "[" * 60 + "]" * 60, json.dumps("[" * 60 + "]" * 60)),
        ("array", "[1, 'a']", '[1, "a"]'),
        ("array", '["\\ud800"]', '["\ufffd"]'),
        ("one", "3", "3"),
        ("one", "all", '"all"'),
        ("words", "5", '"5"'),
        ("mixed", "1", "1"),
        ("mixed", "null", "null"),
        ("mixed", "a", '"a"'),
        ("loop", "5", '"5"'),
        ("gone", "5", '"5"'),
        ("free", "5", '"5"'),
        ("free", "[5]", "[5]"),
        ("any", "5", '"5"'),
        ("unknown", "[5]", '"[5]"'),
    ],
)
def test_a_value_has_the_type_of_its_schema(name: str, text: str, expected: str) -> None:
    assert ArgumentTypes(SCHEMA).value(name, text) == expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("text", "5", '"5"'),
        ("unknown", "5", "5"),
        ("unknown", "five", '"five"'),
        ("free", "true", "true"),
        ("free", '"a"', '"\\"a\\""'),
    ],
)
def test_without_a_type_a_value_may_be_what_it_is_as_json(
    name: str, text: str, expected: str
) -> None:
    assert ArgumentTypes(SCHEMA, untyped_is_text=False).value(name, text) == expected


def test_schemas_that_are_none_say_nothing() -> None:
    schemas: list[dict[str, object]] = [{}, {"properties": 3}, {"properties": {"a": True}}]
    schemas.append({"properties": {"a": []}})
    for schema in schemas:
        assert ArgumentTypes(schema).value("a", "5") == '"5"'


@given(st.sampled_from([*SCHEMA["properties"], "unknown"]), st.text(max_size=20), st.booleans())  # type: ignore[misc]  # a mapping
def test_any_text_is_a_value(name: str, text: str, untyped_is_text: bool) -> None:
    found = ArgumentTypes(SCHEMA, untyped_is_text=untyped_is_text).value(name, text)
    value = json.loads(found)
    assert found.encode()
    if name == "text":
        assert value == text


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(values)
def test_a_value_is_read_in_json_and_in_python(value: object) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False), repr(value)):
        found = any_json(text)
        assert found is not None
        assert json.loads(found) == value
