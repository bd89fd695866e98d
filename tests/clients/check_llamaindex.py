"""LlamaIndex's model for servers that speak OpenAI's API, and its agent."""

from __future__ import annotations

import asyncio

import pytest
from llama_index.core.agent.workflow import FunctionAgent  # type: ignore[import-not-found]
from llama_index.core.llms import ChatMessage  # type: ignore[import-not-found]
from llama_index.core.prompts import PromptTemplate  # type: ignore[import-not-found]
from llama_index.core.tools import FunctionTool  # type: ignore[import-not-found]
from llama_index.llms.openai_like import OpenAILike  # type: ignore[import-not-found]
from pydantic import BaseModel

from tests.clients import talk


class Place(BaseModel):
    """What a structured answer says."""

    city: talk.City


def weather(city: talk.City) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


WEATHER = FunctionTool.from_defaults(weather, fn_schema=Place)


def make(url: str, **more: object) -> OpenAILike:
    return OpenAILike(
        model=talk.MODEL,
        api_base=f"{url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=8192,
        max_tokens=talk.ROOM_FOR_JSON,
        max_retries=0,
        **more,
    )


@pytest.fixture
def model(url: str) -> OpenAILike:
    return make(url)


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def test_chat(model: OpenAILike) -> None:
    assert model.chat([user(talk.HELLO)]).message.content == talk.HELLO_ANSWER


def test_stream(model: OpenAILike) -> None:
    pieces = [piece.delta or "" for piece in model.stream_chat([user(talk.HELLO)])]
    assert "".join(pieces) == talk.HELLO_ANSWER
    assert len(list(filter(None, pieces))) > 1


def test_turns_are_not_computed_again(model: OpenAILike) -> None:
    messages = [user(talk.HELLO)]
    prompts, cached = [], []
    for text in (talk.reading("index"), talk.NAME, talk.CITY):
        reply = model.chat(messages)
        usage = reply.raw.usage
        prompts.append(usage.prompt_tokens)
        cached.append(usage.prompt_tokens_details.cached_tokens)
        messages += [reply.message, user(text)]
    assert messages[-2].content == talk.NAME_ANSWER
    assert talk.grows(prompts, cached)


@pytest.mark.parametrize("by_schema", [False, True])
def test_structured_output(url: str, *, by_schema: bool) -> None:
    model = make(url, should_use_structured_outputs=by_schema)
    reply = model.as_structured_llm(Place).chat([user(talk.WEATHER)])
    assert isinstance(reply.raw, Place)
    found = model.structured_predict(Place, PromptTemplate(talk.WEATHER))
    assert isinstance(found, Place)


def test_a_tool_is_called(model: OpenAILike) -> None:
    reply = model.chat_with_tools([WEATHER], user_msg=talk.WEATHER, tool_required=True)
    for call in model.get_tool_calls_from_response(reply):
        assert call.tool_name == "weather"
        assert call.tool_kwargs["city"] in talk.CITIES
    found = model.predict_and_call([WEATHER], user_msg=talk.WEATHER, tool_required=True)
    assert found.response.startswith("It is sunny in")


def test_an_agent(model: OpenAILike) -> None:
    async def answer() -> str:
        mira = FunctionAgent(tools=[WEATHER], llm=model, system_prompt="You are Mira, the planner.")
        return str(await mira.run("What is your name?"))

    assert asyncio.run(answer()) == "My name is Mira."
