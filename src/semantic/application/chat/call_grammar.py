"""Grammars for structured output, in llguidance's Lark dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from semantic.domain.chat import AnswerFormat, Chat, JsonSchema, Tool
from semantic.domain.grammar import Grammar
from semantic.ports.chat import OBJECTS, CallForm, Headers, Marks

_dumps = partial(json.dumps, ensure_ascii=False)

_IN_REGEX = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
"""Characters that would end a regex in Lark, with their escapes."""

ANY_OBJECT: JsonSchema = {"type": "object"}

# Models write a line break or two between a mark and JSON; without a limit a degenerate model
# writes white space up to max_tokens.
_TERMINALS = r"""TEXT: /(.|\n)*/
WS: /[ \n\r\t]{0,4}/"""

_CHOSEN: Final = {"$number": "/[0-9]{1,3}/", "$id": "/[a-zA-Z0-9]{9}/"}
"""Regexes for the parts that the model chooses before a call's arguments."""

MOST_FORCED_CALLS = 16
"""The maximum number of calls in an answer that must contain calls."""

JSON_SPACE = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,8}"}
"""The schema option "x-guidance" that limits white space in JSON."""


@dataclass(frozen=True, slots=True)
class SpelledMark:
    """A mark for a grammar: the ids of special tokens, and texts between them."""

    text: str
    pieces: tuple[int | str, ...]

    @property
    def has_tokens(self) -> bool:
        """True if the mark has special tokens."""
        return any(isinstance(piece, int) for piece in self.pieces)

    @property
    def starts_with_token(self) -> bool:
        """True if the mark begins with a special token, which text never contains."""
        return bool(self.pieces) and isinstance(self.pieces[0], int)

    def tokens(self) -> str:
        """Return the mark in Lark."""
        return " ".join(
            f"<[{piece}]>" if isinstance(piece, int) else _dumps(piece) for piece in self.pieces
        )

    def lark(self) -> str:
        """Return a Lark rule for the mark's special tokens or their letters."""
        return f"({self.tokens()} | {_dumps(self.text)})" if self.has_tokens else self.tokens()


def as_text(mark: str) -> SpelledMark:
    return SpelledMark(mark, (mark,) if mark else ())


@dataclass(frozen=True, slots=True)
class CallLanguage:
    """How a model writes calls and reasoning."""

    marks: Marks
    thought: Marks | None = None
    form: CallForm = OBJECTS
    headers: Headers | None = None
    bare: bool = False
    spell: Callable[[str], SpelledMark] = as_text


def arguments_schema(tool: Tool) -> JsonSchema:
    """Return the schema of a call's arguments, without further properties if possible."""
    return closed({**tool.parameters, **ANY_OBJECT})


def call_grammar(
    chat: Chat,
    language: CallLanguage,
    schema_of: Callable[[Tool], JsonSchema],
    *,
    after: str | None = None,
) -> Grammar | None:
    """Return the grammar of an answer to `chat`, or None. `after` is the end mark of reasoning
    that the prompt has opened."""
    tools = _callable(chat)
    forced = bool(tools) and chat.tool_choice.mode == "required"
    strict = any(tool.strict for tool in tools)
    answer = chat.answer_format
    if not forced and answer is None and not strict:
        return None
    is_plain = after is None and language.thought is None and language.headers is None
    if answer is not None and not tools and is_plain:
        return answer_grammar(answer)
    # As in OpenAI's API, a named tool is called exactly once.
    many = chat.parallel_tool_calls and chat.tool_choice.name is None
    # A call ends reasoning that the prompt has opened: the grammar must also bind inside reasoning.
    opened = after is not None and bool(tools) and language.thought is not None
    rules = _Rules(language, many=many, opened=opened)
    if forced:
        rules.add("start", "lead calls | unclosed" if opened else "lead calls")
    elif answer is None:
        rules.add("start", "lead mixed | mixed" if opened else "lead mixed")
        rules.mixed()
    else:
        start = "lead (calls | head answer)" if tools else "lead head answer"
        rules.add("start", f"{start} | unclosed" if opened else start)
        rules.add("answer", _answer(answer))
    rules.lead(thinks=after is None)
    if tools:
        rules.calls(tools, schema_of)
    return Grammar("lark", rules.text(), None if opened else after)


def answer_grammar(wanted: AnswerFormat) -> Grammar:
    """Return the grammar of an answer in the format `wanted`."""
    if wanted.grammar is None:
        return Grammar("json_schema", json.dumps(wanted.schema or ANY_OBJECT))
    return Grammar("lark", f"start: answer\nanswer: {_answer(wanted)}\n")


def regex_grammar(regex: str) -> str:
    """Return a Lark grammar of the texts that `regex` matches in full."""
    parts = re.findall(r"\\.|[^\\]|\\", regex, re.DOTALL)
    written = "".join(_IN_REGEX.get(part, part) for part in parts)
    return f"start: /{written}/"


def choice_grammar(choices: Sequence[str]) -> str:
    """Return a Lark grammar of the texts `choices`."""
    return f"start: {' | '.join(map(_dumps, choices))}"


def enforced_schemas(chat: Chat) -> list[JsonSchema]:
    """Return the schemas of the answer's format and of its calls."""
    tools = _callable(chat)
    wanted = chat.answer_format
    answer = [] if wanted is None or wanted.grammar else [wanted.schema or ANY_OBJECT]
    is_free = wanted is None and chat.tool_choice.mode != "required"
    if is_free and not any(tool.strict for tool in tools):
        return []
    return [*answer, *map(arguments_schema, tools)]


def _callable(chat: Chat) -> Sequence[Tool]:
    if chat.tool_choice.mode == "none":
        return ()
    name = chat.tool_choice.name
    return tuple(tool for tool in chat.tools if name in (None, tool.name))


def _answer(wanted: AnswerFormat) -> str:
    if wanted.grammar is not None:
        return f"%lark {{\n{wanted.grammar}\n}}"
    return _json(wanted.schema or ANY_OBJECT)


def _json(schema: JsonSchema) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_SPACE})}"


class _Rules:
    def __init__(self, language: CallLanguage, *, many: bool, opened: bool) -> None:
        self._language = language
        self._headers = language.headers
        self._spell = language.spell
        self._many = many
        self._opened = opened
        self._lines: list[str] = []

    def add(self, name: str, rule: str) -> None:
        self._lines.append(f"{name}: {rule}")

    def text(self) -> str:
        return "\n".join([*self._lines, _TERMINALS]) + "\n"

    def lead(self, *, thinks: bool) -> None:
        headers, marks = self._headers, self._language.thought
        if headers is not None:
            self.add("head", self._lark(headers.answer))
        else:
            self.add("head", '""')
        if marks is None or not (thinks or self._opened):
            self.add("lead", "WS")
            return
        following = "" if headers is None else headers.following
        start, end = self._spell(marks.start), self._spell(marks.end + following)
        self.add("lead", "thought_rest WS" if self._opened else "WS | WS thought WS")
        self.add("thought", f"{start.lark()} thought_rest")
        if end.starts_with_token:
            self.add("thought_rest", f"TEXT {end.lark()}")
        else:
            self.add("thought_rest[lazy]", f"TEXT {_dumps(end.text)}")

    def mixed(self) -> None:
        # The text ends where a call's mark begins.
        if self._headers is not None:
            self.add("mixed", "head TEXT | calls")
            return
        free = "tagged* TEXT" if self._many else "TEXT | tagged"
        if self._language.bare:
            # Text that could be a call without its mark must be a call.
            self.add("mixed", "calls | (/[^\\[{ \\n\\r\\t]/ free)?")
            self.add("free", free)
        else:
            self.add("mixed", free)
        if not self._opened:
            self._tagged()

    def _tagged(self) -> None:
        start = self._spell(self._language.marks.start)
        body = f"body {self._end()}"
        by_token = f"TEXT {start.tokens()} {body} | " if start.starts_with_token else ""
        self.add("tagged", f"{by_token}call_start {body}")
        self.add("call_start[lazy]", f"TEXT {_dumps(start.text)}")

    def calls(self, tools: Sequence[Tool], schema_of: Callable[[Tool], JsonSchema]) -> None:
        language, form = self._language, self._language.form
        many = self._many and self._headers is None
        more = f"({{}}){{{{0,{MOST_FORCED_CALLS - 1}}}}}" if many else ""
        before = "" if self._headers else "WS"
        after = before if language.marks.end else ""
        bodies = {
            "marked": f"{before} call {after}",
            "within": f"WS call {more.format('WS call')} WS",
            "listed": f"""WS "[" call {more.format('", " call')} "]" {after}""",
        }
        others = more.format("WS one") if form.several == "marked" else ""
        first = f"(one | {bodies['marked']})" if language.bare else "one"
        remark = ""
        if self._headers is not None:
            end = self._lark(f"{self._headers.ends[0]}{self._headers.following}")
            remark = f"({self._lark(self._headers.remark)} TEXT {end})?"
        self.add("calls", f"head? {remark} {first} {others}")
        if self._opened:
            self.add("unclosed", f"tagged {others}")
            self._tagged()
        self.add("one", f"{self._lark(language.marks.start)} body {self._end()}")
        self.add("body", bodies[form.several])
        self.add("call", " | ".join(f"call_{i}" for i in range(len(tools))))
        for i, tool in enumerate(tools):
            before, after = self._before(tool.name), self._lark(form.after)
            self.add(f"call_{i}", f"{before} {_json(schema_of(tool))} {after}")

    def _before(self, name: str) -> str:
        given = {"$name": name, "$quoted": _dumps(name)}
        pieces = re.split(r"(\$number|\$id)", self._language.form.before)
        return " ".join(
            _CHOSEN[piece] if piece in _CHOSEN else self._lark(_filled(piece, given))
            for piece in pieces
        )

    def _end(self) -> str:
        return self._lark(self._language.marks.end)

    def _lark(self, text: str) -> str:
        return self._spell(text).lark() if text else ""


def _filled(text: str, given: Mapping[str, str]) -> str:
    return re.sub(r"\$(name|quoted)", lambda found: given[found[0]], text)


_COMBINING = frozenset(
    {
        "$ref", "$dynamicRef", "additionalProperties", "allOf", "anyOf", "dependentSchemas", "else",
        "if", "minProperties", "not", "oneOf", "patternProperties", "propertyNames", "then",
        "unevaluatedProperties",
    }
)  # fmt: skip
"""Keywords of a schema that, besides `properties`, decide an object's contents."""


def closed(schema: JsonSchema) -> JsonSchema:
    """Return `schema` with objects that allow only the listed properties. A model may add further
    properties without end."""
    found = dict(schema)
    properties = found.get("properties")
    if isinstance(properties, Mapping):
        found["properties"] = {name: _closed_value(value) for name, value in properties.items()}
        if properties and not _COMBINING & found.keys() and _names_all(found, properties):
            found["additionalProperties"] = False
    if "items" in found:
        found["items"] = _closed_value(found["items"])
    return found


def _names_all(schema: JsonSchema, properties: Mapping[str, object]) -> bool:
    required = schema.get("required", ())
    return isinstance(required, list | tuple) and all(name in properties for name in required)


def _closed_value(value: object) -> object:
    return closed(value) if isinstance(value, Mapping) else value
