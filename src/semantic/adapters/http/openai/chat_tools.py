"""Tools and the choice among them, as the domain means them.

Tools that a service would run itself are left out, with one warning: this server runs none.
Knows the wire's shapes; not how a model is told of its tools.
"""

from __future__ import annotations

from collections.abc import Sequence

from semantic.adapters.http.errors import FieldError
from semantic.adapters.http.openai.fields import warnings
from semantic.adapters.http.openai.parts import list_at, object_at, text_at, validated_at
from semantic.domain.chat import Tool, ToolChoice

_CHOICE = "tool_choice"


def tools_of(value: object) -> tuple[Tool, ...]:
    """The functions among a body's tools. Raises FieldError for one that is no tool."""
    found: dict[str, Tool] = {}
    for i, one in enumerate(list_at("tools", value)):
        path = f"tools[{i}]"
        tool = _tool(path, one)
        if tool is None:
            continue
        if tool.name in found:
            at = f"{path}.function.name"
            raise FieldError(f"{at}: there is a tool {tool.name!r} already", param=at)
        found[tool.name] = tool
    return tuple(found.values())


def choice_among(tools: Sequence[Tool], value: object) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that may be called, and how free that choice is.

    Raises FieldError for a choice that is none, or of a tool that is not there.
    """
    match value:
        case None | "auto":
            return tuple(tools), ToolChoice()
        case "none":
            return tuple(tools), ToolChoice("none")
        case "required":
            return required(tools)
        case _:
            return _chosen(tools, object_at(_CHOICE, value))


def _chosen(
    tools: Sequence[Tool], choice: dict[str, object]
) -> tuple[tuple[Tool, ...], ToolChoice]:
    match choice.get("type"):
        case "function":
            return tuple(tools), ToolChoice("required", _named(tools, choice))
        case "allowed_tools":
            return _allowed(tools, choice)
        case _:
            path = f"{_CHOICE}.type"
            raise FieldError(f"{path}: expected function or allowed_tools", param=path)


def _tool(path: str, value: object) -> Tool | None:
    from semantic.adapters.http.openai.message_types import tool_adapter

    tool = object_at(path, value)
    kind = text_at(f"{path}.type", tool.get("type"))
    if kind != "function":
        warnings.warn(f"tools of type {kind!a:.80} are left out: only functions can be called")
        return None
    tool["function"] = object_at(f"{path}.function", tool.get("function"))
    function = validated_at(path, tool_adapter(), tool)["function"]
    if not function["name"]:
        at = f"{path}.function.name"
        raise FieldError(f"{at}: expected a name", param=at)
    return Tool(
        function["name"],
        function.get("description", ""),
        function.get("parameters", {}),
        strict=bool(function.get("strict")),
    )


def required(tools: Sequence[Tool]) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The choice to call any of `tools`. Raises FieldError when there is none."""
    if not tools:
        raise FieldError("tool_choice: required, but there is no function to call", param=_CHOICE)
    return tuple(tools), ToolChoice("required")


def _named(tools: Sequence[Tool], choice: dict[str, object]) -> str:
    from semantic.adapters.http.openai.message_types import named_choice_adapter

    name = validated_at(_CHOICE, named_choice_adapter(), choice)["function"]["name"]
    check_known(name, tools, f"{_CHOICE}.function.name")
    return name


def _allowed(
    tools: Sequence[Tool], choice: dict[str, object]
) -> tuple[tuple[Tool, ...], ToolChoice]:
    from semantic.adapters.http.openai.message_types import (
        allowed_choice_adapter,
        named_choice_adapter,
    )

    path = f"{_CHOICE}.allowed_tools"
    mode = validated_at(_CHOICE, allowed_choice_adapter(), choice)["allowed_tools"]["mode"]
    among = list_at(f"{path}.tools", object_at(path, choice["allowed_tools"])["tools"])
    names: set[str] = set()
    for i, one in enumerate(among):
        at = f"{path}.tools[{i}]"
        name = validated_at(at, named_choice_adapter(), object_at(at, one))["function"]["name"]
        check_known(name, tools, at)
        names.add(name)
    left = tuple(tool for tool in tools if tool.name in names)
    return required(left) if mode == "required" else (left, ToolChoice())


def check_known(name: str, tools: Sequence[Tool], path: str) -> None:
    """Raise FieldError, with the `path` of the choice, unless `tools` have one of that name."""
    if name not in {tool.name for tool in tools}:
        raise FieldError(f"{path}: there is no function {name!r} among the tools", param=path)
