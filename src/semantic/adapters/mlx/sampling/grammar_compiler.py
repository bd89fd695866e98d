"""Structured output: JSON schemas and Lark grammars compiled for constrained decoding."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn, cast

from cachetools import LRUCache, cachedmethod
from llguidance import LLMatcher

from semantic.adapters.mlx.sampling.grammar_child import on_deep_stack, start
from semantic.adapters.mlx.sampling.token_mask import FreePrefix, GrammarMask, Vocabulary
from semantic.application.chat.call_grammar import JSON_SPACE
from semantic.application.chat.grammar_checks import Verdicts
from semantic.domain.errors import InvalidRequestError, UncheckedGrammarError
from semantic.domain.fair_share import FairLru
from semantic.domain.grammar import Grammar
from semantic.domain.identity import digest

_MAX_COMPILED = 128
"""The total weight of grammars to cache. Most take 1 or 2 MB."""
_WEIGHT_PER_S = 32
_MAX_WEIGHT = _MAX_COMPILED // 2
_QUICK_S, _MAX_QUICK = 0.05, 4096
"""The maximum CPU seconds for a quick grammar, and the number of verdicts to remember."""
_MAX_SCHEMA_ERRORS = 64
_MAX_PREFIXES = 8
_MAX_GRAMMAR = 1 << 18
"""The maximum number of characters in a grammar. The stack of `on_deep_stack` limits it."""
_MAX_MARK = 256
_MAX_MESSAGE = 200


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A grammar in its start state. Each sequence gets a copy of `matcher`."""

    matcher: LLMatcher
    prefix: FreePrefix | None


class GrammarCompiler:
    """Compiles the grammars of one model, with an LRU cache. Thread-safe."""

    def __init__(self, tokenizer: object | None, eos: Collection[int], vocab_size: int) -> None:
        """`tokenizer` is a Hugging Face tokenizer or mlx-lm's wrapper; with None, the compiler
        refuses every grammar. `vocab_size` is the model's number of logits."""
        self._tokenizer = tokenizer
        self._eos = frozenset(eos)
        self._vocab_size = vocab_size
        self._compiled: FairLru[Grammar, _Compiled] = FairLru(_MAX_COMPILED)
        self._quick: FairLru[bytes, bool] = FairLru(_MAX_QUICK)
        self._schema_errors: FairLru[str, str] = FairLru(_MAX_SCHEMA_ERRORS)
        self._prefixes: LRUCache[Hashable, FreePrefix] = LRUCache(_MAX_PREFIXES)
        self._lock = threading.Lock()
        self._verdicts: Verdicts | None = None

    def guard(self, verdicts: Verdicts) -> None:
        """Accept only cheap grammars and grammars that `verdicts` accepts. For other grammars,
        raise the verdict's error, or UncheckedGrammarError."""
        self._verdicts = verdicts

    def schema_error(self, schema: str, tenant: str = "") -> str:
        """Return why the engine cannot enforce a tenant's JSON schema; empty if it can."""
        grammar = Grammar("json_schema", schema, tenant=tenant)
        if self._verdicts is None or is_cheap(schema):
            return self._schema_error(grammar)
        problem = self._verdicts.problem(grammar)
        if problem is None:
            raise UncheckedGrammarError([grammar], compiles=False)
        return problem

    def require_checked(self, schemas: Sequence[str], tenant: str = "") -> None:
        """Raise UncheckedGrammarError with the tenant's `schemas` that still need a check."""
        if self._verdicts is None:
            return
        expensive = [schema for schema in schemas if not is_cheap(schema)]
        grammars = [Grammar("json_schema", schema, tenant=tenant) for schema in expensive]
        unknown = [one for one in grammars if self._verdicts.problem(one) is None]
        if unknown:
            raise UncheckedGrammarError(unknown, compiles=False)

    def require_enforceable(self, grammar: Grammar) -> None:
        """Raise InvalidRequestError unless the engine can enforce a client's `grammar`. Raises
        UncheckedGrammarError if another process must check the grammar first."""
        if self._verdicts is None:
            self.check(grammar)
            return
        problem = self._verdicts.problem(grammar)
        if problem is None:
            raise UncheckedGrammarError([grammar], compiles=False)
        if problem:
            raise InvalidRequestError(problem)

    def check(self, grammar: Grammar) -> None:
        """Compile `grammar` and compute its first masks.

        Raises InvalidRequestError if the engine cannot enforce it, and UncheckedGrammarError if it
        first needs a check.
        """
        self._ready(grammar)

    def compile(self, grammar: Grammar) -> None:
        """Like `check`, but for a checked grammar, even if the compilation takes long."""
        self._compile(grammar)

    def mask(self, grammar: Grammar, n_prompt: int) -> GrammarMask:
        """Return a logits processor for an answer after `n_prompt` tokens. See `check` for
        errors."""
        compiled = self._ready(grammar)
        matcher = compiled.matcher.deep_copy()
        return GrammarMask(self.vocabulary, matcher, compiled.prefix, n_prompt)

    def _ready(self, grammar: Grammar) -> _Compiled:
        """Return the compiled `grammar`. Compiles only a quick one, as requests wait for this
        thread."""
        with self._lock:
            found = self._compiled.get(grammar.tenant, grammar)
            is_quick = self._quick.get(grammar.tenant, _key(grammar)) is True
        if found is not None:
            return found
        if self._verdicts is not None and not is_cheap(grammar.text):
            problem = self._verdicts.problem(grammar)
            if problem:
                raise InvalidRequestError(problem)
            if problem is None or not is_quick:
                raise UncheckedGrammarError([grammar], compiles=True)
        return self._compile(grammar)

    def _compile(self, grammar: Grammar) -> _Compiled:
        source = grammar_source(grammar)
        vocabulary = self.vocabulary
        matcher, seconds = on_deep_stack(lambda: _timed_start(vocabulary, source))
        if matcher.is_error():
            raise InvalidRequestError(f"{name_of(grammar)}: {error_line(matcher.get_error())}")
        prefix = None if grammar.after is None else self._prefix(grammar.after)
        weight = min(_MAX_WEIGHT, 1 + int(seconds * _WEIGHT_PER_S))
        compiled = _Compiled(matcher, prefix)
        with self._lock:
            if seconds <= _QUICK_S:
                self._quick.put(grammar.tenant, _key(grammar), True)
            self._compiled.put(grammar.tenant, grammar, compiled, weight)
        return compiled

    def _schema_error(self, grammar: Grammar) -> str:
        with self._lock:
            known = self._schema_errors.get(grammar.tenant, grammar.text)
        if known is not None:
            return known
        problem = schema_error(grammar.text)
        with self._lock:
            self._schema_errors.put(grammar.tenant, grammar.text, problem)
        return problem

    @cachedmethod(lambda self: self._prefixes, lock=lambda self: self._lock)
    def _prefix(self, mark: str) -> FreePrefix:
        return FreePrefix(self.vocabulary, mark)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens that masks cover. Raises InvalidRequestError if the tokenizer is unusable."""
        if self._tokenizer is None:
            raise InvalidRequestError("grammar: not available, because this model has no tokenizer")
        return Vocabulary(self._tokenizer, self._eos, self._vocab_size)


_CHEAP = 1024
"""The maximum number of characters in a cheap grammar."""
_EXPENSIVE = re.compile(
    r"""multipleOf|[pP]attern|allOf|anyOf|oneOf|[rR]ef"|format|x-guidance|%regex|%lark"""
    r"""|additionalProperties"\s*:\s*\{|\\u00[0-7]"""
)
_OWN_OPTIONS = json.dumps({"x-guidance": JSON_SPACE})[1:-1]


def is_cheap(text: str) -> bool:
    """Return whether a JSON schema, or our own grammar with schemas in it, is cheap to compile.

    Judges by the text alone. A short text is expensive only if it multiplies parts, as
    `multipleOf`, `allOf` and references do. A client's own grammar (`%lark`) is never cheap.
    """
    return len(text) <= _CHEAP and not _EXPENSIVE.search(text.replace(_OWN_OPTIONS, ""))


def _key(grammar: Grammar) -> bytes:
    return digest("quick-grammar-v1", grammar.text.encode("utf-8", "replace"))


def name_of(grammar: Grammar) -> str:
    """Return the name of the grammar's kind for error messages."""
    return grammar.kind.replace("_", " ")


def grammar_source(grammar: Grammar) -> str:
    """Return `grammar` in llguidance's own notation. Raises InvalidRequestError if it is too long
    or malformed."""
    if len(grammar.text) > _MAX_GRAMMAR:
        raise InvalidRequestError(
            f"grammar: expected at most {_MAX_GRAMMAR} characters, got {len(grammar.text)}"
        )
    if grammar.after is not None and not 0 < len(grammar.after) <= _MAX_MARK:
        raise InvalidRequestError(
            f"grammar: `after` must have 1 to {_MAX_MARK} characters, got {len(grammar.after)}"
        )
    for text in (grammar.text, grammar.after or ""):
        _require_unicode(text)
    if grammar.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(_normalized_schema(grammar.text))
    return LLMatcher.grammar_from_lark(grammar.text)


def schema_error(schema: str) -> str:
    """Return why the engine cannot enforce the JSON schema in `schema`; empty if it can."""
    try:
        source = grammar_source(Grammar("json_schema", schema))
    except InvalidRequestError as error:
        return str(error)
    is_error, messages = on_deep_stack(lambda: LLMatcher.validate_grammar_with_warnings(source))
    return "; ".join(messages).strip() if is_error else ""


def _timed_start(vocabulary: Vocabulary, source: str) -> tuple[LLMatcher, float]:
    before = time.thread_time()
    matcher = start(vocabulary.trie, source)
    return matcher, time.thread_time() - before


def error_line(report: str) -> str:
    """Return the line in llguidance's report that names the problem."""
    lines = [line.strip() for line in report.strip().splitlines()]
    errors = [line for line in lines if line.startswith("error:")] or lines or ["cannot compile it"]
    return errors[0][:_MAX_MESSAGE]


def _normalized_schema(text: str) -> str:
    """Return the text of a schema so that llguidance gets exactly one JSON value."""
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
