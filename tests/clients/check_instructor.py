"""instructor: structured answers in each mode that a tiny model can follow."""

from __future__ import annotations

import instructor  # type: ignore[import-not-found]
import openai
import pytest
from pydantic import BaseModel

from tests.clients import talk

MODES = ["TOOLS", "TOOLS_STRICT", "FUNCTIONS", "JSON_SCHEMA", "RESPONSES_TOOLS"]
"""The others ask for JSON in words, or for calls that nothing forces."""


class Place(BaseModel):
    """What a structured answer says."""

    city: talk.City


def asked(**more: object) -> dict[str, object]:
    messages = [{"role": "user", "content": talk.WEATHER}]
    return {"messages": messages, "max_tokens": talk.ROOM_FOR_JSON, **more}


@pytest.mark.parametrize("mode", MODES)
def test_an_object(url: str, mode: str) -> None:
    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode[mode])
    reply = client.chat.completions.create(
        model=talk.MODEL, response_model=Place, max_retries=0, **asked()
    )
    assert isinstance(reply, Place)


@pytest.fixture
def client(url: str) -> instructor.Instructor:
    return instructor.from_provider(f"openai/{talk.MODEL}", base_url=f"{url}/v1", api_key="none")


def test_by_the_name_of_a_provider(client: instructor.Instructor) -> None:
    assert isinstance(client.create(response_model=Place, max_retries=0, **asked()), Place)


def test_an_object_while_it_is_written(client: instructor.Instructor) -> None:
    parts = list(client.create_partial(response_model=Place, max_retries=0, **asked()))
    assert parts[-1].city in talk.CITIES


def test_an_object_and_its_reply(client: instructor.Instructor) -> None:
    place, reply = client.create_with_completion(response_model=Place, max_retries=0, **asked())
    (call,) = reply.choices[0].message.tool_calls
    assert Place.model_validate_json(call.function.arguments).city == place.city
    assert reply.choices[0].finish_reason == "tool_calls"
