"""Families of models, with the form of their calls and reasoning.

A model's chat template or vocabulary identifies its family. The names are those of vLLM's and
mlx-lm's parsers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from semantic.application.chat import spellings
from semantic.domain.errors import InvalidRequestError
from semantic.ports.chat import OBJECTS, CallForm, CallSpelling, Headers, Marks


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models, and the form of their calls. The texts of `template`, or else the
    `tokens`, identify the family."""

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
        """Write `calls` in the family's form. Each call is a name and its arguments."""
        if self.spelling is spellings.PYTHON:
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
"""The marks of reasoning, with the names of their parsers."""

_UNREAD: Final = "none"
"""The choice not to separate reasoning."""

HERMES: Final = Family(
    ("hermes", "qwen2_5", "qwen3", "json_tools"),
    "Hermes, Qwen 2.5 and 3, Granite 4, EXAONE 4, SmolLM 3",
    spellings.TOOL_CALL,
    None,
    ("<tool_call>",),
)
"""The form of calls that most open models learn to write."""

FAMILIES: Final = (
    Family(
        ("minimax_m2",),
        "MiniMax M2",
        Marks("<minimax:tool_call>", "</minimax:tool_call>"),
        spellings.invoke("", untyped_is_text=True),
        ("<minimax:tool_call>",),
    ),
    Family(
        ("gemma4",),
        "Gemma 4",
        Marks("<|tool_call>", "<tool_call|>"),
        spellings.listed(('<|"|>',)),
        ("<|tool_call>", "<tool_call|>"),
    ),
    Family(
        ("functiongemma", "function_gemma"),
        "FunctionGemma",
        Marks("<start_function_call>", "<end_function_call>"),
        spellings.listed(("<escape>",)),
        ("<start_function_call>",),
    ),
    Family(
        ("longcat",),
        "LongCat",
        Marks("<longcat_tool_call>", "</longcat_tool_call>"),
        spellings.pairs("longcat_"),
        ("<longcat_tool_call>",),
    ),
    Family(
        ("glm45", "glm47", "laguna"),
        "GLM 4.5 to 5, Laguna",
        spellings.TOOL_CALL,
        spellings.pairs(""),
        ("<arg_key>",),
    ),
    Family(
        ("lfm2", "pythonic"),
        "LFM 2",
        Marks("<|tool_call_start|>", "<|tool_call_end|>"),
        spellings.PYTHON,
        ("<|tool_call_start|>",),
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    Family(
        ("seed_oss",),
        "Seed-OSS",
        Marks("<seed:tool_call>", "</seed:tool_call>"),
        spellings.function_tags(),
        ("<seed:tool_call>",),
    ),
    Family(
        ("qwen3_coder", "qwen3_xml", "step3p5", "nemotron_v3"),
        "Qwen 3 Coder, Qwen 3.5, Step 3.5, Nemotron 3",
        spellings.TOOL_CALL,
        spellings.function_tags(),
        ("<tool_call>", "<function="),
    ),
    Family(
        ("kimi_k2",),
        "Kimi K2 and later",
        Marks("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        spellings.KIMI,
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
        spellings.MINICPM,
        ('<function name="', '<param name="'),
    ),
    Family(
        ("mistral",),
        "Mistral Small 3.2, Devstral",
        Marks("[TOOL_CALLS]", ""),
        spellings.MISTRAL,
        ("[TOOL_CALLS]", "[CALL_ID]"),
        form=CallForm("$name[CALL_ID]$id[ARGS]", ""),
    ),
    Family(
        ("mistral",),
        "Ministral 3, Magistral",
        Marks("[TOOL_CALLS]", ""),
        spellings.MISTRAL,
        ("[TOOL_CALLS]", "[ARGS]"),
        form=CallForm("$name[ARGS]", ""),
    ),
    Family(
        ("mistral",),
        "Mistral 7B and Nemo",
        Marks("[TOOL_CALLS]", ""),
        spellings.MISTRAL,
        ("[TOOL_CALLS]",),
        form=CallForm(several="listed"),
    ),
    Family(
        ("muse_spark",),
        "Muse Spark",
        Marks("<atem:function_calls>", "</atem:function_calls>"),
        spellings.invoke("atem:", untyped_is_text=False),
        ("<atem:function_calls>",),
    ),
    Family(
        ("deepseek_v3",),
        "DeepSeek V3, R1",
        spellings.DEEPSEEK_MARKS,
        spellings.DEEPSEEK_FENCED,
        (spellings.DEEPSEEK_MARKS.start, "```json"),
        form=CallForm(
            f"{spellings.DS_BEGIN}function{spellings.DS_SEP}$name\n```json\n",
            f"\n```{spellings.DS_END}",
            "within",
        ),
    ),
    Family(
        ("deepseek_v31",),
        "DeepSeek V3.1",
        spellings.DEEPSEEK_MARKS,
        spellings.DEEPSEEK,
        (spellings.DEEPSEEK_MARKS.start,),
        form=CallForm(f"{spellings.DS_BEGIN}$name{spellings.DS_SEP}", spellings.DS_END, "within"),
    ),
    Family(
        ("deepseek_v32",),
        "DeepSeek V3.2",
        Marks("<\uff5cDSML\uff5cfunction_calls>", "</\uff5cDSML\uff5cfunction_calls>"),
        spellings.invoke("\uff5cDSML\uff5c", spellings.DSML_KEY, untyped_is_text=True),
        ("\uff5cDSML\uff5c", "function_calls>"),
    ),
    Family(
        ("kimi_k3",),
        "Kimi K3",
        Marks("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        spellings.XTML_TAGS,
        tokens=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
        silent=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    Family(
        ("openai", "openai_gptoss", "harmony"),
        "gpt-oss",
        Marks("<|channel|>commentary to=functions", "<|call|>"),
        spellings.HARMONY_CALL,
        ("<|channel|>", "<|message|>", "analysis"),
        thought=Marks("<|channel|>analysis<|message|>", "<|end|>"),
        headers=spellings.HARMONY,
        form=CallForm(".$name <|constrain|>json<|message|>", ""),
    ),
    Family(
        ("llama4_pythonic", "llama4_json"),
        "Llama 4",
        Marks("<|python_start|>", "<|python_end|>"),
        spellings.PYTHON,
        ("<|python_start|>",),
        bare=True,
    ),
    Family(
        ("llama3_json",),
        "Llama 3.1 to 3.3",
        Marks("<|python_tag|>", ""),
        spellings.LLAMA,
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
        spellings.COHERE,
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
"""All families; a model belongs to the first that fits its template."""


def family_of(
    template: str, vocabulary: Container[str], parser: str | None = None
) -> Family | None:
    """Return a model's family, or None. If `parser` is known, only its families count."""
    named = [family for family in FAMILIES if parser in family.names]
    for family in named or FAMILIES:
        if family.template and all(text in template for text in family.template):
            return family
    for family in named or FAMILIES:
        if family.tokens and all(token in vocabulary for token in family.tokens):
            return family
    return named[0] if named else None


def thought_of(template: str) -> Marks | None:
    """Return the marks of reasoning that occur in a template."""
    named = (one for _, one in _THOUGHTS if one.start in template and one.end in template)
    return next(named, None)


@dataclass(frozen=True, slots=True)
class Parsers:
    """The parsers of calls and of reasoning that an operator chose. If a parser is None, the
    model's files decide. Raises InvalidRequestError for an unknown name."""

    calls: str | None = None
    reasoning: str | None = None

    def __post_init__(self) -> None:
        families = {name for family in FAMILIES for name in family.names}
        _check("tool_call_parser", self.calls, families)
        _check("reasoning_parser", self.reasoning, {_UNREAD, *reasoning_parsers()})

    def thought(self, found: Marks | None) -> Marks | None:
        """Return the marks of reasoning of the chosen parser, else `found`."""
        return found if self.reasoning is None else reasoning_parsers().get(self.reasoning)


def reasoning_parsers() -> Mapping[str, Marks]:
    """Return the marks of reasoning of each parser, by the parser's name."""
    own = {name: one.thought for one in FAMILIES if one.thought for name in one.names}
    return own | {name: marks for names, marks in _THOUGHTS for name in names}


def _check(field: str, name: str | None, known: Collection[str]) -> None:
    if name is not None and name not in known:
        names = ", ".join(sorted(known))
        raise InvalidRequestError(f"{field} must be one of {names}, got {name!r:.80}")
