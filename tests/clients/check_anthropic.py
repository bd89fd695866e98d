"""Anthropic's SDK."""

from __future__ import annotations

import asyncio
import json

import anthropic
import pytest
from anthropic.types import Message, MessageParam, ToolParam, ToolUseBlock
from pydantic import BaseModel

from tests.clients import talk

TOOLS: list[ToolParam] = [
    {
        "name": "weather",
        "description": "The weather of a city.",
        "input_schema": dict(talk.CITY_SCHEMA),
    }
]


class Place(BaseModel):
    """What a structured answer says."""

    city: talk.City


@pytest.fixture(scope="module")
def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


def ask(client: anthropic.Anthropic, *messages: MessageParam) -> Message:
    return client.messages.create(model=talk.MODEL, messages=messages, max_tokens=60)


def user(text: str) -> MessageParam:
    return {"role": "user", "content": text}


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def prompt_of(message: Message) -> int:
    """All tokens of the prompt: this wire counts in three parts that do not overlap."""
    usage = message.usage
    cached, written = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    return usage.input_tokens + (cached or 0) + (written or 0)


def test_message(client: anthropic.Anthropic) -> None:
    reply = ask(client, user(talk.HELLO))
    assert text_of(reply) == talk.HELLO_ANSWER
    assert reply.stop_reason == "end_turn"
    assert reply.usage.output_tokens > 1


def test_system_prompt(client: anthropic.Anthropic) -> None:
    reply = client.messages.create(
        model=talk.MODEL,
        system="You are Mira, the planner.",
        messages=[user("What is your name?")],
        max_tokens=60,
    )
    assert text_of(reply) == "My name is Mira."


def test_stream_says_the_same(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model=talk.MODEL, messages=[user(talk.HELLO)], max_tokens=60
    ) as stream:
        texts = list(stream.text_stream)
        reply = stream.get_final_message()
    assert "".join(texts) == text_of(reply) == talk.HELLO_ANSWER
    assert len(texts) > 1
    assert reply.usage.output_tokens > 1


def test_events_come_in_order(client: anthropic.Anthropic) -> None:
    events = client.messages.create(
        model=talk.MODEL, messages=[user(talk.HELLO)], max_tokens=60, stream=True
    )
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_turns_are_not_computed_again(client: anthropic.Anthropic) -> None:
    messages = [user(talk.HELLO)]
    prompts, cached, answers = [], [], []
    for text in (talk.reading("letter"), talk.NAME, talk.CITY):
        reply = ask(client, *messages)
        prompts.append(prompt_of(reply))
        cached.append(reply.usage.cache_read_input_tokens or 0)
        answers.append(text_of(reply))
        messages += [{"role": "assistant", "content": text_of(reply)}, user(text)]
    answers.append(text_of(ask(client, *messages)))
    assert answers[0] == talk.HELLO_ANSWER
    assert answers[2:] == [talk.NAME_ANSWER, talk.CITY_ANSWER]
    assert talk.grows(prompts, cached)


def test_stop_sequence(client: anthropic.Anthropic) -> None:
    reply = client.messages.create(
        model=talk.MODEL,
        messages=[user(talk.COUNT)],
        stop_sequences=[talk.COUNT_STOP],
        max_tokens=60,
    )
    assert text_of(reply) == talk.COUNT_TO_STOP
    assert reply.stop_reason == "stop_sequence"
    assert reply.stop_sequence == talk.COUNT_STOP


def test_max_tokens(client: anthropic.Anthropic) -> None:
    reply = client.messages.create(model=talk.MODEL, messages=[user(talk.COUNT)], max_tokens=3)
    assert reply.stop_reason == "max_tokens"
    assert reply.usage.output_tokens == 3


def test_parse(client: anthropic.Anthropic) -> None:
    reply = client.messages.parse(
        model=talk.MODEL,
        messages=[user(talk.WEATHER)],
        output_format=Place,
        max_tokens=talk.ROOM_FOR_JSON,
    )
    assert isinstance(reply.parsed_output, Place)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_loop(client: anthropic.Anthropic, *, stream: bool) -> None:
    reply = forced_call(client, stream=stream)
    assert reply.stop_reason == "tool_use"
    call = reply.content[-1]
    assert isinstance(call, ToolUseBlock)
    assert call.name == "weather"
    assert json.loads(json.dumps(call.input))["city"] in talk.CITIES
    answer = client.messages.create(
        model=talk.MODEL,
        messages=[
            user(talk.WEATHER),
            {"role": "assistant", "content": reply.content},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": call.id, "content": talk.WEATHER_FOUND}
                ],
            },
        ],
        tools=TOOLS,
        tool_choice={"type": "none"},
        max_tokens=60,
    )
    assert answer.stop_reason == "end_turn"
    assert text_of(answer)
    assert prompt_of(answer) > prompt_of(reply)


def forced_call(client: anthropic.Anthropic, *, stream: bool) -> Message:
    """The same request whole and in pieces."""
    if not stream:
        return client.messages.create(
            model=talk.MODEL,
            messages=[user(talk.WEATHER)],
            tools=TOOLS,
            tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
            max_tokens=talk.ROOM_FOR_JSON,
        )
    with client.messages.stream(
        model=talk.MODEL,
        messages=[user(talk.WEATHER)],
        tools=TOOLS,
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        max_tokens=talk.ROOM_FOR_JSON,
    ) as events:
        return events.get_final_message()


def test_tokens_are_counted_as_they_are_used(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=talk.MODEL, messages=[user(talk.COUNT)])
    assert counted.input_tokens == prompt_of(ask(client, user(talk.COUNT)))


def test_models(client: anthropic.Anthropic) -> None:
    assert talk.MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(talk.MODEL).type == "model"


def test_a_bad_request_names_its_field(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        ask(client)


def test_an_unknown_model(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match=talk.MODEL):
        client.messages.create(model="nobody", messages=[user(talk.HELLO)], max_tokens=9)


def test_too_long_a_prompt(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 8192 "):
        ask(client, user(talk.TOO_LONG))


def test_eight_at_once(url: str) -> None:
    async def all_of_them() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as client:
            replies = await asyncio.gather(
                *(
                    client.messages.create(
                        model=talk.MODEL, messages=[user(talk.counting(first)[0])], max_tokens=60
                    )
                    for first in range(1, 9)
                )
            )
        return [text_of(reply) for reply in replies]

    assert asyncio.run(all_of_them()) == [talk.counting(first)[1] for first in range(1, 9)]


def test_who_leaves_a_stream_is_not_computed_for(url: str, client: anthropic.Anthropic) -> None:
    agent = "leaves-messages"
    with client.messages.stream(
        model=talk.MODEL,
        messages=[user(talk.ENDLESS)],
        max_tokens=5000,
        extra_headers={"X-Agent-ID": agent},
    ) as stream:
        assert next(iter(stream.text_stream))
    assert talk.tokens_when_idle(url, agent) < 200
