"""Spellings of calls: how models write a tool's name and its arguments."""

from __future__ import annotations

import re
from typing import Final

from semantic.ports.chat import CallHead, CallList, CallSpelling, CallTags, Headers, Marks

_NO_NAME: Final = r"\s<>{}\[\]()\"',="
_NAME, _STARTS_NAME = re.compile(rf"(?P<name>[^{_NO_NAME}]+)"), re.compile(rf"[^{_NO_NAME}]*")
_QUOTED: Final = re.compile(r"""(?P<quote>["']?)(?P<name>[^\s"'<>]+)(?P=quote)""")
_STARTS_QUOTED: Final = re.compile(r"""["']?[^\s"'<>]*["']?""")
_KEY: Final = re.compile(r"""\s*(?P<quote>["']?)(?P<key>[^\s"'<>]+)(?P=quote)\s*""")
_TAG_NAME: Final = re.compile(r"(?P<name>[^\s<>]+)")
_STARTS_TAG_NAME: Final = re.compile(r"[^\s<>]*")
TOOL_CALL: Final = Marks("<tool_call>", "</tool_call>")


def function_tags() -> CallSpelling:
    """Return the spelling <function=look><parameter=what>...</parameter></function>."""
    return CallSpelling(
        CallHead(("<function=",), _TAG_NAME, _STARTS_TAG_NAME, ((">",),)),
        CallTags(
            "<parameter=",
            re.compile(r"\s*(?P<key>[^\s<>]+)"),
            ">",
            "</parameter>",
            "</function>",
            trims="line",
        ),
        unmarked="<function=",
    )


def pairs(prefix: str) -> CallSpelling:
    """Return the spelling of calls as NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>."""
    key, value, end = f"{prefix}arg_key", f"{prefix}arg_value", f"</{prefix}tool_call>"
    tags = CallTags(
        f"<{key}>",
        re.compile(rf"\s*(?P<key>[^\s<]+)\s*</{key}>(?:\\n|\s)*"),
        f"<{value}>",
        f"</{value}>",
        untyped_is_text=False,
    )
    return CallSpelling(
        CallHead((), _NAME, _STARTS_NAME, begin=(f"<{key}>", end)),
        tags,
        json_head=CallHead((), _NAME, _STARTS_NAME, begin=("{",)),
    )


def invoke(prefix: str, key: re.Pattern[str] = _KEY, *, untyped_is_text: bool) -> CallSpelling:
    """Return the spelling <invoke name="look"><parameter name="what">...</parameter></invoke>."""
    return CallSpelling(
        CallHead((f"<{prefix}invoke name=",), _QUOTED, _STARTS_QUOTED, ((">",),)),
        CallTags(
            f"<{prefix}parameter name=",
            key,
            ">",
            f"</{prefix}parameter>",
            f"</{prefix}invoke>",
            untyped_is_text=untyped_is_text,
        ),
    )


def listed(quotes: tuple[str, ...]) -> CallSpelling:
    """Return the spelling call:look{what:"...",n:2}, with the given `quotes`."""
    return CallSpelling(
        CallHead(
            ("call:",), re.compile(r"(?P<name>[^\s<>{}]+)"), re.compile(r"[^\s<>{}]*"), (("{",),)
        ),
        CallList(
            re.compile(r"""(?P<quote>["']?)(?P<key>[^\s"'{}\[\]:,]+)(?P=quote)"""),
            ":",
            quotes,
            "}",
            opening="{[",
            closing="}]",
        ),
    )


PYTHON: Final = CallSpelling(
    # A list of look(what="...").
    CallHead((), _NAME, _STARTS_NAME, (("(",),)),
    CallList(
        re.compile(r"(?P<key>[^\s=,()\[\]{}]+)"),
        "=",
        ('"', "'"),
        ")",
        opening="([{",
        closing=")]}",
        escapes=True,
    ),
    in_list=True,
)

MISTRAL: Final = CallSpelling(
    # look[ARGS]{...}, look[CALL_ID]abc123def[ARGS]{...}
    CallHead(
        (),
        re.compile(r"(?P<name>[^\s\[\]{}\"]+)(?:\[CALL_ID\]\w*)?(?=\s*\[ARGS\])"),
        re.compile(r"[^\s\[\]{}\"]*\s*(?:\[[A-Z_]*\]?\w*(?:\[[A-Z]*)?)?"),
        (("[ARGS]",),),
        ("{",),
    )
)

KIMI: Final = CallSpelling(
    # <|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
    CallHead(
        ("<|tool_call_begin|>",),
        re.compile(r"(?:functions\.)?(?P<name>[^\s<>{}]+?):[0-9]+(?![0-9])"),
        re.compile(r"[^\s<>{}]*"),
        (("<|tool_call_argument_begin|>",),),
        ("{",),
    ),
    between=("<|tool_call_end|>",),
)

XTML_TAGS: Final = CallSpelling(
    # <|open|>call tool="look" index="1"<|sep|><|open|>argument key="what" type="string"<|sep|>...
    CallHead(
        ("<|open|>call",),
        re.compile(r'tool="(?P<name>[^\s"&<>]+)"(?: index="[0-9]*")?(?=<)'),
        re.compile(r"[^<>]*"),
        (("<|sep|>",),),
        ("<|open|>argument", "<|close|>call<|sep|>"),
    ),
    CallTags(
        "<|open|>argument",
        re.compile(r'\s+key="(?P<key>[^\s"&<>]+)"(?: type="(?P<kind>\w+)")?'),
        "<|sep|>",
        "<|close|>argument<|sep|>",
        "<|close|>call<|sep|>",
    ),
    ("<|close|>json<|sep|>", "<|close|>call<|sep|>"),
    json_head=CallHead(
        ("<|open|>call",),
        re.compile(r'tool="(?P<name>[^\s"&<>]+)"(?: index="[0-9]*")?(?=<)'),
        re.compile(r"[^<>]*"),
        (("<|sep|>",), ('<|open|>json type="object"<|sep|>',)),
        ("{",),
    ),
)

DS_BEGIN, DS_SEP, DS_END = (
    f"<\uff5ctool\u2581{name}\uff5c>" for name in ("call\u2581begin", "sep", "call\u2581end")
)
DEEPSEEK: Final = CallSpelling(
    # <|tool_call_begin|>look<|tool_sep|>{...}<|tool_call_end|>
    CallHead(
        (DS_BEGIN,),
        re.compile(r"(?P<name>[^\s<>{}]+)"),
        re.compile(r"[^\s<>{}]*"),
        ((DS_SEP,),),
        ("{",),
    ),
    between=(DS_END,),
)
DEEPSEEK_FENCED: Final = CallSpelling(
    # <|tool_call_begin|>function<|tool_sep|>look```json{...}```<|tool_call_end|>
    CallHead(
        (DS_BEGIN, "function", DS_SEP),
        re.compile(r"(?P<name>[^\s<>{}`]+)"),
        re.compile(r"[^\s<>{}`]*"),
        (("```json",),),
        ("{",),
    ),
    between=("```", DS_END),
)
DEEPSEEK_MARKS: Final = Marks(
    "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
)
DSML_KEY: Final = re.compile(r'\s*"(?P<key>[^"<>]+)"\s*(?:string="(?P<kind>true|false)")?\s*')

COHERE: Final = CallSpelling(
    # A list of {"tool_call_id": "0", "tool_name": "look", "parameters": {...}}.
    CallHead(
        ("{",),
        re.compile(
            r'(?:"tool_call_id"\s*:\s*"[^"]*"\s*,\s*)?"tool_name"\s*:\s*(?P<name>"[^"\\]*")'
        ),
        re.compile(r'(?:"[^{}]*)?'),
        ((",",), ('"parameters"',), (":",)),
        ("{",),
        quoted=True,
    ),
    in_list=True,
)

LLAMA: Final = CallSpelling(between=(";", ",", "<|python_tag|>", "<|eom_id|>"))

HARMONY: Final = Headers(
    # <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
    starts=("<|start|>", "<|channel|>"),
    end="<|message|>",
    ends=("<|end|>", "<|return|>", "<|call|>"),
    thought=re.compile(r"<\|channel\|>\s*analysis"),
    call=re.compile(r"\bto=(?:functions\b\.?)?(?P<name>[^\s<]*)"),
    begins=("<|start|>", "<|channel|>", "assistant", "to="),
    known=re.compile(r"(?:<\|\w+\|>|assistant|analysis|commentary|final|to=\S*|\s)*"),
    following="<|start|>assistant",
    answer="<|channel|>final<|message|>",
    remark="<|channel|>commentary<|message|>",
)
HARMONY_CALL: Final = CallSpelling(
    # The tool's name, and the text that ends its header, as the reader of headers passes them on.
    CallHead((), _TAG_NAME, _STARTS_TAG_NAME, (("<|message|>",),), ("{",)),
    ends=("<|end|>", "<|return|>"),
)

MINICPM: Final = CallSpelling(
    # <function name="look"><param name="what">...</param>
    CallHead((), _QUOTED, _STARTS_QUOTED, ((">",),)),
    CallTags("<param name=", _KEY, ">", "</param>", wrap=("<![CDATA[", "]]>")),
)
