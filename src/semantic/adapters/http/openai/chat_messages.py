"""Messages of a chat completion as messages of the domain.

Texts stay as they were written. Knows the roles and parts of the wire; not how a model's template
writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from semantic.adapters.http.errors import FieldError
from semantic.adapters.http.openai.parts import list_at, object_at, text_at, validated_at
from semantic.domain.chat import Message, ToolCall

_PART_SEPARATOR: Final = "\n"
"""Between the texts of one message; other local servers write them so, too."""

_REASONING_FIELDS: Final = ("reasoning_content", "reasoning")

_UNREADABLE: Final = {
    "image_url": "images cannot be read by this model",
    "input_audio": "audio cannot be read by this model",
    "file": "files cannot be read by this model",
}


def messages_of(value: object) -> tuple[Message, ...]:
    """The messages of a body. Raises FieldError for the first that is none."""
    found = list_at("messages", value)
    if not found:
        raise FieldError("messages: expected at least one message", param="messages")
    return tuple(_message(f"messages[{i}]", one) for i, one in enumerate(found))


def _message(path: str, value: object) -> Message:
    from semantic.adapters.http.openai.message_types import message_adapters

    message = object_at(path, value)
    role = message.get("role")
    adapter = message_adapters().get(role) if isinstance(role, str) else None
    reader = _READERS.get(role) if isinstance(role, str) else None
    if adapter is None or reader is None:
        expected = ", ".join(_READERS)
        hint = "; functions are tools now" if role == "function" else ""
        raise FieldError(f"{path}.role: expected one of {expected}{hint}", param=f"{path}.role")
    validated_at(path, adapter, message)
    return reader(path, message)


def _system(path: str, message: Mapping[str, object]) -> Message:
    return Message("system", _content(path, message), name=_name(message))


def _developer(path: str, message: Mapping[str, object]) -> Message:
    return Message("developer", _content(path, message), name=_name(message))


def _user(path: str, message: Mapping[str, object]) -> Message:
    return Message("user", _content(path, message), name=_name(message))


def _tool(path: str, message: Mapping[str, object]) -> Message:
    call = text_at(f"{path}.tool_call_id", message["tool_call_id"])
    return Message("tool", _content(path, message), tool_call_id=call, name=_name(message))


def _assistant(path: str, message: Mapping[str, object]) -> Message:
    for name in ("function_call", "audio"):
        if name in message:
            hint = "use tool_calls" if name == "function_call" else "there is no audio here"
            raise FieldError(f"{path}.{name}: not supported; {hint}", param=f"{path}.{name}")
    texts = (_content(path, message), _text(path, message, "refusal"))
    return Message(
        "assistant",
        _PART_SEPARATOR.join(filter(None, texts)),
        reasoning=_reasoning(path, message),
        tool_calls=_calls(f"{path}.tool_calls", message.get("tool_calls", [])),
        name=_name(message),
    )


_READERS: Final[dict[str, Callable[[str, Mapping[str, object]], Message]]] = {
    "system": _system,
    "developer": _developer,
    "user": _user,
    "assistant": _assistant,
    "tool": _tool,
}


def _content(path: str, message: Mapping[str, object]) -> str:
    content = message.get("content", "")
    if isinstance(content, str):
        return content
    path = f"{path}.content"
    parts = list_at(path, content)
    return _PART_SEPARATOR.join(_part(f"{path}[{i}]", part) for i, part in enumerate(parts))


def _part(path: str, value: object) -> str:
    part = object_at(path, value)
    kind = str(part.get("type"))
    if kind in {"text", "refusal"}:
        return text_at(f"{path}.{kind}", part.get(kind))
    problem = _UNREADABLE.get(kind, "expected a part of type text")
    raise FieldError(f"{path}.type: {problem}", param=f"{path}.type")


def _reasoning(path: str, message: Mapping[str, object]) -> str:
    """What the assistant had thought; replies name it twice, so either name comes back."""
    given = (_text(path, message, name) for name in _REASONING_FIELDS)
    return next(filter(None, given), "")


def _text(path: str, message: Mapping[str, object], name: str) -> str:
    return text_at(f"{path}.{name}", message.get(name, ""))


def _name(message: Mapping[str, object]) -> str | None:
    name = message.get("name")
    return name if isinstance(name, str) else None


def _calls(path: str, value: object) -> tuple[ToolCall, ...]:
    return tuple(_call(f"{path}[{i}]", one) for i, one in enumerate(list_at(path, value)))


def _call(path: str, value: object) -> ToolCall:
    from semantic.adapters.http.openai.message_types import call_adapter

    call = validated_at(path, call_adapter(), object_at(path, value))
    return ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
