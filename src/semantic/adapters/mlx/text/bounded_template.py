"""Limits on time and size for rendering chat templates, which come with downloaded models.

Replaces transformers' Jinja environment.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from functools import wraps
from string import Formatter
from typing import NamedTuple, TypeAlias, TypeVar, cast

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import generate_lorem_ipsum
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils

from semantic.domain.errors import InvalidRequestError

T = TypeVar("T")

_SECONDS = 10.0
"""The maximum CPU seconds for a rendering. A chat of a million tokens takes less than one."""
_CHARACTERS = 1 << 26
"""The maximum number of characters in one value, or in the whole text."""
_MADE = 1 << 28
"""The maximum number of characters in all values that a template makes."""
_OBJECT, _REFERENCE = 64, 8
"""The number of characters to count for a new part of a list, and for a reused part."""
_LARGEST_NUMBER = 1 << 24
"""The largest number that a template may pass to a function or filter."""
_LARGEST_BITS = 1 << 12
_TURNS_PER_LOOK = 256
_PARTS_PER_LOOK = 1 << 16
_WIDTH = re.compile(r"\d{7}|%[^a-zA-Z%]*\*")
"""Matches a format whose width is too large, or is itself an argument."""
_FORMATS = frozenset({"format", "format_map"})
_TEXTUAL = _FORMATS | {
    "capitalize", "center", "escape", "forceescape", "indent", "lower", "mark_safe", "pprint",
    "replace", "soft_str", "striptags", "title", "trim", "truncate", "upper", "urlencode", "urlize",
    "wordcount", "wordwrap", "xmlattr",
}  # fmt: skip
"""Functions and filters that turn their arguments into text."""


_LITERALS = (nodes.List, nodes.Tuple, nodes.Dict)
_WITH_PARTS = (nodes.TemplateData, *_LITERALS)
_CONTAINERS = (dict, list, tuple, set, frozenset)
Sliceable: TypeAlias = str | list[object] | tuple[object, ...]


class TemplateLimitError(InvalidRequestError):
    """A template took too long or made too much text."""


class _Budget(threading.local):
    """The time and the characters that the rendering on this thread has used."""

    ends: float | None = None
    turns = 0
    characters = 0
    made = 0


_budget = _Budget()


@contextmanager
def bounded_rendering() -> Iterator[None]:
    """In the `with` block, rendering on this thread raises TemplateLimitError beyond a limit."""
    _budget.turns = _budget.characters = _budget.made = 0
    _budget.ends = time.thread_time() + _SECONDS
    try:
        yield
    except MemoryError as error:
        raise TemplateLimitError("the chat template needs too much memory") from error
    finally:
        _budget.ends = None


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with limits on each value and on the rendering."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **{"finalize": _count, **options})
        self._own = (self.turn, self.concatenated, self.sliced)
        self.filters = _Filters(self.filters)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        bounded = cast(nodes.Template, _Counting().visit(template))
        bounded.set_environment(self)
        return bounded

    def call(self, context: Context, called: object, /, *args: object, **kwargs: object) -> object:
        if called in self._own:
            return cast(Callable[..., object], called)(*args)
        owner, given = _owner(called), (*args, *kwargs.values())
        # Numbers given to macros, objects and lists may come from a chat, so any value is allowed.
        counts = called is generate_lorem_ipsum or called is safe_range
        if counts or isinstance(owner, str | bytes | int | float):
            _check_numbers(called, given)
        _check_arguments(called, owner, given)
        if isinstance(owner, str) and _name(called) == "join":
            args = tuple(_counted(one, len(owner)) for one in args)
        return _made(super().call(context, called, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        _check_operands(operator, left, right)
        return _made(super().call_binop(context, operator, left, right), _REFERENCE)

    def sliced(self, value: Sliceable, *bounds: int | None) -> object:
        return _made(value[slice(*bounds)], _REFERENCE)

    def turn(self, n_characters: int, n_parts: int) -> str:
        """Count an iteration of a loop or a call of a macro, with its fixed text and its lists."""
        if _budget.ends is not None:
            _budget.turns += 1
            _add(n_characters)
            _use(_OBJECT + _REFERENCE * n_parts)
            if _budget.turns % _TURNS_PER_LOOK == 0:
                _check_time()
        return ""

    def concatenated(self, *values: object) -> str:
        """Return the texts of `values`, one after the other."""
        _check_size(sum(_measure(value).characters for value in values))
        texts = [str(value) for value in values]
        _check_size(sum(map(len, texts)))
        return _made("".join(texts))


class _Counting(NodeTransformer):
    """Changes a template so that it counts each iteration of a loop and each call of a macro."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - the visitor's names
        self.generic_visit(node)
        node.body.insert(0, _turn(node.body, node.lineno))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, _turn(node.body, node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _call("concatenated", node.nodes, node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        given = [nodes.Const(None) if one is None else one for one in bounds]
        return _call("sliced", [node.node, *given], node.lineno)


def _turn(body: list[nodes.Node], line: int) -> nodes.Node:
    own = [data for node in body for data in (node, *node.find_all(_WITH_PARTS))]
    n_characters = sum(len(data.data) for data in own if isinstance(data, nodes.TemplateData))
    parts = sum(len(data.items) for data in own if isinstance(data, _LITERALS))
    counted = _call("turn", [nodes.Const(n_characters), nodes.Const(parts)], line)
    return nodes.ExprStmt(counted).set_lineno(line)


def _call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Expr:
    called = nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)
    return cast(nodes.Expr, called.set_lineno(line))


def _made(value: T, part: int = _OBJECT) -> T:
    """Count a value that a template makes; each part of a list counts as `part` characters."""
    if isinstance(value, _CONTAINERS):
        _use(part * len(value))
    else:
        _use(len(value) if isinstance(value, str | bytes) else _OBJECT)
    return value


def _use(n_characters: int) -> None:
    if _budget.ends is not None:
        _budget.made += n_characters
        if _budget.made > _MADE:
            raise TemplateLimitError(f"the chat template makes more than {_MADE} characters in all")


def _count(value: T) -> T:
    if _budget.ends is not None:
        _add(len(value) if isinstance(value, str) else _measure(value).characters)
    return value


class _Measure(NamedTuple):
    parts: int
    depth: int
    characters: int


def _measure(value: object) -> _Measure:
    level: list[object] = [value]
    n_parts = depth = n_characters = 0
    while level:
        below: list[object] = []
        for part in level:
            n_parts += 1
            if isinstance(part, str):
                n_characters += len(part)
                continue
            n_characters += 1
            if isinstance(part, _CONTAINERS):
                _check_size(n_characters + len(below) + len(part))
                below += part
                if isinstance(part, dict):
                    below += part.values()
            if n_parts % _PARTS_PER_LOOK == 0:
                _check_time()
        _check_size(n_characters + len(below))
        level, depth = below, depth + bool(below)
    return _Measure(n_parts, depth, n_characters)


def _check_time() -> None:
    if _budget.ends is not None and time.thread_time() > _budget.ends:
        raise TemplateLimitError(
            f"the chat template takes longer than {_SECONDS:g} seconds to render"
        )


def _check_json(value: object, options: Iterable[object]) -> None:
    measure, width = _measure(value), 0
    for one in options:
        for text in one if isinstance(one, tuple | list) else (one,):
            width += (
                abs(text) if isinstance(text, int) else len(text) if isinstance(text, str) else 0
            )
    _check_size(measure.characters + measure.parts * width * (1 + measure.depth))


def _add(n_characters: int) -> None:
    _budget.characters += n_characters
    _check_size(_budget.characters)


def _check_size(size: int) -> None:
    if size > _CHARACTERS:
        raise TemplateLimitError(f"the chat template makes more than {_CHARACTERS} characters")


def _check_operands(operator: str, left: object, right: object) -> None:
    if operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
        _check_size(len(left) + len(right))
    elif operator == "*":
        for one, times in ((left, right), (right, left)):
            if isinstance(one, Sized) and isinstance(times, int):
                _check_size(len(one) * times)
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))
    elif operator == "%" and isinstance(left, str):
        _check_format(left)
        _check_size(_measure(right).characters)


def _check_bits(n_bits: int) -> None:
    if n_bits > _LARGEST_BITS:
        raise TemplateLimitError(f"the chat template computes a number of {n_bits} bits")


def _check_format(text: str) -> None:
    if _WIDTH.search(text) or _has_nested_field(text):
        raise TemplateLimitError("the chat template formats text to a width that is too large")


def _has_nested_field(text: str) -> bool:
    try:
        return any("{" in (spec or "") for _, _, spec, _ in Formatter().parse(text))
    except ValueError:
        return False  # `format` will raise the same error


def _check_numbers(called: object, given: Iterable[object]) -> None:
    """Raise TemplateLimitError for large numbers, because a number may be a width or a count."""
    too_large = any(isinstance(one, int) and abs(one) > _LARGEST_NUMBER for one in given)
    if too_large and _name(called) not in _FORMATS:
        raise TemplateLimitError("the chat template calls a function with too large a number")


def _check_arguments(called: object, owner: object, given: tuple[object, ...]) -> None:
    name = _name(called)
    if name in _TEXTUAL:
        _check_size(sum(_measure(one).characters for one in given))
    texts = [one for one in (owner, *given) if isinstance(one, str)]
    if name in _FORMATS:
        for text in texts[:1]:
            _check_format(text)
    elif name == "replace":
        text, old, new = (*texts, "", "", "")[:3]
        _check_size(len(text) + (text.count(old) + 1) * len(new))


def _counted(values: object, mark: int) -> object:
    """Yield `values` for a join. Raises TemplateLimitError once the text is too large."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        return values
    return _within_limits(values, mark)


def _within_limits(values: Iterable[T], mark: int) -> Iterator[T]:
    n_characters = 0
    for value in values:
        n_characters += mark + _measure(value).characters
        _check_size(n_characters)
        yield value


def _name(called: object) -> str:
    return getattr(called, "__name__", "").removeprefix("do_")


def _owner(method: object) -> object:
    wrapped = getattr(method, "__wrapped__", method)
    found: object = getattr(wrapped, "__self__", None)
    return found


def _checked(function: Callable[..., T]) -> Callable[..., T]:
    # The value to filter may be any number. Some filters get one more argument before it.
    n_values = 2 if hasattr(function, "jinja_pass_arg") else 1

    @wraps(function)
    def checked(*args: object, **kwargs: object) -> T:
        _check_numbers(function, (*args[n_values:], *kwargs.values()))
        _check_arguments(function, None, (*args, *kwargs.values()))
        _check_time()
        first, value, options = args[: n_values - 1], args[n_values - 1], args[n_values:]
        given = (*options, *kwargs.values())
        if _name(function) == "tojson":
            _check_json(value, given)
        elif _name(function) == "join":
            marks = [len(one) for one in given if isinstance(one, str)]
            args = (*first, _counted(value, max(marks, default=0)), *options)
        return _made(function(*args, **kwargs))

    return checked


class _Filters(dict[str, Callable[..., object]]):
    """An environment's filters. All have checks, even filters that transformers adds later."""

    def __init__(self, filters: Mapping[str, Callable[..., object]]) -> None:
        super().__init__({name: _checked(one) for name, one in filters.items()})

    def __setitem__(self, name: str, function: Callable[..., object]) -> None:
        super().__setitem__(name, _checked(function))


def install() -> None:
    """Make transformers compile chat templates in a `BoundedEnvironment` from now on."""
    vars(chat_template_utils)["ImmutableSandboxedEnvironment"] = BoundedEnvironment


install()
