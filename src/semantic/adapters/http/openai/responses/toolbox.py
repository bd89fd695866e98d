"""The functions that a request brings along, and what the model knows them by.

A function in a namespace is known by its own name, unless another one has it; the client gets its
calls with the namespace. What a namespace says of itself is not told to the model. Tools that a
service would run are left out, with one warning: this server runs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from semantic.adapters.http.errors import FieldError
from semantic.adapters.http.openai.fields import warnings
from semantic.adapters.http.openai.parts import list_at, object_at, text_at, validated_at
from semantic.domain.chat import Tool

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class CallName:
    """A function as the client names it."""

    name: str
    namespace: str | None = None


@dataclass(slots=True)
class Toolbox:
    """Functions by what the model knows them by. `told` are the tools of the reply's body."""

    told: list[Json] = field(default_factory=list)
    _tools: dict[str, Tool] = field(default_factory=dict)
    _names: dict[str, CallName] = field(default_factory=dict)

    @property
    def tools(self) -> tuple[Tool, ...]:
        """What the model may call."""
        return tuple(self._tools.values())

    def add_given(self, path: str, value: object) -> None:
        """Add the list of tools at `path`. Raises FieldError for one that is no tool, and for a
        function that is there already."""
        found = _read(path, value)
        self.told += [one.told for one in found if one.told is not None]
        # Functions outside of namespaces keep their names.
        for one in sorted(found, key=lambda one: one.name.namespace is not None):
            if one.name in self._names.values():
                raise FieldError(
                    f"{one.path}: there is a tool {one.name.name!r} already", param=one.path
                )
            self._add(one)

    def add_loaded(self, path: str, value: object) -> tuple[Tool, ...]:
        """Add tools that came in the midst of a conversation, and return them. One that is there
        already is replaced."""
        return tuple(self._tools[self._add(one)] for one in _read(path, value))

    def add_earlier(self, tools: Sequence[Tool]) -> None:
        """Add tools that came with earlier requests, where nothing newer has their names."""
        for tool in tools:
            if tool.name not in self._tools:
                self._tools[tool.name] = tool
                self._names[tool.name] = CallName(tool.name)

    def known_as(self, name: CallName) -> str:
        """What the model knows the function by; its own name where it is not among the tools."""
        return next((known for known, one in self._names.items() if one == name), name.name)

    def named(self, known: str) -> CallName:
        """The function that the model knows as `known`."""
        return self._names.get(known, CallName(known))

    def _add(self, one: _Given) -> str:
        tool, known = one.tool, one.name.name
        if self._names.get(known, one.name) != one.name:
            known = f"{one.name.namespace}__{one.name.name}"
        if self._names.get(known, one.name) != one.name:
            raise FieldError(f"{one.path}: there is a tool {known!r} already", param=one.path)
        self._names[known] = one.name
        self._tools[known] = replace(tool, name=known)
        return known


@dataclass(frozen=True, slots=True)
class _Given:
    """A function at `path`. `told` is the tool it came in, with the first function of it."""

    path: str
    name: CallName
    tool: Tool
    told: Json | None


def _read(path: str, value: object) -> list[_Given]:
    found: list[_Given] = []
    for i, one in enumerate(list_at(path, value)):
        at = f"{path}[{i}]"
        tool = object_at(at, one)
        kind = text_at(f"{at}.type", tool.get("type"))
        if kind == "function":
            found.append(_function(at, tool))
        elif kind == "namespace":
            found += _namespace(at, tool)
        else:
            _leave_out(kind)
    return found


def _namespace(path: str, given: Json) -> list[_Given]:
    namespace = _name_at(path, given)
    functions: list[_Given] = []
    for i, one in enumerate(list_at(f"{path}.tools", given.get("tools"))):
        at = f"{path}.tools[{i}]"
        tool = object_at(at, one)
        kind = text_at(f"{at}.type", tool.get("type"))
        if kind == "function":
            functions.append(_function(at, tool, namespace))
        else:
            _leave_out(kind)
    told: Json = {
        "type": "namespace",
        "name": namespace,
        "description": str(given.get("description", "")),
        "tools": [one.told for one in functions],
    }
    return [replace(one, told=None if i else told) for i, one in enumerate(functions)]


def _function(path: str, given: Json, namespace: str | None = None) -> _Given:
    from semantic.adapters.http.openai.responses.sdk_types import tool_adapter

    checked = validated_at(path, tool_adapter(), {"parameters": None, "strict": None, **given})
    name = _name_at(path, given)
    parameters, strict = checked["parameters"] or {}, bool(checked["strict"])
    description = checked.get("description")
    told: Json = {
        "type": "function",
        "name": name,
        "description": description,
        "parameters": parameters,
        "strict": strict,
    }
    tool = Tool(name, description or "", parameters, strict=strict)
    return _Given(f"{path}.name", CallName(name, namespace), tool, told)


def _name_at(path: str, given: Json) -> str:
    name = text_at(f"{path}.name", given.get("name"))
    if not name:
        raise FieldError(f"{path}.name: expected a name", param=f"{path}.name")
    return name


def _leave_out(kind: str) -> None:
    warnings.warn(f"tools of type {kind!a:.80} are left out: only functions can be called")
