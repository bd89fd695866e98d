"""Chat: a conversation independent of any wire: messages, tools and options of the answer.

Texts are unchanged. Knows neither wires nor templates nor tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["system", "developer", "user", "assistant", "tool"]

JsonSchema = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call by the assistant. `arguments` is JSON text, unchanged."""

    id: str
    name: str
    arguments: str


def numbered_call(number: int) -> str:
    """The id of a conversation's call `number`, which counts from 0, where calls have no other."""
    return f"call_{number}"


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `tool_call_id` is the call whose result a message of role "tool" is."""

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def length(self) -> int:
        """Characters of content and arguments; not of reasoning, which a template may drop."""
        return len(self.content) + sum(len(call.arguments) for call in self.tool_calls)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. With `strict`, calls always match `parameters`."""

    name: str
    description: str = ""
    parameters: JsonSchema = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may (auto), must not (none) or must (required) call a tool.

    With `name` it must call that one.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Structured output: the answer must be JSON, matching `schema` if given, or match `grammar`
    instead, which is in Lark's notation and begins with the rule `start`."""

    schema: JsonSchema | None = None
    grammar: str | None = None


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to be continued by the assistant.

    `template_options` are passed to the chat template (enable_thinking, reasoning_effort).
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    answer_format: AnswerFormat | None = None
    template_options: Mapping[str, object] = field(default_factory=dict)

    @property
    def may_call(self) -> bool:
        """Whether calls are recognised in the answer."""
        return bool(self.tools) and self.tool_choice.mode != "none"

    @property
    def length(self) -> int:
        """Characters of all messages."""
        return sum(message.length for message in self.messages)
