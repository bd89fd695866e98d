"""Which tool a request wants to be called, as the domain means it, and as the reply tells it.

Knows the wire's shapes; not how a model is told of its tools.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from semantic.adapters.http.errors import FieldError
from semantic.adapters.http.openai.chat_tools import check_known, required
from semantic.adapters.http.openai.parts import list_at, object_at, text_at
from semantic.adapters.http.openai.responses.toolbox import CallName, Json, Toolbox
from semantic.domain.chat import Tool, ToolChoice

_PATH: Final = "tool_choice"
_MODES: Final = ("auto", "required")


@dataclass(frozen=True, slots=True)
class Choice:
    """The tools that may be called, how free that choice is, and how it was asked for."""

    tools: tuple[Tool, ...]
    choice: ToolChoice
    told: str | Json


def choice_among(toolbox: Toolbox, value: object) -> Choice:
    """Raises FieldError for a choice that is none, or of a tool that is not there."""
    match value:
        case None | "auto":
            return Choice(toolbox.tools, ToolChoice(), "auto")
        case "none":
            return Choice(toolbox.tools, ToolChoice("none"), "none")
        case "required":
            return Choice(*required(toolbox.tools), "required")
        case _:
            return _chosen(toolbox, object_at(_PATH, value))


def _chosen(toolbox: Toolbox, given: Json) -> Choice:
    match given.get("type"):
        case "function":
            known = _known(toolbox, _PATH, given)
            told = {"type": "function", "name": given["name"]}
            return Choice(toolbox.tools, ToolChoice("required", known), told)
        case "allowed_tools":
            return _allowed(toolbox, given)
        case _:
            path = f"{_PATH}.type"
            raise FieldError(
                f"{path}: expected function or allowed_tools; nothing else can be called here",
                param=path,
            )


def _allowed(toolbox: Toolbox, given: Json) -> Choice:
    mode = given.get("mode")
    if mode not in _MODES:
        path = f"{_PATH}.mode"
        raise FieldError(f"{path}: expected one of {', '.join(_MODES)}", param=path)
    names: list[str] = []
    told: list[Json] = []
    for i, one in enumerate(list_at(f"{_PATH}.tools", given.get("tools"))):
        at = f"{_PATH}.tools[{i}]"
        tool = object_at(at, one)
        if text_at(f"{at}.type", tool.get("type")) == "function":
            names.append(_known(toolbox, at, tool))
            told.append({"type": "function", "name": tool["name"]})
    left = tuple(tool for tool in toolbox.tools if tool.name in names)
    body: Json = {"type": "allowed_tools", "mode": mode, "tools": told}
    if mode == "required":
        return Choice(*required(left), body)
    return Choice(left, ToolChoice(), body)


def _known(toolbox: Toolbox, path: str, given: Json) -> str:
    """What the model knows the function by that is named at `path`."""
    at = f"{path}.name"
    name = text_at(at, given.get("name"))
    namespace = given.get("namespace")
    known = toolbox.known_as(CallName(name, namespace if isinstance(namespace, str) else None))
    check_known(known, toolbox.tools, at)
    return known
