"""Detects the features of a model's chat template, by rendering small chats at loading."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from jinja2 import TemplateError

from semantic.adapters.mlx.text.bounded_template import TemplateLimitError

TemplateMessage = dict[str, object]
Apply = Callable[[list[TemplateMessage], "list[TemplateMessage] | None", Mapping[str, object]], str]
"""Takes messages, tools and options. Returns text that ends with the generation prompt."""

# Errors that a template raises for messages that it does not support: its own or, if it is Python
# code or reads a missing value, Python's.
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

Ids = Literal["any", "short", "numbered"]

_IDS: Final[Mapping[Ids, str]] = {
    "any": "call_0123456789abcdefghijkl{}",
    "short": "call0000{}",
    "numbered": "functions.probetool:{}",
}
REASONING_FIELDS: Final = ("reasoning_content", "reasoning", "thinking")
"""Names under which templates expect reasoning in an assistant message."""
_OBJECT = {"probekey": "probevalue"}
_TEXT = '{"probekey": "probevalue"}'
_NO_OBJECT = '{"probekey": "probevalue'
"""Arguments of a call that a client cut short."""


@dataclass(frozen=True, slots=True)
class TemplateFeatures:
    """The features that a template supports."""

    tools: bool = False  # renders tools, their calls and results
    writes_calls: bool = False  # calls must be part of the answer's text
    text_arguments: bool = False  # expects a call's arguments as JSON text
    any_arguments: bool = False  # renders arguments that are not objects, as text
    ids: Ids = "any"  # the ids of calls: any, nine letters and digits, or with the tool's name
    single_calls: bool = False  # an answer may contain only one call
    splits_text: bool = False  # text beside a call must be in an answer of its own
    thought_or_text: bool = False  # an answer with a call has either reasoning or text
    developer: bool = False  # there is a developer role
    first_system: bool = False  # a system message may come first
    later_system: bool = False  # a system message may come anywhere
    repeats: bool = False  # consecutive messages may have the same role
    assistant_first: bool = False  # the assistant may begin
    user_after_result: bool = True  # a user's text may follow the result of a call
    orphan_results: bool = False  # a result may come without a call
    empty_answers: bool = True  # an answer may be empty
    parts: bool = False  # contents must be lists of parts
    loses_users: bool = False  # leaves out users' texts
    lists_tools: bool = False  # requires a list of tools, which may be empty
    unread_calls: bool = False  # renders tools, but no parser understands its calls


def in_parts(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Return `messages` with each content as a list of one part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]


def detect_features(
    apply: Apply, source: str, *, parses_calls: bool, numbered_ids: bool = False
) -> TemplateFeatures:
    """Detect a template's features by trial.

    `source` is the template's text, or empty for a template in Python. `parses_calls` is False if
    no parser understands its tool calls. If `numbered_ids`, ids of calls must contain the tool's
    name.
    """
    probe = _Probe(apply)
    is_lost = not probe.renders_users()
    parts = is_lost and _Probe(apply, parts=True).renders_users()
    loses_users = is_lost and not parts and probe.accepts_users()
    lists_tools = is_lost and _Probe(apply, no_tools=[]).renders_users()
    probe = _Probe(apply, parts=parts, no_tools=[] if lists_tools else None)
    shows_tools = probe.renders_tools()
    tools = parses_calls and shows_tools
    known: tuple[Ids, ...] = ("numbered",) if numbered_ids else ("any", "short")
    forms = [(text, ids) for text in (False, True) for ids in known] if tools else []
    form = next((one for one in forms if probe.renders_calls(*one)), None)
    writes_calls = tools and form is None and probe.renders_results()
    tools = form is not None or writes_calls
    text_arguments, ids = form or (False, "any")
    calls = partial(probe.renders_calls, text_arguments, ids)
    has_calls = form is not None
    repeats = probe.renders("user", "user", "assistant", "assistant", "user")
    # Some templates write the system message only before the last question, so the prompt would
    # change from turn to turn.
    system = probe.renders("system", "user", "assistant", "user") and (
        not has_calls or calls(before=("system", "user"))
    )
    return TemplateFeatures(
        tools=tools,
        writes_calls=writes_calls,
        text_arguments=text_arguments,
        any_arguments=has_calls and calls(arguments=_NO_OBJECT),
        ids=ids,
        single_calls=has_calls and not calls(n_calls=2),
        thought_or_text=has_calls and not calls(thought=True),
        developer="developer" in source and probe.renders("developer", "user"),
        first_system=system,
        later_system=system and probe.renders_later_systems(),
        repeats=repeats,
        splits_text=has_calls and repeats and not calls(text="probesaid"),
        assistant_first=probe.renders("assistant", "user")
        and (not has_calls or calls(before=(), after=("user",))),
        user_after_result=not has_calls or calls(after=("user", "assistant", "user")),
        orphan_results=has_calls and probe.renders("user", "tool", "user"),
        empty_answers=probe.renders("user", "", "user"),
        parts=parts,
        loses_users=loses_users,
        lists_tools=lists_tools,
        unread_calls=shows_tools and not parses_calls,
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


def _call(arguments: object, ids: Ids, number: int) -> dict[str, object]:
    function = {"name": "probetool", "arguments": arguments}
    return {"id": _IDS[ids].format(number), "type": "function", "function": function}


def _result(call: Mapping[str, object], number: int) -> TemplateMessage:
    content = f"proberesult{number}"
    return {"role": "tool", "content": content, "tool_call_id": call["id"], "name": "probetool"}


def _messages(roles: Roles, n_before: int = 0) -> list[TemplateMessage]:
    return [_message(role, number) for number, role in enumerate(roles, start=n_before + 1)]


def _contents(messages: Sequence[TemplateMessage]) -> list[str]:
    return [str(message["content"]) for message in messages]


class _Probe:
    def __init__(
        self, apply: Apply, *, parts: bool = False, no_tools: list[TemplateMessage] | None = None
    ) -> None:
        self._apply = apply
        self._parts = parts
        self._no_tools = no_tools

    def renders_users(self) -> bool:
        """Return whether the template renders a user's text, at least after a system message."""
        return self.renders("user") or self.renders("system", "user")

    def accepts_users(self) -> bool:
        return self._text([_message("user", 1)], None) is not None

    def renders(self, *roles: str) -> bool:
        """Return whether the template renders these roles in order. "" is an empty answer."""
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

    def renders_results(self) -> bool:
        """Return whether the template renders a tool result whose call is in an answer's text."""
        messages = [_message("user", 1), _message("assistant", 2), _message("tool", 3)]
        text = self._text(messages, [_TOOL])
        return text is not None and _in_order(text, _contents(messages))

    def renders_calls(
        self,
        text_arguments: bool,
        ids: Ids,
        *,
        arguments: str | None = None,
        n_calls: int = 1,
        text: str = "",
        thought: bool = False,
        before: Roles = ("user",),
        after: Roles = (),
    ) -> bool:
        """Return whether tool calls and results appear between the roles `before` and `after`."""
        given = arguments or (_TEXT if text_arguments else _OBJECT)
        calls = [_call(given, ids, number) for number in range(n_calls)]
        answer: TemplateMessage = {"role": "assistant", "content": text, "tool_calls": calls}
        if thought:
            answer |= {"content": "probesaid", **dict.fromkeys(REASONING_FIELDS, "probethought")}
        results = [_result(call, number) for number, call in enumerate(calls)]
        earlier, behind = _messages(before), _messages(after, len(before))
        found = self._text([*earlier, answer, *results, *behind], [_TOOL])
        words = ["probetool", "probevalue"] * n_calls + _contents(results)
        said = [text] if text else []
        expected = [*_contents(earlier), *said, *words, *_contents(behind)]
        return found is not None and _in_order(found, expected)

    def _text(
        self, messages: Sequence[TemplateMessage], tools: list[TemplateMessage] | None
    ) -> str | None:
        try:
            given = in_parts(messages) if self._parts else [dict(one) for one in messages]
            return self._apply(given, tools or self._no_tools, {})
        except TemplateLimitError:
            raise  # another trial would take just as long
        except TEMPLATE_ERRORS:
            return None


def _in_order(text: str, words: Sequence[str]) -> bool:
    at = -1
    for word in words:
        at = text.find(word, at + 1)
        if at < 0:
            return False
    return True
