"""OpenAI's SDK, of both major versions that are in use."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel

from tests.clients import talk

TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": talk.CITY_SCHEMA,
        },
    }
]


class Place(BaseModel):
    """What a structured answer says."""

    city: talk.City


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, *messages: ChatCompletionMessageParam) -> ChatCompletion:
    return client.chat.completions.create(model=talk.MODEL, messages=messages, max_tokens=60)


def user(text: str) -> ChatCompletionMessageParam:
    return {"role": "user", "content": text}


def test_chat(client: openai.OpenAI) -> None:
    reply = ask(client, user(talk.HELLO))
    assert reply.choices[0].message.content == talk.HELLO_ANSWER
    assert reply.choices[0].finish_reason == "stop"
    assert reply.model == talk.MODEL
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_stream_says_the_same_and_ends_with_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=talk.MODEL,
            messages=[user(talk.HELLO)],
            max_tokens=60,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == talk.HELLO_ANSWER
    assert len([text for text in texts if text]) > 1
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens > 1
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=talk.MODEL, messages=[user(talk.HELLO)], max_tokens=60
    ) as stream:
        kinds = {event.type for event in stream}
        reply = stream.get_final_completion()
    assert reply.choices[0].message.content == talk.HELLO_ANSWER
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_turns_are_not_computed_again(client: openai.OpenAI) -> None:
    messages = [user(talk.HELLO)]
    prompts, cached, answers = [], [], []
    for text in (talk.reading("book"), talk.NAME, talk.CITY):
        reply = ask(client, *messages)
        answer = reply.choices[0].message.content
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        prompts.append(reply.usage.prompt_tokens)
        cached.append(reply.usage.prompt_tokens_details.cached_tokens or 0)
        answers.append(answer)
        messages += [{"role": "assistant", "content": answer}, user(text)]
    answers.append(ask(client, *messages).choices[0].message.content)
    assert answers[0] == talk.HELLO_ANSWER
    assert answers[2:] == [talk.NAME_ANSWER, talk.CITY_ANSWER]
    assert talk.grows(prompts, cached)


def test_stop(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=talk.MODEL, messages=[user(talk.COUNT)], stop=talk.COUNT_STOP
    )
    assert reply.choices[0].message.content == talk.COUNT_TO_STOP
    assert reply.choices[0].finish_reason == "stop"


def test_max_tokens(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=talk.MODEL, messages=[user(talk.COUNT)], max_completion_tokens=3
    )
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 3


def test_several_choices(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=talk.MODEL, messages=[user(talk.HELLO)], n=2)
    assert [one.message.content for one in reply.choices] == [talk.HELLO_ANSWER] * 2
    assert [one.index for one in reply.choices] == [0, 1]


def test_logprobs(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=talk.MODEL, messages=[user(talk.HELLO)], logprobs=True, top_logprobs=2
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(one.token for one in logprobs.content).startswith(talk.HELLO_ANSWER)
    for one in logprobs.content:
        assert one.logprob <= 0
        assert one.logprob == pytest.approx(max(top.logprob for top in one.top_logprobs))


def test_parse(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(
        model=talk.MODEL,
        messages=[user(talk.WEATHER)],
        response_format=Place,
        max_tokens=talk.ROOM_FOR_JSON,
    )
    assert isinstance(reply.choices[0].message.parsed, Place)


def test_json_schema(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=talk.MODEL,
        messages=[user(talk.WEATHER)],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "place", "strict": True, "schema": talk.CITY_SCHEMA},
        },
        max_tokens=talk.ROOM_FOR_JSON,
    )
    assert json.loads(reply.choices[0].message.content or "")["city"] in talk.CITIES


@pytest.mark.parametrize("stream", [False, True])
def test_tool_loop(client: openai.OpenAI, *, stream: bool) -> None:
    reply = forced_call(client, stream=stream)
    message = reply.choices[0].message
    assert reply.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    call = message.tool_calls[0]
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in talk.CITIES

    said: ChatCompletionMessageParam = {
        "role": "assistant",
        "tool_calls": [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": "weather", "arguments": call.function.arguments},
            }
        ],
    }
    found: ChatCompletionMessageParam = {
        "role": "tool",
        "tool_call_id": call.id,
        "content": talk.WEATHER_FOUND,
    }
    answer = client.chat.completions.create(
        model=talk.MODEL,
        messages=[user(talk.WEATHER), said, found],
        tools=TOOLS,
        tool_choice="none",
        max_tokens=60,
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content
    assert not answer.choices[0].message.tool_calls
    assert answer.usage is not None
    assert reply.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens > reply.usage.prompt_tokens


def forced_call(client: openai.OpenAI, *, stream: bool) -> ChatCompletion:
    """The same request whole and in pieces."""
    if not stream:
        return client.chat.completions.create(
            model=talk.MODEL,
            messages=[user(talk.WEATHER)],
            tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": "weather"}},
            parallel_tool_calls=False,
            max_tokens=talk.ROOM_FOR_JSON,
        )
    with client.chat.completions.stream(
        model=talk.MODEL,
        messages=[user(talk.WEATHER)],
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "weather"}},
        parallel_tool_calls=False,
        max_tokens=talk.ROOM_FOR_JSON,
        stream_options={"include_usage": True},
    ) as events:
        return events.get_final_completion()


def test_completions(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model=talk.MODEL, prompt="<|user|>" + talk.HELLO + "<|end|><|assistant|>", max_tokens=60
    )
    assert reply.choices[0].text == talk.HELLO_ANSWER


def test_embeddings(client: openai.OpenAI) -> None:
    """The SDK asks for base 64 by itself."""
    reply = client.embeddings.create(model=talk.EMBEDDING_MODEL, input=list(talk.EMBEDDED))
    assert talk.are_vectors([one.embedding for one in reply.data])
    assert reply.usage.prompt_tokens > len(talk.EMBEDDED)
    asked = client.embeddings.create(
        model=talk.EMBEDDING_MODEL, input=talk.EMBEDDED[0], encoding_format="float", dimensions=8
    )
    assert len(asked.data[0].embedding) == 8


def test_models(client: openai.OpenAI) -> None:
    assert talk.MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(talk.MODEL).id == talk.MODEL


def test_a_bad_request_names_its_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=talk.MODEL, messages=[user(talk.HELLO)], temperature=-1
        )
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"


def test_an_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nobody", messages=[user(talk.HELLO)])
    assert caught.value.code == "model_not_found"
    assert talk.MODEL in caught.value.message


def test_too_long_a_prompt(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, user(talk.TOO_LONG))
    assert caught.value.code == "context_length_exceeded"


def test_eight_at_once(url: str) -> None:
    async def all_of_them() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            replies = await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model=talk.MODEL, messages=[user(talk.counting(first)[0])]
                    )
                    for first in range(1, 9)
                )
            )
        return [reply.choices[0].message.content for reply in replies]

    assert asyncio.run(all_of_them()) == [talk.counting(first)[1] for first in range(1, 9)]


def test_who_leaves_a_stream_is_not_computed_for(url: str, client: openai.OpenAI) -> None:
    agent = f"leaves-{openai.VERSION}"
    stream = client.chat.completions.create(
        model=talk.MODEL,
        messages=[user(talk.ENDLESS)],
        max_tokens=5000,
        stream=True,
        extra_headers={"X-Agent-ID": agent},
        extra_body={"ignore_eos": True},
    )
    with stream:
        assert next(iter(stream)).object == "chat.completion.chunk"
    assert talk.tokens_when_idle(url, agent) < 2000
