"""Ollama's wire over a scripted model: what is asked, what comes back, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

import pytest
from starlette.testclient import TestClient

from semantic.domain.answer import (
    AnswerEnd,
    AnswerReason,
    AnswerStarted,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from semantic.domain.chat import AnswerFormat, Chat, Message, ToolCall
from semantic.domain.errors import OverloadedError
from semantic.domain.value_objects import SamplingParams, TokenLogprob
from semantic.ports.serving import Ask
from semantic_server.http.app import create_app
from semantic_server.http.errors import FieldError
from semantic_server.http.ollama import options as tables
from semantic_server.http.ollama.generation import ReplyWriter
from semantic_server.http.ollama.models import in_short
from semantic_server.http.ollama.options import read_keep_alive
from semantic_server.http.ollama.request import ConversationReader, chat_request
from semantic_server.http.openai.requests import Caller
from semantic_server.http.request_fields.table import Field
from tests.clients import ollama_fields
from tests.support.fake_serving import FakeServing, Script

Json = dict[str, object]

HELLO: list[Json] = [{"role": "user", "content": "Hello"}]
LOOK: Json = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}},
}
OURS = {"agent_id", "semantic", "shift", "truncate"}
"""Fields of the routes that the client has no parameters for."""
TEXT_CALL: Json = {"function": {"name": "look", "arguments": "{}"}}
CALLS = (
    TextDelta("Let me look."),
    ToolCallStarted(0, "call_0", "look"),
    ToolCallDelta(0, '{"for": '),
    ToolCallDelta(0, '"ä"}'),
    ToolCallStarted(1, "call_1", "look"),
)


class Wire:
    """The one application, which serves `fake`, and requests to it."""

    app = create_app()

    def __init__(self, script: Callable[[Ask], Script] | Script | None = None) -> None:
        self.fake = FakeServing(script if callable(script) else lambda _: script or Script())
        self.app.state.context.serving = self.fake
        self.client = TestClient(self.app, "http://127.0.0.1:8000", raise_server_exceptions=False)

    @property
    def ask(self) -> Ask:
        """The one thing that was asked."""
        [ask] = self.fake.asked
        return ask

    @property
    def chat_asked(self) -> Chat:
        prompt = self.ask.prompt
        assert isinstance(prompt, Chat)
        return prompt

    def whole(self, path: str = "/api/chat", **fields: object) -> Json:
        """The reply to a request that succeeds."""
        response = self.client.post(path, json=_body(path, {"stream": False, **fields}))
        assert response.status_code == 200, response.text
        return cast(Json, response.json())

    def parts(self, path: str = "/api/chat", **fields: object) -> list[Json]:
        """The parts of a stream."""
        response = self.client.post(path, json=_body(path, fields))
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in response.text.splitlines()]

    def error(self, path: str = "/api/chat", status: int = 400, /, **fields: object) -> str:
        """The message that a request ends with; nothing was asked."""
        response = self.client.post(path, json=_body(path, fields))
        assert response.status_code == status, response.text
        assert list(response.json()) == ["error"]
        assert self.fake.asked == []
        return str(response.json()["error"])


def _body(path: str, fields: Json) -> Json:
    what: Json = {"messages": HELLO} if path == "/api/chat" else {"prompt": "Hello"}
    return {"model": "fake", **what, **fields}


def message(part: Json) -> Json:
    return cast(Json, part["message"])


# Streams and replies


def test_a_stream_is_the_default_and_its_last_part_has_the_counts() -> None:
    wire = Wire(Script((TextDelta("Hel"), TextDelta("lo.")), cached=3))
    first, second, last = wire.parts()
    assert (first["model"], first["done"]) == ("fake", False)
    assert [message(first)["content"], message(second)["content"]] == ["Hel", "lo."]
    assert message(last) == {"role": "assistant", "content": ""}
    assert (last["done"], last["done_reason"]) == (True, "stop")
    assert (last["prompt_eval_count"], last["eval_count"]) == (5, 6)
    assert last["semantic"] == {"cached_tokens": 3, "cache_write_tokens": 2, "lost": None}


def test_a_reply_is_the_sum_of_a_stream() -> None:
    wire = Wire(Script((ReasoningDelta("Hm"), ReasoningDelta("m."), *CALLS), "tool_calls"))
    parts, whole = wire.parts(tools=[LOOK]), wire.whole(tools=[LOOK])
    calls = [
        call for part in parts for call in cast(list[Json], message(part).get("tool_calls", []))
    ]
    assert message(whole) == {
        "role": "assistant",
        "content": "Let me look.",
        "thinking": "".join(str(message(part).get("thinking", "")) for part in parts),
        "tool_calls": calls,
    }
    assert message(whole)["thinking"] == "Hmm."
    assert [call["function"] for call in calls] == [
        {"index": 0, "name": "look", "arguments": {"for": "ä"}},
        {"index": 1, "name": "look", "arguments": {}},
    ]
    assert (whole["done"], whole["done_reason"]) == (True, "stop")


@pytest.mark.parametrize(
    ("written", "reason", "arguments"),
    [
        ('{"a": 1, "b": "tw', "length", {"a": 1, "b": "tw"}),  # what is certain of a cut call
        ('{"a": 1, "b": "tw', "tool_calls", {"raw_arguments": '{"a": 1, "b": "tw'}),
        ("[1]", "length", {"raw_arguments": "[1]"}),
        ('{"a": 1} then', "tool_calls", {"raw_arguments": '{"a": 1} then'}),
    ],
)
def test_arguments_are_always_an_object(
    written: str, reason: AnswerReason, arguments: Json
) -> None:
    pieces = (ToolCallStarted(0, "call_0", "look"), ToolCallDelta(0, written))
    whole = Wire(Script(pieces, reason)).whole(tools=[LOOK])
    [call] = cast(list[Json], message(whole)["tool_calls"])
    assert cast(Json, call["function"])["arguments"] == arguments
    assert whole["done_reason"] == ("length" if reason == "length" else "stop")


def test_durations_are_nanoseconds_of_its_phases() -> None:
    times = iter([110, 140, 200])
    writer = ReplyWriter("chat", "fake", lambda: next(times), 100)
    writer.write(AnswerStarted("uid", "ada", 5))
    writer.write(TextDelta("Hi"))
    writer.write(AnswerEnd("stop", Usage(5, 0, 2)))
    names = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
    assert [writer.reply()[name] for name in names] == [100, 10, 30, 60]


def test_log_probabilities_have_the_text_of_tokens() -> None:
    scored = TokenLogprob(ord("H"), -0.5, ((ord("H"), -0.5), (ord("J"), -1.0)))
    wire = Wire(Script((TextDelta("H", (scored,)),)))
    [first, _] = wire.parts(logprobs=True, top_logprobs=2)
    [token] = cast(list[Json], first["logprobs"])
    assert (token["token"], token["logprob"]) == ("H", -0.5)
    assert [one["token"] for one in cast(list[Json], token["top_logprobs"])] == ["H", "J"]
    assert wire.ask.sampling.logprobs == 2
    assert wire.whole(logprobs=True)["logprobs"] == first["logprobs"]


def test_a_failure_within_a_stream_is_its_last_part() -> None:
    *_, last = Wire(Script((TextDelta("Hi"),), "error", error="it broke")).parts()
    assert list(last) == ["error"]
    assert "it broke" not in str(last)


def test_a_cancelled_request_is_an_error_that_is_not_repeated() -> None:
    wire = Wire(Script((TextDelta("Hi"),), "cancelled"))
    reply = wire.client.post("/api/chat", json=_body("/api/chat", {"stream": False}))
    assert (reply.status_code, reply.json()) == (499, {"error": "the request was cancelled"})
    assert reply.headers["x-should-retry"] == "false"
    assert list(wire.parts()[-1]) == ["error"]


def test_errors_have_ollamas_shape() -> None:
    wire = Wire(Script(failure=OverloadedError("full", retry_after=7)))
    assert wire.error("/api/chat", 503) == "full"
    assert "no model 'nobody'" in wire.error("/api/chat", 404, model="nobody")
    assert "must be a model's name" in wire.error(model=7)
    missing = wire.client.get("/api/nothing")
    assert (missing.status_code, list(missing.json())) == (404, ["error"])
    assert "error" in wire.client.get("/api/v0/models/nobody").json()


# What is asked


def test_options_are_mapped() -> None:
    wire = Wire()
    wire.whole(
        options={
            "num_predict": 9, "temperature": 1, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 3,
            "stop": ["END"], "repeat_penalty": 1.2, "repeat_last_n": 7, "presence_penalty": 0.5,
            "frequency_penalty": 0.25, "num_ctx": 100, "num_gpu": 99, "mirostat": 0, "tfs_z": 1.0,
        },
        agent_id="ada",
        keep_alive="5m",
    )  # fmt: skip
    assert wire.ask.sampling == SamplingParams(
        1.0, 0.5, 5, 0.1, 1.2, 7, 0.5, 0.25, seed=3, stop=("END",)
    )
    assert (wire.ask.max_tokens, wire.ask.context_tokens, wire.ask.agent) == (9, 100, "ada")


def test_a_request_without_options_has_the_models_defaults() -> None:
    wire = Wire()
    wire.whole()
    expected = Ask(Chat((Message("user", "Hello"),)), SamplingParams(), numbered_calls=True)
    assert replace(wire.ask, prompt=expected.prompt) == expected


@pytest.mark.parametrize(
    ("options", "ask"),
    [
        ({"num_predict": -1}, {"max_tokens": 512}),
        ({"num_predict": -2}, {"max_tokens": 512}),
        ({"num_ctx": 0}, {"context_tokens": None}),
        ({"num_ctx": 100.0, "num_predict": 9.0}, {"context_tokens": 100, "max_tokens": 9}),
        ({"mirostat": 0.0, "seed": 3.0}, {"sampling": SamplingParams(seed=3)}),
        ({"num_ctx": 1e300, "temperature": 1.0}, {"sampling": SamplingParams(1.0)}),
        ({"seed": -1}, {"sampling": SamplingParams()}),
        ({"repeat_last_n": 0, "repeat_penalty": 1.5}, {"sampling": SamplingParams()}),
        (
            {"repeat_last_n": -1, "repeat_penalty": 1.5},
            {"sampling": SamplingParams(repetition_penalty=1.5, repetition_context=512)},
        ),
    ],
)
def test_neutral_values_of_options(options: Json, ask: Json) -> None:
    wire = Wire()
    wire.whole(options=options)
    assert {name: getattr(wire.ask, name) for name in ask} == ask


def test_a_prompt_above_num_ctx_is_refused() -> None:
    problem = Wire().error(options={"num_ctx": 5})
    assert "5" in problem


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"options": {"mirostat": 2}}, "options.mirostat: "),
        ({"options": {"typical_p": 0.5}}, "options.typical_p: "),
        ({"options": {"temprature": 1}}, "did you mean options.temperature?"),
        ({"options": {"temperature": "1"}}, "options.temperature: "),
        ({"options": {"temperature": 3}}, "options.temperature must be between 0 and 2"),
        ({"options": {"num_ctx": -1}}, "options.num_ctx: "),
        ({"options": {"stop": [""]}}, "options.stop must"),
        ({"options": {"seed": 1.5}}, "options.seed: expected a valid integer"),
        ({"options": []}, "options: expected an object"),
        ({"temperature": 1}, "temperature: send it in options"),
        ({"max_tokens": 5}, "max_tokens: use options.num_predict"),
        ({"tool_choice": "required"}, "tool_choice: not in this API"),
        ({"messages": {}}, "messages: expected a list"),
        ({"messages": [{"role": "owl", "content": ""}]}, "messages[0].role: "),
        ({"messages": [{"role": "user", "content": ["Hi"]}]}, "messages[0].content: "),
        (
            {"messages": [{"role": "user", "content": "What?", "images": [5]}]},
            "messages[0].images[0]: ",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [TEXT_CALL]}]},
            "messages[0].tool_calls[0].function.arguments: expected an object",
        ),
        ({"tools": [{"function": {"name": ""}}]}, "tools[0].function.name: expected a name"),
        ({"format": "yaml"}, "format: "),
        ({"think": "hard"}, "think: "),
        ({"stream": "yes"}, "stream: expected true or false"),
        ({"keep_alive": "soon"}, "keep_alive: "),
        ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty must be between"),
        ({"top_logprobs": 21}, "top_logprobs: "),
        ({"semantic": {"kept": True}}, "semantic.kept"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(fields: Json, problem: str) -> None:
    assert problem in Wire().error(**fields)


@pytest.mark.parametrize(
    ("think", "options", "budget"),
    [
        (False, {"enable_thinking": False}, 0),
        (True, {"enable_thinking": True}, None),
        ("high", {"enable_thinking": True, "reasoning_effort": "high"}, None),
    ],
)
def test_think(think: object, options: Json, budget: int | None) -> None:
    wire = Wire()
    wire.whole(think=think)
    assert (wire.chat_asked.template_options, wire.ask.thinking_tokens) == (options, budget)


@pytest.mark.parametrize(
    ("given", "form"),
    [("", None), ("json", AnswerFormat()), ({"type": "object"}, AnswerFormat({"type": "object"}))],
)
def test_format(given: object, form: AnswerFormat | None) -> None:
    wire = Wire()
    wire.whole(format=given)
    assert wire.chat_asked.answer_format == form


def test_calls_are_numbered_and_results_find_theirs() -> None:
    """Whatever ids clients send, or none: the conversation is the same."""
    call: Json = {"function": {"name": "look", "arguments": {"for": "x"}}}
    other: Json = {"function": {"name": "hear", "arguments": {}}}
    spellings: list[tuple[list[Json], list[Json]]] = [
        ([call, other], [{"tool_name": "look"}, {"tool_name": "hear"}]),
        (
            [{"id": "a", **call}, {"id": "b", **other}],
            [{"tool_call_id": "a"}, {"tool_call_id": "b"}],
        ),
        ([call, other], [{}, {"tool_call_id": "of a client's own"}]),
    ]
    asked = []
    for calls, results in spellings:
        wire = Wire()
        turns = [*HELLO, {"role": "assistant", "tool_calls": calls}]
        turns += [{"role": "tool", "content": f"{i}", **one} for i, one in enumerate(results)]
        wire.whole(messages=turns)
        asked.append(wire.chat_asked.messages)
        assert wire.ask.numbered_calls
    written = (ToolCall("call_0", "look", '{"for": "x"}'), ToolCall("call_1", "hear", "{}"))
    assert asked[0] == (
        Message("user", "Hello"),
        Message("assistant", tool_calls=written),
        Message("tool", "0", tool_call_id="call_0", name="look"),
        Message("tool", "1", tool_call_id="call_1", name="hear"),
    )
    assert asked[1:] == [asked[0], asked[0]]


def test_many_results_find_their_calls() -> None:
    """As many as a body may have: a search of all for each would take minutes."""
    n = 20_000
    call: Json = {"function": {"name": "look", "arguments": {}}}
    turns = [{"role": "assistant", "tool_calls": [call] * n}]
    turns += [{"role": "tool", "content": "", "tool_name": "look"}] * n
    messages = ConversationReader().read(turns)
    assert [one.tool_call_id for one in messages[1:]] == [f"call_{i}" for i in range(n)]
    assert ConversationReader().read([{"role": "tool", "content": "x"}])[0].tool_call_id is None


def test_a_request_without_messages_loads_the_model() -> None:
    wire = Wire()
    for path, empty in (("/api/chat", {"messages": []}), ("/api/generate", {"prompt": ""})):
        whole = wire.whole(path, keep_alive=-1, **empty)
        assert (whole["done"], whole["done_reason"]) == (True, "load")
        [part] = wire.parts(path, **empty)
        assert part["done_reason"] == "load"
    assert wire.fake.asked == []


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None), (0, 0), (300, 300), (-1, math.inf), ("-1", math.inf), ("-1m", math.inf),
        ("5m", 300), ("+5m", 300), ("1h30m", 5400), ("1.5h", 5400), ("250ms", 0.25), ("24", 24),
        ("0", 0), (10**400, math.inf), ("9" * 64, math.inf), ("999999999h", math.inf),
        (10**9, 10**9),
    ],
)  # fmt: skip
def test_keep_alive_is_a_duration(given: object, seconds: float | None) -> None:
    assert read_keep_alive(given) == seconds
    body = {"model": "fake", "messages": HELLO, "keep_alive": given}
    assert chat_request(body, FakeServing().model, Caller()).keep_alive == seconds


@pytest.mark.parametrize("given", ["", "m5", "5m ", "1e9m", "5 m", "--5m", "+-5m", True, "9" * 65])
def test_what_is_no_duration_is_refused(given: object) -> None:
    with pytest.raises(FieldError, match="keep_alive"):
        read_keep_alive(given)


@pytest.mark.parametrize(
    ("table", "documented", "ours"),
    [
        (tables.CHAT_FIELDS, ollama_fields.CHAT, OURS),
        (tables.GENERATE_FIELDS, ollama_fields.GENERATE, OURS),
        (tables.MESSAGE_FIELDS, ollama_fields.MESSAGE, {"tool_call_id"}),
        (tables.OPTION_FIELDS, ollama_fields.OPTIONS, {"min_p", "num_gqa"}),
    ],
)
def test_every_field_of_ollamas_client_is_in_a_table(
    table: Mapping[str, Field], documented: set[str], ours: set[str]
) -> None:
    assert set(table) == documented | ours
    assert not documented & ours


# /api/generate


def test_a_prompt_is_a_conversation_of_one_message() -> None:
    wire = Wire()
    whole = wire.whole("/api/generate", system="Be brief.")
    assert whole["response"] == "Hello."
    assert wire.chat_asked.messages == (Message("system", "Be brief."), Message("user", "Hello"))


def test_a_context_continues_the_conversation() -> None:
    wire = Wire(Script((ReasoningDelta("Hm."), TextDelta("Hi, ä."))))
    context = wire.whole("/api/generate", system="Be brief.")["context"]
    assert wire.parts("/api/generate", system="Be brief.")[-1]["context"] == context
    wire.fake.asked.clear()
    wire.whole("/api/generate", system="Be brief.", prompt="And now?", context=context)
    assert wire.chat_asked.messages == (
        Message("system", "Be brief."),
        Message("user", "Hello"),
        Message("assistant", "Hi, ä.", "Hm."),
        Message("user", "And now?"),
    )


def test_a_raw_prompt_is_a_text_in_no_template() -> None:
    wire = Wire()
    whole = wire.whole("/api/generate", raw=True, format="json", think=False)
    assert wire.ask.prompt == "Hello"
    assert wire.ask.sampling.grammar is not None
    assert "context" not in whole


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"suffix": "end"}, "suffix: this model can only append to text"),
        ({"template": "{{ .Prompt }}"}, "template: this server uses the model's own template"),
        ({"images": ["aGk="]}, "images: "),
        ({"raw": True, "system": "Be brief."}, "system: not allowed with a raw prompt"),
        ({"context": [1, 2, 300]}, "context must be the unchanged context of a reply"),
        ({"context": [1, 2, 3]}, "context must be"),
        ({"context": list(b"semantic-1\n" + b"[" * 100_000)}, "context must be"),
        ({"context": list(b'semantic-1\n[["tool","x",""]]')}, "context must be"),
        ({"context": list(b'semantic-1\n{"a":1}')}, "context must be"),
        ({"prompt": 7}, "prompt: expected a string"),
        ({"messages": HELLO}, "messages: a field of /api/chat"),
    ],
)
def test_prompts_that_cannot_be_honoured_are_refused(fields: Json, problem: str) -> None:
    assert problem in Wire().error("/api/generate", **fields)


# Models


def test_the_model_is_listed_with_a_tag_and_answers_to_it() -> None:
    wire = Wire()
    listed = wire.client.get("/api/tags").json()["models"]
    assert [one["name"] for one in listed] == ["fake:latest", "default:latest"]
    for name in ("fake:latest", "fake", "default:latest", "/models/fake"):
        assert wire.whole(model=name)["model"] == name
    [running] = wire.client.get("/api/ps").json()["models"]
    assert (running["name"], running["context_length"]) == ("fake:latest", 512)
    assert wire.client.get("/api/version").json()["version"].replace(".", "").isdigit()


def test_a_model_is_shown() -> None:
    wire = Wire()
    found = wire.client.post("/api/show", json={"model": "fake:latest", "verbose": True}).json()
    assert found["capabilities"] == ["completion", "tools"]
    assert wire.client.post("/api/show", json={"name": "fake"}).status_code == 200
    assert wire.client.post("/api/show", json={"model": "nobody"}).status_code == 404


def test_a_served_model_needs_no_pull_and_others_are_not_fetched() -> None:
    wire = Wire()
    assert wire.client.post("/api/pull", json={"model": "fake"}).json() == {"status": "success"}
    refused = wire.client.post("/api/pull", json={"model": "org/name", "stream": False})
    assert refused.status_code == 403
    assert "semantic models pull" in refused.json()["error"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999"), (3_721_984, "3.7M"), (137_000_000, "137M"), (8_030_261_248, "8.0B")],
)
def test_parameters_in_short(count: int, text: str) -> None:
    assert in_short(count) == text


def test_lm_studio_lists_the_same_names() -> None:
    wire = Wire()
    listed = wire.client.get("/api/v0/models").json()
    assert [one["id"] for one in listed["data"]] == ["fake", "default"]
    shown = wire.client.get("/api/v0/models/fake").json()
    assert shown == listed["data"][0]
    assert (shown["type"], shown["state"], shown["loaded_context_length"]) == ("llm", "loaded", 512)
    refused = wire.client.get("/api/v0/models/nobody")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["/", "/api/tags", "/api/version"])
def test_clients_that_ask_whether_it_is_there(path: str) -> None:
    head = Wire().client.head(path)
    assert (head.status_code, head.content) == (200, b"")


def test_lm_studios_routes_answer_as_openais() -> None:
    wire = Wire()
    for route, fields in (
        ("chat/completions", {"messages": HELLO}),
        ("completions", {"prompt": "Hello"}),
    ):
        mine, other = (
            wire.client.post(f"{prefix}/{route}", json={"model": "fake", **fields}).json()
            for prefix in ("/api/v0", "/v1")
        )
        assert mine["choices"] == other["choices"]
        wrong = wire.client.post(f"/api/v0/{route}", json={"model": "nobody", **fields})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
    vectors = wire.client.post("/api/v0/embeddings", json={"model": "fake", "input": "x"})
    assert "--embedding-model" in vectors.json()["error"]["message"]
