"""Thinking budgets on every wire, with a model whose template opens a thought.

The model is random, so it thinks on: what a budget cuts is what it would have written.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from semantic.application.serving import Serving
from semantic.composition.engine_settings import Settings
from semantic.serve import ServeSettings, load_serving
from semantic_server.http.anthropic import request
from tests.support.http_server import RunningServer, running
from tests.support.model_folder import small_model, write_model

pytestmark = pytest.mark.process

Json = dict[str, object]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER: Json = {"role": "user", "content": "Which way?"}


SCHEMA: Json = {
    "type": "object",
    "properties": {"way": {"enum": ["left"]}},
    "required": ["way"],
    "additionalProperties": False,
}
WAY: Json = {
    "type": "json_schema",
    "json_schema": {"name": "way", "schema": SCHEMA, "strict": True},
}


def load(folder: Path) -> Serving:
    settings = Settings(model=str(folder), pool_blocks=400)
    return asyncio.run(load_serving(ServeSettings(settings, max_context=4096)))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    found = load(small_model(tmp_path_factory.mktemp("thinking") / "model"))
    yield found
    asyncio.run(found.close())


@pytest.fixture(scope="module")
def server(served: Serving) -> Iterator[RunningServer]:
    with running(served) as found:
        yield found


def at(body: object, *path: str | int) -> object:
    for step in path:
        body = body[step]  # type: ignore[index]
    return body


def chat(server: RunningServer, **more: object) -> Json:
    body: Json = {"model": "model", "messages": [USER], "max_tokens": 30, "temperature": 0}
    reply = server.ask("POST", CHAT, body | more)
    assert reply.status == 200, reply.json
    return reply.json


def thought(reply: Json) -> object:
    return at(reply, "choices", 0, "message", "reasoning")


def n_thoughts(reply: Json) -> object:
    return at(reply, "usage", "completion_tokens_details", "reasoning_tokens")


def test_a_thought_is_cut_at_its_budget_and_the_answer_follows(server: RunningServer) -> None:
    free = chat(server)
    assert n_thoughts(free) == 30
    for budget in (1, 5, 20):
        cut = chat(server, reasoning={"max_tokens": budget})
        assert n_thoughts(cut) == budget + 1, "with its end mark"
        assert str(thought(free)).startswith(str(thought(cut)))
        assert at(cut, "choices", 0, "message", "content")
        assert at(cut, "usage", "completion_tokens") == 30
    assert chat(server, reasoning={"max_tokens": 30})["choices"] == free["choices"]
    streamed = server.ask(
        "POST",
        CHAT,
        {"model": "model", "messages": [USER], "max_tokens": 30, "temperature": 0, "stream": True}
        | {"reasoning": {"max_tokens": 20}},
    )
    assert str(thought(cut)) in "".join(
        str(json.loads(line[6:])["choices"][0]["delta"].get("reasoning", ""))
        for line in streamed.body.decode().splitlines()
        if line.startswith("data: {") and json.loads(line[6:])["choices"]
    )


def test_the_next_turn_finds_all_of_a_cut_answer(server: RunningServer) -> None:
    first = chat(server, reasoning={"max_tokens": 7}, agent_id="turns")
    message = at(first, "choices", 0, "message")
    history = [USER, message, {"role": "user", "content": "And then?"}]
    second = chat(server, messages=history, agent_id="turns", reasoning={"max_tokens": 9})
    assert n_thoughts(second) == 10
    cached = at(second, "usage", "prompt_tokens_details", "cached_tokens")
    assert cached == at(first, "usage", "total_tokens")


def test_no_budget_is_no_thought(server: RunningServer) -> None:
    for reasoning in ({"max_tokens": 0}, {"enabled": False}):
        reply = chat(server, reasoning=reasoning)
        assert n_thoughts(reply) == 0
        assert at(reply, "choices", 0, "message", "content")
    # Also where the template opens a thought all the same.
    stubborn = {"enable_thinking": True}
    reply = chat(server, reasoning={"max_tokens": 0}, chat_template_kwargs=stubborn)
    assert n_thoughts(reply) == 0


def test_an_answer_format_is_kept_after_a_cut_thought(server: RunningServer) -> None:
    reply = chat(server, max_tokens=400, reasoning={"max_tokens": 4}, response_format=WAY)
    assert n_thoughts(reply) == 5
    assert json.loads(str(at(reply, "choices", 0, "message", "content"))) == {"way": "left"}


def test_a_grammar_that_fails_behind_the_thought_is_refused_before_it(
    server: RunningServer,
) -> None:
    body: Json = {"model": "model", "messages": [USER], "guided_grammar": "start: start"}
    for budget in (0, 4):
        reply = server.ask("POST", CHAT, body | {"reasoning": {"max_tokens": budget}})
        assert reply.status == 400
        assert str(at(reply.json, "error", "message")).startswith("lark: ")


@pytest.mark.parametrize(
    ("constraint", "content"),
    [
        ({"guided_grammar": "start: <think>"}, "<think>"),
        ({"guided_grammar": 'start: "a" <think> "b" </think>'}, "a<think>b</think>"),
        ({"guided_grammar": 'start: "</think>"'}, "</think>"),
        ({"guided_regex": "<think>{3}"}, "<think>>>"),
        ({"guided_choice": ["<tool_call>"]}, "<tool_call>"),
        ({"guided_choice": ["<|user|>"]}, "<|user|>"),
        ({"guided_json": {"const": "a</think>b"}}, '"a</think>b"'),
    ],
)
def test_marks_that_a_constraint_demands_are_the_answers_text(
    server: RunningServer, constraint: Json, content: str
) -> None:
    """They begin no reasoning, which the budget would have to end."""
    reply = chat(server, reasoning={"max_tokens": 1}, **constraint)
    assert at(reply, "choices", 0, "finish_reason") == "stop"
    assert at(reply, "choices", 0, "message", "content") == content
    assert n_thoughts(reply) == 2


def test_a_prompt_without_reasoning_is_held_to_marks_alike(server: RunningServer) -> None:
    body: Json = {"model": "model", "prompt": "Which way?", "guided_choice": ["</think>"]}
    reply = server.ask("POST", "/v1/completions", body | {"max_tokens": 30})
    assert at(reply.json, "choices", 0, "text") == "</think>"


def test_a_thought_that_the_answer_opens_is_cut_within_its_grammar(tmp_path: Path) -> None:
    served = load(write_model(tmp_path / "model", "json_tools"))
    try:
        with running(served) as server:
            (opens,) = asyncio.run(served.tokenize("<think>", add_special_tokens=False))
            thinks: Json = {"max_tokens": 400, "logit_bias": {str(opens): 80}}
            reply = chat(server, reasoning={"max_tokens": 4}, response_format=WAY, **thinks)
    finally:
        asyncio.run(served.close())
    assert n_thoughts(reply) == 6, "with both marks"
    assert json.loads(str(at(reply, "choices", 0, "message", "content"))) == {"way": "left"}


def test_responses_have_the_budget_too(server: RunningServer) -> None:
    body: Json = {"model": "model", "input": "Which way?", "max_output_tokens": 20}
    body |= {"temperature": 0, "reasoning": {"max_tokens": 5}}
    reply = server.ask("POST", RESPONSES, body).json
    assert at(reply, "usage", "output_tokens_details", "reasoning_tokens") == 6
    text = at(reply, "output", 0, "content", 0, "text")
    assert text == thought(chat(server, reasoning={"max_tokens": 5}))
    assert at(reply, "output", 1, "type") == "message"


def test_messages_have_the_budget_too(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "_MIN_BUDGET", 5)  # 1,024 tokens would take seconds
    body: Json = {"model": "model", "messages": [USER], "max_tokens": 20, "temperature": 0}
    body["thinking"] = {"type": "enabled", "budget_tokens": 5}
    reply = server.ask("POST", MESSAGES, body).json
    assert at(reply, "usage", "output_tokens") == 20
    assert at(reply, "usage", "output_tokens_details", "thinking_tokens") == 6
    assert at(reply, "content", 0, "type") == "thinking"
    assert at(reply, "content", 0, "thinking") == thought(chat(server, reasoning={"max_tokens": 5}))
    assert at(reply, "content", 1, "type") == "text"


def test_a_budget_that_leaves_no_answer_is_refused(server: RunningServer) -> None:
    body: Json = {"model": "model", "messages": [USER], "max_tokens": 1024}
    body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    refused = server.ask("POST", MESSAGES, body)
    assert refused.status == 400
    assert "thinking.budget_tokens: expected less than max_tokens" in refused.body.decode()
    between = {"anthropic-beta": "other,interleaved-thinking-2025-05-14"}
    # The prompt is empty: a request that passed this check is refused for that.
    other = server.ask("POST", MESSAGES, body | {"messages": []}, between)
    assert "thinking" not in other.body.decode()
    for path, more in ((CHAT, {"messages": [USER]}), (RESPONSES, {"input": "x"})):
        for wrong in (-1, 1.5, "7", True):
            reply = server.ask(
                "POST", path, {"model": "model", "reasoning": {"max_tokens": wrong}} | more
            )
            assert reply.status == 400
            assert at(reply.json, "error", "param") == "reasoning.max_tokens"
