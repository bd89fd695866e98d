"""Features of a model's chat template, detected by trial when the model is loaded.

The trials do not depend on any chat, so a message is always rendered in the same way and a growing
chat keeps its prefix. Knows messages, not tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jinja2 import TemplateError

from semantic.adapters.mlx.text.bounded_template import TemplateLimitError

TemplateMessage = dict[str, object]
Apply = Callable[[list[TemplateMessage], "list[TemplateMessage] | None", Mapping[str, object]], str]
"""Messages, tools and options to text that ends with the generation prompt."""

# What a template raises for messages that it does not support: its own error or, where it is
# Python code or reads a missing value, Python's.
TEMPLATE_ERRORS = (
    TemplateError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    NotImplementedError,
    ArithmeticError,
    RecursionError,
)

_LONG_ID = "call_0123456789abcdefghijklmn"
_SHORT_ID = "call00001"
_OBJECT = {"probekey": "probevalue"}
_TEXT = '{"probekey": "probevalue"}'
_NO_OBJECT = '{"probekey": "probevalue'
"""Arguments that were cut."""


@dataclass(frozen=True, slots=True)
class TemplateFeatures:
    """What a template supports.

    `tools`: it renders tools, their calls and results. `text_arguments`: it expects a call's
    arguments as JSON text. `any_arguments`: it renders arguments that are no object, as text.
    `short_ids`: ids of calls must be nine letters and digits. `developer`: it has a developer role.
    `first_system`, `later_system`: a system message may come first, or anywhere. `repeats`:
    consecutive messages may have the same role.
    """

    tools: bool = False
    text_arguments: bool = False
    any_arguments: bool = False
    short_ids: bool = False
    developer: bool = False
    first_system: bool = False
    later_system: bool = False
    repeats: bool = False


def detect_features(apply: Apply, source: str, *, parses_calls: bool) -> TemplateFeatures:
    """Detect by trial what a template supports; `source` is its text, empty for one in Python.

    Without a parser for its calls (`parses_calls`) a template counts as one without tools.
    """
    probe = _Probe(apply)
    text_arguments, short_ids = False, False
    tools = parses_calls and probe.renders_tools()
    if tools:
        forms = [(text, short) for text in (False, True) for short in (False, True)]
        supported = next(
            (
                (text, short)
                for text, short in forms
                if probe.renders_calls(_TEXT if text else _OBJECT, short_ids=short)
            ),
            None,
        )
        tools = supported is not None
        text_arguments, short_ids = supported or (False, False)
    system = probe.renders("system", "user")
    return TemplateFeatures(
        tools=tools,
        text_arguments=text_arguments,
        any_arguments=tools and probe.renders_calls(_NO_OBJECT, short_ids=short_ids),
        short_ids=short_ids,
        developer="developer" in source and probe.renders("developer", "user"),
        first_system=system,
        later_system=system and probe.renders_later_systems(),
        repeats=probe.renders("user", "user", "assistant", "assistant", "user"),
    )


def _message(role: str, number: int) -> TemplateMessage:
    return {"role": role, "content": f"probe{number}text"}


_TOOL: TemplateMessage = {
    "type": "function",
    "function": {
        "name": "probetool",
        "description": "probedescription",
        "parameters": {
            "type": "object",
            "properties": {"probekey": {"type": "string", "description": "probe"}},
            "required": ["probekey"],
        },
    },
}


class _Probe:
    """Renders small chats and checks whether everything in them appears."""

    def __init__(self, apply: Apply) -> None:
        self._apply = apply

    def renders(self, *roles: str) -> bool:
        """The contents of messages with these roles appear, in order."""
        messages = [_message(role, number) for number, role in enumerate(roles, start=1)]
        text = self._text(messages, None)
        return text is not None and _in_order(text, [str(one["content"]) for one in messages])

    def renders_later_systems(self) -> bool:
        return (
            self.renders("system", "user", "system", "assistant", "user")
            and self.renders("user", "assistant", "system", "user")
            and self.renders("system", "system", "user", "system")
        )

    def renders_tools(self) -> bool:
        question = [_message("user", 1)]
        text = self._text(question, [_TOOL])
        return text is not None and text != self._text(question, None) and "probetool" in text

    def renders_calls(self, arguments: object, *, short_ids: bool) -> bool:
        """A call with these `arguments` appears, and so does its result."""
        call_id = _SHORT_ID if short_ids else _LONG_ID
        call = {
            "id": call_id,
            "type": "function",
            "function": {"name": "probetool", "arguments": arguments},
        }
        messages: list[TemplateMessage] = [
            _message("user", 1),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {
                "role": "tool",
                "content": "proberesult",
                "tool_call_id": call_id,
                "name": "probetool",
            },
        ]
        text = self._text(messages, [_TOOL])
        return text is not None and _in_order(
            text, ["probe1text", "probetool", "probevalue", "proberesult"]
        )

    def _text(
        self, messages: Sequence[TemplateMessage], tools: list[TemplateMessage] | None
    ) -> str | None:
        try:
            return self._apply([dict(message) for message in messages], tools, {})
        except TemplateLimitError:
            raise  # another trial would take as long
        except TEMPLATE_ERRORS:
            return None


def _in_order(text: str, words: Sequence[str]) -> bool:
    at = -1
    for word in words:
        at = text.find(word, at + 1)
        if at < 0:
            return False
    return True
