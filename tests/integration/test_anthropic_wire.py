"""Anthropic's own client on the embedded model: turns are cached, agents kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import anthropic
import pytest
from anthropic.types import MessageParam

from semantic.application.serving import Serving
from semantic.composition.engine_settings import Settings
from semantic.serve import ServeSettings, load_serving
from semantic_server.http.app import create_app
from semantic_server.http.context import ServerContext
from tests.support.http_server import RunningServer, running

pytestmark = pytest.mark.process

MODEL = "semantic-tiny"
CONTEXT = 1024
STORY: MessageParam = {"role": "user", "content": "Tell me a story. " * 20}
BILLING = "x-anthropic-billing-header: cc_version=2.1.{}.f6c; cc_entrypoint=sdk-cli;"


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    wanted = ServeSettings(Settings(pool_blocks=400), max_context=CONTEXT)
    found = asyncio.run(load_serving(wanted))
    yield found
    asyncio.run(found.close())


@pytest.fixture(scope="module")
def server(served: Serving) -> Iterator[RunningServer]:
    with running(app=create_app(context=ServerContext(served, agents=served.agents))) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as found:
        yield found


def prompt_tokens(usage: anthropic.types.Usage) -> int:
    """All tokens of the prompt: the three parts add up."""
    return (
        usage.input_tokens
        + (usage.cache_read_input_tokens or 0)
        + (usage.cache_creation_input_tokens or 0)
    )


def test_the_next_turn_is_cached_whatever_the_client_says_of_itself(
    client: anthropic.Anthropic, server: RunningServer
) -> None:
    history: list[MessageParam] = [STORY]
    read = []
    for turn in range(3):
        message = client.messages.create(
            model=MODEL,
            max_tokens=8,
            system=[
                {"type": "text", "text": BILLING.format(turn)},
                {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            ],
            messages=history,
            extra_body={"temperature": 0},
            extra_headers={"x-agent-id": "claude/ada"},
        )
        count = client.messages.count_tokens(model=MODEL, messages=history, system="Be brief.")
        assert prompt_tokens(message.usage) == count.input_tokens
        read.append((message.usage.cache_read_input_tokens or 0) / count.input_tokens)
        history += [
            {"role": "assistant", "content": message.content or "Well."},
            {"role": "user", "content": "And then?"},
        ]
    assert read[0] == 0
    assert min(read[1:]) > 0.8
    agent = server.ask("GET", "/v1/agents/claude%2Fada").json
    assert (agent["turns"], agent["state"]) == (3, "idle")
    match = server.ask("GET", "/v1/agents/claude%2Fada/why").json["match"]
    assert isinstance(match, dict)
    assert match["reused_tokens"] > 0


def test_nameless_turns_are_one_agents(client: anthropic.Anthropic, server: RunningServer) -> None:
    history: list[MessageParam] = [{"role": "user", "content": "A story without a name. " * 20}]
    for _ in range(2):
        message = client.messages.create(model=MODEL, max_tokens=8, messages=history)
        history += [
            {"role": "assistant", "content": message.content or "Well."},
            {"role": "user", "content": "And then?"},
        ]
    listed = server.ask("GET", "/v1/agents").json["data"]
    assert isinstance(listed, list)
    nameless = [one for one in listed if one["id"].startswith("auto-")]
    assert [one["turns"] for one in nameless] == [2]


def test_an_answer_in_json(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"mood": {"enum": ["good", "bad"]}},
        "required": ["mood"],
        "additionalProperties": False,
    }
    message = client.messages.create(
        model=MODEL,
        max_tokens=200,
        messages=[{"role": "user", "content": "How are you?"}],
        output_config={"format": {"type": "json_schema", "schema": schema}},
        extra_body={"temperature": 0},
    )
    (text,) = message.content
    assert text.type == "text"
    assert json.loads(text.text) in ({"mood": "good"}, {"mood": "bad"})


def test_a_prompt_that_is_too_long(client: anthropic.Anthropic) -> None:
    long: list[MessageParam] = [{"role": "user", "content": "Tell me a story. " * 2000}]
    count = client.messages.count_tokens(model=MODEL, messages=long).input_tokens
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model=MODEL, max_tokens=8, messages=long)
    body = caught.value.body
    assert isinstance(body, dict)
    assert body["error"]["message"] == f"prompt is too long: {count} tokens > {CONTEXT} maximum"


def test_a_prompt_computed_ahead_is_cached(client: anthropic.Anthropic) -> None:
    ahead: list[MessageParam] = [{"role": "user", "content": "Something quite new. " * 20}]
    first = client.messages.create(model=MODEL, max_tokens=0, messages=ahead)
    assert (first.content, first.usage.output_tokens) == ([], 0)
    again = client.messages.create(model=MODEL, max_tokens=4, messages=ahead)
    assert (again.usage.cache_read_input_tokens or 0) > 0.9 * prompt_tokens(again.usage)


def test_a_stop_sequence_inside_a_call_ends_the_answer_without_it(
    client: anthropic.Anthropic,
) -> None:
    answer = client.messages.create(
        model=MODEL,
        max_tokens=200,
        messages=[STORY],
        tools=[{"name": "look", "input_schema": {"type": "object"}}],
        tool_choice={"type": "any"},
        stop_sequences=['"name"'],
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", '"name"')
    assert not [block for block in answer.content if block.type == "tool_use"]
