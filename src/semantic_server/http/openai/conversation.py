"""Reads the messages, tools and answer format of a chat completion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from semantic.domain.chat import AnswerFormat, Attachment, Message, Role, Tool, ToolCall, ToolChoice
from semantic_server.http.errors import FieldError
from semantic_server.http.openai.fields import warnings
from semantic_server.http.openai.validators import (
    allowed_choice_adapter,
    format_adapters,
    message_adapters,
    named_choice_adapter,
    tool_adapter,
    tool_call_adapter,
)
from semantic_server.http.request_fields.client_tools import (
    CUSTOM,
    custom_tool,
    written_call,
    written_id,
)
from semantic_server.http.request_fields.notes import attachment, file_note, picture
from semantic_server.http.request_fields.table import (
    list_at,
    name_at,
    object_at,
    text_at,
    validated_at,
    validated_by_type,
)

_PART_SEPARATOR: Final = "\n"
"""The text between two text parts of one message."""

_REASONING_FIELDS: Final = ("reasoning_content", "reasoning")

_CONTINUED: Final = ("prefix", "partial")
"""Fields with which clients ask to continue an assistant message."""

_PLAIN_ROLES: Final[Mapping[str, Role]] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
}

_CHOICE: Final = "tool_choice"
_SYNTAXES: Final = ("lark", "regex")
_FORMAT: Final = "response_format"

_NO_THINKING_EFFORTS: Final = frozenset({"none", "minimal"})
"""Efforts that switch reasoning off."""

_RESERVED_OPTIONS: Final = frozenset((
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents",
    "max_length", "messages", "padding", "sanitize_control_tokens", "self", "tokenize",
    "tokenizer_kwargs", "tools", "truncation",
))  # fmt: skip
"""Template arguments that a client must not set."""


# Messages


def messages_of(value: object) -> tuple[Message, ...]:
    """Read `messages`. Raises FieldError for the first invalid message."""
    found = list_at("messages", value)
    if not found:
        raise FieldError("messages: expected at least one message", param="messages")
    return tuple(_message(f"messages[{i}]", one) for i, one in enumerate(found))


def _message(path: str, value: object) -> Message:
    message = object_at(path, value)
    role = message.get("role")
    adapter = message_adapters.get(role) if isinstance(role, str) else None
    reader = _READERS.get(role) if isinstance(role, str) else None
    if adapter is None or reader is None:
        expected = ", ".join(_READERS)
        hint = "; functions are now tools" if role == "function" else ""
        raise FieldError(f"{path}.role: expected one of {expected}{hint}", param=f"{path}.role")
    validated_at(path, adapter(), message)
    for name in _CONTINUED:
        if message.get(name):
            raise FieldError(
                f"{path}.{name} must be false: this server cannot continue an answer",
                param=f"{path}.{name}",
            )
    return reader(path, message)


def _plain(path: str, message: Mapping[str, object]) -> Message:
    role = _PLAIN_ROLES[str(message["role"])]
    text, attachments = _content(path, message)
    return Message(role, text, name=_name(message), attachments=attachments)


def _tool_result(path: str, message: Mapping[str, object]) -> Message:
    call = written_id(text_at(f"{path}.tool_call_id", message["tool_call_id"]))
    text, attachments = _content(path, message)
    return Message("tool", text, tool_call_id=call, name=_name(message), attachments=attachments)


def _assistant(path: str, message: Mapping[str, object]) -> Message:
    for name in ("function_call", "audio"):
        if name in message:
            hint = "use tool_calls" if name == "function_call" else "this server has no audio"
            raise FieldError(f"{path}.{name}: not supported; {hint}", param=f"{path}.{name}")
    content, attachments = _content(path, message)
    texts = (content, _text(path, message, "refusal"))
    return Message(
        "assistant",
        _PART_SEPARATOR.join(filter(None, texts)),
        reasoning=_reasoning(path, message),
        tool_calls=_calls(f"{path}.tool_calls", message.get("tool_calls", [])),
        name=_name(message),
        attachments=attachments,
    )


_READERS: Final[dict[str, Callable[[str, Mapping[str, object]], Message]]] = {
    **dict.fromkeys(_PLAIN_ROLES, _plain),
    "assistant": _assistant,
    "tool": _tool_result,
}


_Content = tuple[str, tuple[Attachment, ...]]
"""A text and its attachments. A note replaces each part that is not text."""


def _content(path: str, message: Mapping[str, object]) -> _Content:
    content = message.get("content", "")
    if isinstance(content, str):
        return content, ()
    return content_of(f"{path}.content", content, _part)


def predicted_of(value: object) -> str:
    """Return the text of a `prediction`, "" for None. Raises FieldError."""
    return "" if value is None else _content("prediction", object_at("prediction", value))[0]


def content_of(
    path: str, value: object, read: Callable[[str, object], str | tuple[str, Attachment]]
) -> _Content:
    """Return the parts of a message as one text with attachments. `read` converts each part."""
    texts, attachments = [], []
    for i, one in enumerate(list_at(path, value)):
        part = read(f"{path}[{i}]", one)
        if not isinstance(part, str):
            part, attached = part
            attachments.append(attached)
        texts.append(part)
    return _PART_SEPARATOR.join(texts), tuple(attachments)


def _part(path: str, value: object) -> str | tuple[str, Attachment]:
    part = object_at(path, value)
    kind = str(part.get("type"))
    match kind:
        case "text" | "refusal":
            return text_at(f"{path}.{kind}", part.get(kind))
        case "image_url":
            given = part.get(kind)  # some clients send the URL itself
            at, url = f"{path}.{kind}", given
            if not isinstance(given, str):
                at, url = f"{at}.url", object_at(at, given).get("url")
            return picture(text_at(at, url))
        case "input_audio":
            sound = object_at(f"{path}.{kind}", part.get(kind))
            data = text_at(f"{path}.{kind}.data", sound.get("data"))
            return attachment("audio", str(sound.get("format", "")), data)
        case "file":
            return file_note(object_at(f"{path}.{kind}", part.get(kind)))
        case _:
            raise FieldError(f"{path}.type: expected a part of type text", param=f"{path}.type")


def _reasoning(path: str, message: Mapping[str, object]) -> str:
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
    given = object_at(path, value)
    if given.get("type") == CUSTOM:
        at = f"{path}.{CUSTOM}"
        custom = object_at(at, given.get(CUSTOM))
        return written_call(
            text_at(f"{path}.id", given.get("id")),
            text_at(f"{at}.name", custom.get("name")),
            text_at(f"{at}.input", custom.get("input")),
        )
    call = validated_at(path, tool_call_adapter(), given)
    return ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])


# Tools


def tools_of(value: object) -> tuple[Tool, ...]:
    """Read `tools`. Raises FieldError for an invalid tool."""
    found: dict[str, Tool] = {}
    for i, one in enumerate(list_at("tools", value)):
        path = f"tools[{i}]"
        tool = _tool(path, one)
        if tool is None:
            continue
        if tool.name in found:
            at = f"{path}.{tool.kind}.name"
            raise FieldError(f"{at}: duplicate tool {tool.name!r}", param=at)
        found[tool.name] = tool
    return tuple(found.values())


def _tool(path: str, value: object) -> Tool | None:
    tool = object_at(path, value)
    kind = text_at(f"{path}.type", tool.get("type"))
    if kind == CUSTOM:
        at = f"{path}.{CUSTOM}"
        return read_custom_tool(at, object_at(at, tool.get(CUSTOM)))
    if kind != "function":
        warn_hosted(kind)
        return None
    tool["function"] = object_at(f"{path}.function", tool.get("function"))
    function = validated_at(path, tool_adapter(), tool)["function"]
    return Tool(
        name_at(f"{path}.function", function),
        function.get("description", ""),
        function.get("parameters", {}),
        strict=bool(function.get("strict")),
    )


def read_custom_tool(path: str, given: Mapping[str, object]) -> Tool:
    """Read a custom tool from `given`, the JSON object at `path`. Raises FieldError."""
    name = name_at(path, given)
    description = text_at(f"{path}.description", given.get("description", ""))
    return custom_tool(name, description, _expected(f"{path}.format", given.get("format")))


def _expected(path: str, value: object) -> str:
    given = object_at(path, {"type": "text"} if value is None else value)
    match given.get("type"):
        case "text":
            return "Any text."
        case "grammar":
            nested = "grammar" in given  # in chat completions
            at = f"{path}.grammar" if nested else path
            grammar = object_at(at, given["grammar"]) if nested else given
            syntax = grammar.get("syntax")
            if syntax not in _SYNTAXES:
                at = f"{at}.syntax"
                raise FieldError(f"{at}: expected one of {', '.join(_SYNTAXES)}", param=at)
            definition = text_at(f"{at}.definition", grammar.get("definition"))
            return f"A text that matches this {syntax}:\n{definition}"
        case _:
            at = f"{path}.type"
            raise FieldError(f"{at}: expected text or grammar", param=at)


def warn_hosted(kind: str) -> None:
    """Log once that the server ignores hosted tools of this type."""
    warnings.warn(f"dropped tools of type {kind!a:.80}: only clients run tools")


def choice_among(tools: Sequence[Tool], value: object) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Return the callable tools and the tool choice. Raises FieldError."""
    match value:
        case None | "auto":
            return tuple(tools), ToolChoice()
        case "none":
            return tuple(tools), ToolChoice("none")
        case "required":
            return required(tools)
        case _:
            return _chosen(tools, object_at(_CHOICE, value))


def _chosen(
    tools: Sequence[Tool], choice: dict[str, object]
) -> tuple[tuple[Tool, ...], ToolChoice]:
    match choice.get("type"):
        case "function" | "custom":
            name, at = _named(_CHOICE, choice)
            check_known(name, tools, at)
            return tuple(tools), ToolChoice("required", name)
        case "allowed_tools":
            return _allowed(tools, choice)
        case _:
            path = f"{_CHOICE}.type"
            raise FieldError(f"{path}: expected function, custom or allowed_tools", param=path)


def required(tools: Sequence[Tool]) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Return the choice that requires one of `tools`. Raises FieldError if `tools` is empty."""
    if not tools:
        raise FieldError("tool_choice requires a call, but tools has no function", param=_CHOICE)
    return tuple(tools), ToolChoice("required")


def _named(path: str, choice: dict[str, object]) -> tuple[str, str]:
    if choice.get("type") != CUSTOM:
        name = validated_at(path, named_choice_adapter(), choice)["function"]["name"]
        return name, f"{path}.function.name"
    at = f"{path}.{CUSTOM}.name"
    return text_at(at, object_at(f"{path}.{CUSTOM}", choice.get(CUSTOM)).get("name")), at


def _allowed(
    tools: Sequence[Tool], choice: dict[str, object]
) -> tuple[tuple[Tool, ...], ToolChoice]:
    path = f"{_CHOICE}.allowed_tools"
    mode = validated_at(_CHOICE, allowed_choice_adapter(), choice)["allowed_tools"]["mode"]
    among = list_at(f"{path}.tools", object_at(path, choice["allowed_tools"])["tools"])
    names: set[str] = set()
    for i, one in enumerate(among):
        at = f"{path}.tools[{i}]"
        name, _ = _named(at, object_at(at, one))
        check_known(name, tools, at)
        names.add(name)
    allowed = tuple(tool for tool in tools if tool.name in names)
    return required(allowed) if mode == "required" else (allowed, ToolChoice())


def check_known(name: str, tools: Sequence[Tool], path: str) -> None:
    """Raise FieldError unless one of `tools` is called `name`."""
    if name not in {tool.name for tool in tools}:
        raise FieldError(f"{path}: tools has no function {name!r}", param=path)


# Answer format and template options


def answer_format_of(value: object) -> AnswerFormat | None:
    """Read `response_format`. None means free text. Raises FieldError for an invalid format."""
    if value is None:
        return None
    checked = validated_by_type(_FORMAT, format_adapters, object_at(_FORMAT, value))
    if checked["type"] == "text":
        return None
    if checked["type"] == "json_object":
        return AnswerFormat()
    schema = checked["json_schema"].get("schema")
    if schema is None:
        path = f"{_FORMAT}.json_schema.schema"
        raise FieldError(f"{path}: expected a JSON schema", param=path)
    return AnswerFormat(schema)


def template_options(
    effort: str | None, own: Mapping[str, object], thinking_tokens: int | None = None
) -> dict[str, object]:
    """Return template options for a thinking budget and an effort. The client's `own` options take
    precedence over them. Raises FieldError for a reserved option."""
    options: dict[str, object] = {}
    if thinking_tokens is not None:
        options["enable_thinking"] = thinking_tokens > 0
    if effort is not None:
        options |= {
            "reasoning_effort": effort,
            "enable_thinking": effort not in _NO_THINKING_EFFORTS,
        }
    for name in own:
        if name in _RESERVED_OPTIONS or name.startswith("return_") or name.endswith("_token"):
            path = "chat_template_kwargs"
            raise FieldError(f"{path}: clients cannot set {name!r}", param=path)
    return options | dict(own)
