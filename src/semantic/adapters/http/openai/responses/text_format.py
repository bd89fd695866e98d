"""What the text of a response must be, as the domain means it, and as the reply tells it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from semantic.adapters.http.errors import FieldError
from semantic.adapters.http.openai.fields import known_fields
from semantic.adapters.http.openai.parts import object_at, validated_at
from semantic.adapters.http.openai.responses.fields import TEXT_FIELDS
from semantic.adapters.http.openai.responses.toolbox import Json
from semantic.domain.chat import AnswerFormat

_PATH: Final = "text.format"
_FREE: Final[Json] = {"type": "text"}


@dataclass(frozen=True, slots=True)
class TextFormat:
    """`answer_format` of None is a free text."""

    answer_format: AnswerFormat | None = None
    told: Json = field(default_factory=lambda: dict(_FREE))


def text_format_of(value: object) -> TextFormat:
    """What the field `text` asks for. A schema is enforced whether it is called strict or not.

    Raises FieldError for what is no format.
    """
    from semantic.adapters.http.openai.responses.sdk_types import format_adapters

    if value is None:
        return TextFormat()
    text = known_fields(object_at("text", value), TEXT_FIELDS, "text.")
    if "format" not in text:
        return TextFormat()
    given = object_at(_PATH, text["format"])
    kind = given.get("type")
    adapters = format_adapters()
    if not isinstance(kind, str) or kind not in adapters:
        path = f"{_PATH}.type"
        raise FieldError(f"{path}: expected one of {', '.join(adapters)}", param=path)
    checked = validated_at(_PATH, adapters[kind], given)
    if checked["type"] == "text":
        return TextFormat()
    if checked["type"] == "json_object":
        return TextFormat(AnswerFormat(), {"type": "json_object"})
    return TextFormat(AnswerFormat(checked["schema"]), {**checked})
