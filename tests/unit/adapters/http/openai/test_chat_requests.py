"""What a chat completion's body asks of the served model, and what it may not ask."""

from __future__ import annotations

import pytest

from semantic.domain.chat import AnswerFormat, Chat, Message, Tool, ToolCall, ToolChoice
from semantic.domain.value_objects import SamplingParams
from semantic.ports.serving import Ask
from tests.unit.adapters.http.openai.wire import CHAT, MISSING, Json, wire_of

LOOK: Json = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
STOP: Json = {
    "type": "function",
    "function": {"name": "stop", "description": "Stops.", "strict": True},
}
LOOK_TOOL = Tool("look", parameters={"type": "object"})
STOP_TOOL = Tool("stop", "Stops.", strict=True)
NAMED: Json = {"type": "function", "function": {"name": "look"}}


def asked(**fields: object) -> Ask:
    wire = wire_of()
    wire.chat(**fields)
    return wire.ask


def chat(**fields: object) -> Chat:
    prompt = asked(**fields).prompt
    assert isinstance(prompt, Chat)
    return prompt


def test_a_plain_request() -> None:
    assert asked() == Ask(Chat((Message("user", "Hello"),)), SamplingParams())


def test_messages_of_all_roles() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    found = chat(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "developer", "content": [{"type": "text", "text": "a"}], "name": "dev"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Hm."},
            {"role": "tool", "content": "seen", "tool_call_id": "c1"},
            {"role": "assistant", "content": "Yes.", "reasoning_content": "So.", "audio": None},
            {"role": "system", "content": "Be briefer."},
            {"role": "assistant", "content": None, "refusal": "No.", "function_call": None},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "Never."}]},
            {"role": "assistant", "content": ""},
            {"role": "user", "content": "", "name": None},
        ]
    )
    assert found.messages == (
        Message("system", "Be brief."),
        Message("developer", "a", name="dev"),
        Message("user", "a\nb"),
        Message("assistant", reasoning="Hm.", tool_calls=(ToolCall("c1", "look", '{"a": 1}'),)),
        Message("tool", "seen", tool_call_id="c1"),
        Message("assistant", "Yes.", reasoning="So."),
        Message("system", "Be briefer."),
        Message("assistant", "No."),
        Message("assistant", "Never."),
        Message("assistant"),
        Message("user"),
    )


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (MISSING, "messages"),
        (None, "messages"),
        ([], "messages"),
        ("Hello", "messages"),
        ([5], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "function", "name": "f", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": 5}}]}],
            "messages[0].content[0].image_url.url",
        ),
        (
            [{"role": "user", "content": [{"type": "input_audio"}]}],
            "messages[0].content[0].input_audio",
        ),
        ([{"role": "user", "content": [{"type": "file"}]}], "messages[0].content[0].file"),
        ([{"role": "user", "content": [{"type": ["text"]}]}], "messages[0].content[0].type"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
        (
            [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}],
            "messages[0].function_call",
        ),
        ([{"role": "assistant", "audio": {"id": "a"}}], "messages[0].audio"),
        ([{"role": "assistant", "reasoning": {"text": "x"}}], "messages[0].reasoning"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [5]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "c", "type": "function"}]}],
            "messages[0].tool_calls[0].function",
        ),
        (
            [
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
                    ],
                }
            ],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_wrong_messages_are_refused_by_place(messages: object, param: str) -> None:
    wire = wire_of()
    error = wire.error(CHAT, messages=messages)
    assert error["param"] == param
    assert wire.fake.asked == []


def test_sampling_starts_from_what_the_model_does_by_itself() -> None:
    ask = asked(
        temperature=1,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"7": -100, "9": 3},
        seed=11,
        stop=["a", "b"],
        ignore_eos=True,
        logprobs=True,
        top_logprobs=3,
    )
    assert ask.sampling == SamplingParams(
        temperature=1.0,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={7: -100.0, 9: 3.0},
        seed=11,
        stop=("a", "b"),
        logprobs=3,
        ignore_eos=True,
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"top_p": 0, "temperature": 1}, SamplingParams(temperature=1, top_p=0)),
        ({"top_p": 1e-300, "temperature": 1}, SamplingParams(temperature=1, top_p=1e-300)),
        ({"temperature": 1e-39}, SamplingParams(temperature=1e-39)),
        ({"top_k": -1}, SamplingParams()),
        ({"repetition_penalty": 1}, SamplingParams()),
        ({"stop": "x"}, SamplingParams(stop=("x",))),
        ({"stop": []}, SamplingParams()),
        ({"seed": -1}, SamplingParams(seed=2**63 - 1)),
        ({"logprobs": True}, SamplingParams(logprobs=0)),
        ({"logprobs": False, "top_logprobs": 0}, SamplingParams()),
    ],
)
def test_values_that_mean_something_else_here(
    given: dict[str, object], expected: SamplingParams
) -> None:
    assert asked(**given).sampling == expected


@pytest.mark.parametrize("given", [{"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21}])
def test_top_logprobs_are_at_most_20_and_of_logprobs(given: dict[str, object]) -> None:
    assert wire_of().error(CHAT, **given)["param"] == "top_logprobs"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 7}, 7),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
    ],
)
def test_the_newer_field_says_how_many_tokens(
    given: dict[str, object], expected: int | None
) -> None:
    assert asked(**given).max_tokens == expected


def test_choices_are_answers_of_their_own() -> None:
    wire = wire_of()
    wire.post(
        CHAT,
        {"model": "fake", "messages": [{"role": "user", "content": "x"}], "n": 3, "seed": 5},
        {"X-Agent-ID": "ada"},
    )
    assert [ask.agent for ask in wire.fake.asked] == ["ada", "ada/2", "ada/3"]
    assert [ask.sampling.seed for ask in wire.fake.asked] == [5, 6, 7]
    assert len({id(ask.prompt) for ask in wire.fake.asked}) == 1


def test_without_a_name_no_choice_has_one() -> None:
    wire = wire_of()
    wire.chat(n=2)
    assert [ask.agent for ask in wire.fake.asked] == [None, None]


def test_the_header_names_the_agent_before_the_body() -> None:
    assert asked(agent_id="bob").agent == "bob"
    wire = wire_of()
    body: Json = {"model": "fake", "messages": [{"role": "user", "content": "x"}]}
    wire.post(CHAT, body | {"agent_id": "bob"}, {"X-Agent-ID": "ada"})
    assert wire.ask.agent == "ada"


def test_tools_are_functions_and_others_are_left_out() -> None:
    hosted: Json = {"type": "web_search"}
    found = chat(tools=[LOOK, hosted, STOP], parallel_tool_calls=False)
    assert found.tools == (LOOK_TOOL, STOP_TOOL)
    assert found.tool_choice == ToolChoice()
    assert not found.parallel_tool_calls


LARK = {"syntax": "lark", "definition": "start: /.+/s"}


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (None, "Any text."),
        ({"type": "text"}, "Any text."),
        ({"type": "grammar", "grammar": LARK}, "A text that matches this lark:\nstart: /.+/s"),
        ({"type": "grammar", **LARK}, "A text that matches this lark:\nstart: /.+/s"),
    ],
)
def test_a_custom_tool_is_a_function_of_one_text(form: object, expected: str) -> None:
    custom = {"name": "free", "description": "Frees.", "format": form}
    [tool] = chat(tools=[{"type": "custom", "custom": custom}]).tools
    assert (tool.name, tool.description) == ("free", "Frees.")
    assert tool.parameters == {
        "type": "object",
        "properties": {"input": {"type": "string", "description": expected}},
        "required": ["input"],
        "additionalProperties": False,
    }


FREE = {"type": "custom", "custom": {"name": "free"}}


def test_a_custom_tool_can_be_chosen() -> None:
    assert chat(tools=[LOOK, FREE], tool_choice=FREE).tool_choice == ToolChoice("required", "free")
    found = chat(tools=[LOOK, FREE, STOP], tool_choice=allowing(FREE, NAMED))
    assert [tool.name for tool in found.tools] == ["look", "free"]


def test_a_custom_call_in_the_history_is_the_one_that_was_written() -> None:
    call = {"id": "c1", "type": "custom", "custom": {"name": "free", "input": '"a"\n'}}
    raw = {"id": "c2-as-written", "type": "custom", "custom": {"name": "free", "input": "{}"}}
    found = chat(
        messages=[
            {"role": "user", "content": "x"},
            {"role": "assistant", "tool_calls": [call, raw]},
            {"role": "tool", "tool_call_id": "c1", "content": "one"},
            {"role": "tool", "tool_call_id": "c2-as-written", "content": "two"},
        ]
    )
    assert found.messages[1].tool_calls == (
        ToolCall("c1", "free", '{"input": "\\"a\\"\\n"}'),
        ToolCall("c2", "free", "{}"),
    )
    assert [message.tool_call_id for message in found.messages[2:]] == ["c1", "c2"]


@pytest.mark.parametrize(
    ("call", "param"),
    [
        ({"custom": {"name": "free", "input": "x"}}, "id"),
        ({"id": "c"}, "custom"),
        ({"id": "c", "custom": {"input": "x"}}, "custom.name"),
        ({"id": "c", "custom": {"name": "free", "input": {}}}, "custom.input"),
    ],
)
def test_a_wrong_custom_call_is_refused_by_place(call: Json, param: str) -> None:
    said = {"role": "assistant", "tool_calls": [{"type": "custom", **call}]}
    error = wire_of().error(CHAT, messages=[{"role": "user", "content": "x"}, said])
    assert error["param"] == f"messages[1].tool_calls[0].{param}"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        (NAMED, ToolChoice("required", "look")),
    ],
)
def test_tool_choices(choice: object, expected: ToolChoice) -> None:
    found = chat(tools=[LOOK, STOP], tool_choice=choice)
    assert found.tool_choice == expected
    assert found.tools == (LOOK_TOOL, STOP_TOOL)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_those_that_are_left(mode: str) -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [NAMED]}}
    found = chat(tools=[STOP, LOOK], tool_choice=allowed)
    assert found.tools == (LOOK_TOOL,)
    assert found.tool_choice.mode == mode


def formatted(form: object) -> Json:
    return {"type": "custom", "custom": {"name": "free", "format": form}}


def allowing(*tools: object, mode: object = "auto") -> Json:
    allowed: Json = {"mode": mode, "tools": list(tools)}
    return {"type": "allowed_tools", "allowed_tools": allowed}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"function": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "x", "parameters": 5}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [LOOK, LOOK]}, "tools[1].function.name"),
        ({"tools": [LOOK], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": 5}, "tool_choice"),
        (
            {"tools": [LOOK], "tool_choice": allowing(mode="maybe")},
            "tool_choice.allowed_tools.mode",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [STOP], "tool_choice": NAMED}, "tool_choice.function.name"),
        (
            {"tools": [LOOK], "tool_choice": allowing(NAMED, {"type": "x"})},
            "tool_choice.allowed_tools.tools[1].function",
        ),
        ({"tools": [STOP], "tool_choice": allowing(NAMED)}, "tool_choice.allowed_tools.tools[0]"),
        ({"tools": [LOOK], "tool_choice": allowing(mode="required")}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": FREE}, "tool_choice.custom.name"),
        ({"tools": [LOOK], "tool_choice": {"type": "custom"}}, "tool_choice.custom"),
        ({"tools": [LOOK], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"type": "custom", "custom": {"name": ""}}]}, "tools[0].custom.name"),
        ({"tools": [FREE, FREE]}, "tools[1].custom.name"),
        ({"tools": [formatted(5)]}, "tools[0].custom.format"),
        ({"tools": [formatted({"type": "json"})]}, "tools[0].custom.format.type"),
        (
            {"tools": [formatted({"type": "grammar", "syntax": "gbnf"})]},
            "tools[0].custom.format.syntax",
        ),
        (
            {"tools": [formatted({"type": "grammar", "grammar": {"syntax": "regex"}})]},
            "tools[0].custom.format.grammar.definition",
        ),
    ],
)
def test_wrong_tools_are_refused_by_place(given: dict[str, object], param: str) -> None:
    wire = wire_of()
    assert wire.error(CHAT, **given)["param"] == param
    assert wire.fake.asked == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, AnswerFormat()),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}},
            AnswerFormat({"type": "array"}),
        ),
        (
            {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "array"}, "strict": True},
            },
            AnswerFormat({"type": "array"}),
        ),
    ],
)
def test_answer_formats(given: Json, expected: AnswerFormat | None) -> None:
    assert chat(response_format=given).answer_format == expected


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("json", "response_format"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": ["text"]}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        (
            {"type": "json_schema", "json_schema": {"name": "x"}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_wrong_answer_formats(given: object, param: str) -> None:
    assert wire_of().error(CHAT, response_format=given)["param"] == param


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "minimal"},
            {"reasoning_effort": "minimal", "enable_thinking": False},
        ),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high", "enable_thinking": True}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "low", "enable_thinking": False},
        ),
        ({"chat_template_kwargs": {"custom": [1]}}, {"custom": [1]}),
    ],
)
def test_template_options(given: dict[str, object], expected: dict[str, object]) -> None:
    assert chat(**given).template_options == expected


@pytest.mark.parametrize(
    "name", ["chat_template", "messages", "tools", "return_tensors", "bos_token", "self"]
)
def test_the_template_itself_is_not_the_clients(name: str) -> None:
    error = wire_of().error(CHAT, chat_template_kwargs={name: "x"})
    assert error["param"] == "chat_template_kwargs"


def test_an_effort_that_is_none_of_the_wires() -> None:
    assert wire_of().error(CHAT, reasoning_effort="extreme")["param"] == "reasoning_effort"
