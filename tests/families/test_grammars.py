"""A grammar binds the calls that a family's models write, and lets them write these."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Final

import pytest

from semantic.domain.chat import Chat, Message, ToolChoice
from semantic.domain.grammar import Grammar
from tests.families.answers import ANSWERS, CALLS, LOOK, TOOLS, Answer
from tests.support.families import OURS, REAL, format_of, tokenizer_of
from tests.support.grammar_fit import FULL, WRONG, fits

ALL: Final = OURS | REAL
OBJECTS: Final = ("minimax_m2", "gemma4", "functiongemma", "longcat", "glm45", "lfm2", "seed_oss",
                  "qwen3_coder", "minicpm5", "muse_spark", "deepseek_v32", "kimi_k3",
                  "llama4_pythonic")  # fmt: skip
"""Families whose models write no JSON: a grammar binds an object between their marks."""
PLAIN: Final = ("call", "name", "nothing", "thought, call", "marked", "preamble")
"""Answers in the form that a model was trained to write, not in one that is merely read."""
STRICT: Final = tuple(replace(tool, strict=True) for tool in TOOLS)
ASKED: Final = Chat((Message("user", "?"),), STRICT)
FORCED: Final = replace(ASKED, tool_choice=ToolChoice("required"))


def grammar(name: str, chat: Chat) -> Grammar:
    found = format_of(name).call_grammar(chat, opens_thought=False)
    assert found is not None
    return found


def answers(name: str) -> dict[str, Answer]:
    """The answers with calls of the family of a template's models."""
    speaks, source = format_of(name), format_of(name).source
    family = speaks.call_parser
    if family == "mistral" and "[CALL_ID]" in source:
        family = "mistral, ids"
    elif speaks.tools == "native" and family == "mistral" and "[ARGS]" not in source:
        objects = [{"name": name, "arguments": given} for name, given in CALLS]
        listed = f"[TOOL_CALLS]{json.dumps(objects, ensure_ascii=False)}"
        return {"several": Answer(listed, calls=CALLS)}
    elif family in OBJECTS:
        marks = speaks.call_marks
        call = json.dumps({"name": LOOK[0], "arguments": LOOK[1]}, ensure_ascii=False)
        return {"call": Answer(f"{marks.start}{call}{marks.end}", calls=(LOOK,))}
    found = ANSWERS[family]
    return {case: one for case, one in found.items() if one.calls and case in PLAIN}


@pytest.mark.parametrize("name", [name for name in ALL if name != "no_template"])
def test_a_call_may_be_written_as_its_model_writes_it(name: str) -> None:
    tokenizer, free, forced = tokenizer_of(name), grammar(name, ASKED), grammar(name, FORCED)
    has_headers = format_of(name).headers is not None
    for case, answer in answers(name).items():
        thought = format_of(name).thought_marks
        if answer.reasoning and (thought is None or thought.start not in answer.written):
            continue
        assert fits(tokenizer, free, answer.written) == FULL, case
        wrong = answer.written.replace('"n": 5', '"n": "five"')
        assert fits(tokenizer, free, wrong) == (FULL if wrong == answer.written else WRONG), case
        if not answer.content:
            assert fits(tokenizer, forced, answer.written) == FULL, case
            assert fits(tokenizer, forced, wrong) == fits(tokenizer, free, wrong), case
    text = "Hello, <b>world</b>! \u00e9\U0001f600\n\n{"
    headed = f"<|channel|>final<|message|>{text}" if has_headers else text
    assert fits(tokenizer, free, headed) == FULL
    assert fits(tokenizer, forced, headed) == WRONG
