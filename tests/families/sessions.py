"""A session of an agent as the models of several families write it, answer by answer."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tests.support.chat_templates import Format
from tests.support.scripted_model import Said

Call = tuple[str, dict[str, object]]

OLD: Final = "    if x:\n        return '<b>' \\ \"5\"  # é😀\n"
NEW: Final = (
    '    if x is None:\n        return "</parameter></arg_value></function></tool_call>"\n\n'
    "\treturn '[ARGS]{}' + 'null'  \n"
)
"""Edits of a file: white space at both ends, and marks of calls."""
TOOLS: Final[tuple[dict[str, object], ...]] = (
    {
        "name": "read",
        "description": "Reads a file.",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            },
        },
    },
    {
        "name": "edit-file",
        "description": "Changes a file.",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": "string"} for name in ("path", "old", "new")},
        },
    },
)


@dataclass(frozen=True)
class Step:
    """An answer: what it says. `interrupted`: the user speaks before the calls have results."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[Call, ...] = ()
    interrupted: bool = False


def read(path: str, **more: object) -> Call:
    return "read", {"path": path, **more}


EDIT: Final[Call] = ("edit-file", {"path": "a.py", "old": OLD, "new": NEW})
STEPS: Final = (
    Step("I look first.", "I read it.", (read("a.py", limit=40),)),
    Step("Both at once.", "", (EDIT, read("b.py"), read("null"))),
    Step("", "It is done: `x` may be None."),
    Step("Once more.", "", (read("c.py", limit=5),), interrupted=True),
    Step("The user stopped me.", "I stop."),
    Step("", "Again.", (EDIT,)),
    Step("It failed.", "", (read("a.py"), read("d.py"))),
    Step("Now I know.", "The file is changed."),
    Step("", "", (read("e.py", limit=1),)),
    Step("Fine.", "All is well.\n\n- `a.py`\n- é😀"),
)
"""Ten answers; a result with a picture comes behind the second."""


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _object(call: Call) -> str:
    return _json({"name": call[0], "arguments": call[1]})


def _value(value: object) -> str:
    return value if isinstance(value, str) else _json(value)


def _harmony(steps: Sequence[Step]) -> Iterator[Said]:
    start, channel, message, end = "<|start|>assistant", "<|channel|>", "<|message|>", "<|end|>"
    for step in steps:
        thought = f"{channel}analysis{message}{step.reasoning}{end}{start}"
        written = thought if step.reasoning else ""
        if not step.calls:
            yield Said(f"{written}{channel}final{message}{step.text}", "<|return|>")
            continue
        [(name, given)] = step.calls
        preamble = f"{channel}commentary{message}{step.text}{end}{start}"
        written += preamble if step.text else ""
        to = f"{channel}commentary to=functions.{name} <|constrain|>json{message}"
        yield Said(f"{written}{to}{_json(given)}", "<|call|>")


def _kimi(steps: Sequence[Step]) -> Iterator[Said]:
    numbers = itertools.count()
    for step in steps:
        calls = "".join(
            f"<|tool_call_begin|>functions.{name}:{next(numbers)}<|tool_call_argument_begin|>"
            f"{_json(given)}<|tool_call_end|>"
            for name, given in step.calls
        )
        section = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>" * bool(calls)
        yield Said(f"{step.text}{section}", "<|im_end|>")


def _mistral(steps: Sequence[Step]) -> Iterator[Said]:
    for number, step in enumerate(steps):
        calls = "".join(
            f"[TOOL_CALLS]{name}[CALL_ID]call{number:02}{at:03}[ARGS]{_json(given)}"
            for at, (name, given) in enumerate(step.calls)
        )
        yield Said(f"{step.text}{calls}", "</s>")


def _glm(steps: Sequence[Step]) -> Iterator[Said]:
    for step in steps:
        calls = "".join(
            f"\n<tool_call>{name}\n"
            + "".join(
                f"<arg_key>{key}</arg_key>\n<arg_value>{_value(value)}</arg_value>\n"
                for key, value in given.items()
            )
            + "</tool_call>"
            for name, given in step.calls
        )
        end = "<|observation|>" if calls else "<|user|>"
        yield Said(f"\n<think>{step.reasoning}</think>\n{step.text}{calls}", end)


def _qwen(steps: Sequence[Step]) -> Iterator[Said]:
    for step in steps:
        calls = "".join(f"\n<tool_call>\n{_object(call)}\n</tool_call>" for call in step.calls)
        thought = f"<think>\n{step.reasoning}\n</think>\n\n"
        yield Said(f"{thought}{step.text}{calls}", "<|im_end|>")


def _qwen_coder(steps: Sequence[Step]) -> Iterator[Said]:
    for step in steps:
        calls = "".join(
            f"\n<tool_call>\n<function={name}>\n"
            + "".join(
                f"<parameter={key}>\n{_value(value)}\n</parameter>\n"
                for key, value in given.items()
            )
            + "</function>\n</tool_call>"
            for name, given in step.calls
        )
        yield Said(f"{step.text}{calls}", "<|im_end|>")


@dataclass(frozen=True)
class Speaker:
    """How a family's models write, and what they can say. `template`: a real one, and `own`: the
    project's of the same form. `forgets`: reasoning is not shown behind an answer without calls.
    `moves_tools`: they are written before the last question.
    """

    template: str
    own: str
    write: Callable[[Sequence[Step]], Iterator[Said]]
    thinks: bool = True
    parallel: bool = True
    text_beside_calls: bool = True
    forgets: bool = False
    moves_tools: bool = False

    def said(self, step: Step) -> Step:
        """An answer as such a model gives it."""
        return Step(
            step.reasoning if self.thinks and (step.calls or not self.forgets) else "",
            step.text if self.text_beside_calls or not step.calls else "",
            step.calls if self.parallel else step.calls[:1],
            step.interrupted,
        )

    def answers(self, written: Format, steps: Sequence[Step]) -> list[Said]:
        """What it writes; the project's own templates end all that is said with one token."""
        return [
            one if one.end in written.special else replace(one, end="<|end|>")
            for one in self.write(steps)
        ]


SPEAKERS: Final = {
    "harmony": Speaker("gpt-oss", "harmony", _harmony, parallel=False, forgets=True),
    "kimi": Speaker("kimi-official", "kimi_k2", _kimi, thinks=False),
    "mistral": Speaker(
        "Mistral-Small-3.2-24B-Instruct-2506",
        "mistral",
        _mistral,
        thinks=False,
        text_beside_calls=False,
        moves_tools=True,
    ),
    "glm": Speaker("GLM-4.6", "glm47", _glm),
    "qwen": Speaker("Qwen-Qwen3-0.6B", "json_tools", _qwen),
    "qwen coder": Speaker("Qwen3-Coder", "qwen3_coder", _qwen_coder, thinks=False),
}
