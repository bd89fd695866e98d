"""Anthropic's tools and tool choice to those of every wire.

Knows which tools only Anthropic's own servers or trained-in schemas make work; not how a model
is shown a tool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from semantic.adapters.http.anthropic.sdk_types import SdkTypes, checked, list_at, object_at
from semantic.adapters.http.errors import FieldError
from semantic.adapters.http.logs import WarnOnce
from semantic.domain.chat import Tool, ToolChoice

if TYPE_CHECKING:
    from anthropic.types.beta import BetaToolChoiceParam


def read_tools(sdk: SdkTypes, tools: object, warnings: WarnOnce) -> tuple[Tool, ...]:
    """The tools that a client describes itself; others are skipped with a warning.

    Raises FieldError for one that is not as it should be.
    """
    if tools is None:
        return ()
    found: dict[str, Tool] = {}
    for number, given in enumerate(list_at(tools, "tools")):
        path = f"tools[{number}]"
        kind = object_at(given, path).get("type")
        if kind not in (None, "custom"):
            warnings.warn(f"/v1/messages: tools of type {kind!r:.80} are skipped: not served here")
            continue
        tool = checked(sdk.tool, given, path)
        name = tool["name"]
        if not name:
            raise FieldError(f"{path}.name: expected a name", param=f"{path}.name")
        if name in found:
            raise FieldError(f"{path}.name: {name!r:.80} is there twice", param=f"{path}.name")
        found[name] = Tool(
            name,
            tool.get("description", ""),
            object_at(object_at(given, path).get("input_schema"), f"{path}.input_schema"),
            strict=tool.get("strict", False),
        )
    return tuple(found.values())


def read_choice(
    choice: BetaToolChoiceParam | None, tools: Sequence[Tool]
) -> tuple[ToolChoice, bool]:
    """Whether a tool must be called, and whether several may be.

    Raises FieldError when it must and there is none, or not the one named.
    """
    if choice is None:
        return ToolChoice(), True
    if choice["type"] == "none":
        return ToolChoice("none"), True
    parallel = not choice.get("disable_parallel_tool_use", False)
    if choice["type"] == "auto":
        return ToolChoice(), parallel
    if choice["type"] == "any":
        if not tools:
            raise FieldError("tool_choice: any needs a tool in tools", param="tool_choice")
        return ToolChoice("required"), parallel
    name = choice["name"]
    if name not in {tool.name for tool in tools}:
        raise FieldError(
            f"tool_choice.name: {name!r:.80} is not among tools", param="tool_choice.name"
        )
    return ToolChoice("required", name), parallel
