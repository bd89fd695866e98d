"""Call spellings: how the formats that mlx-lm parses write a call, if not as JSON.

A spelling is a model's only if mlx-lm's parser reads an example of it. Knows no tools.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from semantic.domain.errors import ToolCallError
from semantic.ports.chat import CallHead, CallList, CallSpelling, CallTags, WrittenCall

_QUOTED = re.compile(r"""(?P<quote>["']?)(?P<name>[^\s"'<>]+)(?P=quote)""")
_STARTS_QUOTED = re.compile(r"""["']?[^\s"'<>]*["']?""")
_KEY = re.compile(r"""\s*(?P<quote>["']?)(?P<key>[^\s"'<>]+)(?P=quote)\s*""")
_NAME, _STARTS_NAME = re.compile(r"(?P<name>[\w.:/-]+)"), re.compile(r"[\w.:/-]*")
_CALL_HEAD = CallHead(
    ("call:",),
    re.compile(r"(?P<name>[\w-]+)"),
    re.compile(r"[\w-]*"),
    (("{",),),
)
_LISTED_KEY = re.compile(r"""(?P<quote>["']?)(?P<key>[\w.-]+)(?P=quote)""")


@dataclass(frozen=True, slots=True)
class _Example:
    """A spelling, and how it writes a call of `probe` whose argument `a` is `x`."""

    text: str
    spelling: CallSpelling


def _pairs(prefix: str) -> CallSpelling:
    """probe<arg_key>a</arg_key><arg_value>x</arg_value>"""
    key, value = f"{prefix}arg_key", f"{prefix}arg_value"
    tags = CallTags(
        f"<{key}>",
        re.compile(rf"\s*(?P<key>[^\s<]+)\s*</{key}>(?:\\n|\s)*"),
        f"<{value}>",
        f"</{value}>",
    )
    return CallSpelling(CallHead((), _NAME, _STARTS_NAME, begin=f"<{key}>"), tags)


_EXAMPLES = (
    _Example(
        "<function=probe>\n<parameter=a>\nx\n</parameter>\n</function>",
        CallSpelling(
            CallHead(
                ("<function=",),
                re.compile(r"(?P<name>[^\s<>]+)"),
                re.compile(r"[^\s<>]*"),
                ((">",),),
            ),
            CallTags(
                "<parameter=",
                re.compile(r"\s*(?P<key>[^\s<>]+)"),
                ">",
                "</parameter>",
                "</function>",
                trims="line",
            ),
        ),
    ),
    _Example("probe<arg_key>a</arg_key><arg_value>x</arg_value>", _pairs("")),
    _Example(
        "probe<longcat_arg_key>a</longcat_arg_key><longcat_arg_value>x</longcat_arg_value>",
        _pairs("longcat_"),
    ),
    _Example(
        '<invoke name="probe"><parameter name="a">x</parameter></invoke>',
        CallSpelling(
            CallHead(("<invoke name=",), _QUOTED, _STARTS_QUOTED, ((">",),)),
            CallTags("<parameter name=", _KEY, ">", "</parameter>", "</invoke>"),
        ),
    ),
    _Example(
        '"probe"><param name="a">x</param>',
        CallSpelling(
            CallHead((), _QUOTED, _STARTS_QUOTED, ((">",),)),
            CallTags("<param name=", _KEY, ">", "</param>", other=("<![CDATA[",)),
        ),
    ),
    _Example(
        '<atem:invoke name="probe"><atem:parameter name="a">x</atem:parameter></atem:invoke>',
        CallSpelling(
            CallHead(
                ("<atem:invoke",),
                re.compile(r'name="(?P<name>[^\s"<>]+)"'),
                re.compile(r"[^<>]*"),
                ((">",),),
            ),
            CallTags(
                "<atem:parameter",
                re.compile(r'\s+name="(?P<key>[^\s"<>]+)"'),
                ">",
                "</atem:parameter>",
                "</atem:invoke>",
                other=tuple('{["-0123456789'),  # JSON, if it is that
            ),
        ),
    ),
    _Example(
        '<|open|>call tool="probe" index="1"<|sep|><|open|>argument key="a" type="string"<|sep|>x'
        "<|close|>argument<|sep|><|close|>call<|sep|>",
        CallSpelling(
            CallHead(
                ("<|open|>call",),
                re.compile(r'tool="(?P<name>[^\s"&<>]+)"(?: index="[0-9]*")?(?=<)'),
                re.compile(r"[^<>]*"),
                (("<|sep|>",),),
                "<|open|>argument",
            ),
            CallTags(
                "<|open|>argument",
                re.compile(r'\s+key="(?P<key>[^\s"&<>]+)"(?: type="\w+")?'),
                "<|sep|>",
                "<|close|>argument<|sep|>",
                "<|close|>call<|sep|>",
                trims="nothing",
            ),
        ),
    ),
    _Example(
        'call:probe{a:<|"|>x<|"|>}',
        CallSpelling(
            _CALL_HEAD,
            CallList(_LISTED_KEY, ":", ('<|"|>',), "}", opening="{[", closing="}]"),
        ),
    ),
    _Example(
        "call:probe{a:<escape>x<escape>}",
        CallSpelling(
            _CALL_HEAD,
            CallList(_LISTED_KEY, ":", ("<escape>",), "}", opening="[", closing="]"),
        ),
    ),
    _Example(
        '[probe(a="x")]',
        CallSpelling(
            CallHead(
                (),
                re.compile(r"(?P<name>[\w.]+)"),
                re.compile(r"[\w.]*"),
                (("(",),),
            ),
            CallList(
                re.compile(r"(?P<key>[\w.-]+)"),
                "=",
                ('"', "'"),
                ")",
                opening="([{",
                closing=")]}",
                escapes=True,
                before="[",
                after="]",
            ),
            in_list=True,
        ),
    ),
)


def spelling_of(read: Callable[[str], list[WrittenCall]]) -> CallSpelling | None:
    """The spelling whose example `read` reads; it raises ToolCallError for what it cannot read."""
    for example in _EXAMPLES:
        try:
            calls = read(example.text)
        except ToolCallError:
            continue
        if calls == [WrittenCall("probe", '{"a": "x"}')]:
            return example.spelling
    return None
