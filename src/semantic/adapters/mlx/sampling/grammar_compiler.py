"""Structured output: JSON schemas and Lark grammars compiled for constrained decoding.

llguidance compiles a grammar to an automaton over the model's tokens. Knows the tokenizer; neither
sequences nor the model.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Generic, NoReturn, TypeVar, cast

from cachetools import LRUCache, cachedmethod
from llguidance import LLMatcher, LLParserLimits

from semantic.adapters.mlx.sampling.token_mask import FreePrefix, GrammarMask, Vocabulary
from semantic.application.chat.call_grammar import JSON_SPACE
from semantic.domain.errors import InvalidRequestError
from semantic.domain.grammar import Grammar

_MAX_COMPILED = 32
"""Cached grammars; one takes a megabyte or more."""
_MAX_PREFIXES = 8
_MAX_GRAMMAR = 1 << 18
"""Characters. Compilation recurses into nested input: this much fits the stack of
`_on_deep_stack`."""
_MAX_MARK = 256
_MAX_MESSAGE = 200
_STACK = 512 << 20
"""Bytes of address space; memory is committed only as far as the stack grows."""
_LIMITS = LLParserLimits(verbose_errors=False)
"""llguidance's defaults: they bound the cost of compiling and of a step. Its verbose errors would
quote the whole grammar."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A grammar in its start state; each sequence gets a copy of `matcher`."""

    matcher: LLMatcher
    prefix: FreePrefix | None


class GrammarCompiler:
    """Compiles the grammars of one model, with an LRU cache. Any thread may use it."""

    def __init__(self, tokenizer: object | None, eos: Collection[int], vocab_size: int) -> None:
        """`tokenizer` is a Hugging Face tokenizer or mlx-lm's wrapper of one; without it every
        grammar is refused. `vocab_size` is the number of logits of the model.
        """
        self._tokenizer = tokenizer
        self._eos = frozenset(eos)
        self._vocab_size = vocab_size
        self._compiled: LRUCache[Hashable, _Compiled] = LRUCache(_MAX_COMPILED)
        self._prefixes: LRUCache[Hashable, FreePrefix] = LRUCache(_MAX_PREFIXES)
        self._lock = threading.Lock()

    def check(self, grammar: Grammar) -> None:
        """Compile `grammar` and compute its first masks.

        Raises InvalidRequestError, naming the problem, if it cannot be enforced.
        """
        self._compile(grammar)

    def mask(self, grammar: Grammar, n_prompt: int) -> GrammarMask:
        """A logits processor for one sequence, whose answer begins after `n_prompt` tokens.

        Raises InvalidRequestError as `check` does.
        """
        compiled = self._compile(grammar)
        matcher = compiled.matcher.deep_copy()
        return GrammarMask(self._vocabulary, matcher, compiled.prefix, n_prompt)

    @cachedmethod(lambda self: self._compiled, lock=lambda self: self._lock)
    def _compile(self, grammar: Grammar) -> _Compiled:
        source = grammar_source(grammar)
        vocabulary = self._vocabulary
        matcher = _on_deep_stack(lambda: _start(vocabulary, source))
        if matcher.is_error():
            name = grammar.kind.replace("_", " ")
            raise InvalidRequestError(f"{name}: {_first_error(matcher.get_error())}")
        return _Compiled(matcher, None if grammar.after is None else self._prefix(grammar.after))

    @cachedmethod(lambda self: self._prefixes, lock=lambda self: self._lock)
    def _prefix(self, mark: str) -> FreePrefix:
        return FreePrefix(self._vocabulary, mark)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        if self._tokenizer is None:
            raise InvalidRequestError("grammar: this model has no tokenizer to enforce one with")
        return Vocabulary(self._tokenizer, self._eos, self._vocab_size)


def grammar_source(grammar: Grammar) -> str:
    """`grammar` in llguidance's own notation.

    Raises InvalidRequestError for text that is too long, not Unicode or not JSON.
    """
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


@lru_cache(maxsize=64)
def schema_error(schema: str) -> str:
    """Why the JSON schema in `schema` cannot be enforced; empty if it can."""
    try:
        source = grammar_source(Grammar("json_schema", schema))
    except InvalidRequestError as error:
        return str(error)
    is_error, messages = _on_deep_stack(lambda: LLMatcher.validate_grammar_with_warnings(source))
    return "; ".join(messages).strip() if is_error else ""


def _start(vocabulary: Vocabulary, source: str) -> LLMatcher:
    """A matcher whose first mask is computed, or one in an error state.

    Takes two steps, so that a grammar that exceeds the limits at once fails here and not while a
    batch waits for it.
    """
    matcher = LLMatcher(vocabulary.trie, source, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        return matcher
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    if matcher.is_error() or not mask:
        return matcher
    trial = matcher.deep_copy()
    trial.consume_token((mask & -mask).bit_length() - 1)
    trial.compute_bitmask()
    return trial if trial.is_error() else matcher


def _first_error(report: str) -> str:
    """The line of llguidance's report that names the problem."""
    lines = [line.strip() for line in report.strip().splitlines()]
    errors = (
        [line for line in lines if line.startswith("error:")] or lines or ["cannot be compiled"]
    )
    return errors[0][:_MAX_MESSAGE]


def _normalized_schema(text: str) -> str:
    """The schema parsed and written again, so that llguidance gets exactly one JSON value."""
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


# llguidance recurses into nested input, and a stack overflow in native code ends the process.
# Hence its compiler runs on a thread with a stack large enough for `_MAX_GRAMMAR`.

Result = TypeVar("Result")

_stack_size_lock = threading.Lock()


class _Call(threading.Thread, Generic[Result]):
    def __init__(self, function: Callable[[], Result]) -> None:
        super().__init__(name="deep-stack", daemon=True)
        self._function = function
        self.results: list[Result] = []

    def run(self) -> None:
        self.results.append(self._function())


def _on_deep_stack(function: Callable[[], Result]) -> Result:
    """What `function` returns. It must not raise."""
    call = _Call(function)
    with _stack_size_lock:  # the size is global: it applies to any thread that starts meanwhile
        before = threading.stack_size(_STACK)
        try:
            call.start()
        finally:
            threading.stack_size(before)
    call.join()
    return call.results[0]
