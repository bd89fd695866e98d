"""A chat as the messages that one model's template can say. Knows no template text, no tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Protocol

from semantic.adapters.mlx.text.chat_template import TemplateMessage, Traits
from semantic.adapters.mlx.text.json_values import deeper_than
from semantic.adapters.mlx.text.tool_text import (
    call_as_text,
    result_as_text,
    system_as_text,
    tools_as_text,
)
from semantic.domain.chat import Chat, Message, Tool, ToolCall

_SYSTEM = ("system", "developer")
_SHORT_ID_LENGTH = 9
_DEEPEST = 64
"""Levels of lists and objects in a call's arguments; templates write each by a call of its own."""
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""What templates call the thought of an assistant's message."""


class Hide(Protocol):
    """Takes the special tokens out of a text; `marks` also those that only templates use."""

    def __call__(self, text: str, *, marks: bool = False) -> str: ...


def tools_for(tools: Sequence[Tool], hide: Hide) -> list[TemplateMessage]:
    """Tools as templates expect them."""
    return [{"type": "function", "function": _signature(tool, hide)} for tool in tools]


def messages_for(chat: Chat, traits: Traits, hide: Hide) -> list[TemplateMessage]:
    """The messages of `chat` for a template of these traits, each where it stands."""
    writer = _Writer(traits, hide)
    messages = list(chat.messages)
    if chat.tools and not traits.tools:
        writer.about_tools(chat.tools, after=bool(messages) and messages[0].role in _SYSTEM)
    for message in messages:
        writer.add(message)
    return writer.messages


def arguments_object(arguments: str) -> object:
    """A call's arguments as an object, of which null is an empty one; the text itself when it is
    the text of none, or of one that is nested too deeply for a template to write."""
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if value is None:
        return {}
    return value if isinstance(value, dict) and not deeper_than(_DEEPEST, value) else arguments


def _signature(tool: Tool, hide: Hide) -> dict[str, object]:
    parameters = dict(tool.parameters) or {"type": "object", "properties": {}}
    return {
        "name": hide(tool.name),
        "description": hide(tool.description),
        "parameters": hidden_in(parameters, hide),
    }


def hidden_in(value: object, hide: Hide) -> object:
    """`value` with the special tokens taken out of every text in it."""
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, dict):
        return {hide(str(key)): hidden_in(entry, hide) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [hidden_in(entry, hide) for entry in value]
    return value


class _Writer:
    """Builds the messages one by one; none depends on a later one."""

    def __init__(self, traits: Traits, hide: Hide) -> None:
        self._traits = traits
        self._hide = hide
        self._tools_text = ""
        self.messages: list[TemplateMessage] = []

    def about_tools(self, tools: Sequence[Tool], *, after: bool) -> None:
        """Tell of `tools` in the first system message, `after` what it says, or in one before."""
        self._tools_text = tools_as_text([_signature(tool, self._hide) for tool in tools])
        if not after:
            self._system("system", "")

    def add(self, message: Message) -> None:
        if message.role in _SYSTEM:
            self._system(message.role, self._hide(message.content))
        elif message.role == "assistant":
            self._assistant(message)
        elif message.role == "tool":
            self._tool(message)
        else:
            self._user(self._hide(message.content, marks=True), message.name)

    def _system(self, role: str, content: str) -> None:
        if self._tools_text:
            content = "\n\n".join(filter(None, (content, self._tools_text)))
            self._tools_text = ""
        role = role if role == "system" or self._traits.developer else "system"
        allowed = self._traits.later_system if self.messages else self._traits.first_system
        if allowed or (role == "developer" and not self.messages):
            self._put({"role": role, "content": content})
        elif self._last_role() in _SYSTEM:
            self._extend(content)
        elif self._last_role() == "tool":
            # A user's message here would be one more question: some templates drop the thoughts
            # before the last question, and with them what is in the cache.
            self._extend(system_as_text(content))
        else:
            self._user(system_as_text(content))

    def _user(self, content: str, name: str | None = None) -> None:
        self._put({"role": "user", "content": content} | self._named(name))

    def _assistant(self, message: Message) -> None:
        content = self._hide(message.content)
        said: TemplateMessage = {"role": "assistant", "content": content}
        if message.reasoning:
            said |= dict.fromkeys(_REASONING_FIELDS, self._hide(message.reasoning))
        if message.tool_calls and self._traits.tools:
            said["tool_calls"] = [self._call(call) for call in message.tool_calls]
        elif message.tool_calls:
            calls = (
                call_as_text(self._hide(call.name), self._hide(call.arguments.strip() or "{}"))
                for call in message.tool_calls
            )
            said["content"] = "\n".join(filter(None, (content, *calls)))
        self._put(said)

    def _tool(self, message: Message) -> None:
        content = self._hide(message.content, marks=True)
        if not self._traits.tools:
            self._user(result_as_text(content))
            return
        said: TemplateMessage = {"role": "tool", "content": content} | self._named(message.name)
        if message.tool_call_id is not None:
            said["tool_call_id"] = self._id(message.tool_call_id)
            if message.name is None:
                said |= self._named(self._called(said["tool_call_id"]))
        self._put(said)

    def _call(self, call: ToolCall) -> dict[str, object]:
        arguments = arguments_object(call.arguments)
        if self._traits.text_arguments or isinstance(arguments, str):
            arguments = self._hide(call.arguments)
        return {
            "id": self._id(call.id),
            "type": "function",
            "function": {
                "name": self._hide(call.name),
                "arguments": hidden_in(arguments, self._hide),
            },
        }

    def _called(self, call_id: object) -> str | None:
        """The name in the call that `call_id` says."""
        for message in reversed(self.messages):
            calls = message.get("tool_calls")
            for call in calls if isinstance(calls, list) else []:
                if call["id"] == call_id:
                    return str(call["function"]["name"])
        return None

    def _id(self, call_id: str) -> str:
        if not self._traits.short_ids:
            return self._hide(call_id)
        if len(call_id) == _SHORT_ID_LENGTH and call_id.isalnum() and call_id.isascii():
            return call_id
        return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[
            :_SHORT_ID_LENGTH
        ]

    def _named(self, name: str | None) -> TemplateMessage:
        return {} if name is None else {"name": self._hide(name)}

    def _last_role(self) -> object:
        return self.messages[-1]["role"] if self.messages else None

    def _extend(self, content: str) -> None:
        """Add to the last message."""
        self.messages[-1]["content"] = f"{self.messages[-1]['content']}\n\n{content}"

    def _put(self, message: TemplateMessage) -> None:
        """Append a message, to the last one's text where the template wants roles to alternate."""
        last = self.messages[-1] if self.messages else None
        joins = (
            last is not None
            and not self._traits.repeats
            and last["role"] == message["role"] in ("user", "assistant")
            and "tool_calls" not in last
        )
        if last is None or not joins:
            self.messages.append(message)
            return
        texts = (str(last["content"]), str(message["content"]))
        self.messages[-1] = {**last, **message, "content": "\n\n".join(filter(None, texts))}
