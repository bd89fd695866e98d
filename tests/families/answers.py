"""Answers as models of each family write them: text, reasoning and calls in their own spelling."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from semantic.domain.chat import Tool

CODE: Final = "    if x:\n        return '<b>' \\ \"5\" # é😀\n"
"""A text whose first and last characters are white space."""
NESTED: Final = "<node>\n  <parameter>5</parameter>\n</node>"
TOOLS: Final = (
    Tool(
        "look",
        "Looks.",
        {
            "type": "object",
            "properties": {
                "what": {"type": "string"},
                "n": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "all": {"type": ["boolean", "null"]},
            },
        },
    ),
    Tool("ns.find-it/x", "Finds.", {"type": "object", "properties": {"what": {"type": "string"}}}),
    Tool("stop", "Stops.", {"type": "object", "properties": {}}),
)

Call = tuple[str, dict[str, object]]


@dataclass(frozen=True)
class Answer:
    """What a model writes, and what that says."""

    written: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


def _json(arguments: object) -> str:
    return json.dumps(arguments, ensure_ascii=False)


LOOK: Final[Call] = ("look", {"what": CODE, "n": 5, "all": False})
FIND: Final[Call] = ("ns.find-it/x", {"what": "null"})
STOP: Final[Call] = ("stop", {})
CALLS: Final = (LOOK, FIND, STOP)


def _answers(*calls: str, joined: str, think: str = "") -> dict[str, Answer]:
    """An answer with one of these calls, with all of them `joined`, and one that thinks."""
    found = {
        "text": Answer("Hello.", "Hello."),
        "call": Answer(f"I look.{joined.format(calls[0])}", "I look.", calls=(LOOK,)),
        "name": Answer(joined.format(calls[1]), calls=(FIND,)),
        "nothing": Answer(joined.format(calls[2]), calls=(STOP,)),
        "several": Answer(joined.format("".join(calls)), calls=CALLS),
    }
    if think:
        found["thought"] = Answer(f"{think.format('Hm.')}Hello.", "Hello.", "Hm.")
        found["thought, call"] = Answer(
            f"{think.format('Hm.')}{joined.format(calls[0])}", "", "Hm.", (LOOK,)
        )
    return found


_LOOKS: Final = (
    f"<function=look>\n<parameter=what>\n{CODE}\n</parameter>\n<parameter=n>\n5\n</parameter>\n"
    "<parameter=all>\nfalse\n</parameter>\n</function>"
)
_THINK: Final = "<think>\n{}\n</think>\n\n"
_OBJECTS: Final = [_json({"name": name, "arguments": given}) for name, given in CALLS]
_PARAMETERS: Final = [_json({"name": name, "parameters": given}) for name, given in CALLS]
_TOOL_NAMES: Final = [
    _json({"tool_call_id": str(i), "tool_name": name, "parameters": given})
    for i, (name, given) in enumerate(CALLS)
]


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _tags(call: str, argument: str, end: str) -> list[str]:
    """Calls in tags: the formats of a name, of a key with its value, and what ends a call."""
    return [
        call.format(name)
        + "".join(argument.format(key, _text(value)) for key, value in given.items())
        + end
        for name, given in CALLS
    ]


_PYTHON: Final = [
    f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
    for name, given in CALLS
]


def _listed(quote: str) -> list[str]:
    """Calls as Gemma writes them, with these marks around a text."""
    return [
        f"call:{name}{{"
        + ",".join(
            f"{key}:{quote}{value}{quote}" if isinstance(value, str) else f"{key}:{_json(value)}"
            for key, value in given.items()
        )
        + "}"
        for name, given in CALLS
    ]


def _each(start: str, end: str, calls: list[str]) -> list[str]:
    return [f"{start}{call}{end}" for call in calls]


_FENCED: Final = [
    f"<\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>{name}\n```json\n{_json(given)}\n```"
    "<\uff5ctool\u2581call\u2581end\uff5c>"
    for name, given in CALLS
]
_DEEPSEEK: Final = [
    f"<\uff5ctool\u2581call\u2581begin\uff5c>{name}<\uff5ctool\u2581sep\uff5c>{_json(given)}<\uff5ctool\u2581call\u2581end\uff5c>"
    for name, given in CALLS
]
_DEEPSEEK_ALL: Final = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c>{}<\uff5ctool\u2581calls\u2581end\uff5c>"
)
_DSML: Final = [
    f'\n<\uff5cDSML\uff5cinvoke name="{name}">\n'
    + "".join(
        f'<\uff5cDSML\uff5cparameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
        f"{_text(value)}</\uff5cDSML\uff5cparameter>\n"
        for key, value in given.items()
    )
    + "</\uff5cDSML\uff5cinvoke>\n"
    for name, given in CALLS
]
_KIMI: Final = [
    f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{_json(given)}"
    "<|tool_call_end|>"
    for i, (name, given) in enumerate(CALLS)
]

_C, _M = "<|channel|>", "<|message|>"
_ANALYSIS: Final = f"{_C}analysis{_M}Hm.<|end|>"
_TO_LOOK: Final = f"{_C}commentary to=functions.look <|constrain|>json{_M}{_json(LOOK[1])}<|call|>"
_HARMONY: Final = {
    "final": Answer(f"{_C}final{_M}Hello.<|return|>", "Hello."),
    "thought": Answer(f"{_ANALYSIS}<|start|>assistant{_C}final{_M}Hello.", "Hello.", "Hm."),
    "thought alone": Answer(f"{_C}analysis{_M}Hm.", "", "Hm."),
    "call": Answer(f"{_ANALYSIS}<|start|>assistant{_TO_LOOK}", "", "Hm.", (LOOK,)),
    "recipient first": Answer(
        f" to=functions.look{_C}commentary <|constrain|>json{_M}{_json(LOOK[1])}", calls=(LOOK,)
    ),
    "recipient first, later": Answer(
        f"{_ANALYSIS}<|start|>assistant to=functions.ns.find-it/x{_C}commentary json{_M}"
        f"{_json(FIND[1])}<|call|>",
        reasoning="Hm.",
        calls=(FIND,),
    ),
    "preamble": Answer(
        f"{_C}commentary{_M}I look.<|end|><|start|>assistant{_TO_LOOK}", "I look.", calls=(LOOK,)
    ),
    "preamble and answer": Answer(
        f"{_C}commentary{_M}I look.<|end|><|start|>assistant{_C}final{_M}Done.", "I look.\n\nDone."
    ),
    "nothing": Answer(
        f"{_C}commentary to=functions.stop <|constrain|>json{_M}{{}}<|call|>", calls=(STOP,)
    ),
    "several": Answer(
        f"{_TO_LOOK}<|start|>assistant{_C}commentary to=functions.stop json{_M}{{}}<|call|>",
        calls=(LOOK, STOP),
    ),
    "forced": Answer(f"{_C}commentary to=functions{_M}{_OBJECTS[0]}<|call|>", calls=(LOOK,)),
    "no header": Answer("Hello there.", "Hello there."),
    "a text that quotes marks": Answer(f"{_C}final{_M}A <|x|> b.", "A <|x|> b."),
    "a text that mentions marks": Answer(
        f"{_C}final{_M}The {_C} begins a header, <|start|> a message. Bye.",
        f"The {_C} begins a header, <|start|> a message. Bye.",
    ),
    "a text that ends with a mark": Answer(f"{_C}final{_M}It is {_C} x.", f"It is {_C} x."),
}

_WITH_IDS: Final = json.dumps(
    [{"name": name, "arguments": given, "id": f"call{i}"} for i, (name, given) in enumerate(CALLS)],
    ensure_ascii=False,
)
"""A list of calls as some templates write them in history."""

ANSWERS: Final[dict[str, dict[str, Answer]]] = {
    "hermes": {
        **_answers(
            *_each("\n<tool_call>\n", "\n</tool_call>", _OBJECTS), joined="{}", think=_THINK
        ),
        "ids": Answer(f"<tool_call>{_WITH_IDS}</tool_call>", calls=CALLS),
        "forgotten ends": Answer("".join(f"<tool_call>\n{one}\n" for one in _OBJECTS), calls=CALLS),
        "code": Answer(
            "```\n<think>\nHm\n</think>\n```\nSo.", "```\n<think>\nHm\n</think>\n```\nSo."
        ),
        "backticks": Answer("<think>It is `x`</think>```\ny\n```", "```\ny\n```", "It is `x`"),
    },
    "qwen3_coder": _answers(
        *_each(
            "\n<tool_call>\n",
            "\n</tool_call>",
            _tags("<function={}>\n", "<parameter={}>\n{}\n</parameter>\n", "</function>"),
        ),
        joined="{}",
        think=_THINK,
    )
    | {
        "forgotten start": Answer(f"I look.\n\n{_LOOKS}\n</tool_call>", "I look.", calls=(LOOK,)),
        "forgotten marks": Answer(f"{_LOOKS}\n", calls=(LOOK,)),
        "forgotten start of several": Answer(
            f"{_LOOKS}\n</tool_call>\n<tool_call>\n{_LOOKS}\n</tool_call>", calls=(LOOK, LOOK)
        ),
        "mentions": Answer("Use <function=look> so.", "Use <function=look> so."),
        "code, tags": Answer(f"```\n{_LOOKS}\n```\nSo.", f"```\n{_LOOKS}\n```\nSo."),
        "no tool": Answer("<function=f>\n</function>\nSo.", "<function=f>\n</function>\nSo."),
        "thought of": Answer(f"<think>\n{_LOOKS}\n</think>\nSo.", "So.", _LOOKS),
    },
    "seed_oss": _answers(
        *_each(
            "<seed:tool_call>",
            "</seed:tool_call>",
            _tags("<function={}>\n", "<parameter={}>\n{}\n</parameter>\n", "</function>"),
        ),
        joined="{}",
        think="<seed:think>{}</seed:think>",
    ),
    "glm45": _answers(
        *_each(
            "\n<tool_call>",
            "</tool_call>",
            _tags("{}\n", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", ""),
        ),
        joined="{}",
        think=_THINK,
    ),
    "longcat": _answers(
        *_each(
            "<longcat_tool_call>",
            "</longcat_tool_call>",
            _tags(
                "{}\n",
                "<longcat_arg_key>{}</longcat_arg_key>\n<longcat_arg_value>{}"
                "</longcat_arg_value>\n",
                "",
            ),
        ),
        joined="{}",
    ),
    "minimax_m2": _answers(
        *_tags('\n<invoke name="{}">\n', '<parameter name="{}">{}</parameter>\n', "</invoke>"),
        joined="<minimax:tool_call>{}\n</minimax:tool_call>",
        think=_THINK,
    ),
    "deepseek_v3": _answers(*_FENCED, joined=_DEEPSEEK_ALL, think=_THINK),
    "deepseek_v31": _answers(*_DEEPSEEK, joined=_DEEPSEEK_ALL, think=_THINK),
    "deepseek_v32": _answers(
        *_DSML,
        joined="\n\n<\uff5cDSML\uff5cfunction_calls>{}</\uff5cDSML\uff5cfunction_calls>",
        think=_THINK,
    ),
    "kimi_k2": _answers(
        *_KIMI, joined="<|tool_calls_section_begin|>{}<|tool_calls_section_end|>", think=_THINK
    ),
    "mistral": _answers(
        *(f"[TOOL_CALLS]{name}[ARGS]{_json(given)}" for name, given in CALLS),
        joined="{}",
        think="[THINK]{}[/THINK]",
    ),
    "mistral, ids": _answers(
        *(
            f"[TOOL_CALLS]{name}[CALL_ID]abc12345{i}[ARGS]{_json(given)}"
            for i, (name, given) in enumerate(CALLS)
        ),
        joined="{}",
    ),
    "mistral, listed": {
        "several": Answer(f"[TOOL_CALLS]{_WITH_IDS}", calls=CALLS),
        "text behind": Answer(f"[TOOL_CALLS][{_OBJECTS[0]}] So.", "So.", calls=(LOOK,)),
    },
    "lfm2": _answers(
        *(f"<|tool_call_start|>[{call}]<|tool_call_end|>" for call in _PYTHON),
        joined="{}",
        think=_THINK,
    ),
    "gemma4": _answers(
        *_each("<|tool_call>", "<tool_call|>", _listed('<|"|>')),
        joined="{}",
        think="<|channel>thought\n{}<channel|>",
    ),
    "openai": _HARMONY,
    "llama3_json": {
        "text": Answer("Hello.", "Hello."),
        "call": Answer(_PARAMETERS[0], calls=(LOOK,)),
        "marked": Answer(f"<|python_tag|>{_PARAMETERS[1]}", calls=(FIND,)),
        "nothing": Answer(_PARAMETERS[2], calls=(STOP,)),
        "several": Answer("; ".join(_PARAMETERS), calls=CALLS),
        "commas": Answer(", ".join(_PARAMETERS), calls=CALLS),
        "types": Answer(
            _PARAMETERS[0].replace('{"name"', '{"type": "function", "name"', 1), calls=(LOOK,)
        ),
        "text behind": Answer(f"{_PARAMETERS[0]}\nI looked.", "I looked.", calls=(LOOK,)),
        "an object": Answer(
            '{"name": "no tool of ours", "a": 1}', '{"name": "no tool of ours", "a": 1}'
        ),
        "a list": Answer("[1, 2]", "[1, 2]"),
    },
    "llama4_pythonic": {
        "text": Answer("[Hello].", "[Hello]."),
        "bare": Answer(f"[{', '.join(_PYTHON)}]", calls=CALLS),
        "marked": Answer(f"<|python_start|>[{_PYTHON[0]}]<|python_end|>", calls=(LOOK,)),
        "json": Answer(_PARAMETERS[0], calls=(LOOK,)),
        "nothing": Answer(f"[{_PYTHON[2]}]", calls=(STOP,)),
    },
    "cohere": {
        "text": Answer(
            "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Hello.<|END_RESPONSE|>",
            "Hello.",
            "Hm.",
        ),
        "call": Answer(
            f"<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[{', '.join(_TOOL_NAMES)}]"
            "<|END_ACTION|>",
            reasoning="Hm.",
            calls=CALLS,
        ),
        "nothing": Answer(f"<|START_ACTION|>[{_TOOL_NAMES[2]}]<|END_ACTION|>", calls=(STOP,)),
    },
    "granite": {
        "text": Answer("<think>Hm.</think><response>Hello.</response>", "Hello.", "Hm."),
        "code": Answer(
            "```xml\n<response>\n</response>\n```", "```xml\n<response>\n</response>\n```"
        ),
        "call": Answer(f"<|tool_call|>[{', '.join(_OBJECTS)}]", calls=CALLS),
        "nothing": Answer(f"<|tool_call|>[{_OBJECTS[2]}]", calls=(STOP,)),
    },
    "nemotron": {
        "call": Answer(
            f"{_THINK.format('Hm.')}<TOOLCALL>[{', '.join(_OBJECTS)}]</TOOLCALL>",
            reasoning="Hm.",
            calls=CALLS,
        ),
        "nothing": Answer(f"<TOOLCALL>[{_OBJECTS[2]}]</TOOLCALL>", calls=(STOP,)),
    },
    "apriel": {
        "call": Answer(f"<tool_calls>[{', '.join(_OBJECTS)}]</tool_calls>", calls=CALLS),
        "ids": Answer(f"<tool_calls>{_WITH_IDS}</tool_calls>", calls=CALLS),
        "nothing": Answer(f"<tool_calls>[{_OBJECTS[2]}]</tool_calls>", calls=(STOP,)),
    },
    "functiongemma": _answers(
        *_each("<start_function_call>", "<end_function_call>", _listed("<escape>")), joined="{}"
    ),
    "minicpm5": _answers(
        *_tags('<function name="{}">', '<param name="{}">{}</param>', "</function>"), joined="{}"
    ),
    "muse_spark": _answers(
        *_tags(
            '<atem:invoke name="{}">',
            '<atem:parameter name="{}">{}</atem:parameter>',
            "</atem:invoke>",
        ),
        joined="<atem:function_calls>{}</atem:function_calls>",
    ),
    "kimi_k3": _answers(
        *(
            f'<|open|>call tool="{name}" index="{i}"<|sep|><|open|>json type="object"<|sep|>'
            f"{_json(given)}<|close|>json<|sep|><|close|>call<|sep|>"
            for i, (name, given) in enumerate(CALLS, 1)
        ),
        joined="<|open|>tools<|sep|>{}<|close|>tools<|sep|>",
    ),
}
"""By family, and "mistral, ids" with ids in calls."""
