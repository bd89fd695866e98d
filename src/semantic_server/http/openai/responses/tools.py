"""Tools of a response's request: the callable functions, their names, and the choice.

The model sees a function's namespace only if two functions have the same name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from semantic.domain.chat import Tool, ToolChoice
from semantic_server.http.errors import FieldError
from semantic_server.http.openai.conversation import (
    check_known,
    read_custom_tool,
    required,
    warn_hosted,
)
from semantic_server.http.openai.fields import Json
from semantic_server.http.openai.validators import response_tool_adapter
from semantic_server.http.request_fields.client_tools import CUSTOM, OPENAI_TOOLS
from semantic_server.http.request_fields.table import (
    list_at,
    name_at,
    object_at,
    text_at,
    validated_at,
)

_CHOICE: Final = "tool_choice"
_MODES: Final = ("auto", "required")
_CUSTOM_FIELDS: Final = ("type", "name", "description", "format")
_CALLED: Final = frozenset({"function", CUSTOM, *OPENAI_TOOLS})
"""The types of callable tools."""


@dataclass(frozen=True, slots=True)
class FunctionName:
    """A function's name and namespace, as the client uses them."""

    name: str
    namespace: str | None = None


@dataclass(slots=True)
class ToolSet:
    """Functions by the names that the model sees. `reply_tools` is the reply's field `tools`."""

    reply_tools: list[Json] = field(default_factory=list)
    _tools: dict[str, Tool] = field(default_factory=dict)
    _names: dict[str, FunctionName] = field(default_factory=dict)

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The functions that the model may call."""
        return tuple(self._tools.values())

    def add_requested(self, path: str, value: object) -> None:
        """Add the tools at `path`. Raises FieldError for an invalid tool or duplicate function."""
        found = _functions(path, value)
        self.reply_tools += [one.reply_tool for one in found if one.reply_tool is not None]
        # Functions outside of namespaces first, so that they keep their names.
        for one in sorted(found, key=lambda one: one.name.namespace is not None):
            if one.name in self._names.values():
                raise FieldError(f"{one.path}: duplicate tool {one.name.name!r}", param=one.path)
            self._add(one)

    def add_loaded(self, path: str, value: object) -> tuple[Tool, ...]:
        """Add the tools of an input item. They replace tools with the same names. Returns the added
        tools."""
        return tuple(self._tools[self._add(one)] for one in _functions(path, value))

    def add_previous(self, tools: Sequence[Tool]) -> None:
        """Add the tools of previous responses, except tools with a name that is in use."""
        for tool in tools:
            if tool.name not in self._tools:
                self._tools[tool.name] = tool
                self._names[tool.name] = FunctionName(tool.name)

    def model_name(self, name: FunctionName) -> str:
        """Return the name under which the model sees the function `name`."""
        return next((known for known, one in self._names.items() if one == name), name.name)

    def client_name(self, model_name: str) -> FunctionName:
        """Return the client's name for the function that the model calls `model_name`."""
        return self._names.get(model_name, FunctionName(model_name))

    def kind_of(self, model_name: str) -> str:
        """Return the type of the tool that the model calls `model_name`."""
        tool = self._tools.get(model_name)
        return "function" if tool is None else tool.kind

    def _add(self, one: _Function) -> str:
        tool, known = one.tool, one.name.name
        if self._names.get(known, one.name) != one.name:
            known = f"{one.name.namespace}__{one.name.name}"
        if self._names.get(known, one.name) != one.name:
            raise FieldError(f"{one.path}: duplicate tool {known!r}", param=one.path)
        self._names[known] = one.name
        self._tools[known] = replace(tool, name=known)
        return known


# Tools


@dataclass(frozen=True, slots=True)
class _Function:
    """A function. `path` is its place in the request. In a namespace, only the first function has a
    `reply_tool`."""

    path: str
    name: FunctionName
    tool: Tool
    reply_tool: Json | None


def _functions(path: str, value: object, namespace: str | None = None) -> list[_Function]:
    found: list[_Function] = []
    for i, one in enumerate(list_at(path, value)):
        at = f"{path}[{i}]"
        tool = object_at(at, one)
        kind = text_at(f"{at}.type", tool.get("type"))
        if kind == "function":
            found.append(_function(at, tool, namespace))
        elif kind == CUSTOM:
            found.append(_custom(at, tool, namespace))
        elif kind == "namespace" and namespace is None:
            found += _namespace(at, tool)
        elif kind in OPENAI_TOOLS and _is_local(tool):
            reply_tool: Json = {"type": kind}
            found.append(_Function(at, FunctionName(kind), OPENAI_TOOLS[kind], reply_tool))
        else:
            warn_hosted(kind)
    return found


def _is_local(tool: Json) -> bool:
    environment = tool.get("environment")
    return not isinstance(environment, dict) or environment.get("type") == "local"


def _namespace(path: str, given: Json) -> list[_Function]:
    namespace = name_at(path, given)
    functions = _functions(f"{path}.tools", given.get("tools"), namespace)
    reply_tool: Json = {
        "type": "namespace",
        "name": namespace,
        "description": str(given.get("description", "")),
        "tools": [one.reply_tool for one in functions],
    }
    return [replace(one, reply_tool=None if i else reply_tool) for i, one in enumerate(functions)]


def _function(path: str, given: Json, namespace: str | None = None) -> _Function:
    complete = {"parameters": None, "strict": None, **given}
    checked = validated_at(path, response_tool_adapter(), complete)
    name = name_at(path, given)
    parameters, strict = checked["parameters"] or {}, bool(checked["strict"])
    description = checked.get("description")
    reply_tool: Json = {
        "type": "function",
        "name": name,
        "description": description,
        "parameters": parameters,
        "strict": strict,
    }
    tool = Tool(name, description or "", parameters, strict=strict)
    return _Function(f"{path}.name", FunctionName(name, namespace), tool, reply_tool)


def _custom(path: str, given: Json, namespace: str | None) -> _Function:
    tool = read_custom_tool(path, given)
    reply_tool: Json = {name: given[name] for name in _CUSTOM_FIELDS if name in given}
    return _Function(f"{path}.name", FunctionName(tool.name, namespace), tool, reply_tool)


# Tool choice


@dataclass(frozen=True, slots=True)
class Choice:
    """The callable tools and the tool choice. `reply_value` is the reply's field `tool_choice`."""

    tools: tuple[Tool, ...]
    choice: ToolChoice
    reply_value: str | Json


def choice_among(tools: ToolSet, value: object) -> Choice:
    """Read `tool_choice`. Raises FieldError for an invalid choice or an unknown tool."""
    match value:
        case None | "auto":
            return Choice(tools.tools, ToolChoice(), "auto")
        case "none":
            return Choice(tools.tools, ToolChoice("none"), "none")
        case "required":
            return Choice(*required(tools.tools), "required")
        case _:
            return _chosen(tools, object_at(_CHOICE, value))


def _chosen(tools: ToolSet, given: Json) -> Choice:
    kind = given.get("type")
    if kind == "allowed_tools":
        return _allowed(tools, given)
    if not isinstance(kind, str) or kind not in _CALLED:
        path = f"{_CHOICE}.type"
        raise FieldError(
            f"{path} must be function, custom or allowed_tools: this server runs no hosted tools",
            param=path,
        )
    known, reply_value = _known(tools, _CHOICE, given)
    if kind == "local_shell":  # OpenAI's types do not define this choice
        reply_value = {"type": "function", "name": known}
    return Choice(tools.tools, ToolChoice("required", known), reply_value)


def _allowed(tools: ToolSet, given: Json) -> Choice:
    mode = given.get("mode")
    if mode not in _MODES:
        path = f"{_CHOICE}.mode"
        raise FieldError(f"{path}: expected one of {', '.join(_MODES)}", param=path)
    names: list[str] = []
    functions: list[Json] = []
    for i, one in enumerate(list_at(f"{_CHOICE}.tools", given.get("tools"))):
        at = f"{_CHOICE}.tools[{i}]"
        tool = object_at(at, one)
        if text_at(f"{at}.type", tool.get("type")) in _CALLED:
            known, reply_tool = _known(tools, at, tool)
            names.append(known)
            functions.append(reply_tool)
    allowed = tuple(tool for tool in tools.tools if tool.name in names)
    reply_value: Json = {"type": "allowed_tools", "mode": mode, "tools": functions}
    if mode == "required":
        return Choice(*required(allowed), reply_value)
    return Choice(allowed, ToolChoice(), reply_value)


def _known(tools: ToolSet, path: str, given: Json) -> tuple[str, Json]:
    kind = given["type"]
    if isinstance(kind, str) and kind in OPENAI_TOOLS:
        check_known(kind, tools.tools, path)
        return kind, {"type": kind}
    at = f"{path}.name"
    name = text_at(at, given.get("name"))
    namespace = given.get("namespace")
    known = tools.model_name(FunctionName(name, namespace if isinstance(namespace, str) else None))
    check_known(known, tools.tools, at)
    return known, {"type": kind, "name": name}
