"""smolagents: its model, and an agent whose tools are called."""

from __future__ import annotations

import pytest
from smolagents import OpenAIModel, ToolCallingAgent, tool  # type: ignore[import-not-found]
from smolagents.models import ChatMessage  # type: ignore[import-not-found]

from tests.clients import talk


@pytest.fixture
def model(url: str) -> OpenAIModel:
    return OpenAIModel(
        model_id=talk.MODEL, api_base=f"{url}/v1", api_key="none", max_tokens=talk.ROOM_FOR_JSON
    )


def test_chat(model: OpenAIModel) -> None:
    reply = model.generate([ChatMessage(role="user", content=talk.HELLO)])
    assert reply.content == talk.HELLO_ANSWER
    assert reply.token_usage.output_tokens > 1


def test_stream(model: OpenAIModel) -> None:
    pieces = list(model.generate_stream([ChatMessage(role="user", content=talk.HELLO)]))
    assert "".join(piece.content or "" for piece in pieces) == talk.HELLO_ANSWER
    assert sum(piece.token_usage is not None for piece in pieces) == 1


def test_an_agent_calls_its_tool(model: OpenAIModel) -> None:
    heard: list[str] = []

    @tool  # type: ignore[untyped-decorator]
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name
        """
        heard.append(city)
        return f"It is sunny in {city}."

    agent = ToolCallingAgent(tools=[weather], model=model, max_steps=2, verbosity_level=0)
    assert agent.run(talk.WEATHER)
    assert heard
