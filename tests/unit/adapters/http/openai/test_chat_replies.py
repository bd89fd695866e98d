"""What clients of chat completions read: replies and chunks fit OpenAI's types and agree."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming._deltas import accumulate_delta
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from semantic.domain.answer import (
    AnswerPiece,
    AnswerReason,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from semantic.domain.errors import (
    GRAMMAR_FAILED,
    NOT_FINITE,
    BackendError,
    ContextOverflowError,
    InvalidRequestError,
    OverloadedError,
    PoolExhaustedError,
    SemanticError,
)
from semantic.domain.match import CacheMiss, MatchEnd, MatchReport
from semantic.domain.request_parts import Change, Difference, PartKind
from semantic.domain.value_objects import TokenLogprob
from semantic.ports.serving import Ask
from semantic_server.http.openai.replies import UsageSum, usage_object
from tests.support.fake_serving import Script
from tests.support.lanes import examples
from tests.unit.adapters.http.openai.wire import CHAT, Json, Wire, at, spelled, wire_of

CALLS = (
    ToolCallStarted(0, "call_a", "look"),
    ToolCallDelta(0, '{"at": '),
    ToolCallDelta(0, '"x"}'),
    ToolCallStarted(1, "call_b", "stop"),
    ToolCallDelta(1, "{}"),
)

CALL_BODIES = [
    {"id": "call_a", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}},
    {"id": "call_b", "type": "function", "function": {"name": "stop", "arguments": "{}"}},
]


def replied(script: Script, **fields: object) -> Json:
    """The reply, which fits the type of the SDK."""
    reply = wire_of(script).chat(**fields)
    ChatCompletion.model_validate(reply, strict=True)
    return reply


def chunked(script: Script, **fields: object) -> list[Json]:
    """The chunks, each of which fits the type of the SDK, which knows no custom calls in them."""
    chunks = wire_of(script).chunks(CHAT, **fields)
    for chunk in chunks:
        known = json.loads(json.dumps(chunk).replace('"type": "custom"', '"type": null'))
        ChatCompletionChunk.model_validate(known, strict=True)
    return chunks


def summed(chunks: Sequence[Json]) -> dict[int, Json]:
    """Message and finish reason of each choice, added up as OpenAI's client does it."""
    messages: dict[int, Json] = {}
    for chunk in chunks:
        for choice in json.loads(json.dumps(chunk["choices"])):
            message = messages.setdefault(choice["index"], {"content": None, "finish": None})
            accumulate_delta(message, choice["delta"])  # type: ignore[arg-type]
            message["finish"] = choice["finish_reason"] or message["finish"]
            for one in (choice["logprobs"] or {}).get("content", []):
                message.setdefault("logprobs", []).append(one)  # type: ignore[attr-defined]
    return messages


def whole(reply: Json) -> dict[int, Json]:
    """Message and finish reason of each choice of a reply, in the shape of `summed`."""
    messages: dict[int, Json] = {}
    for choice in reply["choices"]:  # type: ignore[attr-defined]
        message = dict(choice["message"])
        assert message.pop("refusal") is None
        for number, call in enumerate(message.get("tool_calls", [])):
            call["index"] = number
        message["finish"] = choice["finish_reason"]
        if choice["logprobs"]:
            message["logprobs"] = choice["logprobs"]["content"]
        messages[choice["index"]] = message
    return messages


CUSTOM = {"type": "custom", "custom": {"name": "free"}}
CUSTOM_CALLS = Script(
    (
        ToolCallStarted(0, "call_a", "free"),
        ToolCallDelta(0, '{"input": "a'),
        ToolCallDelta(0, '\\n"}'),
        ToolCallStarted(1, "call_b", "look"),
        ToolCallDelta(1, "{"),
        ToolCallDelta(1, "}"),
        ToolCallStarted(2, "call_c", "free"),
        ToolCallDelta(2, '{"path": 5}'),
    ),
    "tool_calls",
)


def test_a_custom_call_has_its_text() -> None:
    tools = [CUSTOM, {"type": "function", "function": {"name": "look"}}]
    reply = whole(replied(CUSTOM_CALLS, tools=tools))
    assert reply == summed(chunked(CUSTOM_CALLS, tools=tools))
    assert reply[0]["finish"] == "tool_calls"
    assert reply[0]["tool_calls"] == [
        {"index": 0, "id": "call_a", "type": "custom", "custom": {"name": "free", "input": "a\n"}},
        {
            "index": 1,
            "id": "call_b",
            "type": "function",
            "function": {"name": "look", "arguments": "{}"},
        },
        {
            "index": 2,
            "id": "call_c-as-written",
            "type": "custom",
            "custom": {"name": "free", "input": '{"path": 5}'},
        },
    ]


def test_a_custom_call_that_is_cut_is_as_far_as_it_was_written() -> None:
    script = Script(
        (ToolCallStarted(0, "call_a", "free"), ToolCallDelta(0, '{"input": "a')), "length"
    )
    reply = whole(replied(script, tools=[CUSTOM]))
    assert reply == summed(chunked(script, tools=[CUSTOM]))
    assert reply[0]["finish"] == "length"
    assert at(reply[0], "tool_calls", 0, "custom", "input") == '{"input": "a'


def test_a_reply() -> None:
    reply = replied(Script((TextDelta("Hel"), TextDelta("lo.")), cached=3, completion=2))
    assert str(reply.pop("id")).startswith("chatcmpl-")
    assert isinstance(reply.pop("created"), int)
    assert str(reply.pop("system_fingerprint")).startswith("fp_")
    assert reply == {
        "object": "chat.completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello.", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 2},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
            "semantic": {"lost": None},
        },
    }


def test_a_stream() -> None:
    chunks = chunked(Script((TextDelta("Hel"), TextDelta("lo."))))
    assert [at(chunk, "choices", 0, "delta") for chunk in chunks] == [
        {"role": "assistant"},
        {"content": "Hel"},
        {"content": "lo."},
        {},
    ]
    assert [at(chunk, "choices", 0, "finish_reason") for chunk in chunks] == [None] * 3 + ["stop"]
    assert len({str(chunk["id"]) for chunk in chunks}) == 1
    assert ["usage" in chunk for chunk in chunks] == [False] * 3 + [True]


def test_usage_is_in_the_last_finish_chunk_where_it_is_not_asked_for() -> None:
    script = Script((TextDelta("Hi"),), cached=2, reasoning=1)
    assert chunked(script)[-1]["usage"] == replied(script)["usage"]
    three = wire_of(script).chunks(CHAT, n=3, seed=1)
    assert [chunk for chunk in three if "usage" in chunk] == three[-1:]
    finished = [at(chunk, "choices", 0, "finish_reason") for chunk in three]
    assert len(list(filter(None, finished))) == 3
    assert finished[-1]
    assert three[-1]["usage"] == wire_of(script).chat(n=3, seed=1)["usage"]


def test_a_stream_that_wants_no_usage_has_none() -> None:
    chunks = chunked(Script((TextDelta("Hi"),)), stream_options={"include_usage": False})
    assert all("usage" not in chunk for chunk in chunks)


def test_two_requests_have_two_ids() -> None:
    wire = wire_of()
    assert wire.chat()["id"] != wire.chat()["id"]


def test_the_models_own_name_is_told() -> None:
    assert wire_of().chat(model="default")["model"] == "fake"


def test_usage_at_the_end_of_a_stream() -> None:
    script = Script((TextDelta("Hi"),), cached=2, reasoning=1)
    options = {"include_usage": True}
    *others, last = chunked(script, stream_options=options)
    assert [chunk["usage"] for chunk in others] == [None] * 3
    assert last["choices"] == []
    assert last["usage"] == replied(script)["usage"]


def test_running_usage_is_told_when_a_choice_ends() -> None:
    chunks = chunked(Script((TextDelta("Hi"),)), stream_options={"continuous_usage_stats": True})
    assert [chunk["usage"] is None for chunk in chunks] == [True, True, False, False]
    assert chunks[-1]["usage"] == chunks[-2]["usage"]


@pytest.mark.parametrize("script", [Script(CALLS), Script(CALLS, reason="tool_calls")])
def test_calls(script: Script) -> None:
    reply = replied(script)
    assert at(reply, "choices", 0, "message") == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": CALL_BODIES,
    }
    assert at(reply, "choices", 0, "finish_reason") == "tool_calls"
    chunks = chunked(script)
    assert at(chunks[1], "choices", 0, "delta", "tool_calls", 0) == {
        "index": 0,
        "id": "call_a",
        "type": "function",
        "function": {"name": "look", "arguments": ""},
    }
    assert at(chunks[-1], "choices", 0, "finish_reason") == "tool_calls"


def test_text_before_calls_stays() -> None:
    reply = replied(Script((TextDelta("Let me look."), *CALLS), reason="tool_calls"))
    assert at(reply, "choices", 0, "message", "content") == "Let me look."
    assert at(reply, "choices", 0, "finish_reason") == "tool_calls"


def test_an_answer_that_was_cut_says_so_even_after_a_call() -> None:
    reply = replied(Script(CALLS, reason="length"))
    assert at(reply, "choices", 0, "finish_reason") == "length"


def test_a_call_that_a_stop_string_cut_is_not_to_be_made() -> None:
    for reason, told in (("stop", "stop"), ("tool_calls", "tool_calls")):
        reply = replied(Script(CALLS, reason=cast("AnswerReason", reason), stop_string="x"))
        assert at(reply, "choices", 0, "finish_reason") == told


def test_an_empty_answer_is_an_empty_text() -> None:
    assert at(replied(Script(())), "choices", 0, "message", "content") == ""


def test_thoughts_have_both_names() -> None:
    script = Script((ReasoningDelta("Hm"), ReasoningDelta("."), TextDelta("Yes.")), reasoning=2)
    message = at(replied(script), "choices", 0, "message")
    assert at(message, "reasoning") == at(message, "reasoning_content") == "Hm."
    assert at(message, "content") == "Yes."


def test_logprobs() -> None:
    script = Script((*spelled("Hé", top=2), TextDelta("", (TokenLogprob(0, float("-inf")),))))
    reply = replied(script, logprobs=True, top_logprobs=2)
    top = [
        {"token": "z", "bytes": [122], "logprob": -0.25},
        {"token": "y", "bytes": [121], "logprob": -0.5},
    ]
    assert at(reply, "choices", 0, "logprobs", "content") == [
        {"token": "H", "bytes": [72], "logprob": -0.5, "top_logprobs": top},
        {"token": "é", "bytes": [195, 169], "logprob": -0.5, "top_logprobs": top},
        {"token": "\0", "bytes": [0], "logprob": -9999.0, "top_logprobs": []},
    ]
    assert at(reply, "choices", 0, "message", "content") == "Hé"
    assert summed(chunked(script, logprobs=True, top_logprobs=2)) == whole(reply)


def test_a_part_of_a_character_has_no_bytes() -> None:
    script = Script((TextDelta("", (TokenLogprob(0xFFFD, -1.0),)), TextDelta("é")))
    content = at(replied(script, logprobs=True), "choices", 0, "logprobs", "content")
    assert at(content, 0, "bytes") is None


def by_seed(ask: Ask) -> Script:
    """Answers with the seed; the later choices are quicker."""
    assert ask.sampling.seed is not None
    return Script(spelled("abc"[: 4 - ask.sampling.seed]), cached=ask.sampling.seed)


def test_usage_tells_what_was_lost() -> None:
    tool = Difference(PartKind.TOOL, Change.CHANGED, 7, "Bash")
    match = MatchReport(
        900, 512, MatchEnd.DIVERGED, "disk", 512, 17, 23, 1.5, CacheMiss(380, 1.25, tool)
    )
    told = {
        "tokens": 380,
        "seconds": 1.25,
        "differs_at": 512,
        "part": {"kind": "tool", "change": "changed", "number": 7, "name": "Bash"},
        "end": "diverged",
        "reason": "Tool 7 (Bash) changed.",
    }
    assert at(replied(Script(match=match)), "usage", "semantic") == {"lost": told}
    last = chunked(Script(match=match), stream_options={"include_usage": True})[-1]
    assert at(last, "usage", "semantic") == {"lost": told}
    small = replace(match, lost=CacheMiss(5, 0.1))
    usage = UsageSum()
    for number, one in enumerate((small, match, None, replace(match, lost=None))):
        usage.add(number, Usage(900, 512, 3, match=one))
    assert usage_object(usage.total())["semantic"] == {"lost": told}


def test_several_choices() -> None:
    wire = wire_of(by_seed)
    reply = wire.chat(n=3, seed=1)
    ChatCompletion.model_validate(reply, strict=True)
    texts = [at(reply, "choices", i, "message", "content") for i in range(3)]
    assert texts == ["abc", "ab", "a"]
    assert [at(reply, "choices", i, "index") for i in range(3)] == [0, 1, 2]
    usage = reply["usage"]
    assert (at(usage, "prompt_tokens"), at(usage, "completion_tokens")) == (5, 6)
    assert at(usage, "prompt_tokens_details", "cached_tokens") == 1
    chunks = wire.chunks(CHAT, n=3, seed=1, stream_options={"include_usage": True})
    assert summed(chunks) == whole(reply)
    assert chunks[-1]["usage"] == usage


# --- errors -------------------------------------------------------------------------------------

FAILURES: list[tuple[SemanticError, int, str | None]] = [
    (InvalidRequestError("no"), 400, None),
    (ContextOverflowError("long", prompt_tokens=9, limit=8), 400, "context_length_exceeded"),
    (OverloadedError("busy", retry_after=7), 503, "overloaded"),
    (PoolExhaustedError("full"), 503, "overloaded"),
    (BackendError("secret"), 500, "internal_error"),
]


@pytest.mark.parametrize(("failure", "status", "code"), FAILURES)
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3}, {"n": 3, "stream": True}])
def test_what_fails_before_it_begins_is_an_http_error(
    failure: SemanticError, status: int, code: str | None, fields: Json
) -> None:
    wire = wire_of(Script(failure=failure))
    error = wire.error(CHAT, status, **fields)
    assert error["code"] == code
    assert "secret" not in str(error)


def test_one_choice_that_cannot_begin_ends_them_all() -> None:
    def script(ask: Ask) -> Script:
        assert ask.sampling.seed is not None
        busy = OverloadedError("busy", retry_after=7)
        return Script(failure=busy) if ask.sampling.seed == 3 else Script()

    wire = wire_of(script)
    assert wire.error(CHAT, 503, n=4, seed=1, stream=True)["message"] == "busy"
    assert len(wire.fake.cancelled) == len(wire.fake.asked) == 3


TOO_MUCH = f"{GRAMMAR_FAILED}: lexer error: too many expressions constructed"
ENDS: list[tuple[Script, int, str]] = [
    (Script((TextDelta("a"),), reason="error", error="secret"), 500, "answer_failed"),
    (Script((TextDelta("a"),), reason="cancelled"), 499, "cancelled"),
    (Script((TextDelta("a"),), reason="error", error=TOO_MUCH), 400, "grammar_failed"),
]


@pytest.mark.parametrize(("script", "status", "code"), ENDS)
def test_an_answer_that_fails_is_never_a_reply(
    script: Script, status: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "semantic.server"):
        error = wire_of(script).error(CHAT, status)
    assert error["code"] == code
    ours, theirs = "server_error", "invalid_request_error"
    assert error["type"] == (theirs if status == 400 else ours)
    assert ("too many expressions" in str(error)) == (status == 400)
    assert "secret" not in str(error)
    assert ("secret" in caplog.text) == (code == "answer_failed")


@pytest.mark.parametrize(("script", "status", "code"), ENDS)
def test_a_stream_that_fails_ends_with_its_error(script: Script, status: int, code: str) -> None:
    del status
    *chunks, last = wire_of(script).stream(CHAT)
    assert [at(json.loads(chunk), "choices", 0, "delta") for chunk in chunks] == [
        {"role": "assistant"},
        {"content": "a"},
    ]
    assert at(json.loads(last), "error", "code") == code


def test_an_answer_computed_from_nan_says_so() -> None:
    wire = wire_of(Script((TextDelta("a"),), reason="error", error=NOT_FINITE))
    assert NOT_FINITE in str(wire.error(CHAT, 500)["message"])
    assert NOT_FINITE in str(at(json.loads(wire.stream(CHAT)[-1]), "error", "message"))


def test_one_choice_that_fails_cancels_the_others() -> None:
    def script(ask: Ask) -> Script:
        if ask.sampling.seed == 2:
            return Script((), reason="error")
        return Script(spelled("a" * 200))

    wire: Wire = wire_of(script)
    wire.error(CHAT, 500, n=3, seed=1)
    assert len(wire.fake.cancelled) == 2


# --- any answer ---------------------------------------------------------------------------------

TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)


@st.composite
def answers(draw: st.DrawFn) -> Script:
    """An answer as a model may write it: thoughts, texts and calls in any order and pieces."""
    pieces: list[AnswerPiece] = []
    n_calls = 0
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(["text", "scored", "thought", "call"]))
        if kind == "text":
            pieces.append(TextDelta(draw(TEXT)))
        elif kind == "scored":
            pieces += spelled(draw(TEXT))
        elif kind == "thought":
            pieces.append(ReasoningDelta(draw(TEXT)))
        else:
            pieces.append(ToolCallStarted(n_calls, f"call_{n_calls}", draw(TEXT)))
            pieces += [ToolCallDelta(n_calls, part) for part in draw(st.lists(TEXT, max_size=3))]
            n_calls += 1
    reasons: list[AnswerReason] = ["stop", "length", *(["tool_calls"] if n_calls else [])]  # type: ignore[list-item]
    return Script(tuple(pieces), draw(st.sampled_from(reasons)), draw(st.integers(0, 99)))


@settings(max_examples=examples(60, thorough=500), deadline=None)
@given(st.lists(answers(), min_size=1, max_size=3))
def test_streams_and_replies_say_the_same(scripts: list[Script]) -> None:
    def script(ask: Ask) -> Script:
        assert ask.sampling.seed is not None
        return scripts[ask.sampling.seed]

    wire = wire_of(script)
    reply = wire.chat(n=len(scripts), seed=0)
    ChatCompletion.model_validate(reply, strict=True)
    chunks = wire.chunks(CHAT, n=len(scripts), seed=0, stream_options={"include_usage": True})
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    assert summed(chunks) == whole(reply)
    assert chunks[-1]["usage"] == reply["usage"]


def test_progress_of_a_prompt_is_not_told() -> None:
    # The fake has it in each answer; clients get the role, the text and the end.
    assert len(chunked(Script((TextDelta("x"),)))) == 3
