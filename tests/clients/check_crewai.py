"""CrewAI: its model, and a crew of one."""

from __future__ import annotations

import os

os.environ["CREWAI_DISABLE_TELEMETRY"] = "true"
os.environ["OTEL_SDK_DISABLED"] = "true"

import pytest
from crewai import LLM, Agent, Crew, Task  # type: ignore[import-not-found]
from pydantic import BaseModel

from tests.clients import talk


class Place(BaseModel):
    """What a structured answer says."""

    city: talk.City


def make(url: str, **more: object) -> LLM:
    name = f"openai/{talk.MODEL}"
    return LLM(
        model=name, base_url=f"{url}/v1", api_key="none", max_tokens=talk.ROOM_FOR_JSON, **more
    )


@pytest.mark.parametrize("stream", [False, True])
def test_chat(url: str, *, stream: bool) -> None:
    assert make(url, stream=stream).call(talk.HELLO) == talk.HELLO_ANSWER


def test_a_structured_answer(url: str) -> None:
    found = make(url, response_format=Place).call(talk.WEATHER)
    assert isinstance(found, Place)


def test_a_crew(url: str) -> None:
    mira = Agent(role="Mira", goal="to plan", backstory="You are Mira, the planner.", llm=make(url))
    task = Task(description="Say your name.", expected_output="A name.", agent=mira)
    result = Crew(agents=[mira], tasks=[task]).kickoff()
    assert result.raw
    assert result.token_usage.completion_tokens > 1
