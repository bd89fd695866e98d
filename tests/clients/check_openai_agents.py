"""OpenAI's Agents SDK on the chat completions wire."""

from __future__ import annotations

import asyncio
from typing import Final

import openai
import pytest
from agents import (  # type: ignore[import-not-found]
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel

from tests.clients import talk

set_tracing_disabled(disabled=True)

_calls: Final[list[str]] = []


class Place(BaseModel):
    """What a structured answer says."""

    city: talk.City


def weather(city: talk.City) -> str:
    """The weather of a city."""
    _calls.append(city)
    return f"It is sunny in {city}."


@pytest.fixture
def model(url: str) -> OpenAIChatCompletionsModel:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return OpenAIChatCompletionsModel(talk.MODEL, client)


def agent(model: OpenAIChatCompletionsModel, **wanted: object) -> Agent:
    settings = wanted.pop("settings", ModelSettings(max_tokens=talk.ROOM_FOR_JSON))
    return Agent(name="Mira", model=model, model_settings=settings, **wanted)


def test_chat(model: OpenAIChatCompletionsModel) -> None:
    mira = agent(model, instructions="You are Mira, the planner.")
    result = Runner.run_sync(mira, "What is your name?")
    assert result.final_output == "My name is Mira."
    assert result.raw_responses[0].usage.output_tokens > 1


def test_stream(model: OpenAIChatCompletionsModel) -> None:
    async def texts() -> tuple[list[str], object]:
        result = Runner.run_streamed(agent(model), talk.HELLO)
        found = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
        return found, result.final_output

    found, final = asyncio.run(texts())
    assert "".join(found) == final == talk.HELLO_ANSWER
    assert len(found) > 1


def test_turns_are_not_computed_again(model: OpenAIChatCompletionsModel) -> None:
    items: list[object] = [{"role": "user", "content": talk.HELLO}]
    prompts, cached = [], []
    for text in (talk.reading("garden"), talk.NAME, talk.CITY):
        result = Runner.run_sync(agent(model), items)
        usage = result.raw_responses[0].usage
        prompts.append(usage.input_tokens)
        cached.append(usage.input_tokens_details.cached_tokens)
        items = [*result.to_input_list(), {"role": "user", "content": text}]
    assert result.final_output == talk.NAME_ANSWER
    assert Runner.run_sync(agent(model), items).final_output == talk.CITY_ANSWER
    assert talk.grows(prompts, cached)


def test_structured_output(model: OpenAIChatCompletionsModel) -> None:
    result = Runner.run_sync(agent(model, output_type=Place), talk.WEATHER)
    assert isinstance(result.final_output, Place)


def test_tool_loop(model: OpenAIChatCompletionsModel) -> None:
    _calls.clear()
    settings = ModelSettings(
        tool_choice="required", parallel_tool_calls=False, max_tokens=talk.ROOM_FOR_JSON
    )
    helper = agent(model, tools=[function_tool(weather)], settings=settings)
    result = Runner.run_sync(helper, talk.WEATHER)
    assert len(_calls) == 1
    assert _calls[0] in talk.CITIES
    assert isinstance(result.final_output, str)
    assert len(result.raw_responses) == 2


def test_errors_are_those_of_the_sdk(url: str, model: OpenAIChatCompletionsModel) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        Runner.run_sync(agent(model, settings=ModelSettings(temperature=-1)), talk.HELLO)
    with pytest.raises(openai.BadRequestError, match="context"):
        Runner.run_sync(agent(model), talk.TOO_LONG)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="nobody"):
        Runner.run_sync(agent(OpenAIChatCompletionsModel("nobody", client)), talk.HELLO)


def test_eight_at_once(model: OpenAIChatCompletionsModel) -> None:
    async def all_of_them() -> list[object]:
        runs = (Runner.run(agent(model), talk.counting(first)[0]) for first in range(1, 9))
        return [result.final_output for result in await asyncio.gather(*runs)]

    assert asyncio.run(all_of_them()) == [talk.counting(first)[1] for first in range(1, 9)]


def test_who_leaves_a_stream_is_not_computed_for(
    url: str, model: OpenAIChatCompletionsModel
) -> None:
    name = "leaves-agents"
    settings = ModelSettings(
        max_tokens=5000, extra_headers={"X-Agent-ID": name}, extra_body={"ignore_eos": True}
    )

    async def leave() -> int:
        result = Runner.run_streamed(agent(model, settings=settings), talk.ENDLESS)
        async for event in result.stream_events():
            if event.type == "raw_response_event":
                break
        result.cancel()
        return await asyncio.to_thread(talk.tokens_when_idle, url, name)

    assert asyncio.run(leave()) < 2000
