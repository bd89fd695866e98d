"""A grammar's text as llguidance takes it, or what is wrong with it.

Knows texts and their limits; neither tokens nor what compiling shows.
"""

from __future__ import annotations

import json
from typing import NoReturn, cast

from llguidance import LLMatcher

from semantic.application.chat.call_grammar import JSON_SPACE
from semantic.domain.errors import InvalidRequestError
from semantic.domain.grammar import Grammar

_LONGEST = 1 << 18
"""Characters. Compiling follows nested input by recursion: so long a text fits `deep_stack`."""
_LONGEST_MARK = 256


def grammar_source(grammar: Grammar) -> str:
    """What llguidance compiles. Raises InvalidRequestError."""
    if len(grammar.text) > _LONGEST:
        raise InvalidRequestError(
            f"grammar: expected at most {_LONGEST} characters, got {len(grammar.text)}"
        )
    if grammar.after is not None and not 0 < len(grammar.after) <= _LONGEST_MARK:
        raise InvalidRequestError(
            f"grammar: `after` must have 1 to {_LONGEST_MARK} characters, got {len(grammar.after)}"
        )
    for text in (grammar.text, grammar.after or ""):
        _require_unicode(text)
    if grammar.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(_schema(grammar.text))
    return LLMatcher.grammar_from_lark(grammar.text)


def _schema(text: str) -> str:
    """The schema, written again: what llguidance gets is one JSON value and nothing beside it."""
    try:
        schema: object = json.loads(text, parse_constant=_refuse_constant)
        if isinstance(schema, dict):
            schema = {**cast(dict[str, object], schema), "x-guidance": JSON_SPACE}
        return json.dumps(schema)
    except RecursionError as error:
        raise InvalidRequestError("json schema: nested too deeply") from error
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"json schema: not JSON: {error}") from error
    except ValueError as error:
        raise InvalidRequestError(f"json schema: {error}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"grammar: not valid Unicode: {error.reason}") from error
