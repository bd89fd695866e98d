"""The input of a request for a response, as messages of the domain.

Texts stay as they were written, and every message where it stands. Calls of tools that are no
functions are told to the model as calls; what a service did by itself is left out, with one
warning; what would change the conversation's meaning if it were left out is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from semantic.adapters.http.errors import FieldError
from semantic.adapters.http.openai.fields import warnings
from semantic.adapters.http.openai.parts import list_at, object_at, text_at, validated_at
from semantic.adapters.http.openai.responses.content import text_of
from semantic.adapters.http.openai.responses.sealed import opened
from semantic.adapters.http.openai.responses.toolbox import CallName, Json, Toolbox
from semantic.adapters.http.openai.responses.turns import Turns
from semantic.domain.chat import Message, Role, Tool, ToolCall

_PATH: Final = "input"

_ROLES: Final[Mapping[str, Role]] = {
    "user": "user",
    "system": "system",
    "developer": "developer",
}

_OWN_KEYS: Final = frozenset({"type", "id", "call_id", "status", "caller", "created_by"})
"""What an item has beside what was called, or what came back."""

_REFUSED: Final = {
    "compaction": "only the service that made it can read it",
    "computer_call_output": "images cannot be read by this model",
    "configuration_update": "expected reasoning and text beside the input",
    "item_reference": "items are not kept by their ids; send the item itself, or "
    "previous_response_id",
}


@dataclass(frozen=True, slots=True)
class Input:
    """What a request said, and the tools that came in the midst of it."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


def input_of(value: object, toolbox: Toolbox) -> Input:
    """The input of a body; what it loads goes into `toolbox`.

    Raises FieldError for the first item that cannot be read.
    """
    if isinstance(value, str):
        return Input((Message("user", value),))
    if not isinstance(value, list):
        raise FieldError(f"{_PATH}: expected a text or a list of items", param=_PATH)
    reading = _Reading(toolbox)
    items = [_item(f"{_PATH}[{i}]", one) for i, one in enumerate(list_at(_PATH, value))]
    for item in items:  # calls are named by tools that may come behind them
        if item.kind in _LOADING:
            reading.loaded += toolbox.add_loaded(f"{item.path}.tools", item.facts.get("tools"))
    for item in items:
        reading.read(item)
    return Input(reading.turns.messages, tuple(reading.loaded))


@dataclass(frozen=True, slots=True)
class _Item:
    """An item of type `kind` at `path`."""

    path: str
    kind: str
    facts: Json

    def text(self, name: str) -> str:
        return text_at(f"{self.path}.{name}", self.facts.get(name))

    @property
    def has_id(self) -> bool:
        return bool(self.facts.get("id"))


def _item(path: str, value: object) -> _Item:
    facts = object_at(path, value)
    kind = facts.get("type", "message" if "role" in facts else "item_reference")
    return _Item(path, text_at(f"{path}.type", kind), facts)


@dataclass(slots=True)
class _Reading:
    """The conversation as far as it was read."""

    toolbox: Toolbox
    turns: Turns = field(default_factory=Turns)
    loaded: list[Tool] = field(default_factory=list)

    def read(self, item: _Item) -> None:
        """Raises FieldError for an item that is not as it should be, or that is refused."""
        if item.kind in _REFUSED:
            at = f"{item.path}.type"
            raise FieldError(f"{at}: {item.kind}: {_REFUSED[item.kind]}", param=at)
        reader = _READERS.get(item.kind)
        if reader is None:
            warnings.warn(f"input items of type {item.kind!a:.80} are left out")
            return
        reader(self, item)

    def message(self, item: _Item) -> None:
        role = item.facts.get("role")
        content = text_of(f"{item.path}.content", item.facts.get("content"))
        if role == "assistant":
            self.turns.say(content, has_id=item.has_id)
        elif isinstance(role, str) and role in _ROLES:
            self.turns.add(Message(_ROLES[role], content))
        else:
            at = f"{item.path}.role"
            raise FieldError(f"{at}: expected one of assistant, {', '.join(_ROLES)}", param=at)

    def reasoning(self, item: _Item) -> None:
        from semantic.adapters.http.openai.responses.sdk_types import reasoning_adapter

        facts = {"id": "", "summary": [], **item.facts}
        validated_at(item.path, reasoning_adapter(), facts)
        self.turns.think(_thought(item.path, facts), has_id=item.has_id)

    def function_call(self, item: _Item) -> None:
        from semantic.adapters.http.openai.responses.sdk_types import call_adapter

        call = validated_at(item.path, call_adapter(), item.facts)
        name = self.toolbox.known_as(CallName(call["name"], call.get("namespace")))
        self.turns.call(ToolCall(call["call_id"], name, call["arguments"]))

    def custom_call(self, item: _Item) -> None:
        from semantic.adapters.http.openai.responses.sdk_types import custom_call_adapter

        call = validated_at(item.path, custom_call_adapter(), item.facts)
        self.turns.call(ToolCall(call["call_id"], call["name"], _json({"input": call["input"]})))

    def other_call(self, item: _Item) -> None:
        """A call that a client runs, and that has no function's shape."""
        name = item.kind.removesuffix("_call")
        arguments = item.facts.get("arguments", _rest(item))
        self.turns.call(ToolCall(_call_id(item), name, _json(arguments)))

    def output(self, item: _Item) -> None:
        content = text_of(f"{item.path}.output", item.facts.get("output"))
        self.turns.add(Message("tool", content, tool_call_id=item.text("call_id")))

    def other_output(self, item: _Item) -> None:
        """What came of a call that has no function's shape."""
        output = item.facts.get("output", _rest(item))
        content = output if isinstance(output, str) else _json(output)
        self.turns.add(Message("tool", content, tool_call_id=_call_id(item)))

    def found_tools(self, item: _Item) -> None:
        """The tools themselves are among the tools by now."""
        found = list_at(f"{item.path}.tools", item.facts.get("tools"))
        names = [tool.get("name", tool.get("type")) for tool in found if isinstance(tool, dict)]
        content = _json({"tools": names})
        self.turns.add(Message("tool", content, tool_call_id=_call_id(item)))

    def nothing(self, item: _Item) -> None:
        """An item that only brought tools."""


_READERS: Final[dict[str, Callable[[_Reading, _Item], None]]] = {
    "additional_tools": _Reading.nothing,
    "apply_patch_call": _Reading.other_call,
    "apply_patch_call_output": _Reading.other_output,
    "custom_tool_call": _Reading.custom_call,
    "custom_tool_call_output": _Reading.output,
    "function_call": _Reading.function_call,
    "function_call_output": _Reading.output,
    "local_shell_call": _Reading.other_call,
    "local_shell_call_output": _Reading.other_output,
    "message": _Reading.message,
    "reasoning": _Reading.reasoning,
    "shell_call": _Reading.other_call,
    "shell_call_output": _Reading.other_output,
    "tool_search_call": _Reading.other_call,
    "tool_search_output": _Reading.found_tools,
}

_LOADING: Final = frozenset({"additional_tools", "tool_search_output"})


def _thought(path: str, facts: Json) -> str:
    """The thought itself where the item has it, else what was made of it."""
    content = text_of(f"{path}.content", facts.get("content", []))
    carried = text_at(f"{path}.encrypted_content", facts.get("encrypted_content", ""))
    return content or opened(carried) or text_of(f"{path}.summary", facts["summary"])


def _call_id(item: _Item) -> str:
    """Some of these items name their call by their own id."""
    return item.text("call_id" if "call_id" in item.facts else "id")


def _rest(item: _Item) -> Json:
    return {name: value for name, value in item.facts.items() if name not in _OWN_KEYS}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
