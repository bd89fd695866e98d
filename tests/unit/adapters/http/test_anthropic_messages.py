"""What Anthropic's clients read: every event and message fits their SDK, and both say the same."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.beta import BetaMessage, BetaRawMessageStreamEvent
from anthropic.types.parsed_message import ParsedMessage
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from semantic.domain.answer import (
    AnswerEnd,
    AnswerEvent,
    AnswerPiece,
    AnswerReason,
    AnswerStarted,
    PromptProgress,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from semantic.domain.match import CacheMiss, MatchEnd, MatchReport
from semantic.domain.request_parts import Change, Difference, PartKind
from semantic_server.http.anthropic.conversation import thinking_text
from semantic_server.http.anthropic.routes import Json, MessageWriter, ResponseStyle, usage_of
from semantic_server.http.errors import WireError

EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
BETA_EVENT: TypeAdapter[BetaRawMessageStreamEvent] = TypeAdapter(BetaRawMessageStreamEvent)
USAGE = Usage(prompt=700, cached=256, completion=9, reasoning=2)
PLAIN = ResponseStyle(USAGE.completion)


def answer(
    *pieces: AnswerPiece, reason: AnswerReason = "stop", stop_string: str | None = None
) -> list[AnswerEvent]:
    started = AnswerStarted("request-0", "ada", USAGE.prompt)
    end = AnswerEnd(reason, USAGE, stop_string)
    return [started, PromptProgress(699, 699), *pieces, end]


def written(events: list[AnswerEvent], style: ResponseStyle = PLAIN) -> tuple[list[Json], Json]:
    """The events of a stream, and the message that is sent instead of one."""
    writer = MessageWriter("msg_1", "fake", style)
    sent = [one for event in events for one in writer.write(event)]
    # What goes over the wire is text: nothing here may change it afterwards.
    return json.loads(json.dumps(sent)), json.loads(json.dumps(writer.message()))


def added_up(events: list[Json]) -> ParsedMessage[None]:
    """What the SDK makes of a stream."""
    message: ParsedMessage[None] | None = None
    buffers: dict[int, bytes] = {}
    for event in events:
        message = accumulate_event(
            event=EVENT.validate_python(event), current_snapshot=message, json_bufs=buffers
        )
    assert message is not None
    return message


def types(events: list[Json]) -> list[object]:
    return [event["type"] for event in events]


CALL = (
    ToolCallStarted(0, "call_1", "look"),
    ToolCallDelta(0, '{"for": '),
    ToolCallDelta(0, '"ä", "n": [1]}'),
)


def test_a_stream_in_full() -> None:
    pieces = (ReasoningDelta("Hm"), ReasoningDelta("m."), TextDelta("Let me"), TextDelta(" look."))
    events, message = written(answer(*pieces, *CALL, reason="tool_calls"))
    block = ["content_block_start", "content_block_delta", "content_block_delta"]
    stop = "content_block_stop"
    assert types(events) == [
        "message_start",
        *(*block, "content_block_delta", stop),  # the last one is the signature
        *(*block, stop),
        *(*block, "content_block_delta", stop),  # the last one closes the input
        "message_delta",
        "message_stop",
    ]
    assert [event["index"] for event in events if "index" in event] == [0] * 5 + [1] * 4 + [2] * 5
    thought, text, call = Message.model_validate(message).content
    assert (thought.type, text.type, call.type) == ("thinking", "text", "tool_use")
    assert call.type == "tool_use"
    assert (call.id, call.name, call.input) == ("call_1", "look", {"for": "ä", "n": [1]})


@pytest.mark.parametrize(
    ("reason", "stop_string", "max_tokens", "expected"),
    [
        ("stop", None, 9, ("end_turn", None)),
        ("stop", "END", 9, ("stop_sequence", "END")),
        ("length", None, 9, ("max_tokens", None)),
        ("length", None, 10, ("model_context_window_exceeded", None)),
        ("stop", None, 10, ("end_turn", None)),
        ("tool_calls", None, 9, ("tool_use", None)),
    ],
)
def test_why_it_ended(
    reason: AnswerReason, stop_string: str | None, max_tokens: int, expected: tuple[str, str]
) -> None:
    events = answer(TextDelta("x"), reason=reason, stop_string=stop_string)
    _, message = written(events, ResponseStyle(max_tokens))
    assert (message["stop_reason"], message["stop_sequence"]) == expected


def test_an_answer_of_nothing_is_a_message_without_content() -> None:
    events, message = written(answer(TextDelta("")))
    assert types(events) == ["message_start", "message_delta", "message_stop"]
    assert message["content"] == []


def test_thoughts_that_are_not_shown_come_back_in_their_signature() -> None:
    events, message = written(
        answer(ReasoningDelta("Secret"), TextDelta("Hi")), ResponseStyle(9, omit_thinking=True)
    )
    assert "Secret" not in json.dumps([events, message])
    (thought, _) = added_up(events).content
    assert thought.type == "thinking"
    assert thought.thinking == ""
    assert thinking_text("", thought.signature) == "Secret"


def test_a_prompt_alone_has_no_answer() -> None:
    events, message = written(answer(TextDelta("x"), *CALL), ResponseStyle(0))
    assert types(events) == ["message_start", "message_delta", "message_stop"]
    assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
    assert Message.model_validate(message).usage.output_tokens == 0


def test_edits_of_the_context_are_answered_with_none() -> None:
    events, message = written(answer(TextDelta("x")), ResponseStyle(9, report_context_edits=True))
    found = BetaMessage.model_validate(message).context_management
    assert found is not None
    assert found.applied_edits == []
    assert events[-2]["context_management"] == message["context_management"]


def test_an_answer_that_failed_is_an_error() -> None:
    with pytest.raises(WireError, match="the model failed") as caught:
        written(answer(TextDelta("x"), reason="error"))
    assert caught.value.status == 500
    with pytest.raises(WireError) as caught:
        written(answer(reason="cancelled"))
    assert caught.value.status == 499


def test_a_call_that_was_cut_off_is_told_as_far_as_it_goes() -> None:
    events, message = written(answer(*CALL[:2], ToolCallDelta(0, '"a'), reason="length"))
    (streamed,), (whole,) = added_up(events).content, Message.model_validate(message).content
    assert streamed.type == whole.type == "tool_use"
    assert streamed.input == whole.input


@given(st.sampled_from(['{"a": "b", "c": nope}', '{"a": 1} and', '[{"a": 1}]', "", '{"a": "b']),
       st.integers(0, 30))  # fmt: skip
def test_arguments_that_turn_out_to_be_no_object_become_a_field_of_one(text: str, at: int) -> None:
    parts = ToolCallDelta(0, text[:at]), ToolCallDelta(0, text[at:])
    events, message = written(answer(CALL[0], *parts, reason="tool_calls"))
    (streamed,), (whole,) = added_up(events).content, Message.model_validate(message).content
    assert streamed.type == whole.type == "tool_use"
    assert streamed.input == whole.input
    assert whole.input.get("raw_arguments", "") == text


_piece = st.one_of(
    st.builds(TextDelta, st.text(max_size=5)), st.builds(ReasoningDelta, st.text(max_size=5))
)
_argument = st.dictionaries(st.text(max_size=3), st.integers(-(2**40), 2**40) | st.text(max_size=4))


@st.composite
def _calls(draw: st.DrawFn) -> tuple[AnswerPiece, ...]:
    """A call whose arguments come in any two parts."""
    index = draw(st.integers(0, 5))
    text = json.dumps(draw(_argument), ensure_ascii=draw(st.booleans()))
    cut = draw(st.integers(0, len(text)))
    deltas = [ToolCallDelta(index, part) for part in (text[:cut], text[cut:])]
    return (ToolCallStarted(index, f"call_{index}", draw(st.sampled_from("fg"))), *deltas)


@given(
    st.lists(_piece.map(lambda piece: (piece,)) | _calls(), max_size=8),
    st.sampled_from(["stop", "length", "tool_calls"]),
    st.builds(ResponseStyle, st.sampled_from([0, 9, 10]), st.booleans(), st.booleans()),
)
def test_a_stream_adds_up_to_the_message(
    groups: list[tuple[AnswerPiece, ...]], reason: AnswerReason, style: ResponseStyle
) -> None:
    pieces = [piece for group in groups for piece in group]
    events, message = written(answer(*pieces, reason=reason), style)
    for event in events:
        BETA_EVENT.validate_python(event)
    BetaMessage.model_validate(message)
    streamed = added_up(events).to_dict(exclude_unset=False)
    whole = Message.model_validate(message).to_dict(exclude_unset=False)
    # The SDK sums up what it knows; our own member is in the stream's last usage.
    assert usage_in(events[-2]).pop("semantic") == usage_in(whole).pop("semantic")
    for key in ("id", "model", "role", "content", "stop_reason", "stop_sequence", "usage"):
        assert _plain(streamed[key]) == _plain(whole[key])


def test_usage_tells_what_was_lost() -> None:
    changed = Difference(PartKind.MESSAGE, Change.CHANGED, 3, "tool")
    match = MatchReport(
        700, 256, MatchEnd.DIVERGED, "pool", 256, 5, 6, 0.5, CacheMiss(443, 0.5, changed)
    )
    started, end = answer()[0], AnswerEnd("stop", replace(USAGE, match=match))
    events, message = written([started, end])
    BETA_EVENT.validate_python(events[-2])
    BetaMessage.model_validate(message)
    told = usage_in(message)["semantic"]
    assert usage_in(events[-2])["semantic"] == told
    assert told == {
        "lost": {
            "tokens": 443,
            "seconds": 0.5,
            "differs_at": 256,
            "part": {"kind": "message", "change": "changed", "number": 3, "name": "tool"},
            "end": "diverged",
            "reason": "Message 3 (tool) changed.",
        }
    }


def usage_in(holder: object) -> dict[str, object]:
    assert isinstance(holder, dict)
    usage: dict[str, object] = holder["usage"]
    return usage


def _plain(value: object) -> object:
    """Without fields that say nothing: only one of both has them spelled out."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items() if one is not None}
    return [_plain(one) for one in value] if isinstance(value, list) else value


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))))
def test_the_parts_of_a_prompt_add_up(sizes: tuple[int, int]) -> None:
    prompt, cached = sizes
    told = usage_of(Usage(prompt, cached, 1))
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    rest, read, created = (told[name] for name in names)
    assert isinstance(rest, int)
    assert isinstance(read, int)
    assert isinstance(created, int)
    assert rest + read + created == prompt
    assert (rest >= 1, read, created >= 0) == (True, cached, True)
    assert (read + created) % 256 == 0 or created == 0
