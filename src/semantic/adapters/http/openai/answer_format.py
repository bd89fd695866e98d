"""What the text of an answer must be, as the domain means it. Knows the wire's shapes only."""

from __future__ import annotations

from semantic.adapters.http.errors import FieldError
from semantic.adapters.http.openai.parts import object_at, validated_at
from semantic.domain.chat import AnswerFormat

_PATH = "response_format"


def answer_format_of(value: object) -> AnswerFormat | None:
    """None for a free text. A schema is enforced whether it is called strict or not.

    Raises FieldError for what is no format.
    """
    from semantic.adapters.http.openai.message_types import format_adapters

    if value is None:
        return None
    given = object_at(_PATH, value)
    kind = given.get("type")
    adapters = format_adapters()
    if not isinstance(kind, str) or kind not in adapters:
        path = f"{_PATH}.type"
        raise FieldError(f"{path}: expected one of {', '.join(adapters)}", param=path)
    checked = validated_at(_PATH, adapters[kind], given)
    if checked["type"] == "text":
        return None
    if checked["type"] == "json_object":
        return AnswerFormat()
    schema = checked["json_schema"].get("schema")
    if schema is None:
        path = f"{_PATH}.json_schema.schema"
        raise FieldError(f"{path}: expected a JSON schema", param=path)
    return AnswerFormat(schema)
