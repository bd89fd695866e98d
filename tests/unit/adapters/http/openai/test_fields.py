"""Each documented field works or is refused by name: tables, refusals, and the SDK's own types."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.chat.chat_completion_stream_options_param import ChatCompletionStreamOptionsParam

from semantic.application.chat.call_grammar import answer_grammar
from semantic.domain.chat import AnswerFormat, Chat
from semantic.domain.identity import Identity
from semantic_server.http.logs import WarnOnce
from semantic_server.http.openai import fields, requests
from semantic_server.http.openai.fields import CHAT_FIELDS, COMPLETION_FIELDS, STREAM_OPTION_FIELDS
from semantic_server.http.openai.responses.request import RESPONSE_FIELDS
from semantic_server.http.request_fields.table import Field, WireFields
from tests.unit.adapters.http.openai.wire import CHAT, COMPLETIONS, at, wire_of

OURS = {
    "agent_id",
    "ignore_eos",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "semantic",
    "top_k",
    "add_special_tokens",
    *fields.CONSTRAINTS,
}

TABLES = [
    (
        CHAT_FIELDS,
        chat_params.CompletionCreateParamsNonStreaming,
        OURS | {"chat_template_kwargs", "reasoning"},
    ),
    (COMPLETION_FIELDS, completion_params.CompletionCreateParamsNonStreaming, OURS),
    (STREAM_OPTION_FIELDS, ChatCompletionStreamOptionsParam, {"continuous_usage_stats"}),
]


@pytest.mark.parametrize(("table", "documented", "ours"), TABLES)
def test_every_documented_field_is_in_the_table(
    table: Mapping[str, Field], documented: type, ours: set[str]
) -> None:
    known = set(documented.__annotations__)
    assert set(table) - ours == known
    assert not known & ours


REFUSED_CHAT = {
    "audio": {"voice": "alloy", "format": "wav"},
    "function_call": "auto",
    "functions": [{"name": "look"}],
    "modalities": ["text", "audio"],
    "moderation": {"model": "omni"},
    "verbosity": "low",
    "web_search_options": {},
    "min_tokens": 4,
    "add_special_tokens": True,
}


def test_the_refusals_below_are_all_there_are() -> None:
    assert set(REFUSED_CHAT) == {name for name, one in CHAT_FIELDS.items() if one.refusal}


@pytest.mark.parametrize("name", REFUSED_CHAT)
def test_refused_fields_of_chats(name: str) -> None:
    wire = wire_of()
    error = wire.error(CHAT, **{name: REFUSED_CHAT[name]})
    assert error["param"] == name
    assert str(error["message"]).startswith(f"{name}: ")
    assert wire.fake.asked == []


@pytest.mark.parametrize(
    "given",
    [
        {"modalities": ["text"]},
        {"service_tier": "flex", "store": True, "add_special_tokens": False},
        {"background": False, "keep_alive": "5m", "options": {}, "use_beam_search": False},
        {"verbosity": "medium"},
        {"min_tokens": 0},
        {"user": "u", "safety_identifier": "s", "metadata": {"a": "b"}},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h"},
        {"prompt_cache_options": {"mode": "implicit"}},
        dict.fromkeys(CHAT_FIELDS.keys() - {"model", "messages"}),
    ],
)
def test_accepted_values_change_nothing_but_who_asks(given: dict[str, object]) -> None:
    plain, other = wire_of(), wire_of()
    plain.chat()
    other.chat(**given)
    assert plain.ask == replace(other.ask, identity=None)


@pytest.mark.parametrize(
    ("content", "text"), [("x = 1", "x = 1"), ([{"type": "text", "text": "x = 1"}], "x = 1")]
)
def test_a_prediction_reaches_every_choice(content: object, text: str) -> None:
    wire = wire_of()
    wire.chat(prediction={"type": "content", "content": content}, n=2)
    assert [ask.predicted for ask in wire.fake.asked] == [text, text]


def test_a_malformed_prediction_is_refused() -> None:
    wrong = {"type": "content", "content": [{"type": "text", "text": 5}]}
    assert wire_of().error(CHAT, prediction=wrong)["param"] == "prediction.content[0].text"
    assert wire_of().error(CHAT, prediction="x")["param"] == "prediction"
    for given, name in (({"content": "x"}, "type"), ({"type": "content"}, "content")):
        assert wire_of().error(CHAT, prediction=given)["param"] == f"prediction.{name}"
    other = {"type": "other", "content": "x"}
    assert wire_of().error(CHAT, prediction=other)["param"] == "prediction.type"


def test_tags_say_who_asks() -> None:
    wire = wire_of()
    wire.chat(metadata={"session_id": "s"}, user="u")
    assert wire.ask.identity == Identity("s")
    wire = wire_of()
    wire.complete(user="u")
    assert wire.ask.identity == Identity("u", shared=True)


@pytest.mark.parametrize(("name", "value"), [("suffix", "end"), ("min_tokens", 2)])
def test_refused_fields_of_completions(name: str, value: object) -> None:
    assert wire_of().error(COMPLETIONS, **{name: value})["param"] == name
    assert at(wire_of().complete(suffix="", min_tokens=0), "choices", 0, "text") == "Hello."


OTHERS = [
    {"options": {"temperature": 0}},
    {"think": False},
    {"stop_token_ids": [5]},
    {"background": True},
    {"chat_template": "{{ x }}"},
    {"repeat_penalty": 1.1},
    {"extra_body": {"top_k": 1}},
]


@pytest.mark.parametrize("given", OTHERS, ids=lambda given: next(iter(given)))
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_other_servers_know_and_changes_an_answer_is_refused(
    path: str, given: dict[str, object]
) -> None:
    wire = wire_of()
    error = wire.error(path, **given)
    (name,) = given
    assert error["param"] == name
    assert str(error["message"]).startswith(f"{name}: ")
    assert wire.fake.asked == []


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("temprature", "temperature"),
        ("maxTokens", "max_tokens"),
        ("top-p", "top_p"),
        ("stops", "stop"),
        ("guided_jsn", "guided_json"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_misspelt_field_is_refused_with_the_one_that_was_meant(
    path: str, wrong: str, right: str
) -> None:
    error = wire_of().error(path, **{wrong: 1})
    assert error["param"] == wrong
    assert error["message"] == f"{wrong}: unknown field; did you mean {right}?"
    nested = wire_of().error(path, stream=True, stream_options={"include_usge": True})
    assert str(nested["message"]).endswith("did you mean stream_options.include_usage?")


def test_no_field_of_another_server_is_taken_for_a_misspelling() -> None:
    for table in (CHAT_FIELDS, COMPLETION_FIELDS, RESPONSE_FIELDS):
        fields.known_fields(dict.fromkeys(fields.OTHER_SERVERS), table)
        for name, one in fields.OTHER_SERVERS.items():
            if name not in table and one.refusal is None:
                fields.known_fields({name: "x"}, table)


FORMS = [
    ("json", {"type": "object"}, AnswerFormat({"type": "object"})),
    ("json", '{"type": "object"}', AnswerFormat({"type": "object"})),
    ("regex", "a/b\n[/]", AnswerFormat(grammar="start: /a\\/b\\n[\\/]/")),
    ("choice", ["a", 'b"'], AnswerFormat(grammar='start: "a" | "b\\""')),
    ("grammar", 'start: "x"', AnswerFormat(grammar='start: "x"')),
]


@pytest.mark.parametrize(("kind", "value", "wanted"), FORMS)
def test_vllms_constraints_are_answer_formats(
    kind: str, value: object, wanted: AnswerFormat
) -> None:
    for given in ({f"guided_{kind}": value}, {"structured_outputs": {kind: value}}):
        wire = wire_of()
        wire.chat(**given)
        assert isinstance(wire.ask.prompt, Chat)
        assert wire.ask.prompt.answer_format == wanted
        wire = wire_of()
        wire.complete(**given)
        assert wire.ask.sampling.grammar == answer_grammar(wanted)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": 1}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_wrong_constraints_are_refused_by_name(
    path: str, given: dict[str, object], param: str
) -> None:
    wire = wire_of()
    assert wire.error(path, **given)["param"] == param
    assert wire.fake.asked == []


def test_an_answer_has_one_form() -> None:
    wanted = {"type": "json_object"}
    error = wire_of().error(CHAT, guided_regex="a", response_format=wanted)
    assert error["param"] == "response_format"
    wire_of().chat(guided_regex="a", response_format={"type": "text"})
    assert wire_of().error(COMPLETIONS, response_format=wanted)["param"] == "response_format"


def test_an_unknown_field_is_told_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields.warnings, "_logged", WarnOnce()._logged)
    wire = wire_of()
    with caplog.at_level(logging.WARNING, "semantic.server"):
        for _ in range(3):
            wire.chat(typo=1)
            wire.chat(**{"bad\nname": 1})
    assert caplog.messages == [
        "unknown field 'typo' has no effect",
        r"unknown field 'bad\nname' has no effect",
    ]


def test_names_that_a_client_invents_are_not_remembered_without_end() -> None:
    told = WarnOnce()
    known_fields = WireFields(fields.OTHER_SERVERS, told).known
    known_fields({f"name{i}": i for i in range(5000)}, CHAT_FIELDS)
    assert len(told._logged) == 1000


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 1.5}, "seed"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"stop": 5}, "stop"),
        ({"stop": {}}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {str(0x110000): 1}}, "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),
        ({"repetition_penalty": 1e39}, "repetition_penalty"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": "usage"}, "stream_options"),
        ({"agent_id": ""}, "agent_id"),
        ({"agent_id": 5}, "agent_id"),
        ({"user": 5}, "user"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_wrong_values_are_refused_by_name(path: str, given: dict[str, object], param: str) -> None:
    wire = wire_of()
    error = wire.error(path, **given)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert wire.fake.asked == []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("option", ["include_usage", "continuous_usage_stats"])
def test_stream_options_are_checked(path: str, option: str) -> None:
    wire = wire_of()
    error = wire.error(path, stream=True, stream_options={option: 1})
    assert error["param"] == f"stream_options.{option}"
    error = wire.error(path, stream=True, stream_options={"include_obfuscation": True})
    assert error["param"] == "stream_options.include_obfuscation"
    wire.chunks(path, stream_options={"include_obfuscation": False})


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_unknown_model_is_a_404_with_the_names_there_are(path: str) -> None:
    error = wire_of().error(path, 404, model="gpt-6")
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "fake, default" in str(error["message"])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_model_must_be_named(path: str) -> None:
    assert wire_of().error(path, model=None)["param"] == "model"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_server_may_tell_usage_to_all(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wire_of().chunks(path)[-1]["choices"]
    monkeypatch.setattr(requests, "settings_of", lambda _: SimpleNamespace(force_usage=True))
    for options in (None, {"include_usage": False}):
        last = wire_of().chunks(path, stream_options=options)[-1]
        assert last["choices"] == []
        assert at(last, "usage", "completion_tokens") == 6


def test_the_description_has_body_and_reply_of_both_routes() -> None:
    schema = wire_of().client.get("/openapi.json").json()
    for path, field in ((CHAT, "messages"), (COMPLETIONS, "prompt")):
        operation = schema["paths"][path]["post"]
        body = at(operation, "requestBody", "content", "application/json", "schema")
        assert at(body, "required") == ["model", field]
        assert set(operation["responses"]["200"]["content"]) == {
            "application/json",
            "text/event-stream",
        }
        assert {"400", "404", "500", "503"} <= set(operation["responses"])
