"""Texts of a message or of a tool's output: one text, or a list of parts.

Knows the parts of the wire; not what a text means.
"""

from __future__ import annotations

from typing import Final

from semantic.adapters.http.errors import FieldError
from semantic.adapters.http.openai.parts import list_at, object_at, text_at

_PART_SEPARATOR: Final = "\n"
"""Between the texts of one message, as on the chat wire."""

_TEXTS: Final = {
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
    "summary_text": "text",
    "text": "text",
}
"""Where each kind of part has its text."""

_UNREADABLE: Final = {
    "computer_screenshot": "images cannot be read by this model",
    "input_audio": "audio cannot be read by this model",
    "input_file": "files cannot be read by this model",
    "input_image": "images cannot be read by this model",
}


def text_of(path: str, value: object) -> str:
    """The text at `path`. Raises FieldError for what cannot be read as text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise FieldError(f"{path}: expected a text or a list of parts", param=path)
    parts = list_at(path, value)
    return _PART_SEPARATOR.join(_part(f"{path}[{i}]", part) for i, part in enumerate(parts))


def _part(path: str, value: object) -> str:
    part = object_at(path, value)
    kind = str(part.get("type"))
    if kind in _TEXTS:
        name = _TEXTS[kind]
        return text_at(f"{path}.{name}", part.get(name))
    problem = _UNREADABLE.get(kind, "expected a part of type input_text or output_text")
    raise FieldError(f"{path}.type: {problem}", param=f"{path}.type")
