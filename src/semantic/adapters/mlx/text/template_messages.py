"""Turns chats into messages that one model's template supports.

Unsupported parts of a chat become text: JSON between marks.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from semantic.adapters.mlx.text.chat_template import (
    REASONING_FIELDS,
    TemplateFeatures,
    TemplateMessage,
    in_parts,
)
from semantic.application.chat.json_calls import object_of, parse_arguments
from semantic.domain.chat import Chat, Message, Tool, ToolCall

_TOOLS_PROMPT = """\
# Tools

You can call functions. These are their signatures, one JSON object in each line:
<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and its arguments between these marks:
<tool_call>
{{"name": "<name>", "arguments": {{<arguments>}}}}
</tool_call>"""

_SYSTEM = ("system", "developer")
_NO_RESULT = "There is no result."
"""The result of a call that a user interrupted."""
_NOTHING_SAID = "."
"""A user's text to put before an assistant's message that begins a chat."""
_SHORT_ID_LENGTH = 9
_NUMBERED = re.compile(r"functions\..+:[0-9]+")


WriteCalls = Callable[[Sequence[tuple[str, object]]], str]
"""Takes the names and arguments of tool calls. Returns the text of these calls."""


class Escape(Protocol):
    """Escapes the special tokens in a text and, if `marks`, also the marks of templates."""

    def __call__(self, text: str, *, marks: bool = False) -> str: ...


def template_tools(tools: Sequence[Tool], escape: Escape) -> list[TemplateMessage]:
    """Return tools in the form that templates expect."""
    return [{"type": "function", "function": _signature(tool, escape)} for tool in tools]


def template_messages(
    chat: Chat, features: TemplateFeatures, escape: Escape, write: WriteCalls
) -> list[TemplateMessage]:
    """Return the messages of `chat` for a template with these features. `write` returns the text of
    tool calls."""
    writer = _Writer(features, escape, write)
    messages = list(chat.messages)
    if chat.tools and not features.tools:
        writer.add_tools(chat.tools, after=bool(messages) and messages[0].role in _SYSTEM)
    for message in messages:
        writer.add(message)
    writer.end_calls()
    return in_parts(writer.messages) if features.parts else writer.messages


def escape_all(value: object, escape: Escape) -> object:
    """Return `value` with special tokens escaped in every text, including keys."""
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, dict):
        return {escape(str(key)): escape_all(entry, escape) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [escape_all(entry, escape) for entry in value]
    return value


def _signature(tool: Tool, escape: Escape) -> dict[str, object]:
    parameters = dict(tool.parameters) or {"type": "object", "properties": {}}
    return {
        "name": escape(tool.name),
        "description": escape(tool.description),
        "parameters": escape_all(parameters, escape),
    }


def _call_as_text(name: str, arguments: str) -> str:
    name = json.dumps(name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _marked(mark: str, content: str) -> str:
    return f"<{mark}>\n{content}\n</{mark}>"


class _Writer:
    def __init__(self, features: TemplateFeatures, escape: Escape, write: WriteCalls) -> None:
        self._features = features
        self._escape = escape
        self._write = write
        self._n_calls = 0
        self._ids: dict[str, str] = {}  # ids for the template, by clients' ids
        self._later: list[ToolCall] = []  # calls that the last answer may not contain
        self._tools_text = ""
        self._open: list[ToolCall] = []  # the last answer's calls without results so far
        self.messages: list[TemplateMessage] = []

    def add_tools(self, tools: Sequence[Tool], *, after: bool) -> None:
        """Describe `tools` in a new first system message or, if `after`, in the existing one."""
        signatures = (_signature(tool, self._escape) for tool in tools)
        lines = (json.dumps(signature, ensure_ascii=False) for signature in signatures)
        self._tools_text = _TOOLS_PROMPT.format(tools="\n".join(lines))
        if not after:
            self._add_system("system", "")

    def end_calls(self) -> None:
        """Write the tool calls left out of the last answer. Each becomes an answer of its own."""
        while self._later:
            self._add_later()

    def _add_later(self) -> None:
        call = self._call(self._later.pop(0))
        self._append({"role": "assistant", "content": "", "tool_calls": [call]})

    def add(self, message: Message) -> None:
        if message.role != "tool":
            self.end_calls()
        if message.role in _SYSTEM:
            self._add_system(message.role, self._escape(message.content))
        elif message.role == "assistant":
            self._add_assistant(message)
        elif message.role == "tool":
            self._add_result(message)
        else:
            self._add_user(self._escape(message.content, marks=True), message.name)

    def _add_system(self, role: str, content: str) -> None:
        if self._tools_text:
            content = "\n\n".join(filter(None, (content, self._tools_text)))
            self._tools_text = ""
        role = role if role == "system" or self._features.developer else "system"
        allowed = self._features.later_system if self.messages else self._features.first_system
        if allowed or (role == "developer" and not self.messages):
            self._append({"role": role, "content": content})
        elif self._last_role() in _SYSTEM:
            self._extend(content)
        elif self._last_role() == "tool":
            # A user message here would count as a new question. Some templates drop thoughts before
            # the last question, which would invalidate the cached prefix.
            self._extend(_marked("system", content))
        else:
            self._add_user(_marked("system", content))

    def _add_user(self, content: str, name: str | None = None) -> None:
        if not self._features.user_after_result:
            self._end_open_calls()
            if self._last_role() == "tool":
                self._extend(_marked("user", content))
                return
        self._append({"role": "user", "content": content} | self._name_field(name))

    def _end_open_calls(self) -> None:
        for call in list(self._open):
            self._add_result(Message("tool", _NO_RESULT, tool_call_id=call.id))

    def _add_assistant(self, message: Message) -> None:
        if not self._features.assistant_first and self._last_role() in (None, *_SYSTEM):
            self._add_user(_NOTHING_SAID)
        if message.content and message.tool_calls and self._features.splits_text:
            self._add_assistant(Message("assistant", message.content, message.reasoning))
            message = replace(message, content="", reasoning="")
        content = self._escape(message.content)
        answer: TemplateMessage = {"role": "assistant", "content": content}
        thought = self._escape(message.reasoning)
        if thought and content and message.tool_calls and self._features.thought_or_text:
            thought, answer["content"] = f"{thought}\n\n{content}", ""
        if thought:
            answer |= dict.fromkeys(REASONING_FIELDS, thought)
        self._open = list(message.tool_calls)
        if not message.content and not message.tool_calls and not self._features.empty_answers:
            return
        if message.tool_calls and self._features.writes_calls:
            answer["content"] = content + self._written(message.tool_calls)
        elif message.tool_calls and self._features.tools:
            first = message.tool_calls[:1] if self._features.single_calls else message.tool_calls
            self._later = list(message.tool_calls[len(first) :])
            answer["tool_calls"] = [self._call(call) for call in first]
        elif message.tool_calls:
            calls = (
                _call_as_text(self._escape(call.name), self._escape(call.arguments.strip() or "{}"))
                for call in message.tool_calls
            )
            answer["content"] = "\n".join(filter(None, (content, *calls)))
        self._append(answer)

    def _add_result(self, message: Message) -> None:
        content = self._escape(message.content, marks=True)
        is_orphan = not self._features.orphan_results and not self._open
        if not self._features.tools or is_orphan:
            self._add_user(_marked("tool_response", content))
            return
        self._open = self._open[1:]
        result: TemplateMessage = {"role": "tool", "content": content}
        result |= self._name_field(message.name)
        if message.tool_call_id is not None:
            result["tool_call_id"] = self._id(message.tool_call_id)
            if message.name is None:
                result |= self._name_field(self._called_name(result["tool_call_id"]))
        self._append(result)
        if self._later:
            self._add_later()

    def _written(self, calls: Sequence[ToolCall]) -> str:
        written = []
        for call in calls:
            found = parse_arguments(call.arguments)
            arguments = object_of(found) if isinstance(found, str) else found
            written.append((self._escape(call.name), escape_all(arguments, self._escape)))
        return self._write(written)

    def _call(self, call: ToolCall) -> dict[str, object]:
        arguments = parse_arguments(call.arguments)
        if isinstance(arguments, str) and not self._features.any_arguments:
            arguments = object_of(arguments)
            if self._features.text_arguments:
                arguments = json.dumps(arguments, ensure_ascii=False)
        elif self._features.text_arguments or isinstance(arguments, str):
            arguments = call.arguments
        self._ids[call.id] = self._new_id(call)
        self._n_calls += 1
        return {
            "id": self._ids[call.id],
            "type": "function",
            "function": {
                "name": self._escape(call.name),
                "arguments": escape_all(arguments, self._escape),
            },
        }

    def _called_name(self, call_id: object) -> str | None:
        for message in reversed(self.messages):
            calls = message.get("tool_calls")
            for call in calls if isinstance(calls, list) else []:
                if call["id"] == call_id:
                    return str(call["function"]["name"])
        return None

    def _new_id(self, call: ToolCall) -> str:
        if self._features.ids != "numbered":
            return self._id(call.id)
        is_own = _NUMBERED.fullmatch(call.id) is not None
        return self._escape(call.id if is_own else f"functions.{call.name}:{self._n_calls}")

    def _id(self, call_id: str) -> str:
        if call_id in self._ids:
            return self._ids[call_id]
        if self._features.ids != "short":
            return self._escape(call_id)
        if len(call_id) == _SHORT_ID_LENGTH and call_id.isalnum() and call_id.isascii():
            return call_id
        return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[
            :_SHORT_ID_LENGTH
        ]

    def _name_field(self, name: str | None) -> TemplateMessage:
        return {} if name is None else {"name": self._escape(name)}

    def _last_role(self) -> object:
        return self.messages[-1]["role"] if self.messages else None

    def _extend(self, content: str) -> None:
        self.messages[-1]["content"] = f"{self.messages[-1]['content']}\n\n{content}"

    def _append(self, message: TemplateMessage) -> None:
        """Append a message, or merge it into the last message if roles must alternate."""
        last = self.messages[-1] if self.messages else None
        merges = (
            last is not None
            and not self._features.repeats
            and last["role"] == message["role"] in ("user", "assistant")
            and "tool_calls" not in last
        )
        if last is None or not merges:
            self.messages.append(message)
            return
        texts = (str(last["content"]), str(message["content"]))
        self.messages[-1] = {**last, **message, "content": "\n\n".join(filter(None, texts))}
