"""Templates take conversations as clients send them, and a model sees all of them."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from semantic.adapters.mlx.text.chat_format import MLXChatFormat
from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
from semantic.domain.chat import Chat, Message, ToolCall, in_call_order
from semantic.domain.errors import InvalidRequestError
from tests.families.conversations import CONVERSATIONS, TOOLS, answer, result, texts, user
from tests.support.chat_templates import FORMATS, Format, load_format
from tests.support.families import real_formats

OURS = {name: each for name, each in FORMATS.items() if each.template}
REAL = real_formats()
TEXT_OR_CALLS = ("Mistral-Nemo", "Mistral-Small-3.2")
"""Templates that write the calls of an answer alone, and not its text."""
MOVES_TEXT = ("gemma-4", "ax-gemma4")
"""Templates that write the text of an answer behind its calls."""


@functools.cache
def tokenizer_of(name: str) -> MLXTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return load_format((FORMATS | REAL)[name], Path(folder))


@functools.cache
def format_of(name: str) -> MLXChatFormat:
    return MLXChatFormat(tokenizer_of(name))


def rendered(name: str, messages: Sequence[Message]) -> str:
    return tokenizer_of(name).decode(
        format_of(name).render(Chat(in_call_order(messages), TOOLS)).tokens
    )


def single_calls(name: str) -> bool:
    """Whether a template of real models has one call in an answer."""
    return is_one_of(name, ("gpt-oss", "meta-llama"))


def interleaved(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Each call with its result behind it."""
    found: list[Message] = []
    later: list[ToolCall] = []
    for message in messages:
        if message.role == "tool" and later:
            found += [message, Message("assistant", tool_calls=(later.pop(0),))]
            continue
        found += [Message("assistant", tool_calls=(call,)) for call in later]
        later = list(message.tool_calls[1:])
        found.append(replace(message, tool_calls=message.tool_calls[:1]))
    return tuple(found)


def is_one_of(name: str, parts: Sequence[str]) -> bool:
    return any(part in name for part in parts)


@pytest.mark.parametrize("name", [*OURS, *REAL])
def test_a_model_sees_all_of_a_conversation(name: str) -> None:
    loses_text = name in REAL and is_one_of(name, TEXT_OR_CALLS)
    moves = name in REAL and is_one_of(name, MOVES_TEXT)
    for title, messages in CONVERSATIONS.items():
        text = rendered(name, messages)
        is_single = name in REAL and single_calls(name)
        sent = interleaved(messages) if is_single else messages
        said = [one for one in sent if not (loses_text and one.content and one.tool_calls)]
        at = -1
        for expected in texts(said):
            at = text.find(expected, 0 if moves else at + 1)
            assert at >= 0, (title, expected, text)


@pytest.mark.parametrize("name", [*OURS, *REAL])
def test_the_order_in_which_results_come_changes_no_prompt(name: str) -> None:
    calls = answer("", "C1", "C2", "C3")
    results = [result(what, text) for what, text in (("C1", "R1"), ("C2", "R2"), ("C3", "R3"))]
    expected = rendered(name, (user("Q1"), calls, *results))
    assert rendered(name, (user("Q1"), calls, *results[::-1])) == expected
    assert rendered(name, (user("Q1"), calls, results[2], *results[:2])) == expected


def test_results_stand_behind_their_calls_in_the_order_of_the_calls() -> None:
    choose = random.Random(1)
    calls = [ToolCall(f"id{number % 7}", "look", f"[{number}]") for number in range(9)]
    results = [Message("tool", call.arguments, tool_call_id=call.id) for call in calls]
    rest = [user("Q2"), Message("tool", "orphan", tool_call_id="other"), Message("tool", "none")]
    asked = [user("Q1"), Message("assistant", tool_calls=tuple(calls))]
    end = [Message("assistant", "A1"), results[0]]
    for _ in range(50):
        sent = [*results[:7], *rest]
        choose.shuffle(sent)
        first = [one for one in sent if one in results[:7]]
        others = [one for one in sent if one not in first]
        first.sort(key=results.index)
        ordered = in_call_order([*asked, *sent, *end])
        assert ordered == (*asked, *first, *others, *end)
    assert in_call_order([*asked, *results]) == (*asked, *results)  # ids that are there twice


PARTS = (
    "{%- for m in messages -%}<|{{ m.role }}|>LOOP<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
LOOPS = {
    "loop": "{%- for p in m.content -%}{%- if p.type == 'text' -%}{{ p.text }}{%- endif -%}"
    "{%- endfor -%}",
    "selected": "{%- for p in m['content'] | selectattr('type', 'equalto', 'text') -%}"
    "{{ p['text'] }}{%- endfor -%}",
    "first": "{{ m['content'][0]['text'] }}",
}


def chat_format(template: str, folder: Path) -> tuple[MLXTokenizer, MLXChatFormat]:
    tokenizer = load_format(Format("given", template), folder)
    return tokenizer, MLXChatFormat(tokenizer)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_template_that_takes_parts_alone_gets_parts(loop: str, tmp_path: Path) -> None:
    tokenizer, given = chat_format(PARTS.replace("LOOP", LOOPS[loop]), tmp_path)
    for title, messages in CONVERSATIONS.items():
        text = tokenizer.decode(given.render(Chat(in_call_order(messages), TOOLS)).tokens)
        assert [one for one in texts(messages) if one not in text] == [], title


def test_a_template_that_loses_what_a_user_says_is_refused(tmp_path: Path) -> None:
    _, given = chat_format(PARTS.replace("LOOP", "hello"), tmp_path)
    with pytest.raises(InvalidRequestError, match="leaves out what a user says"):
        given.render(Chat((user("Q1"),)))


def test_a_template_that_demands_a_list_of_tools_gets_one(tmp_path: Path) -> None:
    demands = "{%- for tool in tools -%}{{ tool | tojson }}{%- endfor -%}"
    loop = "{{ m.content }}"
    tokenizer, given = chat_format(demands + PARTS.replace("LOOP", loop), tmp_path)
    assert "Q1" in tokenizer.decode(given.render(Chat((user("Q1"),))).tokens)
