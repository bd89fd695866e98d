"""Reads calls in JSON from an answer, and arguments from the history."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from semantic.application.chat.argument_types import is_deeper_than, portable_json, refuse_constant
from semantic.application.chat.object_text import MAX_DEPTH, ObjectText
from semantic.domain.chat import is_tool_name, replace_surrogates
from semantic.domain.errors import ToolCallError

_NAMES: Final = ("name", "tool_name")
_ARGUMENTS: Final = ("arguments", "parameters")
_MAX_RENDERED_DEPTH: Final = 64
"""The maximum number of levels of lists and objects in a call of the history."""


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A tool call in an answer; `arguments` is the JSON text of an object."""

    name: str
    arguments: str


def read_calls(text: str, names: Collection[str]) -> list[WrittenCall]:
    """Return the calls that `text` contains as JSON. Raises ToolCallError if the text has none."""
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise ToolCallError(f"cannot read the model's tool call: {reason}") from error
    calls = value if isinstance(value, list) else [value]
    if not calls:
        raise ToolCallError("the model began a tool call but wrote none")
    return [_checked_call(call, names) for call in calls]


def parse_arguments(arguments: str) -> object:
    """Return the arguments of a call in the history as an object. Returns other text unchanged."""
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if value is None:
        return {}
    if not isinstance(value, dict) or is_deeper_than(_MAX_RENDERED_DEPTH, value):
        return arguments
    return value


def object_of(arguments: str) -> dict[str, object]:
    """Return an object for malformed `arguments`: their complete part, or the whole text."""
    read = ObjectText()
    certain = read.push(arguments)
    if certain and not read.is_broken and not read.is_closed:
        found = json.loads(certain + read.closing())
        if isinstance(found, dict):
            return found
    return {"raw_arguments": arguments}


def _checked_call(call: object, names: Collection[str]) -> WrittenCall:
    fields = call if isinstance(call, Mapping) else {}
    name = next((fields[one] for one in _NAMES if one in fields), None)
    if not isinstance(name, str):
        raise ToolCallError("a tool call of the model must be a JSON object with a name")
    if name not in names and not is_tool_name(name):
        raise ToolCallError("the model wrote a tool call without the name of a tool")
    arguments: object = next((fields[one] for one in _ARGUMENTS if one in fields), {})
    if isinstance(arguments, str):
        found = parse_arguments(arguments)
        if isinstance(found, str):
            return WrittenCall(name, replace_surrogates(found))
        arguments = found
    if is_deeper_than(MAX_DEPTH, arguments):
        raise ToolCallError(f"the arguments of {name} must have at most {MAX_DEPTH} levels")
    try:
        return WrittenCall(name, portable_json(arguments))
    except ValueError as error:
        raise ToolCallError(f"the arguments of {name} have a number that is not JSON") from error
