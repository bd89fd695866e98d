"""Families of models: how each writes calls and reasoning, in one table.

The texts of its chat template find a family, else its vocabulary; an operator may name it. The
names are those of vLLM's and mlx-lm's parsers. Knows no template and no tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from semantic.domain.errors import InvalidRequestError
from semantic.ports.chat import (
    OBJECTS,
    CallForm,
    CallHead,
    CallList,
    CallSpelling,
    CallTags,
    Headers,
    Marks,
)


@dataclass(frozen=True, slots=True)
class Family:
    """How models of a family write calls: between `marks`, in JSON or in a `spelling` of their own.

    `names` are those of its parser; `models` write so. `template`: texts that all stand in its chat
    template. `tokens`: entries of its vocabulary, where a template may not name them. `bare`:
    an answer may begin with a call without its mark. `thought`: the marks of its reasoning, where
    they are not among `_THOUGHTS`. `numbered_ids`: ids of calls have the tool's name and a number.
    `form`: the spelling of a call under a grammar: where arguments are JSON, as the model writes
    it. `silent` are marks around a text that say nothing.
    """

    names: tuple[str, ...]
    models: str
    marks: Marks
    spelling: CallSpelling | None = None
    template: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    bare: bool = False
    thought: Marks | None = None
    headers: Headers | None = None
    numbered_ids: bool = False
    form: CallForm = OBJECTS
    silent: tuple[str, ...] = ()

    def written(self, calls: Sequence[tuple[str, object]]) -> str:
        """Calls, names with their arguments, as a model of this family writes them."""
        if self.spelling is _PYTHON:
            inner = ", ".join(f"{name}({_keywords(given)})" for name, given in calls)
            return f"{self.marks.start}[{inner}]{self.marks.end}"
        objects = [
            json.dumps({"name": name, "arguments": given}, ensure_ascii=False)
            for name, given in calls
        ]
        if self.form.several == "listed":
            return f"{self.marks.start}[{', '.join(objects)}]{self.marks.end}"
        return "".join(f"{self.marks.start}{one}{self.marks.end}" for one in objects)


def _keywords(arguments: object) -> str:
    """Arguments as those of a call in Python."""
    given = arguments if isinstance(arguments, Mapping) else {}
    words = {"true": "True", "false": "False", "null": "None"}
    pairs = ((key, json.dumps(value, ensure_ascii=False)) for key, value in given.items())
    return ", ".join(f"{key}={words.get(text, text)}" for key, text in pairs)


_THOUGHTS: Final = (
    (("mistral",), Marks("[THINK]", "[/THINK]")),
    (("seed_oss",), Marks("<seed:think>", "</seed:think>")),
    (("cohere_command3", "cohere"), Marks("<|START_THINKING|>", "<|END_THINKING|>")),
    (("gemma4",), Marks("<|channel>thought", "<channel|>")),
    (
        ("deepseek_r1", "deepseek_v3", "ernie45", "glm45", "kimi_k2", "minimax_m2", "nemotron_v3",
         "olmo3", "qwen3", "step3", "step3p5"),
        Marks("<think>", "</think>"),
    ),
)  # fmt: skip
"""Marks of reasoning with the names of their parsers; a template of a model names both marks."""

_UNREAD: Final = "none"
"""The parser that reads no reasoning."""

_NO_NAME: Final = r"\s<>{}\[\]()\"',="
_NAME, _STARTS_NAME = re.compile(rf"(?P<name>[^{_NO_NAME}]+)"), re.compile(rf"[^{_NO_NAME}]*")
_QUOTED: Final = re.compile(r"""(?P<quote>["']?)(?P<name>[^\s"'<>]+)(?P=quote)""")
_STARTS_QUOTED: Final = re.compile(r"""["']?[^\s"'<>]*["']?""")
_KEY: Final = re.compile(r"""\s*(?P<quote>["']?)(?P<key>[^\s"'<>]+)(?P=quote)\s*""")
_TAG_NAME: Final = re.compile(r"(?P<name>[^\s<>]+)")
_STARTS_TAG_NAME: Final = re.compile(r"[^\s<>]*")
_TOOL_CALL: Final = Marks("<tool_call>", "</tool_call>")


def _function_tags() -> CallSpelling:
    """<function=look><parameter=what>...</parameter></function>"""
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


def _pairs(prefix: str) -> CallSpelling:
    """look<arg_key>what</arg_key><arg_value>...</arg_value>, or look{...}"""
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


def _invoke(prefix: str, key: re.Pattern[str] = _KEY, *, untyped_is_text: bool) -> CallSpelling:
    """<invoke name="look"><parameter name="what">...</parameter></invoke>"""
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


def _listed(quotes: tuple[str, ...]) -> CallSpelling:
    """call:look{what:"...",n:2}, with quotes of its own"""
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


_PYTHON: Final = CallSpelling(
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

_MISTRAL: Final = CallSpelling(
    # look[ARGS]{...}, look[CALL_ID]abc123def[ARGS]{...}
    CallHead(
        (),
        re.compile(r"(?P<name>[^\s\[\]{}\"]+)(?:\[CALL_ID\]\w*)?(?=\s*\[ARGS\])"),
        re.compile(r"[^\s\[\]{}\"]*\s*(?:\[[A-Z_]*\]?\w*(?:\[[A-Z]*)?)?"),
        (("[ARGS]",),),
        ("{",),
    )
)

_KIMI: Final = CallSpelling(
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

_XTML_TAGS: Final = CallSpelling(
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

_DS_BEGIN, _DS_SEP, _DS_END = (
    f"<\uff5ctool\u2581{name}\uff5c>" for name in ("call\u2581begin", "sep", "call\u2581end")
)
_DEEPSEEK: Final = CallSpelling(
    # <|tool_call_begin|>look<|tool_sep|>{...}<|tool_call_end|>
    CallHead(
        (_DS_BEGIN,),
        re.compile(r"(?P<name>[^\s<>{}]+)"),
        re.compile(r"[^\s<>{}]*"),
        ((_DS_SEP,),),
        ("{",),
    ),
    between=(_DS_END,),
)
_DEEPSEEK_FENCED: Final = CallSpelling(
    # <|tool_call_begin|>function<|tool_sep|>look```json{...}```<|tool_call_end|>
    CallHead(
        (_DS_BEGIN, "function", _DS_SEP),
        re.compile(r"(?P<name>[^\s<>{}`]+)"),
        re.compile(r"[^\s<>{}`]*"),
        (("```json",),),
        ("{",),
    ),
    between=("```", _DS_END),
)
_DEEPSEEK_MARKS: Final = Marks(
    "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
)
_DSML_KEY: Final = re.compile(r'\s*"(?P<key>[^"<>]+)"\s*(?:string="(?P<kind>true|false)")?\s*')

_COHERE: Final = CallSpelling(
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

_LLAMA: Final = CallSpelling(between=(";", ",", "<|python_tag|>", "<|eom_id|>"))

_HARMONY: Final = Headers(
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
_HARMONY_CALL: Final = CallSpelling(
    # The name and what ends the header, as the reader of headers gives them.
    CallHead((), _TAG_NAME, _STARTS_TAG_NAME, (("<|message|>",),), ("{",)),
    ends=("<|end|>", "<|return|>"),
)

HERMES: Final = Family(
    ("hermes", "qwen2_5", "qwen3", "json_tools"),
    "Hermes, Qwen 2.5 and 3, Granite 4, EXAONE 4, SmolLM 3",
    _TOOL_CALL,
    None,
    ("<tool_call>",),
)
"""The form in the training of most open models."""

FAMILIES: Final = (
    Family(
        ("minimax_m2",),
        "MiniMax M2",
        Marks("<minimax:tool_call>", "</minimax:tool_call>"),
        _invoke("", untyped_is_text=True),
        ("<minimax:tool_call>",),
    ),
    Family(
        ("gemma4",),
        "Gemma 4",
        Marks("<|tool_call>", "<tool_call|>"),
        _listed(('<|"|>',)),
        ("<|tool_call>", "<tool_call|>"),
    ),
    Family(
        ("functiongemma", "function_gemma"),
        "FunctionGemma",
        Marks("<start_function_call>", "<end_function_call>"),
        _listed(("<escape>",)),
        ("<start_function_call>",),
    ),
    Family(
        ("longcat",),
        "LongCat",
        Marks("<longcat_tool_call>", "</longcat_tool_call>"),
        _pairs("longcat_"),
        ("<longcat_tool_call>",),
    ),
    Family(
        ("glm45", "glm47", "laguna"),
        "GLM 4.5 to 5, Laguna",
        _TOOL_CALL,
        _pairs(""),
        ("<arg_key>",),
    ),
    Family(
        ("lfm2", "pythonic"),
        "LFM 2",
        Marks("<|tool_call_start|>", "<|tool_call_end|>"),
        _PYTHON,
        ("<|tool_call_start|>",),
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    Family(
        ("seed_oss",),
        "Seed-OSS",
        Marks("<seed:tool_call>", "</seed:tool_call>"),
        _function_tags(),
        ("<seed:tool_call>",),
    ),
    Family(
        ("qwen3_coder", "qwen3_xml", "step3p5", "nemotron_v3"),
        "Qwen 3 Coder, Qwen 3.5, Step 3.5, Nemotron 3",
        _TOOL_CALL,
        _function_tags(),
        ("<tool_call>", "<function="),
    ),
    Family(
        ("kimi_k2",),
        "Kimi K2 and later",
        Marks("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        _KIMI,
        ("<|tool_calls_section_begin|>",),
        numbered_ids=True,
        form=CallForm(
            "<|tool_call_begin|>functions.$name:$number<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "within",
        ),
    ),
    Family(
        ("minicpm5",),
        "MiniCPM 5",
        Marks("<function name=", "</function>"),
        CallSpelling(
            CallHead((), _QUOTED, _STARTS_QUOTED, ((">",),)),
            CallTags("<param name=", _KEY, ">", "</param>", wrap=("<![CDATA[", "]]>")),
        ),
        ('<function name="', '<param name="'),
    ),
    Family(
        ("mistral",),
        "Mistral Small 3.2, Devstral",
        Marks("[TOOL_CALLS]", ""),
        _MISTRAL,
        ("[TOOL_CALLS]", "[CALL_ID]"),
        form=CallForm("$name[CALL_ID]$id[ARGS]", ""),
    ),
    Family(
        ("mistral",),
        "Ministral 3, Magistral",
        Marks("[TOOL_CALLS]", ""),
        _MISTRAL,
        ("[TOOL_CALLS]", "[ARGS]"),
        form=CallForm("$name[ARGS]", ""),
    ),
    Family(
        ("mistral",),
        "Mistral 7B and Nemo",
        Marks("[TOOL_CALLS]", ""),
        _MISTRAL,
        ("[TOOL_CALLS]",),
        form=CallForm(several="listed"),
    ),
    Family(
        ("muse_spark",),
        "Muse Spark",
        Marks("<atem:function_calls>", "</atem:function_calls>"),
        _invoke("atem:", untyped_is_text=False),
        ("<atem:function_calls>",),
    ),
    Family(
        ("deepseek_v3",),
        "DeepSeek V3, R1",
        _DEEPSEEK_MARKS,
        _DEEPSEEK_FENCED,
        (_DEEPSEEK_MARKS.start, "```json"),
        form=CallForm(f"{_DS_BEGIN}function{_DS_SEP}$name\n```json\n", f"\n```{_DS_END}", "within"),
    ),
    Family(
        ("deepseek_v31",),
        "DeepSeek V3.1",
        _DEEPSEEK_MARKS,
        _DEEPSEEK,
        (_DEEPSEEK_MARKS.start,),
        form=CallForm(f"{_DS_BEGIN}$name{_DS_SEP}", _DS_END, "within"),
    ),
    Family(
        ("deepseek_v32",),
        "DeepSeek V3.2",
        Marks("<\uff5cDSML\uff5cfunction_calls>", "</\uff5cDSML\uff5cfunction_calls>"),
        _invoke("\uff5cDSML\uff5c", _DSML_KEY, untyped_is_text=True),
        ("\uff5cDSML\uff5c", "function_calls>"),
    ),
    Family(
        ("kimi_k3",),
        "Kimi K3",
        Marks("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        _XTML_TAGS,
        tokens=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
        silent=(
            "<|open|>response<|sep|>",
            "<|close|>response<|sep|>",
            "<|close|>message<|sep|>",
        ),
    ),
    Family(
        ("openai", "openai_gptoss", "harmony"),
        "gpt-oss",
        Marks("<|channel|>commentary to=functions", "<|call|>"),
        _HARMONY_CALL,
        ("<|channel|>", "<|message|>", "analysis"),
        thought=Marks("<|channel|>analysis<|message|>", "<|end|>"),
        headers=_HARMONY,
        form=CallForm(".$name <|constrain|>json<|message|>", ""),
    ),
    Family(
        ("llama4_pythonic", "llama4_json"),
        "Llama 4",
        Marks("<|python_start|>", "<|python_end|>"),
        _PYTHON,
        ("<|python_start|>",),
        bare=True,
    ),
    Family(
        ("llama3_json",),
        "Llama 3.1 to 3.3",
        Marks("<|python_tag|>", ""),
        _LLAMA,
        ("ipython", '"parameters"'),
        bare=True,
        form=CallForm('{"name": $quoted, "parameters": '),
    ),
    Family(
        ("apriel", "jamba"),
        "Apriel, Jamba",
        Marks("<tool_calls>", "</tool_calls>"),
        None,
        ("<tool_calls>",),
        form=CallForm(several="listed"),
    ),
    Family(
        ("nemotron",),
        "Nemotron Nano 2",
        Marks("<TOOLCALL>", "</TOOLCALL>"),
        None,
        ("<TOOLCALL>",),
        form=CallForm(several="listed"),
    ),
    Family(
        ("cohere", "command_a"),
        "Command R7B, Command A",
        Marks("<|START_ACTION|>", "<|END_ACTION|>"),
        _COHERE,
        ("<|START_ACTION|>", "<|END_ACTION|>"),
        form=CallForm(
            '{"tool_call_id": "$number", "tool_name": $quoted, "parameters": ', several="listed"
        ),
        silent=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    Family(
        ("granite",),
        "Granite 3.3",
        Marks("<|tool_call|>", ""),
        None,
        ("<|tool_call|>",),
        form=CallForm(several="listed"),
        silent=("<response>", "</response>"),
    ),
    HERMES,
)
"""The first that fits a template is its family."""


def family_of(
    template: str, vocabulary: Container[str], parser: str | None = None
) -> Family | None:
    """Return the family of a model with this template and vocabulary, among those of `parser`, if
    given; None if unknown."""
    named = [family for family in FAMILIES if parser in family.names]
    for family in named or FAMILIES:
        if family.template and all(text in template for text in family.template):
            return family
    for family in named or FAMILIES:
        if family.tokens and all(token in vocabulary for token in family.tokens):
            return family
    return named[0] if named else None


def thought_of(template: str) -> Marks | None:
    """The marks of reasoning that a template names."""
    named = (one for _, one in _THOUGHTS if one.start in template and one.end in template)
    return next(named, None)


@dataclass(frozen=True, slots=True)
class Parsers:
    """The parsers of calls and reasoning that an operator names; None: the model's files decide.

    Raises InvalidRequestError for an unknown name.
    """

    calls: str | None = None
    reasoning: str | None = None

    def __post_init__(self) -> None:
        families = {name for family in FAMILIES for name in family.names}
        _check("tool_call_parser", self.calls, families)
        _check("reasoning_parser", self.reasoning, {_UNREAD, *reasoning_parsers()})

    def thought(self, found: Marks | None) -> Marks | None:
        """Return the marks of reasoning: the named ones, else those in `found`."""
        return found if self.reasoning is None else reasoning_parsers().get(self.reasoning)


def reasoning_parsers() -> Mapping[str, Marks]:
    """The marks of reasoning by the names of their parsers."""
    own = {name: one.thought for one in FAMILIES if one.thought for name in one.names}
    return own | {name: marks for names, marks in _THOUGHTS for name in names}


def _check(field: str, name: str | None, known: Collection[str]) -> None:
    if name is not None and name not in known:
        names = ", ".join(sorted(known))
        raise InvalidRequestError(f"{field} must be one of {names}, got {name!r:.80}")
