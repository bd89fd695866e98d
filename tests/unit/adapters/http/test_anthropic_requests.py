"""What a body of Anthropic's API becomes: messages, tools, options, or one clear error."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress

import pytest
from anthropic.types import message_create_params as stable
from anthropic.types.beta import message_count_tokens_params, message_create_params
from hypothesis import given
from hypothesis import strategies as st

from semantic.domain.chat import AnswerFormat, Message, Tool, ToolCall, ToolChoice
from semantic.domain.errors import InvalidRequestError
from semantic.domain.value_objects import SamplingParams
from semantic_server.http.anthropic.conversation import (
    signature_of,
    signature_with_text,
    thinking_text,
)
from semantic_server.http.anthropic.request import (
    MESSAGE_FIELDS,
    OTHER_WIRES,
    MessageRequest,
    read_chat,
    read_request,
)
from semantic_server.http.anthropic.validators import validators
from semantic_server.http.errors import FieldError
from semantic_server.http.logs import WarnOnce
from semantic_server.http.openai.fields import CHAT_FIELDS, COMPLETION_FIELDS, OTHER_SERVERS
from semantic_server.http.openai.responses.request import RESPONSE_FIELDS

HELLO: dict[str, object] = {"role": "user", "content": "Hello"}
BILLING = "x-anthropic-billing-header: cc_version=2.1.329.f6c; cc_entrypoint=sdk-cli;"
VALIDATORS = validators()


def body(**changes: object) -> dict[str, object]:
    return {"model": "fake", "max_tokens": 100, "messages": [HELLO], **changes}


def wanted(sampling: SamplingParams | None = None, /, **changes: object) -> MessageRequest:
    return read_request(VALIDATORS, body(**changes), sampling or SamplingParams(), WarnOnce())


def messages(*given_messages: object, **changes: object) -> tuple[Message, ...]:
    return wanted(messages=list(given_messages), **changes).chat.messages


def refusal(**changes: object) -> FieldError:
    with pytest.raises(FieldError) as caught:
        wanted(**changes)
    return caught.value


# Fields


def test_every_field_of_the_sdk_has_its_place() -> None:
    placed = set(MESSAGE_FIELDS)
    assert not placed & OTHER_WIRES.keys()
    documented = {
        *message_create_params.MessageCreateParamsStreaming.__annotations__,
        *message_create_params.MessageCreateParamsBase.__annotations__,
        *message_count_tokens_params.MessageCountTokensParams.__annotations__,
        *stable.MessageCreateParamsBase.__annotations__,
    }
    older = {"temperature", "top_k", "top_p", "output_format"}
    assert documented - placed == set()
    ours = {"agent_id", "anthropic_beta", "anthropic_version", "semantic"}
    assert placed - documented - older == ours


def test_every_field_of_another_wire_has_its_place() -> None:
    others = {*CHAT_FIELDS, *COMPLETION_FIELDS, *RESPONSE_FIELDS, *OTHER_SERVERS}
    assert others - MESSAGE_FIELDS.keys() == OTHER_WIRES.keys() - {"generate_summary", "system"}


def test_a_field_that_is_spelled_like_a_known_one_is_refused() -> None:
    for wrong, right in (
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("stopSequences", "stop_sequences"),
        ("meta_data", "metadata"),
    ):
        found = refusal(**{wrong: 1})
        assert found.param == wrong
        assert str(found).endswith(f"did you mean {right}?")


REFUSED = {name: one for name, one in (MESSAGE_FIELDS | OTHER_WIRES).items() if one.refusal}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_served_is_refused_by_name_unless_neutral(name: str) -> None:
    assert refusal(**{name: {"type": "x"}}).param == name
    plain = wanted()
    for neutral in (None, *REFUSED[name].unless):
        assert wanted(**{name: neutral}) == plain
    with pytest.raises(FieldError, match=f"^{name}: "):
        read_chat(VALIDATORS, body(**{name: {"type": "x"}}), WarnOnce())


def test_hints_that_change_no_answer_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    ignored = [name for name, one in OTHER_WIRES.items() if one.refusal is None]
    with caplog.at_level(logging.WARNING):
        assert wanted(**dict.fromkeys(ignored, "x")) == wanted()
    assert {"keep_alive", "prompt_cache_key", "stream_options", "user"} <= set(ignored)
    assert caplog.messages == []


def test_unknown_fields_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    warnings = WarnOnce()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            read_request(VALIDATORS, body(new="x", **{"a\nb": 1}), SamplingParams(), warnings)
    assert [record.message for record in caplog.records] == [
        "unknown field 'a\\nb' has no effect",
        "unknown field 'new' has no effect",
    ]


def test_what_claude_code_sends_is_accepted() -> None:
    asked = wanted(
        system=[
            {"type": "text", "text": BILLING},
            {"type": "text", "text": "You are.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be brief."},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "say hi"}]},
            {"role": "system", "content": "<context>"},
        ],
        metadata={"user_id": '{"session_id": "1"}'},
        thinking={"type": "adaptive", "display": "omitted"},
        output_config={"effort": "high"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        stream=True,
    )
    assert asked.chat.messages == (
        Message("system", "You are.\n\nBe brief."),
        Message("user", "say hi"),
        Message("system", "<context>"),
    )
    assert asked.chat.template_options == {"enable_thinking": True, "reasoning_effort": "high"}
    assert asked.stream
    assert asked.omit_thinking
    assert asked.report_context_edits


# Messages


def test_a_text_and_one_block_of_it_are_the_same() -> None:
    block = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    assert messages(HELLO) == messages({"role": "user", "content": [block]})
    assert messages(HELLO, system="Be brief.") == messages(
        HELLO, system=[{"type": "text", "text": "Be brief."}]
    )


@pytest.mark.parametrize("system", [BILLING, [{"type": "text", "text": BILLING}], None, []])
def test_the_billing_line_alone_is_no_system_prompt(system: object) -> None:
    changes = {} if system is None else {"system": system}
    assert messages(HELLO, **changes) == (Message("user", "Hello"),)


def test_of_a_text_that_begins_with_the_billing_line_the_rest_stays() -> None:
    assert messages(HELLO, system=f"{BILLING}\n\nYou are.")[0] == Message("system", "You are.")


def test_a_tool_loop_keeps_its_order() -> None:
    assert messages(
        HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Which?", "signature": "x"},
                {"type": "redacted_thinking", "data": "zzz"},
                {"type": "text", "text": "I look"},
                {"type": "text", "text": " it up."},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"for": "ä"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "found"},
                {"type": "text", "text": "And now?"},
                {"type": "text", "text": "Quick."},
            ],
        },
    )[1:] == (
        Message("assistant", "I look it up.", "Which?", (ToolCall("t1", "look", '{"for": "ä"}'),)),
        Message("tool", "found", tool_call_id="t1", name="look"),
        Message("user", "And now?\n\nQuick."),
    )


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({}, ""),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\n\nb"),
        ({"content": "no such file", "is_error": True}, "Error: no such file"),
        ({"is_error": True}, "Error: "),
    ],
)
def test_results_of_tools(result: Mapping[str, object], text: str) -> None:
    block = {"type": "tool_result", "tool_use_id": "t9", **result}
    (message,) = messages({"role": "user", "content": [block]})
    assert message == Message("tool", text, tool_call_id="t9")


def test_system_messages_end_when_they_say_so() -> None:
    note = {"role": "system", "content": "note", "clear_at": "next_user_message"}
    assert Message("system", "note") in messages(HELLO, note)
    assert Message("system", "note") not in messages(HELLO, note, HELLO)
    effort = {"role": "system", "output_config": {"effort": "max"}}
    asked = wanted(messages=[HELLO, effort], output_config={"effort": "low"})
    assert asked.chat.template_options == {"reasoning_effort": "high"}
    assert len(asked.chat.messages) == 1


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("x", "messages[1]"),
        ({"role": "bird", "content": "x"}, "messages[1].role"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": 3}, "messages[1].content"),
        ({"role": "user", "content": [3]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[1].content[0]"),
        (
            {"role": "user", "content": [{"type": "image", "source": "x"}]},
            "messages[1].content[0].source",
        ),
        ({"role": "user", "content": [{"type": ["x"]}]}, "messages[1].content[0]"),
        ({"role": "system", "content": "x", "clear_at": "now"}, "messages[1].clear_at"),
        ({"role": "user", "content": []}, "messages[1].content"),
        (
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "is_error": "no"}],
            },
            "messages[1].content[0].is_error",
        ),
        (
            {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "input": {}}]},
            "messages[1].content[0].name",
        ),
        (
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text"}]}
                ],
            },
            "messages[1].content[0].content[0].text",
        ),
    ],
)
def test_a_wrong_message_is_named(message: object, param: str) -> None:
    error = refusal(messages=[HELLO, message])
    assert error.param == param
    assert str(error).startswith(param)


@pytest.mark.parametrize("given_messages", [[], "Hello", None, {"role": "user"}])
def test_messages_are_a_list_of_some(given_messages: object) -> None:
    assert refusal(messages=given_messages).param == "messages"


def test_an_answer_cannot_be_continued() -> None:
    error = refusal(messages=[HELLO, {"role": "assistant", "content": "The best answer is ("}])
    assert "messages[1]: the last message must not be the assistant's" in str(error)


# Thoughts


@given(st.text())
def test_a_thought_that_was_not_shown_comes_back(thought: str) -> None:
    assert thinking_text("", signature_with_text(thought)) == thought
    assert thinking_text(thought, signature_of(thought)) == thought
    assert signature_of(thought) == signature_of(thought)


@pytest.mark.parametrize("signature", ["", "ErUBCkYIB", "semantic.text.%%%", "semantic.text._w=="])
def test_a_signature_that_is_not_ours_says_nothing(signature: str) -> None:
    assert thinking_text("", signature) == ""


@pytest.mark.parametrize(
    ("thinking", "enabled"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "adaptive"}, True),
        ({"type": "between_tools"}, True),
        ({"type": "disabled"}, False),
    ],
)
def test_thinking(thinking: object, enabled: bool) -> None:
    found = wanted(thinking=thinking, max_tokens=1025)
    assert found.chat.template_options == {"enable_thinking": enabled}
    has_budget = isinstance(thinking, dict) and "budget_tokens" in thinking
    assert found.thinking_tokens == (1024 if has_budget else None)


def test_what_is_said_about_thinking_is_checked() -> None:
    assert refusal(thinking={"type": "enabled", "budget_tokens": 5}).param == (
        "thinking.budget_tokens"
    )
    assert refusal(thinking={"type": "deep"}).param.startswith("thinking")
    assert refusal(output_config={"effort": "huge"}).param.startswith("output_config")
    assert wanted().chat.template_options == {}


# Tools

LOOK: dict[str, object] = {"name": "look", "input_schema": {"type": "object", "x-own": 1}}


def test_own_tools_are_kept_and_others_skipped(caplog: pytest.LogCaptureFixture) -> None:
    tools: list[dict[str, object]] = [
        {"type": "web_search_20250305", "name": "web_search"},
        {**LOOK, "type": "custom", "description": "Looks.", "strict": True},
        {"type": "computer_20250124", "name": "computer"},
        {"type": "code_execution_20250825", "name": "code_execution"},
    ]
    with caplog.at_level(logging.WARNING):
        chat = wanted(tools=tools).chat
    assert chat.tools == (Tool("look", "Looks.", {"type": "object", "x-own": 1}, strict=True),)
    assert [str(tool["type"]) in caplog.text for tool in tools] == [True, False, True, True]


@pytest.mark.parametrize(
    ("kind", "name", "fields"),
    [
        ("bash_20250124", "bash", {"command", "restart"}),
        (
            "text_editor_20250728",
            "str_replace_based_edit_tool",
            {
                "command",
                "path",
                "file_text",
                "old_str",
                "new_str",
                "insert_line",
                "insert_text",
                "view_range",
            },
        ),
        (
            "memory_20250818",
            "memory",
            {
                "command",
                "path",
                "file_text",
                "old_str",
                "new_str",
                "insert_line",
                "insert_text",
                "old_path",
                "new_path",
                "view_range",
            },
        ),
    ],
)
def test_tools_that_the_client_runs_are_offered(kind: str, name: str, fields: set[str]) -> None:
    tool = {"type": kind, "name": name, "cache_control": {"type": "ephemeral"}}
    chat = wanted(tools=[LOOK, tool], tool_choice={"type": "tool", "name": name}).chat
    offered = chat.tools[1]
    assert (offered.name, offered.parameters["properties"].keys()) == (name, fields)  # type: ignore[attr-defined]
    assert offered.description
    assert chat.tool_choice == ToolChoice("required", name)


def test_a_tool_that_the_client_runs_has_a_name_of_its_own() -> None:
    assert refusal(tools=[{"type": "bash_20250124"}]).param == "tools[0].name"
    bash = {"type": "bash_20250124", "name": "look"}
    assert refusal(tools=[LOOK, bash]).param == "tools[1].name"


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        ({"type": "auto"}, ToolChoice(), True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(), False),
        ({"type": "any"}, ToolChoice("required"), True),
        ({"type": "none"}, ToolChoice("none"), True),
        (
            {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
            ToolChoice("required", "look"),
            False,
        ),
    ],
)
def test_tool_choice(choice: object, expected: ToolChoice, parallel: bool) -> None:
    chat = wanted(tools=[LOOK], tool_choice=choice).chat
    assert (chat.tool_choice, chat.parallel_tool_calls) == (expected, parallel)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": 3}]}, "tools[0].input_schema"),
        ({"tools": [LOOK, LOOK]}, "tools[1].name"),
        ({"tools": [LOOK, {**LOOK, "name": ""}]}, "tools[1].name"),
        ({"tools": [{**LOOK, "strict": "yes"}]}, "tools[0].strict"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
    ],
)
def test_wrong_tools_are_named(changes: Mapping[str, object], param: str) -> None:
    assert refusal(**changes).param == param


# Sampling and format


def test_what_a_request_does_not_say_stays_as_it_is_served() -> None:
    served = SamplingParams(temperature=0.7, top_p=0.9, top_k=20, stop=("\n",))
    assert wanted(served).sampling == served
    asked = wanted(served, temperature=0, top_p=0.5, top_k=0, stop_sequences=["END"]).sampling
    assert asked == SamplingParams(temperature=0, top_p=0.5, top_k=0, stop=("END",))
    assert wanted(top_p=0, temperature=1).sampling.greedy
    assert wanted(temperature=1e-39).sampling.greedy
    assert len(wanted(stop_sequences=["END"] * 64).sampling.stop) == 64


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1.5),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 2),
        ("top_k", -1),
        ("top_k", 0.5),
        ("max_tokens", -1),
        ("max_tokens", "many"),
        ("max_tokens", None),
        ("stop_sequences", [""]),
        ("stop_sequences", "END"),
        ("stop_sequences", ["END"] * 65),
        ("stream", "yes"),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_tokens", 5.0),
        ("tool_choice", {"type": "auto", "disable_parallel_tool_use": "yes"}),
        ("thinking", {"type": "enabled", "budget_tokens": "2048"}),
    ],
)
def test_a_wrong_value_is_named(name: str, value: object) -> None:
    assert refusal(**{name: value}).param.startswith(name)


@pytest.mark.parametrize(
    "name", sorted(MESSAGE_FIELDS.keys() - {"max_tokens", "messages", "model"})
)
def test_null_is_a_field_that_was_not_given(name: str) -> None:
    assert wanted(**{name: None}) == wanted()
    asked = {"model": "fake", "messages": [HELLO]}
    assert read_chat(VALIDATORS, {**asked, name: None}, WarnOnce()) == read_chat(
        VALIDATORS, asked, WarnOnce()
    )


def test_json_formats() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    expected = AnswerFormat({"type": "object"})
    assert wanted(output_config={"format": form}).chat.answer_format == expected
    assert wanted(output_format=form).chat.answer_format == expected
    assert wanted(output_config={"format": None}).chat.answer_format is None
    assert refusal(output_format={"type": "xml"}).param == "output_format.type"


def test_counting_reads_the_same_conversation() -> None:
    asked = body(system="Be brief.", tools=[LOOK])
    chat = read_chat(VALIDATORS, {k: v for k, v in asked.items() if k != "max_tokens"}, WarnOnce())
    assert chat == read_request(VALIDATORS, asked, SamplingParams(), WarnOnce()).chat


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "name", "id", "input", "format"]),
            inner | st.sampled_from(["text", "user", "assistant", "tool_result", "tool_use"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(sorted(MESSAGE_FIELDS)), _json, max_size=6))
def test_any_body_is_read_or_refused(changes: dict[str, object]) -> None:
    with suppress(InvalidRequestError):
        wanted(**changes)
