"""The command line and the HTTP interface as Markdown, from the program itself.

Knows neither pages nor where the text goes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Final

from typer.core import TyperArgument, TyperGroup, TyperOption
from typer.main import get_command

from semantic.adapters.mlx.device import Device
from semantic.application.chat.families import FAMILIES, reasoning_parsers
from semantic.cli.models.choosing import best, sizes_of, suggestions
from semantic.composition.known_models import known_models
from tests.families.answers import ANSWERS

_MACS: Final = (8, 16, 18, 24, 32, 36, 48, 64, 96, 128, 192)
"""GiB of memory in Macs."""
_LARGE_MAC: Final = 36
"""GiB from which macOS lets a GPU use three quarters of the memory by default, not two thirds."""
Json = Mapping[str, object]
Elsewhere = Mapping[str, Sequence[TyperOption]]
"""Options that other pages have, by a link to each."""

_KINDS: Final = {str: "text", int: "number", float: "number", Path: "path"}
_GROUPS: Final = (
    (
        "OpenAI's interfaces",
        (
            "/v1/chat",
            "/v1/completions",
            "/v1/responses",
            "/v1/models",
            "/v1/embeddings",
            "/v1/rerank",
        ),
    ),
    ("Anthropic's interface", ("/v1/messages",)),
    (
        "Ollama's interface",
        (
            "/api/chat",
            "/api/generate",
            "/api/tags",
            "/api/show",
            "/api/ps",
            "/api/version",
            "/api/embed",
            "/api/pull",
        ),
    ),
    ("LM Studio's interface", ("/api/v0",)),
    ("Agents and requests", ("/v1/agents", "/v1/requests")),
    ("Tokens", ("/tokenize", "/detokenize")),
)
_OTHERS: Final = "The server"
_METHODS: Final = ("get", "post", "put", "delete")


def command_line(name: str) -> str:
    """A command of `semantic` with its arguments and options; without a name the common options,
    and a list of the commands."""
    from semantic.cli.main import app

    program = get_command(app)
    assert isinstance(program, TyperGroup)
    common = _shown(program)
    if not name:
        rows = [
            (f"[semantic {one}](cli/{one}.md)", _cell(str(command.help or "").partition("\n")[0]))
            for one, command in program.commands.items()
        ]
        return f"{_options(common)}\n\n{_table(('command', ''), rows)}"
    serve = [one for one in _shown(program.commands["serve"]) if not _is_among(one, common)]
    elsewhere = {"[Common options](../cli.md)": common}
    if name != "serve":
        elsewhere["[Options of `semantic serve`](serve.md)"] = serve
    parts = _commands(f"semantic {name}", program.commands[name], elsewhere)
    return "\n\n".join(part for part in parts if part)


def _shown(command: object) -> list[TyperOption]:
    params = getattr(command, "params", ())
    return [one for one in params if isinstance(one, TyperOption) and not one.hidden]


def _is_among(option: TyperOption, others: Sequence[TyperOption]) -> bool:
    return _row(option) in map(_row, others)


def families() -> str:
    """How each family of models writes a call of a tool without arguments, and reasoning."""
    rows: dict[str, list[str]] = {}
    for family in FAMILIES:
        spelling = family.spelling
        is_own = spelling is None or spelling.arguments is None
        names = ", ".join(map(_code, family.names))
        if names in rows:
            rows[names][0] += f", {family.models}"
            continue
        rows[names] = [
            family.models,
            _code(ANSWERS[family.names[0]]["nothing"].written.strip()),
            "one" if family.headers else "any number",
            "as the model writes it" if is_own else "a JSON object between the marks",
        ]
    calls = [[names, *cells] for names, cells in rows.items()]
    marks = [
        [_code(name), f"{_code(found.start)} ... {_code(found.end)}"]
        for name, found in sorted(reasoning_parsers().items())
    ]
    heads = ["`--tool-call-parser`", "Models", "A call", "In one answer", "Forced and strict calls"]
    return "\n\n".join((_table(heads, calls), _table(["`--reasoning-parser`", "Between"], marks)))


def models() -> str:
    """The models with short names: what they take, and what they are for."""
    heads = ["Name", "Hub id", "Download", "Context", "An agent of 100k tokens", "For"]
    rows = [
        [_code(one.name), _code(one.hub_id), *sizes_of(one), one.good_for] for one in known_models()
    ]
    choices: dict[str, list[int]] = {}
    for memory in _MACS:
        part, whole = (2, 3) if memory < _LARGE_MAC else (3, 4)
        device = Device("Metal", "", memory << 30, 0, (memory << 30) * part // whole)
        found = best(suggestions(device))
        choices.setdefault("-" if found is None else _code(found.model.name), []).append(memory)
    macs = [[", ".join(map(str, sizes)), name] for name, sizes in choices.items()]
    first = _table(["GiB of a Mac", "First choice for coding agents"], macs)
    return "\n\n".join((first, _table(heads, rows)))


def _code(text: str) -> str:
    """`text` for a cell of a table, which neither bars nor line breaks end."""
    shown = escape(text, quote=False).replace("|", "&#124;").replace("\n", "<br>")
    return f"<code>{shown}</code>"


def _commands(name: str, command: object, elsewhere: Elsewhere) -> Iterator[str]:
    if isinstance(command, TyperGroup):
        yield command.help or ""
        for below, one in command.commands.items():
            yield f"## {name} {below}"
            yield from _commands(f"{name} {below}", one, elsewhere)
        return
    arguments = [one for one in getattr(command, "params", ()) if isinstance(one, TyperArgument)]
    words = map(_word, arguments)
    yield f"    {' '.join((name, '[OPTIONS]', *words))}"
    yield _joined(str(getattr(command, "help", "") or ""))
    if arguments:
        rows = [(f"`{_word(one)}`", _cell(one.help)) for one in arguments]
        yield _table(("argument", ""), rows)
    own = _shown(command)
    for place, known in elsewhere.items():
        named = [one for one in own if _is_among(one, known)]
        own = [one for one in own if one not in named]
        if len(named) == len(known):
            yield f"{place}: all."
        elif named:
            yield f"{place}: {', '.join(_names(one) for one in named)}."
    yield _options(own)


def _options(shown: Sequence[TyperOption]) -> str:
    """A table for each panel, in the order of `--help`."""
    order = ["", *dict.fromkeys(_panel(one) for one in shown)]
    shown = sorted(shown, key=lambda one: order.index(_panel(one)))
    parts = []
    for panel, below in groupby(shown, _panel):
        parts.append(_table((panel or "option", "", ""), [_row(one) for one in below]))
    return "\n\n".join(parts)


def _row(option: TyperOption) -> tuple[str, str, str]:
    return _names(option), _kind(option), _cell(option.help) + _default(option)


def _word(argument: TyperArgument) -> str:
    """An argument in a usage line; in brackets where it may be left out."""
    word = argument.metavar or argument.name.upper()
    return word if argument.required or word.startswith("[") else f"[{word}]"


def _panel(option: TyperOption) -> str:
    return str(option.rich_help_panel or "")


def _names(option: TyperOption) -> str:
    return ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))


def _kind(option: TyperOption) -> str:
    if option.is_flag:
        return ""
    return _KINDS.get(getattr(option.type_descriptor, "annotation", str), "text")


def _default(option: TyperOption) -> str:
    told = option.show_default and not option.is_flag and option.default not in {None, ()}
    return f" Default: `{option.default}`." if told else ""


def http(schema: Json) -> str:
    """Every route of an OpenAPI document, with its parameters and fields."""
    operations = [
        (method, path, operation)
        for path, methods in _at(schema, "paths").items()
        for method, operation in _mapping(methods).items()
        if method in _METHODS
    ]
    parts = []
    for heading in (*(heading for heading, _ in _GROUPS), _OTHERS):
        parts.append(f"## {heading}")
        for method, path, operation in operations:
            if _group(path) == heading:
                parts += _route(schema, method, path, _mapping(operation))
    return "\n\n".join(part for part in parts if part)


def statuses(schema: Json) -> str:
    """The statuses that any route may return, as one table."""
    found: dict[str, str] = {}
    for methods in _at(schema, "paths").values():
        for operation in _mapping(methods).values():
            for status, response in _at(_mapping(operation), "responses").items():
                if status != "200":
                    found[status] = str(_mapping(response).get("description", ""))
    return _table(("status", ""), sorted(found.items()))


def _group(path: str) -> str:
    return next((name for name, starts in _GROUPS if path.startswith(starts)), _OTHERS)


def _route(schema: Json, method: str, path: str, operation: Json) -> Iterator[str]:
    yield f"### {method.upper()} {path}"
    yield _joined(str(operation.get("description", "")))
    parameters = [_mapping(one) for one in _list(operation.get("parameters"))]
    rows = [
        (f"`{one['name']}`", str(one["in"]), _type(schema, _at(one, "schema")))
        for one in parameters
    ]
    if rows:
        yield _table(("parameter", "in", "type"), rows)
    body = _content(operation.get("requestBody"))
    for shape in _list(body.get("anyOf")) or [body]:
        yield _fields(schema, "field", _mapping(shape))
    answer = _content(_at(operation, "responses").get("200"))
    yield _fields(schema, "in the response", _resolved(schema, answer))


def _fields(schema: Json, heading: str, shape: Json) -> str:
    required = _list(shape.get("required"))
    rows = [
        (f"`{name}`", _type(schema, _mapping(field)) + (", required" if name in required else ""))
        for name, field in _at(shape, "properties").items()
    ]
    return _table((heading, "type"), rows) if rows else ""


def _type(schema: Json, field: Json) -> str:
    """A field's type in words."""
    if "enum" in field:
        return " or ".join(f"`{one}`" for one in _list(field["enum"]))
    if "anyOf" in field:
        return " or ".join(_type(schema, _mapping(one)) for one in _list(field["anyOf"]))
    if "$ref" in field:
        resolved = _resolved(schema, field)
        return _type(schema, resolved) if "enum" in resolved else str(resolved.get("title"))
    if field.get("type") == "array":
        return f"list of {_type(schema, _at(field, 'items'))}"
    kind = field.get("type", "any")
    return " or ".join(map(str, _list(kind))) if isinstance(kind, list) else str(kind)


def _content(holder: object) -> Json:
    return _at(_at(_at(_mapping(holder), "content"), "application/json"), "schema")


def _resolved(schema: Json, shape: Json) -> Json:
    name = str(shape.get("$ref", "")).rpartition("/")[2]
    return _at(_at(_at(schema, "components"), "schemas"), name) if name else shape


def _at(mapping: Json, name: str) -> Json:
    return _mapping(mapping.get(name))


def _mapping(value: object) -> Json:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _joined(text: str) -> str:
    """Paragraphs of one line each."""
    paragraphs = re.split(r"\n\s*\n", text.strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = (headings, ["---"] * len(headings), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
