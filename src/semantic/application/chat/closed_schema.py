"""Schemas of objects that hold what is named and nothing else: a model at a loss writes ever more.

What fits the closed schema fits the one that was given. Knows JSON Schema, as far as it is plain.
"""

from __future__ import annotations

from collections.abc import Mapping

from semantic.domain.chat import JsonSchema

_TOGETHER = frozenset(
    {
        "$ref", "$dynamicRef", "additionalProperties", "allOf", "anyOf", "dependentSchemas", "else",
        "if", "minProperties", "not", "oneOf", "patternProperties", "propertyNames", "then",
        "unevaluatedProperties",
    }
)  # fmt: skip
"""Where one of these stands, more than `properties` may say what an object holds."""


def closed(schema: JsonSchema) -> JsonSchema:
    """`schema`, its plain objects closed: those whose `properties` are all that is said of them."""
    found = dict(schema)
    properties = found.get("properties")
    if isinstance(properties, Mapping):
        found["properties"] = {name: _closed_value(value) for name, value in properties.items()}
        if properties and not _TOGETHER & found.keys() and _names_all(found, properties):
            found["additionalProperties"] = False
    if "items" in found:
        found["items"] = _closed_value(found["items"])
    return found


def _names_all(schema: JsonSchema, properties: Mapping[str, object]) -> bool:
    """Whether `properties` names all that is required."""
    required = schema.get("required", ())
    return isinstance(required, list | tuple) and all(name in properties for name in required)


def _closed_value(value: object) -> object:
    return closed(value) if isinstance(value, Mapping) else value
