"""LangChain's models on Ollama's wire."""

from __future__ import annotations

import asyncio

import ollama  # type: ignore[import-not-found]
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage  # type: ignore[import-not-found]
from langchain_core.tools import StructuredTool  # type: ignore[import-not-found]
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM  # type: ignore[import-not-found]
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
def model(url: str) -> ChatOllama:
    return ChatOllama(model=talk.MODEL, base_url=url, num_predict=300, validate_model_on_init=True)


def test_chat(model: ChatOllama) -> None:
    reply = model.invoke(
        [SystemMessage("You are Mira, the planner."), HumanMessage("Who are you?")]
    )
    assert "Mira" in reply.content
    assert reply.usage_metadata["output_tokens"] > 1
    assert reply.response_metadata["done_reason"] == "stop"


def test_stream(model: ChatOllama) -> None:
    chunks = list(model.stream(talk.HELLO))
    assert "".join(chunk.content for chunk in chunks) == talk.HELLO_ANSWER
    assert [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]


def test_turns(model: ChatOllama) -> None:
    messages = [HumanMessage(talk.HELLO)]
    for text in (talk.NAME, talk.CITY):
        messages += [AIMessage(model.invoke(messages).content), HumanMessage(text)]
    assert messages[-2].content == talk.NAME_ANSWER
    assert model.invoke(messages).content == talk.CITY_ANSWER


def test_text(url: str) -> None:
    """A prompt without a conversation, on /api/generate."""
    model = OllamaLLM(model=talk.MODEL, base_url=url)
    assert model.invoke(talk.HELLO) == talk.HELLO_ANSWER
    assert "".join(model.stream(talk.HELLO)) == talk.HELLO_ANSWER


def test_stop(model: ChatOllama) -> None:
    assert model.invoke(talk.COUNT, stop=[talk.COUNT_STOP]).content == talk.COUNT_TO_STOP


def test_structured_output(model: ChatOllama) -> None:
    reply = model.with_structured_output(Place, method="json_schema").invoke(talk.WEATHER)
    assert isinstance(reply, Place)


def test_results_of_tools_are_read(model: ChatOllama) -> None:
    call = {"name": "weather", "args": {"city": "Oslo"}, "id": "of-langchain", "type": "tool_call"}
    messages = [
        HumanMessage(talk.WEATHER),
        AIMessage("", tool_calls=[call]),
        ToolMessage(weather("Oslo"), tool_call_id="of-langchain"),
    ]
    assert model.bind_tools([WEATHER]).invoke(messages).content


def test_thinking_is_refused_by_no_model(model: ChatOllama) -> None:
    assert model.invoke(talk.HELLO, reasoning=False).content == talk.HELLO_ANSWER


def test_embeddings(url: str) -> None:
    model = OllamaEmbeddings(model=talk.EMBEDDING_MODEL, base_url=url)
    found = model.embed_documents(list(talk.EMBEDDED))
    assert talk.are_vectors(found)
    assert model.embed_query(talk.EMBEDDED[0]) == pytest.approx(found[0], abs=1e-5)


def test_errors_are_those_of_the_client(model: ChatOllama) -> None:
    with pytest.raises(ollama.ResponseError, match="mirostat"):
        model.invoke(talk.HELLO, options={"mirostat": 1})
    with pytest.raises(ollama.ResponseError, match="no model"):
        model.invoke(talk.HELLO, model="nobody")
    with pytest.raises(ollama.ResponseError, match="context"):
        model.invoke(talk.TOO_LONG)


def test_eight_at_once(model: ChatOllama) -> None:
    questions = [talk.counting(first)[0] for first in range(1, 9)]
    replies = asyncio.run(model.abatch(questions))
    assert [reply.content for reply in replies] == [talk.counting(n)[1] for n in range(1, 9)]
