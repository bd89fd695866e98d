"""A model's chat template: what it can say, found out by trying, and conversations by it.

Knows messages, not tokens. What a template is tried with does not depend on any conversation, so
one message is always written in the same way and a conversation that grows keeps its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jinja2 import TemplateError

from semantic.domain.errors import InvalidRequestError

TemplateMessage = dict[str, object]
Apply = Callable[[list[TemplateMessage], "list[TemplateMessage] | None", Mapping[str, object]], str]
"""Messages, tools and options by name to text, ready for the assistant's answer."""

# What a template raises for messages that it does not want: its own words, or, where it is a
# program or reads something that is not there, what Python says.
_REFUSED = (
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


@dataclass(frozen=True, slots=True)
class Traits:
    """What a template can say.

    `tools`: it shows tools, their calls and results. `text_arguments`: it wants a call's
    arguments as JSON text. `short_ids`: calls must have ids of nine letters and digits.
    `later_system`: a system message may stand anywhere. `repeats`: two messages of one role may
    follow each other.
    """

    tools: bool = False
    text_arguments: bool = False
    short_ids: bool = False
    developer: bool = False
    first_system: bool = False
    later_system: bool = False
    repeats: bool = False


def render(
    apply: Apply,
    messages: list[TemplateMessage],
    tools: list[TemplateMessage] | None,
    options: Mapping[str, object],
) -> str:
    """The text of a conversation. Raises InvalidRequestError when the template refuses it."""
    try:
        return apply(messages, tools, options)
    except _REFUSED as error:
        reason = str(error) or type(error).__name__
        raise InvalidRequestError(f"the chat template refused the messages: {reason}") from error


def read_traits(apply: Apply, source: str, *, reads_calls: bool) -> Traits:
    """Try the template that `source` is the text of; a program has none.

    Without `reads_calls` nothing reads the calls that the template teaches: it shows no tools.
    """
    probe = _Probe(apply)
    text_arguments, short_ids = False, False
    tools = reads_calls and probe.differs_with_tools()
    if tools:
        ways = [(text, short) for text in (False, True) for short in (False, True)]
        shown = next(
            (way for way in ways if probe.shows_calls(text_arguments=way[0], short_ids=way[1])),
            None,
        )
        tools = shown is not None
        text_arguments, short_ids = shown or (False, False)
    system = probe.shows(_say("system", 1), _say("user", 2))
    return Traits(
        tools=tools,
        text_arguments=text_arguments,
        short_ids=short_ids,
        developer="developer" in source and probe.shows(_say("developer", 1), _say("user", 2)),
        first_system=system,
        later_system=system and probe.shows_later_systems(),
        repeats=probe.shows(
            _say("user", 1),
            _say("user", 2),
            _say("assistant", 3),
            _say("assistant", 4),
            _say("user", 5),
        ),
    )


def _say(role: str, number: int) -> TemplateMessage:
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
    """Renders small conversations and looks at what became of them."""

    def __init__(self, apply: Apply) -> None:
        self._apply = apply

    def shows(self, *messages: TemplateMessage) -> bool:
        """Each message's content appears, in the order in which they stand."""
        text = self._text(messages, None)
        return text is not None and _in_order(text, [str(said["content"]) for said in messages])

    def shows_later_systems(self) -> bool:
        first = _say("system", 1)
        return (
            self.shows(
                first, _say("user", 2), _say("system", 3), _say("assistant", 4), _say("user", 5)
            )
            and self.shows(
                _say("user", 2), _say("assistant", 3), _say("system", 4), _say("user", 5)
            )
            and self.shows(first, _say("system", 2), _say("user", 3), _say("system", 4))
        )

    def differs_with_tools(self) -> bool:
        asked = [_say("user", 1)]
        text = self._text(asked, [_TOOL])
        return text is not None and text != self._text(asked, None) and "probetool" in text

    def shows_calls(self, *, text_arguments: bool, short_ids: bool) -> bool:
        """A call and its result appear, when they are written in this way."""
        call_id = _SHORT_ID if short_ids else _LONG_ID
        arguments = '{"probekey": "probevalue"}' if text_arguments else {"probekey": "probevalue"}
        call = {
            "id": call_id,
            "type": "function",
            "function": {"name": "probetool", "arguments": arguments},
        }
        said: list[TemplateMessage] = [
            _say("user", 1),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {
                "role": "tool",
                "content": "proberesult",
                "tool_call_id": call_id,
                "name": "probetool",
            },
        ]
        text = self._text(said, [_TOOL])
        return text is not None and _in_order(
            text, ["probe1text", "probetool", "probevalue", "proberesult"]
        )

    def _text(
        self, messages: Sequence[TemplateMessage], tools: list[TemplateMessage] | None
    ) -> str | None:
        try:
            return self._apply([dict(message) for message in messages], tools, {})
        except _REFUSED:
            return None


def _in_order(text: str, words: Sequence[str]) -> bool:
    at = -1
    for word in words:
        at = text.find(word, at + 1)
        if at < 0:
            return False
    return True
