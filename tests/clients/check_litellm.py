"""LiteLLM, as a client of both wires."""

from __future__ import annotations

import asyncio
import json

import litellm  # type: ignore[import-not-found]
import pytest

from tests.clients import talk

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": talk.CITY_SCHEMA,
        },
    }
]


class Wire:
    """A wire by LiteLLM's name for it."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        base = url if name == "anthropic" else f"{url}/v1"
        self.access = {"api_base": base, "api_key": "none", "num_retries": 0, "max_retries": 0}

    def ask(self, *messages: object, model: str = talk.MODEL, **wanted: object) -> litellm.Message:
        wanted = {"max_tokens": talk.ROOM_FOR_JSON, **self.access, **wanted}
        return litellm.completion(f"{self.name}/{model}", list(messages), **wanted)

    async def wait(self, *messages: object) -> str:
        reply = await litellm.acompletion(
            f"{self.name}/{talk.MODEL}", list(messages), max_tokens=60, **self.access
        )
        return str(reply.choices[0].message.content)


@pytest.fixture(params=["openai", "hosted_vllm", "anthropic"])
def wire(request: pytest.FixtureRequest, url: str) -> Wire:
    return Wire(request.param, url)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_chat(wire: Wire) -> None:
    reply = wire.ask(user(talk.HELLO))
    assert reply.choices[0].message.content == talk.HELLO_ANSWER
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.completion_tokens > 1


def test_stream(wire: Wire) -> None:
    chunks = list(wire.ask(user(talk.HELLO), stream=True, stream_options={"include_usage": True}))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == talk.HELLO_ANSWER
    assert [chunk for chunk in chunks if getattr(chunk, "usage", None)]


def test_turns_are_not_computed_again(wire: Wire) -> None:
    messages = [user(talk.HELLO)]
    prompts, cached = [], []
    for text in (talk.reading(f"{wire.name} box"), talk.NAME, talk.CITY):
        reply = wire.ask(*messages)
        prompts.append(reply.usage.prompt_tokens)
        cached.append(reply.usage.prompt_tokens_details.cached_tokens)
        answer = reply.choices[0].message.content
        messages += [{"role": "assistant", "content": answer}, user(text)]
    assert answer == talk.NAME_ANSWER
    assert wire.ask(*messages).choices[0].message.content == talk.CITY_ANSWER
    assert talk.grows(prompts, cached)


def test_stop(wire: Wire) -> None:
    reply = wire.ask(user(talk.COUNT), stop=[talk.COUNT_STOP])
    assert reply.choices[0].message.content == talk.COUNT_TO_STOP


def test_json_schema(wire: Wire) -> None:
    schema = {"name": "place", "strict": True, "schema": talk.CITY_SCHEMA}
    wanted = {"type": "json_schema", "json_schema": schema}
    reply = wire.ask(user(talk.WEATHER), response_format=wanted)
    assert json.loads(reply.choices[0].message.content)["city"] in talk.CITIES


def test_tool_loop(wire: Wire) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    first = wire.ask(user(talk.WEATHER), tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    message = first.choices[0].message
    (call,) = message.tool_calls
    assert first.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in talk.CITIES
    found = {"role": "tool", "tool_call_id": call.id, "content": talk.WEATHER_FOUND}
    answer = wire.ask(user(talk.WEATHER), message.model_dump(), found, tools=TOOLS)
    assert answer.choices[0].message.content
    assert not answer.choices[0].message.tool_calls


def test_errors_are_told_apart(wire: Wire) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        wire.ask(user(talk.HELLO), temperature=-1)
    with pytest.raises(litellm.NotFoundError, match="nobody"):
        wire.ask(user(talk.HELLO), model="nobody")
    with pytest.raises(litellm.ContextWindowExceededError):
        wire.ask(user(talk.TOO_LONG))


def test_eight_at_once(wire: Wire) -> None:
    async def all_of_them() -> list[str]:
        asked = (wire.wait(user(talk.counting(first)[0])) for first in range(1, 9))
        return await asyncio.gather(*asked)

    assert asyncio.run(all_of_them()) == [talk.counting(first)[1] for first in range(1, 9)]


@pytest.mark.parametrize("wire", ["openai", "hosted_vllm"], indirect=True)
def test_who_leaves_a_stream_is_not_computed_for(wire: Wire, url: str) -> None:
    """On Anthropic's wire LiteLLM reads on after `aclose`: there it does not leave."""
    agent = f"leaves-litellm-{wire.name}"

    async def leave() -> int:
        stream = await litellm.acompletion(
            f"{wire.name}/{talk.MODEL}",
            [user(talk.ENDLESS)],
            max_tokens=5000,
            stream=True,
            extra_headers={"X-Agent-ID": agent},
            **wire.access,
        )
        await anext(aiter(stream))
        await stream.aclose()
        return await asyncio.to_thread(talk.tokens_when_idle, url, agent)

    assert asyncio.run(leave()) < 200


class TestOllamasWire:
    """LiteLLM leaves out what it has no name for: cached tokens, and a choice of tools."""

    @pytest.fixture
    def wire(self, url: str) -> Wire:
        wire = Wire("ollama_chat", url)
        wire.access = {"api_base": url}
        return wire

    def test_chat(self, wire: Wire) -> None:
        reply = wire.ask(user(talk.HELLO))
        assert reply.choices[0].message.content == talk.HELLO_ANSWER
        assert reply.choices[0].finish_reason == "stop"
        assert reply.usage.completion_tokens > 1

    def test_stream(self, wire: Wire) -> None:
        chunks = list(wire.ask(user(talk.HELLO), stream=True))
        texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(texts) == talk.HELLO_ANSWER

    def test_turns(self, wire: Wire) -> None:
        messages = [user(talk.HELLO)]
        for text in (talk.NAME, talk.CITY):
            answer = wire.ask(*messages).choices[0].message.content
            messages += [{"role": "assistant", "content": answer}, user(text)]
        assert wire.ask(*messages).choices[0].message.content == talk.CITY_ANSWER

    def test_stop(self, wire: Wire) -> None:
        reply = wire.ask(user(talk.COUNT), stop=[talk.COUNT_STOP])
        assert reply.choices[0].message.content == talk.COUNT_TO_STOP

    def test_json_schema(self, wire: Wire) -> None:
        schema = {"name": "place", "strict": True, "schema": talk.CITY_SCHEMA}
        wanted = {"type": "json_schema", "json_schema": schema}
        reply = wire.ask(user(talk.WEATHER), response_format=wanted)
        assert json.loads(reply.choices[0].message.content)["city"] in talk.CITIES

    def test_results_of_tools_are_read(self, wire: Wire) -> None:
        function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
        call = {"id": "call_of_litellm", "type": "function", "function": function}
        called = {"role": "assistant", "content": None, "tool_calls": [call]}
        found = {"role": "tool", "tool_call_id": call["id"], "content": talk.WEATHER_FOUND}
        answer = wire.ask(user(talk.WEATHER), called, found, tools=TOOLS)
        assert answer.choices[0].message.content

    def test_text(self, wire: Wire) -> None:
        """The prefix `ollama`, on /api/generate."""
        reply = litellm.completion(f"ollama/{talk.MODEL}", [user(talk.HELLO)], **wire.access)
        assert talk.HELLO_ANSWER in reply.choices[0].message.content


@pytest.mark.parametrize("name", ["ollama", "openai"])
def test_embeddings(url: str, name: str) -> None:
    base = url if name == "ollama" else f"{url}/v1"
    reply = litellm.embedding(
        f"{name}/{talk.EMBEDDING_MODEL}", list(talk.EMBEDDED), api_base=base, api_key="none"
    )
    assert talk.are_vectors([one["embedding"] for one in reply.data])


@pytest.mark.parametrize("name", ["cohere", "jina_ai"])
def test_rerank(url: str, name: str) -> None:
    reply = litellm.rerank(
        f"{name}/{talk.EMBEDDING_MODEL}",
        talk.EMBEDDED[1],
        list(talk.EMBEDDED),
        api_base=f"{url}/v1/rerank",
        api_key="none",
    )
    assert [one["index"] for one in reply.results] == [1, 0]
    assert reply.results[0]["relevance_score"] == pytest.approx(1)
