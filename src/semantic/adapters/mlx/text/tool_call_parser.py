"""Tool-call parsing: calls out of a model's output, and arguments out of history.

Uses mlx-lm's parsers, and knows what may be wrong in what a model generates. Knows no template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence

from semantic.adapters.mlx.text.tokenizer import replace_surrogates
from semantic.application.chat.object_text import MAX_DEPTH, ObjectText
from semantic.application.chat.streamed_calls import is_name
from semantic.domain.chat import Tool
from semantic.domain.errors import ToolCallError
from semantic.ports.chat import WrittenCall

Parser = Callable[[str, "list[dict[str, object]]"], object]
"""The text between the marks, and the tools, to one call or a list of calls."""

# mlx-lm's parsers expect well-formed calls; for others they raise these.
_PARSER_ERRORS = (
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

# Marks around one argument, by format. The parsers drop an argument that is not closed, as in a
# call whose end mark occurs inside the argument; without it the call would be a different one.
_ARGUMENT_MARKS = (
    ("<arg_value>", "</arg_value>"),
    ("<longcat_arg_value>", "</longcat_arg_value>"),
    ("<parameter", "</parameter>"),
    ("<param ", "</param>"),
    ("<atem:parameter", "</atem:parameter>"),
)

# What begins a call or an argument in some format. For each, a parser may scan all the text that
# follows while it holds the interpreter lock: a few hundred take well below a second.
_PART_STARTS = (
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
_MAX_PARTS = 512


_MAX_RENDERED_DEPTH = 64
"""Levels of lists and objects in a call of the history; templates recurse into each level."""


def parse_calls(parser: Parser | None, text: str, tools: Sequence[Tool]) -> list[WrittenCall]:
    """The calls in `text`: plain JSON, or whatever form `parser` reads.

    JSON is tried first, since constrained decoding produces it whatever the model's own form is.
    A call may name a tool that is not among `tools`, and have arguments that are no object: the
    client answers it, and the model corrects itself. Raises ToolCallError if there is no call.
    """
    try:
        parsed = _parse_json(text)
        if parsed is None and parser is not None:
            _check_size(text)
            _check_closed(text)
            parsed = parser(text, [_declaration(tool) for tool in tools])
        calls = parsed if isinstance(parsed, list) else [parsed]
        names = {tool.name for tool in tools}
        checked = [_checked_call(call, names) for call in calls]
    except ToolCallError:
        raise
    except _PARSER_ERRORS as error:
        reason = str(error) or type(error).__name__
        raise ToolCallError(f"the model wrote a tool call that cannot be read: {reason}") from error
    if not checked:
        raise ToolCallError("the model marked a tool call and wrote none")
    return checked


def parse_arguments(arguments: str) -> object:
    """The arguments of a call in the history as an object; null and blank text are an empty one.

    Returns the text itself if it is not the JSON of an object, or nested too deeply to render.
    """
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if value is None:
        return {}
    if not isinstance(value, dict) or _is_deeper_than(_MAX_RENDERED_DEPTH, value):
        return arguments
    return value


def object_of(arguments: str) -> dict[str, object]:
    """An object in place of arguments that are none: of those that were cut as far as they go, else
    one with the text as its only field."""
    read = ObjectText()
    certain = read.push(arguments)
    if certain and not read.is_broken and not read.is_closed:
        found = json.loads(certain + read.closing())
        if isinstance(found, dict):
            return found
    return {"raw_arguments": arguments}


def _check_size(text: str) -> None:
    parts = sum(map(text.count, _PART_STARTS))
    if parts > _MAX_PARTS:
        raise ToolCallError(f"the model wrote a tool call of {parts} parts, which is too many")


def _check_closed(text: str) -> None:
    for start, end in _ARGUMENT_MARKS:
        if text.rfind(start) > text.rfind(end):
            raise ToolCallError(f"the model wrote a tool call with a {start!r} that does not end")


def _parse_json(text: str) -> object:
    """The call or list of calls in JSON; None if `text` is neither."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    calls = value if isinstance(value, list) else [value]
    named = all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls)
    return value if calls and named else None


def _declaration(tool: Tool) -> dict[str, object]:
    """A tool as mlx-lm's parsers expect it; they look up the types of its arguments."""
    parameters = {"properties": {}, **tool.parameters}
    return {"type": "function", "function": {"name": tool.name, "parameters": parameters}}


def _checked_call(call: object, names: Collection[str]) -> WrittenCall:
    if not isinstance(call, Mapping) or not isinstance(name := call.get("name"), str):
        raise ToolCallError("the model wrote a tool call that is no JSON object with a name")
    arguments = call.get("arguments", call.get("parameters", {}))
    if name not in names and not _is_name(name, arguments):
        raise ToolCallError("the model wrote a tool call without the name of a tool")
    if isinstance(arguments, str):
        found = parse_arguments(arguments)
        if isinstance(found, str):
            return WrittenCall(name, replace_surrogates(found))
        arguments = found
    if _is_deeper_than(MAX_DEPTH, arguments):
        raise ToolCallError(f"the arguments of {name} are nested deeper than {MAX_DEPTH} levels")
    return WrittenCall(name, _portable_json(arguments))


def _is_name(name: str, arguments: object) -> bool:
    """Whether it may be a tool that was not offered, and is not what a parser made of a text that
    it cannot read."""
    unread = name == "unknown" or (isinstance(arguments, Mapping) and arguments.keys() == {"raw"})
    return not unread and is_name(name)


def _portable_json(value: object) -> str:
    """JSON that any client can parse and send back: no NaN, no lone surrogates."""
    return replace_surrogates(json.dumps(value, ensure_ascii=False, allow_nan=False))


def _is_deeper_than(levels: int, value: object) -> bool:
    """Whether lists and objects in `value` are nested more than `levels` deep."""
    level = [value]
    for _ in range(levels + 1):
        level = [outer for outer in level if isinstance(outer, dict | list)]
        if not level:
            return False
        level = [child for outer in level for child in _children(outer)]
    return True


def _children(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
