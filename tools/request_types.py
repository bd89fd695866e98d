"""`python -m tools.request_types`: writes the request types of the wires from the vendors' SDKs.

The server checks requests with the types of OpenAI's and Anthropic's SDKs, but importing an SDK
takes longer than loading a small model. So the types are written to modules of their own. What
decides nothing is left out: the elements of an `Iterable`, which the SDKs' types leave unchecked,
fields that the wires refuse or check by themselves, and known values where any text is accepted.
A test compares the modules with the SDKs.
"""

from __future__ import annotations

import argparse
import importlib
import keyword
import subprocess
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Final, Literal, NotRequired, Required, Union

from typing_extensions import is_typeddict

from semantic_server.http.anthropic import request as anthropic_fields
from semantic_server.http.openai import fields as openai_fields
from semantic_server.http.openai.responses import request as response_fields
from semantic_server.http.request_fields.table import Field

HTTP: Final = Path(__file__).parents[1] / "src" / "semantic_server" / "http"


@dataclass(frozen=True, slots=True)
class Root:
    """A type of an SDK: its module and name there, its name here, and its unchecked fields."""

    module: str
    name: str
    renamed: str = ""
    unchecked: frozenset[str] = frozenset()

    @property
    def own_name(self) -> str:
        """The name of the written class."""
        return self.renamed or self.name

    def load(self) -> type:
        """The SDK's type."""
        found: type = getattr(importlib.import_module(self.module), self.name)
        return found


@dataclass(frozen=True, slots=True)
class Wire:
    """The types of one SDK, written to `path`."""

    package: str
    vendor: str
    path: Path
    roots: tuple[Root, ...]


def unchecked(table: Mapping[str, Field], by_element: Iterable[str]) -> frozenset[str]:
    """The fields that no validator of a whole body sees."""
    never = {name for name, one in table.items() if one.refusal is not None and not one.unless}
    return frozenset({*never, *by_element})


_CHAT: Final = "openai.types.chat"
_RESPONSES: Final = "openai.types.responses"
_BETA: Final = "anthropic.types.beta"

OPENAI: Final = Wire(
    "openai",
    "OpenAI",
    HTTP / "openai" / "request_types.py",
    (
        Root(
            f"{_CHAT}.completion_create_params",
            "CompletionCreateParamsBase",
            "ChatCompletionParams",
            unchecked(openai_fields.CHAT_FIELDS, openai_fields.CHECKED_BY_ELEMENT),
        ),
        Root(
            "openai.types.completion_create_params",
            "CompletionCreateParamsBase",
            "CompletionParams",
            unchecked(openai_fields.COMPLETION_FIELDS, openai_fields.CHECKED_BY_ELEMENT),
        ),
        Root(
            f"{_RESPONSES}.response_create_params",
            "ResponseCreateParamsBase",
            "ResponseParams",
            unchecked(response_fields.RESPONSE_FIELDS, response_fields.CHECKED_BY_ELEMENT),
        ),
        Root(_CHAT, "ChatCompletionAllowedToolChoiceParam"),
        Root(_CHAT, "ChatCompletionAssistantMessageParam"),
        Root(_CHAT, "ChatCompletionDeveloperMessageParam"),
        Root(_CHAT, "ChatCompletionFunctionToolParam"),
        Root(_CHAT, "ChatCompletionMessageFunctionToolCallParam"),
        Root(_CHAT, "ChatCompletionNamedToolChoiceParam"),
        Root(_CHAT, "ChatCompletionSystemMessageParam"),
        Root(_CHAT, "ChatCompletionToolMessageParam"),
        Root(_CHAT, "ChatCompletionUserMessageParam"),
        Root(_RESPONSES, "FunctionToolParam"),
        Root(_RESPONSES, "ResponseFormatTextJSONSchemaConfigParam"),
        Root(_RESPONSES, "ResponseFunctionToolCallParam"),
        Root(f"{_RESPONSES}.response_custom_tool_call_param", "ResponseCustomToolCallParam"),
        Root(f"{_RESPONSES}.response_reasoning_item_param", "ResponseReasoningItemParam"),
        Root("openai.types.shared_params", "ResponseFormatJSONObject"),
        Root("openai.types.shared_params", "ResponseFormatJSONSchema"),
        Root("openai.types.shared_params", "ResponseFormatText"),
    ),
)

ANTHROPIC: Final = Wire(
    "anthropic",
    "Anthropic",
    HTTP / "anthropic" / "request_types.py",
    (
        Root(
            f"{_BETA}.message_create_params",
            "MessageCreateParamsBase",
            "MessageCreateParams",
            unchecked(anthropic_fields.MESSAGE_FIELDS, ()),
        ),
        Root(
            f"{_BETA}.message_count_tokens_params",
            "MessageCountTokensParams",
            unchecked=unchecked(anthropic_fields.MESSAGE_FIELDS, ()),
        ),
        Root(_BETA, "BetaTextBlockParam"),
        Root(_BETA, "BetaThinkingBlockParam"),
        Root(_BETA, "BetaRedactedThinkingBlockParam"),
        Root(_BETA, "BetaToolUseBlockParam"),
        Root(_BETA, "BetaToolResultBlockParam"),
        Root(_BETA, "BetaToolParam"),
        Root(
            f"{_BETA}.beta_system_message_output_config_param", "BetaSystemMessageOutputConfigParam"
        ),
    ),
)

WIRES: Final = (OPENAI, ANTHROPIC)

_UNIONS: Final = (Union, types.UnionType)


@dataclass(slots=True)
class Writer:
    """Writes classes in the order in which they need each other."""

    classes: dict[str, str] = field(default_factory=dict)
    _names: dict[type, str] = field(default_factory=dict)

    def add(self, kind: type, name: str, unchecked: frozenset[str] = frozenset()) -> str:
        """The name of the class for `kind`, which is written unless it has been."""
        if kind in self._names:
            return self._names[kind]
        self._names[kind] = name
        hints = typing.get_type_hints(kind)
        members = {
            member: "object" if member in unchecked else self.hint(hints[member], name)
            for member in kind.__annotations__
        }
        required = _required(kind)
        for member in required:
            members[member] = f"Required[{members[member]}]"
        if name in self.classes:
            raise ValueError(f"two types are called {name}")
        self.classes[name] = _class_source(name, members)
        return name

    def hint(self, hint: object, within: str) -> str:
        """The source of a type that a member of the class `within` has."""
        if hint is object or hint in (bool, float, int, str):
            return str(getattr(hint, "__name__", hint))
        if hint is type(None):
            return "None"
        if isinstance(hint, type) and is_typeddict(hint):
            name = hint.__name__
            return self.add(hint, f"{within}{name}" if name in self.classes else name)
        return self._generic(hint, within)

    def _generic(self, hint: object, within: str) -> str:
        origin, given = typing.get_origin(hint), typing.get_args(hint)
        if origin in _UNIONS:
            return " | ".join(self.hint(one, within) for one in _deciding(given))
        if origin is Literal:
            return f"Literal[{', '.join(map(repr, given))}]"
        if origin in (dict, list, Sequence):
            return f"{origin.__name__}[{', '.join(self.hint(one, within) for one in given)}]"
        if origin is Iterable:
            return "Iterable[object]"
        raise TypeError(f"{hint!r} has no form here")


def _required(kind: type) -> list[str]:
    """The members that an object of `kind`, a typed dictionary, must have."""
    hints = typing.get_type_hints(kind, include_extras=True)
    by_default: frozenset[str] = vars(kind)["__required_keys__"]
    found = []
    for member in kind.__annotations__:
        marker = typing.get_origin(hints[member])
        if marker is Required or (marker is not NotRequired and member in by_default):
            found.append(member)
    return found


def _deciding(branches: Sequence[object]) -> list[object]:
    """The branches of a union without the known texts where any text is accepted."""
    any_text = str in branches
    return [one for one in branches if not (any_text and typing.get_origin(one) is Literal)]


def _class_source(name: str, members: Mapping[str, str]) -> str:
    """A typed dictionary; members that no class can name come from a base."""
    words = {member: hint for member, hint in members.items() if keyword.iskeyword(member)}
    base = f"_{name}Keywords" if words else "TypedDict"
    lines = [f"class {name}({base}, total=False):"]
    lines += [f"    {member}: {hint}" for member, hint in members.items() if member not in words]
    if words:
        pairs = ", ".join(f'"{member}": {hint}' for member, hint in words.items())
        lines.insert(0, f'{base} = TypedDict("{base}", {{{pairs}}}, total=False)\n\n')
    return "\n".join(lines)


def source(wire: Wire) -> str:
    """The module with the types of `wire`, before it is formatted."""
    writer = Writer()
    for root in wire.roots:
        writer.add(root.load(), root.own_name, root.unchecked)
    text = "\n\n\n".join(writer.classes.values())
    generics = [name for name in ("Iterable", "Sequence") if f"{name}[" in text]
    imports = [f"from collections.abc import {', '.join(generics)}"] if generics else []
    return "\n".join((
        f'"""Types of {wire.vendor}\'s SDK that validate requests.',
        "",
        f"Written by `python -m tools.request_types` from version {version(wire.package)}.",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        *imports,
        "from typing import Literal, Required",
        "",
        "from typing_extensions import TypedDict",
        "",
        "",
        text,
        "",
    ))  # fmt: skip


def formatted(text: str) -> str:
    """`text` in the house format."""
    ruff = Path(sys.executable).with_name("ruff")
    done = subprocess.run(
        [ruff, "format", "--stdin-filename", "request_types.py", "-"],
        input=text,
        capture_output=True,
        check=True,
        text=True,
    )
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a difference")
    check = parser.parse_args().check
    for wire in WIRES:
        text = formatted(source(wire))
        if not check:
            wire.path.write_text(text)
        elif wire.path.read_text() != text:
            sys.exit(f"{wire.path.name} of {wire.vendor} is out of date: run this without --check")


if __name__ == "__main__":
    main()
