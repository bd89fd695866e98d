"""Reads tool calls with mlx-lm's parsers. Knows what may be wrong with what a model wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from semantic.adapters.mlx.text.json_values import deeper_than, unicode_text
from semantic.domain.chat import Tool
from semantic.domain.errors import ToolCallError
from semantic.ports.chat import WrittenCall

Parser = Callable[[str, "list[dict[str, object]]"], object]
"""The text between the marks and the tools to one call, or a list of calls."""

# mlx-lm's parsers expect calls that are well formed; these are what they raise for others.
_GARBAGE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    SyntaxError,
    ArithmeticError,
    AssertionError,
    RecursionError,
    MemoryError,
)

# How formats write one argument. The parsers leave out an argument that is not closed, as in a
# call whose end mark stood inside the argument; without it the call would be another one.
_ARGUMENTS = (
    ("<arg_value>", "</arg_value>"),
    ("<longcat_arg_value>", "</longcat_arg_value>"),
    ("<parameter", "</parameter>"),
    ("<param ", "</param>"),
    ("<atem:parameter", "</atem:parameter>"),
)

# What begins a call or an argument in some format. For each of them a parser may look through all
# that follows, and nothing else runs while it does: a few hundred take it well below a second.
_BEGINNINGS = (
    "call:",
    "<function",
    "<invoke",
    "<atem:invoke",
    "<|open|>",
    "<arg_key>",
    "<longcat_arg_key>",
    "<param",
    "[ARGS]",
)
_MOST_BEGINNINGS = 512

_DEEPEST = 50
"""Levels of lists and objects in a call. What is deeper could not be sent back in a body."""


def read_calls(parser: Parser | None, text: str, tools: Sequence[Tool]) -> list[WrittenCall]:
    """The calls in `text`: plain JSON, or what `parser` reads.

    JSON comes first: it is what a grammar makes of a call, whatever the model's own form is.
    Raises ToolCallError.
    """
    try:
        found = _as_json(text)
        if found is None and parser is not None:
            _check_size(text)
            _check_closed(text)
            found = parser(text, [_declared(tool) for tool in tools])
        calls = found if isinstance(found, list) else [found]
        names = [tool.name for tool in tools]
        written = [_written(call, names) for call in calls]
    except ToolCallError:
        raise
    except _GARBAGE as error:
        reason = str(error) or type(error).__name__
        raise ToolCallError(f"the model wrote a tool call that cannot be read: {reason}") from error
    if not written:
        raise ToolCallError("the model marked a tool call and wrote none")
    return written


def _check_size(text: str) -> None:
    parts = sum(map(text.count, _BEGINNINGS))
    if parts > _MOST_BEGINNINGS:
        raise ToolCallError(f"the model wrote a tool call of {parts} parts, which is too many")


def _check_closed(text: str) -> None:
    for start, end in _ARGUMENTS:
        if text.rfind(start) > text.rfind(end):
            raise ToolCallError(f"the model wrote a tool call with a {start!r} that does not end")


def _as_json(text: str) -> object:
    """The call or list of calls that `text` is the JSON of; None when it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    calls = value if isinstance(value, list) else [value]
    named = all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls)
    return value if calls and named else None


def _declared(tool: Tool) -> dict[str, object]:
    """A tool as mlx-lm's parsers expect it; they read the types of its arguments."""
    parameters = {"properties": {}, **tool.parameters}
    return {"type": "function", "function": {"name": tool.name, "parameters": parameters}}


def _written(call: object, names: Sequence[str]) -> WrittenCall:
    if not isinstance(call, Mapping):
        raise ToolCallError("the model wrote a tool call that is no JSON object with a name")
    name = call.get("name")
    if not isinstance(name, str) or name not in names:
        raise ToolCallError(f"the model called {name!r}; expected one of {', '.join(names)}")
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise ToolCallError(
            f"the arguments of {name} must be an object, got {type(arguments).__name__}"
        )
    _check_depth(name, arguments)
    return WrittenCall(name, _json_text(arguments))


def _json_text(value: object) -> str:
    """JSON that any client can read, and send back: no NaN, and no half of a surrogate pair."""
    return unicode_text(json.dumps(value, ensure_ascii=False, allow_nan=False))


def _check_depth(name: str, arguments: object) -> None:
    if deeper_than(_DEEPEST, arguments):
        raise ToolCallError(f"the arguments of {name} are nested deeper than {_DEEPEST} levels")
