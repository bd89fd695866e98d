"""A conversation as every wire means it: messages, tools, and how the answer is to be formed.

Texts stand as their author wrote them. Knows neither wires nor templates nor tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["system", "developer", "user", "assistant", "tool"]

JsonSchema = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant made. `arguments` is JSON text, as it was written."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `tool_call_id` says which call a message of role "tool" answers."""

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def length(self) -> int:
        """Characters of what it says; its reasoning does not count, a template may drop it."""
        return len(self.content) + sum(len(call.arguments) for call in self.tool_calls)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. With `strict` its calls always fit `parameters`."""

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
    """What the text of an answer must be: JSON of some kind, or JSON that fits `schema`."""

    schema: JsonSchema | None = None


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that waits for the assistant's next message.

    `template_options` go to the model's template by name (enable_thinking, reasoning_effort).
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    answer_format: AnswerFormat | None = None
    template_options: Mapping[str, object] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Characters of what the messages say."""
        return sum(message.length for message in self.messages)
