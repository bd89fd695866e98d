"""Client tools that are not functions. The model sees each of these tools as a function."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from pydantic_core import from_json

from semantic.domain.chat import Tool, ToolCall

Json = dict[str, object]

CUSTOM: Final = "custom"

_AS_WRITTEN: Final = "-as-written"
"""Suffix of a call's id if its input is the unchanged text of the arguments."""

_TEXT: Final[Json] = {"type": "string"}
_NUMBER: Final[Json] = {"type": "integer"}
_TEXTS: Final[Json] = {"type": "array", "items": _TEXT}
_RANGE: Final[Json] = {"type": "array", "items": _NUMBER}


def _tool(kind: str, description: str, *required: str, **properties: Json) -> Tool:
    schema: Json = {"type": "object", "properties": properties, "required": list(required)}
    return Tool(kind, description, schema | {"additionalProperties": False}, kind=kind)


def _one_of(*texts: str) -> Json:
    return _TEXT | {"enum": list(texts)}


def _described(schema: Json, description: str) -> Json:
    return schema | {"description": description}


_PATCH: Final = (
    "Sections that begin with @@, with lines that begin with a space (context), - or +. "
    "All lines of a new file begin with +."
)

OPENAI_TOOLS: Final = {
    tool.kind: tool
    for tool in (
        _tool(
            "local_shell",
            "Runs a program on the user's machine and returns its output.",
            "command",
            command=_described(_TEXTS, "The program and its arguments."),
            workdir=_TEXT,
            env={"type": "object", "additionalProperties": _TEXT},
            timeout_ms=_NUMBER,
            user=_TEXT,
        ),
        _tool(
            "shell",
            "Runs shell commands on the user's machine and returns their output.",
            "commands",
            commands=_TEXTS,
            timeout_ms=_NUMBER,
            max_output_length=_described(_NUMBER, "Characters, for each command."),
        ),
        _tool(
            "apply_patch",
            "Creates, updates or deletes one file. All but delete_file need a diff.",
            "type",
            "path",
            type=_one_of("create_file", "update_file", "delete_file"),
            path=_TEXT,
            diff=_described(_TEXT, _PATCH),
        ),
    )
}
"""OpenAI's tools by type."""

_EDITED: Final[dict[str, Json]] = {
    "path": _TEXT,
    "file_text": _described(_TEXT, "The whole file, for create."),
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": _described(_NUMBER, "The line that insert_text follows; 0 for none."),
    "insert_text": _TEXT,
    "view_range": _described(_RANGE, "The first and the last line, for view."),
}

ANTHROPIC_TOOLS: Final = {
    tool.kind: tool
    for tool in (
        _tool(
            "bash",
            "Runs a command in a bash session that stays open, and returns its output.",
            command=_TEXT,
            restart=_described({"type": "boolean"}, "Begins another session, without a command."),
        ),
        _tool(
            "text_editor",
            "Shows, creates and edits files; view also lists a folder.",
            "command",
            "path",
            command=_one_of("view", "create", "str_replace", "insert"),
            **_EDITED,
        ),
        _tool(
            "memory",
            "Keeps notes for later conversations in files below /memories. View that folder first.",
            "command",
            command=_one_of("view", "create", "str_replace", "insert", "delete", "rename"),
            old_path=_TEXT,
            new_path=_TEXT,
            **_EDITED,
        ),
    )
}
"""Anthropic's tools by type, without the date."""


# Custom tools


def custom_tool(name: str, description: str, expected: str) -> Tool:
    """Return a custom tool. `expected` describes the tool's input for the model."""
    found = _tool(CUSTOM, description, "input", input=_described(_TEXT, expected))
    return replace(found, name=name)


def custom_call(call_id: str, arguments: str) -> tuple[str, str]:
    """Return a custom tool's call as (id, input). If the arguments are not an object with the
    input, they become the input unchanged."""
    match _parsed(arguments):
        case {"input": str(text), **others} if not others:
            return call_id, text
    return call_id + _AS_WRITTEN, arguments


def written_call(call_id: str, name: str, text: str) -> ToolCall:
    """Return a custom tool's call as the model wrote it, except for white space."""
    if call_id.endswith(_AS_WRITTEN):
        return ToolCall(written_id(call_id), name, text)
    return ToolCall(call_id, name, json.dumps({"input": text}, ensure_ascii=False))


def written_id(call_id: str) -> str:
    """Return the call's id without the suffix that `custom_call` added."""
    return call_id.removesuffix(_AS_WRITTEN)


# Calls of OpenAI's tools

_FOLDER: Final = "working_directory"
"""The name of the argument `workdir` in the item."""


def item_fields(kind: str, arguments: str) -> Json | None:
    """Return the fields of an item for a call of `kind`. Returns None if `arguments` do not fit."""
    given = _parsed(arguments)
    if not isinstance(given, dict) or not _fits(given, OPENAI_TOOLS[kind].parameters):
        return None
    match kind:
        case "local_shell":
            return {"action": {"type": "exec", "env": {}} | _renamed(given, "workdir", _FOLDER)}
        case "shell":
            return {"action": given}
    whole = "diff" in given or given["type"] == "delete_file"
    return {"operation": given} if whole else None


def arguments_of(kind: str, fields: Json) -> Json:
    """Return the tool's arguments from an item with these `fields`."""
    action = fields.get("operation" if kind == "apply_patch" else "action")
    if not isinstance(action, dict):
        return fields
    given = {name: value for name, value in action.items() if value not in (None, {})}
    if kind == "local_shell":
        given.pop("type", None)
        return _renamed(given, _FOLDER, "workdir")
    return given


def _renamed(fields: Json, old: str, new: str) -> Json:
    return {new if name == old else name: value for name, value in fields.items()}


def _parsed(text: str) -> object:
    try:
        found: object = from_json(text)
    except ValueError:
        return None
    return found


_TYPES: Final[Mapping[object, type]] = {"string": str, "integer": int}


def _fits(value: object, schema: object) -> bool:
    if not isinstance(schema, dict):
        return False
    match schema["type"]:
        case "object":
            known, others = schema.get("properties", {}), schema["additionalProperties"]
            return (
                isinstance(value, dict)
                and value.keys() >= set(schema.get("required", ()))
                and all(_fits(inner, known.get(name, others)) for name, inner in value.items())
            )
        case "array":
            return isinstance(value, list) and all(_fits(one, schema["items"]) for one in value)
    return type(value) is _TYPES[schema["type"]] and value in schema.get("enum", [value])
