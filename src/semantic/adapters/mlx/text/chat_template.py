"""Features of a model's chat template, detected by trial when the model is loaded.

The trials do not depend on any chat, so a message is always rendered in the same way and a growing
chat keeps its prefix. Knows messages, not tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

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

Roles = tuple[str, ...]

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
    consecutive messages may have the same role. `assistant_first`: the assistant may begin.
    `user_after_result`: a user's text may follow the result of a call. `orphan_results`: a result
    may follow no call. `empty_answers`: an answer may be empty. `parts`: it takes contents as lists
    of parts alone. `loses_users`: it leaves out what a user says. `lists_tools`: it demands a list
    of tools, which may be empty.
    """

    tools: bool = False
    text_arguments: bool = False
    any_arguments: bool = False
    short_ids: bool = False
    developer: bool = False
    first_system: bool = False
    later_system: bool = False
    repeats: bool = False
    assistant_first: bool = False
    user_after_result: bool = True
    orphan_results: bool = False
    empty_answers: bool = True
    parts: bool = False
    loses_users: bool = False
    lists_tools: bool = False


def in_parts(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """`messages` with each content as a list with one part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]


def detect_features(apply: Apply, source: str, *, parses_calls: bool) -> TemplateFeatures:
    """Detect by trial what a template supports; `source` is its text, empty for one in Python.

    Without a parser for its calls (`parses_calls`) a template counts as one without tools.
    """
    probe = _Probe(apply)
    is_lost = not probe.renders_users()
    parts = is_lost and _Probe(apply, parts=True).renders_users()
    loses_users = is_lost and not parts and probe.accepts_users()
    lists_tools = is_lost and _Probe(apply, no_tools=[]).renders_users()
    probe = _Probe(apply, parts=parts, no_tools=[] if lists_tools else None)
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
    calls = partial(probe.renders_calls, _TEXT if text_arguments else _OBJECT, short_ids=short_ids)
    # Some write it before the last question alone: the prompt would change from turn to turn.
    system = probe.renders("system", "user", "assistant", "user") and (
        not tools or calls(before=("system", "user"))
    )
    return TemplateFeatures(
        tools=tools,
        text_arguments=text_arguments,
        any_arguments=tools and probe.renders_calls(_NO_OBJECT, short_ids=short_ids),
        short_ids=short_ids,
        developer="developer" in source and probe.renders("developer", "user"),
        first_system=system,
        later_system=system and probe.renders_later_systems(),
        repeats=probe.renders("user", "user", "assistant", "assistant", "user"),
        assistant_first=probe.renders("assistant", "user"),
        user_after_result=not tools or calls(after=("user", "assistant", "user")),
        orphan_results=tools and probe.renders("user", "tool", "user"),
        empty_answers=probe.renders("user", "", "user"),
        parts=parts,
        loses_users=loses_users,
        lists_tools=lists_tools,
    )


def _message(role: str, number: int) -> TemplateMessage:
    if not role:
        return {"role": "assistant", "content": ""}
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


def _messages(roles: Roles, n_before: int = 0) -> list[TemplateMessage]:
    return [_message(role, number) for number, role in enumerate(roles, start=n_before + 1)]


def _contents(messages: Sequence[TemplateMessage]) -> list[str]:
    return [str(message["content"]) for message in messages]


class _Probe:
    """Renders small chats and checks whether everything in them appears."""

    def __init__(
        self,
        apply: Apply,
        *,
        parts: bool = False,
        no_tools: list[TemplateMessage] | None = None,
    ) -> None:
        self._apply = apply
        self._parts = parts
        self._no_tools = no_tools

    def renders_users(self) -> bool:
        """What a user says appears, behind a system message at least."""
        return self.renders("user") or self.renders("system", "user")

    def accepts_users(self) -> bool:
        """A user's message raises no error."""
        return self._text([_message("user", 1)], None) is not None

    def renders(self, *roles: str) -> bool:
        """The contents of messages with these roles appear, in order; "" is an empty answer."""
        messages = _messages(roles)
        text = self._text(messages, None)
        return text is not None and _in_order(text, _contents(messages))

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

    def renders_calls(
        self, arguments: object, *, short_ids: bool, before: Roles = ("user",), after: Roles = ()
    ) -> bool:
        """A call with these `arguments` and its result appear, with messages of these roles
        `before` and `after` them."""
        call_id = _SHORT_ID if short_ids else _LONG_ID
        call = {
            "id": call_id,
            "type": "function",
            "function": {"name": "probetool", "arguments": arguments},
        }
        result: TemplateMessage = {
            "role": "tool",
            "content": "proberesult",
            "tool_call_id": call_id,
            "name": "probetool",
        }
        earlier, behind = _messages(before), _messages(after, len(before))
        text = self._text(
            [
                *earlier,
                {"role": "assistant", "content": "", "tool_calls": [call]},
                result,
                *behind,
            ],
            [_TOOL],
        )
        return text is not None and _in_order(
            text,
            [*_contents(earlier), "probetool", "probevalue", "proberesult", *_contents(behind)],
        )

    def _text(
        self, messages: Sequence[TemplateMessage], tools: list[TemplateMessage] | None
    ) -> str | None:
        try:
            given = in_parts(messages) if self._parts else [dict(one) for one in messages]
            return self._apply(given, tools or self._no_tools, {})
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
