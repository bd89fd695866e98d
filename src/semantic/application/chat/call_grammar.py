"""Grammars for answers that must be JSON or must hold tool calls, in llguidance's Lark dialect.

Knows how a chat's wishes become a language, and how a mark is spelled when it is told so. Knows
no tokenizer, and cannot tell whether a schema can be enforced.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from semantic.application.chat.closed_schema import closed
from semantic.domain.chat import Chat, JsonSchema, Tool
from semantic.domain.grammar import Grammar

_dumps = partial(json.dumps, ensure_ascii=False)

ANY_OBJECT: JsonSchema = {"type": "object"}

# Free text and white space. What a model writes between a mark and JSON is a line break or two;
# without a limit a model that is at a loss writes white space until it has no tokens left.
_TERMINALS = r"""TEXT: /(.|\n)*/
WS: /[ \n\r\t]{0,4}/"""

JSON_SPACE = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,8}"}
"""What may stand between the parts of JSON, where a model may indent: a schema's "x-guidance". A
model that writes only white space must come to an end."""


@dataclass(frozen=True, slots=True)
class SpelledMark:
    """A mark in pieces: ids of tokens that are no text to a grammar, and texts between them."""

    text: str
    pieces: tuple[int | str, ...]

    @property
    def has_tokens(self) -> bool:
        """Then it may also be written letter by letter, and reads the same."""
        return any(isinstance(piece, int) for piece in self.pieces)

    @property
    def starts_with_token(self) -> bool:
        """Free text before it ends by itself: no text holds that token."""
        return bool(self.pieces) and isinstance(self.pieces[0], int)

    def tokens(self) -> str:
        """The mark in Lark, in its pieces."""
        return " ".join(
            f"<[{piece}]>" if isinstance(piece, int) else _dumps(piece) for piece in self.pieces
        )

    def lark(self) -> str:
        """The mark in Lark, however it may be written."""
        return f"({self.tokens()} | {_dumps(self.text)})" if self.has_tokens else self.tokens()


@dataclass(frozen=True, slots=True)
class CallLanguage:
    """How calls are marked, and how thoughts are when the answer may begin with one."""

    start: SpelledMark
    end: SpelledMark
    thought: tuple[SpelledMark, SpelledMark] | None = None


def arguments_schema(tool: Tool) -> JsonSchema:
    """The schema of a call's arguments: those of `tool`, always an object, which is closed where
    that is plain."""
    return closed({**tool.parameters, **ANY_OBJECT})


def call_grammar(
    chat: Chat,
    language: CallLanguage,
    schema_of: Callable[[Tool], JsonSchema],
    *,
    after: str | None = None,
) -> Grammar | None:
    """The language of an answer to `chat`; None when it is free.

    `schema_of` gives what a call's arguments must fit. `after` is the end of a thought that the
    prompt opened. A forced call wins over an answer format: the answer is that call.
    """
    tools = _callable(chat)
    forced = bool(tools) and chat.tool_choice.mode == "required"
    strict = any(tool.strict for tool in tools)
    answer = None if chat.answer_format is None else (chat.answer_format.schema or ANY_OBJECT)
    if not forced and answer is None and not strict:
        return None
    if answer is not None and not tools and after is None and language.thought is None:
        return Grammar("json_schema", json.dumps(answer))
    rules = _Rules(language, many=chat.parallel_tool_calls)
    if forced:
        rules.add("start", "lead calls")
    elif answer is None:
        rules.add("start", "lead mixed")
        rules.mixed()
    else:
        rules.add("start", "lead (calls | answer)" if tools else "lead answer")
        rules.add("answer", _json(answer))
    rules.lead(thinks=after is None)
    if tools:
        rules.calls(tools, schema_of)
    return Grammar("lark", rules.text(), after)


def _callable(chat: Chat) -> Sequence[Tool]:
    """The tools that an answer may call."""
    if chat.tool_choice.mode == "none":
        return ()
    name = chat.tool_choice.name
    return tuple(tool for tool in chat.tools if name in (None, tool.name))


def _json(schema: JsonSchema) -> str:
    """JSON that fits `schema`, in Lark. What a schema says to the grammar's engine is left out."""
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_SPACE})}"


class _Rules:
    """Rules of one grammar, gathered."""

    def __init__(self, language: CallLanguage, *, many: bool) -> None:
        self._language = language
        self._many = many
        self._lines: list[str] = []

    def add(self, name: str, rule: str) -> None:
        self._lines.append(f"{name}: {rule}")

    def text(self) -> str:
        return "\n".join([*self._lines, _TERMINALS]) + "\n"

    def lead(self, *, thinks: bool) -> None:
        """What may stand before the answer: white space, and a thought where one is possible."""
        if self._language.thought is None or not thinks:
            self.add("lead", "WS")
            return
        start, end = self._language.thought
        self.add("lead", "WS | WS thought WS")
        if end.starts_with_token:
            self.add("thought", f"{start.lark()} TEXT {end.lark()}")
        else:
            self.add("thought", f"{start.lark()} thought_rest")
            self.add("thought_rest[lazy]", f"TEXT {_dumps(end.text)}")

    def mixed(self) -> None:
        """Free text in which every call fits: the text ends where a call's mark begins."""
        self.add("mixed", "tagged* TEXT" if self._many else "TEXT | tagged")
        start, body = self._language.start, f"body {self._end()}"
        by_token = f"TEXT {start.tokens()} {body} | " if start.starts_with_token else ""
        self.add("tagged", f"{by_token}opening {body}")
        self.add("opening[lazy]", f"TEXT {_dumps(start.text)}")

    def calls(self, tools: Sequence[Tool], schema_of: Callable[[Tool], JsonSchema]) -> None:
        """One call between its marks or, where several are allowed, one or more."""
        self.add("calls", "one (WS one)*" if self._many else "one")
        self.add("one", f"{self._language.start.lark()} body {self._end()}")
        if self._language.end.text or not self._many:
            self.add("body", "WS call WS" if self._language.end.text else "WS call")
        else:
            # Nothing ends such a call but the answer, so several of them are one list.
            self.add("body", 'WS "[" call (", " call)* "]"')
        self.add("call", " | ".join(f"call_{i}" for i in range(len(tools))))
        for i, tool in enumerate(tools):
            head = f'{{"name": {_dumps(tool.name)}, "arguments": '
            self.add(f"call_{i}", f'{_dumps(head)} {_json(schema_of(tool))} "}}"')

    def _end(self) -> str:
        return self._language.end.lark() if self._language.end.text else ""
