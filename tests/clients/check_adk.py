"""Google's Agent Development Kit, whose model is litellm's."""

from __future__ import annotations

import asyncio

from google.adk.agents import LlmAgent  # type: ignore[import-untyped]
from google.adk.agents.run_config import RunConfig, StreamingMode  # type: ignore[import-untyped]
from google.adk.events import Event  # type: ignore[import-untyped]
from google.adk.models.lite_llm import LiteLlm  # type: ignore[import-untyped]
from google.adk.runners import InMemoryRunner  # type: ignore[import-untyped]
from google.adk.tools.tool_context import ToolContext  # type: ignore[import-untyped]
from google.genai import types  # type: ignore[import-untyped]

from tests.clients import talk


def make(url: str, **more: object) -> LiteLlm:
    return LiteLlm(model=f"openai/{talk.MODEL}", api_base=f"{url}/v1", api_key="none", **more)


def weather(city: str, tool_context: ToolContext) -> str:
    """The weather of a city."""
    tool_context.actions.skip_summarization = True  # else the model must call for ever
    return f"It is sunny in {city}."


def events(agent: LlmAgent, *said: str, config: RunConfig | None = None) -> list[Event]:
    """All events of one session in which the user says this, turn by turn."""

    async def run() -> list[Event]:
        runner = InMemoryRunner(agent=agent, app_name="app")
        session = await runner.session_service.create_session(app_name="app", user_id="ada")
        found: list[Event] = []
        for text in said:
            message = types.Content(role="user", parts=[types.Part(text=text)])
            found += [
                event
                async for event in runner.run_async(
                    user_id="ada",
                    session_id=session.id,
                    new_message=message,
                    run_config=config or RunConfig(),
                )
            ]
        return found

    return asyncio.run(run())


def test_turns_are_not_computed_again(url: str) -> None:
    found = events(LlmAgent(name="mira", model=make(url)), talk.HELLO, talk.NAME)
    assert [event.content.parts[0].text for event in found] == [talk.HELLO_ANSWER, talk.NAME_ANSWER]
    first, second = (event.usage_metadata for event in found)
    assert second.cached_content_token_count >= first.prompt_token_count


def test_stream(url: str) -> None:
    agent = LlmAgent(name="mira", model=make(url))
    found = events(agent, talk.HELLO, config=RunConfig(streaming_mode=StreamingMode.SSE))
    pieces = [event.content.parts[0].text for event in found if event.partial]
    assert len(pieces) > 1
    assert "".join(pieces) == talk.HELLO_ANSWER


def test_a_tool_is_called(url: str) -> None:
    model = make(url, tool_choice="required", max_tokens=talk.ROOM_FOR_JSON)
    agent = LlmAgent(name="mira", model=model, tools=[weather])
    called, answered = events(agent, talk.WEATHER)[:2]
    asked = [part.function_call for part in called.content.parts if part.function_call]
    told = [part.function_response for part in answered.content.parts if part.function_response]
    assert [one.name for one in asked] == ["weather"] * len(asked)
    assert told[0].response == {"result": f"It is sunny in {asked[0].args['city']}."}
