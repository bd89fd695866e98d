"""Translates the input items of a response's request to messages. Ignores items of hosted tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from semantic.domain.chat import Attachment, Message, Role, Tool, ToolCall
from semantic_server.http.errors import FieldError
from semantic_server.http.openai.conversation import content_of
from semantic_server.http.openai.fields import Json, warnings
from semantic_server.http.openai.responses.output_items import KeptItems, decoded_reasoning
from semantic_server.http.openai.responses.tools import FunctionName, ToolSet
from semantic_server.http.openai.validators import (
    custom_call_adapter,
    function_call_adapter,
    reasoning_adapter,
)
from semantic_server.http.request_fields.client_tools import (
    OPENAI_TOOLS,
    arguments_of,
    written_call,
    written_id,
)
from semantic_server.http.request_fields.notes import attachment, block_note, file_note, picture
from semantic_server.http.request_fields.table import list_at, object_at, text_at, validated_at

_PATH: Final = "input"

_ROLES: Final[Mapping[str, Role]] = {"user": "user", "system": "system", "developer": "developer"}

_REFERENCE: Final = "item_reference"

_ENVELOPE: Final = frozenset({"type", "id", "call_id", "status", "caller", "created_by"})
"""Fields of an item that are neither arguments nor output."""

_REFUSED: Final = {"configuration_update": "send reasoning and text as fields of the request"}

_TEXT_PARTS: Final = {
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
    "summary_text": "text",
    "text": "text",
}
"""The field that contains a part's text, by the part's type."""

_PICTURES: Final = frozenset({"computer_screenshot", "input_image"})
_COMPACTED: Final = "earlier messages that only the service that compacted them can read"


@dataclass(frozen=True, slots=True)
class ResponseInput:
    """The messages of an input, and the tools that its items load."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


def input_of(value: object, tools: ToolSet, kept: KeptItems | None = None) -> ResponseInput:
    """Read `input`, and add the tools in it to `tools`. Items of `kept` replace references to them.
    Raises FieldError for an invalid item, and the same errors as `KeptItems.item`."""
    if isinstance(value, str):
        return ResponseInput((Message("user", value),))
    if not isinstance(value, list):
        raise FieldError(f"{_PATH}: expected a string or a list of items", param=_PATH)
    reader = _Reader(tools)
    items = [_item(f"{_PATH}[{i}]", one, kept) for i, one in enumerate(list_at(_PATH, value))]
    for item in items:  # first, because calls may precede the item that loads their tool
        if item.kind in _LOADING:
            reader.loaded += tools.add_loaded(f"{item.path}.tools", item.fields.get("tools"))
    for item in items:
        reader.read(item)
    return ResponseInput(reader.messages.finish(), tuple(reader.loaded))


# Items


@dataclass(frozen=True, slots=True)
class _Item:
    path: str
    kind: str
    fields: Json

    def text(self, name: str) -> str:
        return text_at(f"{self.path}.{name}", self.fields.get(name))

    @property
    def has_id(self) -> bool:
        return bool(self.fields.get("id"))


def _item(path: str, value: object, kept: KeptItems | None) -> _Item:
    fields = object_at(path, value)
    kind = fields.get("type", "message" if "role" in fields else _REFERENCE)
    if kind == _REFERENCE and kept is not None:
        at = f"{path}.id"
        return _item(path, kept.item(at, text_at(at, fields.get("id"))), None)
    return _Item(path, text_at(f"{path}.type", kind), fields)


class _MessageAssembler:
    """Joins adjacent items of reasoning, text and calls to one assistant message."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._assistant: _AssistantMessage | None = None

    def finish(self) -> tuple[Message, ...]:
        self._close()
        return tuple(self._messages)

    def add(self, message: Message) -> None:
        self._close()
        self._messages.append(message)

    def add_reasoning(self, text: str, *, has_id: bool) -> None:
        self._open(anew=not has_id).reasoning.append(text)

    def add_text(self, text: str, *, has_id: bool) -> None:
        self._open(anew=not has_id).content.append(text)

    def add_call(self, call: ToolCall) -> None:
        self._open(anew=False).calls.append(call)

    def _open(self, *, anew: bool) -> _AssistantMessage:
        if self._assistant is not None and anew and self._assistant.has_output:
            self._close()
        if self._assistant is None:
            self._assistant = _AssistantMessage()
        return self._assistant

    def _close(self) -> None:
        if self._assistant is not None:
            self._messages.append(self._assistant.message())
            self._assistant = None


@dataclass(slots=True)
class _AssistantMessage:
    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    @property
    def has_output(self) -> bool:
        return bool(self.content or self.calls)

    def message(self) -> Message:
        return Message(
            "assistant",
            "".join(self.content),
            reasoning="".join(self.reasoning),
            tool_calls=tuple(self.calls),
        )


@dataclass(slots=True)
class _Reader:
    tools: ToolSet
    messages: _MessageAssembler = field(default_factory=_MessageAssembler)
    loaded: list[Tool] = field(default_factory=list)

    def read(self, item: _Item) -> None:
        if item.kind in _REFUSED:
            at = f"{item.path}.type"
            raise FieldError(f"{at}: {item.kind}: {_REFUSED[item.kind]}", param=at)
        reader = _READERS.get(item.kind)
        if reader is None:
            warnings.warn(f"dropped input items of type {item.kind!a:.80}")
            return
        reader(self, item)

    def message(self, item: _Item) -> None:
        role = item.fields.get("role")
        content, attached = _content_of(f"{item.path}.content", item.fields.get("content"))
        if role == "assistant":
            self.messages.add_text(content, has_id=item.has_id)
        elif isinstance(role, str) and role in _ROLES:
            self.messages.add(Message(_ROLES[role], content, attachments=attached))
        else:
            at = f"{item.path}.role"
            raise FieldError(f"{at}: expected one of assistant, {', '.join(_ROLES)}", param=at)

    def reasoning(self, item: _Item) -> None:
        fields = {"id": "", "summary": [], **item.fields}
        validated_at(item.path, reasoning_adapter(), fields)
        self.messages.add_reasoning(_reasoning_text(item.path, fields), has_id=item.has_id)

    def function_call(self, item: _Item) -> None:
        call = validated_at(item.path, function_call_adapter(), item.fields)
        name = self.tools.model_name(FunctionName(call["name"], call.get("namespace")))
        self.messages.add_call(ToolCall(call["call_id"], name, call["arguments"]))

    def custom_call(self, item: _Item) -> None:
        call = validated_at(item.path, custom_call_adapter(), item.fields)
        name = self.tools.model_name(FunctionName(call["name"], call.get("namespace")))
        self.messages.add_call(written_call(call["call_id"], name, call["input"]))

    def other_call(self, item: _Item) -> None:
        name = item.kind.removesuffix("_call")
        content = _content_fields(item)
        arguments = item.fields.get("arguments", content)
        if name in OPENAI_TOOLS:
            arguments = arguments_of(name, content)
        self.messages.add_call(ToolCall(_call_id(item), name, _json(arguments)))

    def output(self, item: _Item) -> None:
        output = item.fields.get("output")
        parts = [output] if isinstance(output, dict) else output  # of a computer call
        content, attached = _content_of(f"{item.path}.output", parts)
        call = written_id(item.text("call_id"))
        self.messages.add(Message("tool", content, tool_call_id=call, attachments=attached))

    def other_output(self, item: _Item) -> None:
        output = item.fields.get("output", _content_fields(item))
        content = output if isinstance(output, str) else _json(output)
        self.messages.add(Message("tool", content, tool_call_id=_call_id(item)))

    def found_tools(self, item: _Item) -> None:
        found = list_at(f"{item.path}.tools", item.fields.get("tools"))
        names = [tool.get("name", tool.get("type")) for tool in found if isinstance(tool, dict)]
        content = _json({"tools": names})
        self.messages.add(Message("tool", content, tool_call_id=_call_id(item)))

    def compacted(self, item: _Item) -> None:
        """Add a note in place of a summary that only OpenAI can decrypt."""
        self.messages.add(Message("system", block_note(item.kind, {"text": _COMPACTED})))

    def nothing(self, item: _Item) -> None:
        """Ignore an item, because it only loads tools."""


_READERS: Final[dict[str, Callable[[_Reader, _Item], None]]] = {
    "additional_tools": _Reader.nothing,
    "apply_patch_call": _Reader.other_call,
    "apply_patch_call_output": _Reader.other_output,
    "compaction": _Reader.compacted,
    "computer_call": _Reader.other_call,
    "computer_call_output": _Reader.output,
    "custom_tool_call": _Reader.custom_call,
    "custom_tool_call_output": _Reader.output,
    "function_call": _Reader.function_call,
    "function_call_output": _Reader.output,
    "local_shell_call": _Reader.other_call,
    "local_shell_call_output": _Reader.other_output,
    "message": _Reader.message,
    "reasoning": _Reader.reasoning,
    "shell_call": _Reader.other_call,
    "shell_call_output": _Reader.other_output,
    "tool_search_call": _Reader.other_call,
    "tool_search_output": _Reader.found_tools,
}

_LOADING: Final = frozenset({"additional_tools", "tool_search_output"})


def _reasoning_text(path: str, fields: Json) -> str:
    """Return the first non-empty text of an item's content, encrypted content and summary."""
    content = _text_of(f"{path}.content", fields.get("content", []))
    encrypted = text_at(f"{path}.encrypted_content", fields.get("encrypted_content", ""))
    return content or decoded_reasoning(encrypted) or _text_of(f"{path}.summary", fields["summary"])


def _call_id(item: _Item) -> str:
    return item.text("call_id" if "call_id" in item.fields else "id")


def _content_fields(item: _Item) -> Json:
    return {name: value for name, value in item.fields.items() if name not in _ENVELOPE}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


# Texts


def _text_of(path: str, value: object) -> str:
    return _content_of(path, value)[0]


def _content_of(path: str, value: object) -> tuple[str, tuple[Attachment, ...]]:
    if isinstance(value, str):
        return value, ()
    if not isinstance(value, list):
        raise FieldError(f"{path}: expected a string or a list of parts", param=path)
    return content_of(path, value, _part)


def _part(path: str, value: object) -> str | tuple[str, Attachment]:
    part = object_at(path, value)
    kind = str(part.get("type"))
    if kind in _TEXT_PARTS:
        name = _TEXT_PARTS[kind]
        return text_at(f"{path}.{name}", part.get(name))
    if kind in _PICTURES:
        return picture(str(part.get("image_url") or part.get("file_id") or ""))
    if kind == "input_audio":
        sound = part.get("input_audio", part)
        fields = sound if isinstance(sound, dict) else part
        return attachment("audio", str(fields.get("format", "")), str(fields.get("data", "")))
    if kind == "input_file":
        return file_note(part)
    raise FieldError(
        f"{path}.type: expected a part of type input_text or output_text", param=f"{path}.type"
    )
