"""Pydantic AI on both wires."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, ModelSettings, NativeOutput, ToolOutput  # type: ignore[import-not-found]
from pydantic_ai.models import Model  # type: ignore[import-not-found]
from pydantic_ai.models.anthropic import AnthropicModel  # type: ignore[import-not-found]
from pydantic_ai.models.openai import OpenAIChatModel  # type: ignore[import-not-found]
from pydantic_ai.providers.anthropic import AnthropicProvider  # type: ignore[import-not-found]
from pydantic_ai.providers.openai import OpenAIProvider  # type: ignore[import-not-found]

from tests.clients import talk

ROOM = ModelSettings(max_tokens=talk.ROOM_FOR_JSON, parallel_tool_calls=False)


class Place(BaseModel, extra="forbid"):
    """What a structured answer says, and nothing else: the model would go on with more fields."""

    city: talk.City


def make(wire: str, url: str, name: str = talk.MODEL) -> Model:
    if wire == "openai":
        return OpenAIChatModel(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    return AnthropicModel(name, provider=AnthropicProvider(base_url=url, api_key="none"))


@pytest.fixture(params=["openai", "anthropic"])
def wire(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(wire: str, url: str) -> Model:
    return make(wire, url)


def test_chat(model: Model) -> None:
    mira = Agent(model, system_prompt="You are Mira, the planner.", model_settings=ROOM)
    result = mira.run_sync("What is your name?")
    assert result.output == "My name is Mira."
    assert result.usage.output_tokens > 1


def test_stream(model: Model) -> None:
    async def texts() -> list[str]:
        async with Agent(model, model_settings=ROOM).run_stream(talk.HELLO) as result:
            return [text async for text in result.stream_text(delta=True, debounce_by=None)]

    found = asyncio.run(texts())
    assert "".join(found) == talk.HELLO_ANSWER
    assert len(found) > 1


def test_turns_are_not_computed_again(wire: str, model: Model) -> None:
    agent = Agent(model, model_settings=ROOM)
    prompts, cached = [], []
    history = None
    for text in (talk.HELLO, talk.reading(f"{wire} road"), talk.NAME):
        result = agent.run_sync(text, message_history=history)
        history = result.all_messages()
        usage = history[-1].usage
        prompts.append(usage.input_tokens)
        cached.append(usage.cache_read_tokens)
    assert result.output == talk.NAME_ANSWER
    assert talk.grows(prompts, cached)


def test_stop(model: Model) -> None:
    agent = Agent(model, model_settings=ROOM | ModelSettings(stop_sequences=[talk.COUNT_STOP]))
    assert agent.run_sync(talk.COUNT).output.rstrip() == talk.COUNT_TO_STOP


def test_native_output(url: str) -> None:
    agent = Agent(make("openai", url), output_type=NativeOutput(Place), model_settings=ROOM)
    assert isinstance(agent.run_sync(talk.WEATHER).output, Place)


def test_tool_output(model: Model) -> None:
    agent = Agent(model, output_type=ToolOutput(Place), model_settings=ROOM)
    assert isinstance(agent.run_sync(talk.WEATHER).output, Place)


def test_errors_have_a_status(wire: str, url: str, model: Model) -> None:
    with pytest.raises(ModelHTTPError, match="temperature") as wrong:
        Agent(model, model_settings=ModelSettings(temperature=-1)).run_sync(talk.HELLO)
    assert wrong.value.status_code == 400
    with pytest.raises(ModelHTTPError, match="nobody") as unknown:
        Agent(make(wire, url, "nobody")).run_sync(talk.HELLO)
    assert unknown.value.status_code == 404
    with pytest.raises(ModelHTTPError, match="8192") as long:
        Agent(model).run_sync(talk.TOO_LONG)
    assert long.value.status_code == 400


def test_eight_at_once(model: Model) -> None:
    async def all_of_them() -> list[str]:
        agent = Agent(model, model_settings=ROOM)
        runs = (agent.run(talk.counting(first)[0]) for first in range(1, 9))
        return [result.output for result in await asyncio.gather(*runs)]

    assert asyncio.run(all_of_them()) == [talk.counting(first)[1] for first in range(1, 9)]


def test_who_leaves_a_stream_is_not_computed_for(wire: str, url: str, model: Model) -> None:
    name = f"leaves-pydantic-{wire}"
    settings = ModelSettings(max_tokens=5000, extra_headers={"X-Agent-ID": name})

    async def leave() -> int:
        async with Agent(model, model_settings=settings).run_stream(talk.ENDLESS) as result:
            async for _ in result.stream_text(delta=True, debounce_by=None):
                break
        return await asyncio.to_thread(talk.tokens_when_idle, url, name)

    assert asyncio.run(leave()) < 200
