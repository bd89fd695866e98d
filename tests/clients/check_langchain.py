"""LangChain's models on OpenAI's wire."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage  # type: ignore[import-not-found]
from langchain_core.tools import StructuredTool  # type: ignore[import-not-found]
from langchain_openai import ChatOpenAI, OpenAIEmbeddings  # type: ignore[import-not-found]
from pydantic import BaseModel

from tests.clients import talk


class Place(BaseModel):
    """What a structured answer says."""

    city: talk.City


def weather(city: talk.City) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


WEATHER = StructuredTool.from_function(weather)


@pytest.fixture
def model(url: str) -> ChatOpenAI:
    return ChatOpenAI(
        model=talk.MODEL, base_url=f"{url}/v1", api_key="none", max_retries=0, max_tokens=300
    )


@pytest.fixture
def embedder(url: str) -> OpenAIEmbeddings:
    return OpenAIEmbeddings(
        model=talk.EMBEDDING_MODEL,
        base_url=f"{url}/v1",
        api_key="none",
        check_embedding_ctx_length=False,
    )


def test_chat(model: ChatOpenAI) -> None:
    reply = model.invoke(
        [SystemMessage("You are Mira, the planner."), HumanMessage("Who are you?")]
    )
    assert "Mira" in reply.content
    assert reply.usage_metadata["output_tokens"] > 1
    assert reply.response_metadata["finish_reason"] == "stop"


def test_stream(model: ChatOpenAI) -> None:
    chunks = list(model.stream(talk.HELLO, stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == talk.HELLO_ANSWER
    assert [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]


def test_turns_are_not_computed_again(model: ChatOpenAI) -> None:
    messages = [HumanMessage(talk.HELLO)]
    prompts, cached = [], []
    for text in (talk.reading("map"), talk.NAME, talk.CITY):
        reply = model.invoke(messages)
        prompts.append(reply.usage_metadata["input_tokens"])
        cached.append(reply.usage_metadata["input_token_details"]["cache_read"])
        messages += [AIMessage(reply.content), HumanMessage(text)]
    assert messages[-2].content == talk.NAME_ANSWER
    assert model.invoke(messages).content == talk.CITY_ANSWER
    assert talk.grows(prompts, cached)


def test_stop(model: ChatOpenAI) -> None:
    assert model.invoke(talk.COUNT, stop=[talk.COUNT_STOP]).content == talk.COUNT_TO_STOP


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(model: ChatOpenAI, method: str) -> None:
    reply = model.with_structured_output(Place, method=method).invoke(talk.WEATHER)
    assert isinstance(reply, Place)


def test_json_mode(model: ChatOpenAI) -> None:
    reply = model.bind(response_format={"type": "json_object"}, max_tokens=600).invoke(talk.WEATHER)
    if reply.response_metadata["finish_reason"] == "stop":
        assert isinstance(json.loads(reply.content), dict)
    else:
        assert reply.content.lstrip().startswith("{")


def test_tool_loop(model: ChatOpenAI) -> None:
    messages = [HumanMessage(talk.WEATHER)]
    forced = model.bind_tools([WEATHER], tool_choice="weather", parallel_tool_calls=False)
    messages.append(forced.invoke(messages))
    (call,) = messages[-1].tool_calls
    found = WEATHER.invoke(call)
    assert isinstance(found, ToolMessage)
    assert found.content == weather(call["args"]["city"])
    answer = model.bind_tools([WEATHER]).invoke([*messages, found])
    assert answer.content
    assert not answer.tool_calls


def test_embeddings(embedder: OpenAIEmbeddings) -> None:
    found = embedder.embed_documents(list(talk.EMBEDDED))
    assert talk.are_vectors(found)
    assert embedder.embed_query(talk.EMBEDDED[0]) == pytest.approx(found[0], abs=1e-5)


def test_errors_are_those_of_the_sdk(model: ChatOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        model.invoke(talk.HELLO, temperature=-1)
    with pytest.raises(openai.NotFoundError, match="nobody"):
        model.invoke(talk.HELLO, model="nobody")
    with pytest.raises(openai.BadRequestError, match="context"):
        model.invoke(talk.TOO_LONG)


def test_eight_at_once(model: ChatOpenAI) -> None:
    questions = [talk.counting(first)[0] for first in range(1, 9)]
    replies = asyncio.run(model.abatch(questions))
    assert [reply.content for reply in replies] == [talk.counting(n)[1] for n in range(1, 9)]


def test_who_leaves_a_stream_is_not_computed_for(url: str, model: ChatOpenAI) -> None:
    agent = "leaves-langchain"
    stream = model.stream(
        talk.ENDLESS,
        max_tokens=5000,
        extra_headers={"X-Agent-ID": agent},
        extra_body={"ignore_eos": True},
    )
    next(stream)
    stream.close()
    assert talk.tokens_when_idle(url, agent) < 2000
