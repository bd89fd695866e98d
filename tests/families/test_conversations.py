"""Templates take conversations as clients send them, and a model sees all of them."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from semantic.adapters.mlx.model.provider import load_tokenizer
from semantic.adapters.mlx.text.chat_format import MLXChatFormat
from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
from semantic.application.chat.families import Parsers
from semantic.domain.chat import Chat, Message, Tool, ToolCall, in_call_order
from semantic.domain.errors import InvalidRequestError
from semantic.ports.chat import Marks
from tests.families.conversations import CONVERSATIONS, TOOLS, answer, result, texts, user
from tests.support.chat_templates import Format, load_format
from tests.support.families import OURS, REAL, format_of, tokenizer_of

WITH_TEMPLATE = [name for name, each in OURS.items() if each.template]
TEXT_OR_CALLS = ("Mistral-Nemo", "Mistral-Small-3.2")
"""Templates that write the calls of an answer alone, and not its text."""
MOVES_TEXT = ("gemma-4", "ax-gemma4")
"""Templates that write the text of an answer behind its calls."""


def rendered(name: str, messages: Sequence[Message]) -> str:
    return tokenizer_of(name).decode(
        format_of(name).render(Chat(in_call_order(messages), TOOLS)).tokens
    )


def single_calls(name: str) -> bool:
    """Whether a template has one call in an answer."""
    return name == "harmony" or (name in REAL and is_one_of(name, ("gpt-oss", "meta-llama")))


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


@pytest.mark.parametrize("name", [*WITH_TEMPLATE, *REAL])
def test_a_model_sees_all_of_a_conversation(name: str) -> None:
    loses_text = name in REAL and is_one_of(name, TEXT_OR_CALLS)
    moves = name in REAL and is_one_of(name, MOVES_TEXT)
    for title, messages in CONVERSATIONS.items():
        text = rendered(name, messages)
        sent = interleaved(messages) if single_calls(name) else messages
        said = [one for one in sent if not (loses_text and one.content and one.tool_calls)]
        at = -1
        for expected in texts(said):
            at = text.find(expected, 0 if moves else at + 1)
            assert at >= 0, (title, expected, text)


@pytest.mark.parametrize("name", [*WITH_TEMPLATE, *REAL])
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


SHOWS_TOOLS = (
    "{%- if tools -%}<|tools|>{{ tools | tojson }}{%- endif -%}{%- for m in messages -%}"
    "<|{{ m.role }}|>{{ m.content }}{%- for call in m.tool_calls or [] -%}"
    "@{{ call.function.name }} {{ call.function.arguments | tojson }}{%- endfor -%}<|end|>"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def test_a_form_of_calls_that_no_parser_knows_is_said_and_can_be_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer, found = chat_format(SHOWS_TOOLS, tmp_path)
    assert (found.tools, found.call_parser) == ("unknown", "hermes")
    found.tell(logging.getLogger("here"))
    assert [one.levelname for one in caplog.records] == ["WARNING"]
    assert "no parser knows" in caplog.text
    named = MLXChatFormat(tokenizer, parsers=Parsers("mistral", "qwen3"))
    assert (named.tools, named.call_parser) == ("native", "mistral")
    assert (named.call_marks.start, named.thought_marks) == (
        "[TOOL_CALLS]",
        Marks("<think>", "</think>"),
    )


def test_a_parser_for_a_template_without_tools_is_refused(tmp_path: Path) -> None:
    tokenizer, found = chat_format(PARTS.replace("LOOP", "{{ m.content }}"), tmp_path)
    assert (found.tools, found.call_parser, found.thought_marks) == ("text", "hermes", None)
    with pytest.raises(InvalidRequestError, match="renders no tools"):
        MLXChatFormat(tokenizer, parsers=Parsers(calls="mistral"))


def test_a_template_beside_a_processor_is_the_models(tmp_path: Path) -> None:
    load_format(Format("given", None), tmp_path)
    template = json.dumps({"chat_template": PARTS.replace("LOOP", LOOPS["loop"])})
    (tmp_path / "chat_template.json").write_text(template, encoding="utf-8")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    tokenizer = load_tokenizer(str(tmp_path))
    found = MLXChatFormat(tokenizer).render(Chat((user("Q1"),))).tokens
    assert tokenizer.decode(found) == "<|user|>Q1<|end|><|assistant|>"


RECURSES = (
    "{%- macro type_of(schema) -%}{%- if schema.type == 'array' -%}[{{ type_of(schema.items) }}]"
    "{%- elif schema.type is string -%}{{ schema.type }}{%- else -%}{{ type_of(schema) }}"
    "{%- endif -%}{%- endmacro -%}"
    "{%- for tool in tools or [] -%}{%- for name, schema in tool.function.parameters.properties"
    ".items() -%}{{ tool.function.name }}.{{ name }}: {{ type_of(schema) }};{%- endfor -%}"
    "{%- endfor -%}"
)


def test_a_template_that_recurses_on_a_parameter_without_a_type_gets_one(tmp_path: Path) -> None:
    properties = {
        "n": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "any": {"description": "x"},
        "kind": {"enum": ["a", "b"]},
        "which": {"$ref": "#/$defs/which"},
        "text": {"type": "string"},
    }
    schema = {"type": "object", "properties": properties, "$defs": {"which": {"type": "boolean"}}}
    tokenizer, given = chat_format(RECURSES + SHOWS_TOOLS.replace("@", "<tool_call>"), tmp_path)
    chat = Chat((user("Q1"),), (Tool("look", parameters=schema),))
    text = tokenizer.decode(given.render(chat).tokens)
    assert text.startswith(
        "look.n: integer;look.any: string;look.kind: string;look.which: boolean;look.text: string;"
    )


LATE_TOOLS = (
    "{%- set asked = namespace(at=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set asked.at = loop.index0 -%}{%- endif -%}{%- endfor -%}{%- for m in messages -%}"
    "{%- if loop.index0 == asked.at and tools -%}<|tools|>{{ tools | tojson }}{%- endif -%}"
    "<|{{ m.role }}|>{{ m.content }}{%- for call in m.tool_calls or [] -%}<tool_call>"
    "{{ call.function.name }} {{ call.function.arguments | tojson }}{%- endfor -%}<|end|>"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def test_tools_before_the_last_question_are_all_there_and_only_once(tmp_path: Path) -> None:
    tokenizer, found = chat_format(LATE_TOOLS, tmp_path)
    assert found.loops_only
    begun = (user("Q1"), answer("", "C1"))
    by_result = found.render_after(Chat((*begun, result("C1", "R1")), TOOLS), 2)
    assert by_result is not None
    assert tokenizer.decode(by_result.tokens) == "<|end|><|tool|>R1<|end|><|assistant|>"
    asked = Chat((*begun, result("C1", "R1"), answer("A1"), user("Q2")), TOOLS)
    assert found.render_after(asked, 4) is None
    text = tokenizer.decode(found.render(asked).tokens)
    assert [text.count(f'"name": "{tool.name}"') for tool in TOOLS] == [1, 1]
    assert found.render_after(replace(asked, tools=()), 4) is not None
