"""Objects are closed where `properties` say all that is in them."""

from __future__ import annotations

import pytest

from semantic.application.chat.call_grammar import closed
from semantic.domain.chat import JsonSchema

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
CLOSED = {**CITY, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (CITY, CLOSED),
        ({"type": "object"}, {"type": "object"}),
        ({"type": "object", "properties": {}}, {"type": "object", "properties": {}}),
        ({**CITY, "additionalProperties": True}, {**CITY, "additionalProperties": True}),
        ({**CITY, "allOf": [CITY]}, {**CITY, "allOf": [CITY]}),
        ({**CITY, "$ref": "#/$defs/a"}, {**CITY, "$ref": "#/$defs/a"}),
        ({"anyOf": [CITY]}, {"anyOf": [CITY]}),
        ({**CITY, "required": ["city"]}, {**CLOSED, "required": ["city"]}),
        ({**CITY, "required": ["other"]}, {**CITY, "required": ["other"]}),
        ({**CITY, "minProperties": 2}, {**CITY, "minProperties": 2}),
        ({"type": "array", "items": CITY}, {"type": "array", "items": CLOSED}),
        (
            {"type": "object", "properties": {"at": CITY, "any": True}},
            {
                "type": "object",
                "properties": {"at": CLOSED, "any": True},
                "additionalProperties": False,
            },
        ),
    ],
)
def test_plain_objects_are_closed(schema: JsonSchema, expected: JsonSchema) -> None:
    before = repr(schema)
    assert closed(schema) == expected
    assert closed(expected) == expected
    assert repr(schema) == before
