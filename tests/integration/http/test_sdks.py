"""The official SDKs against a started server: every body and every event fits their types.

With `_strict_response_validation` an SDK validates whatever it gets, where it otherwise takes what
comes. That is left out only where OpenAI's own replies have a null that its types do not know:
before the end of a streamed completion, and for the first token of a scored prompt.
`make test-clients` does the same with more clients, each in an environment of its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic import Anthropic
from anthropic.types import Message, MessageParam, ToolParam
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel
from pydantic_core import from_json

from tests.clients import talk
from tests.support.serve_process import OURS, ServeProcess, served

pytestmark = pytest.mark.process

OPENAI_TOOLS: list[ChatCompletionToolParam] = [
    {"type": "function", "function": {"name": "weather", "parameters": talk.CITY_SCHEMA}}
]
ANTHROPIC_TOOLS: list[ToolParam] = [{"name": "weather", "input_schema": dict(talk.CITY_SCHEMA)}]


NOTE: dict[str, object] = {
    "type": "object",
    "properties": {"note": {"type": "string"}},
    "required": ["note"],
}
AGENT = "ada"
"""Goes on in another process."""
CUT = 60
"""Tokens: enough for the name of a forced call and a part of its note."""


class Place(BaseModel):
    """What a structured answer says."""

    city: talk.City


@dataclass(frozen=True)
class Clients:
    """Both SDKs, at one server."""

    openai: OpenAI
    anthropic: Anthropic

    @property
    def lenient(self) -> OpenAI:
        """Takes what comes."""
        return self.openai.with_options(_extra_kwargs={"_strict_response_validation": False})

    def chat(self, *messages: ChatCompletionMessageParam, agent: str = "") -> ChatCompletion:
        headers = {"X-Agent-ID": agent} if agent else {}
        return self.openai.chat.completions.create(
            model=talk.MODEL, messages=messages, max_tokens=60, extra_headers=headers
        )

    def message(self, *messages: MessageParam) -> Message:
        return self.anthropic.messages.create(model=talk.MODEL, messages=messages, max_tokens=60)


@contextmanager
def clients_of(process: ServeProcess) -> Iterator[Clients]:
    with (
        OpenAI(
            base_url=f"{process.url}/v1",
            api_key="none",
            max_retries=0,
            _strict_response_validation=True,
        ) as ours,
        Anthropic(
            base_url=process.url, api_key="none", max_retries=0, _strict_response_validation=True
        ) as theirs,
    ):
        yield Clients(ours, theirs)


@contextmanager
def started(folder: Path) -> Iterator[tuple[ServeProcess, Clients]]:
    """A server that keeps everything in `folder`, and its clients."""
    with (
        served(folder / "store", environment=environment(folder)) as process,
        clients_of(process) as found,
    ):
        yield process, found


def environment(folder: Path) -> dict[str, str]:
    return {**OURS, "HOME": str(folder), "SEMANTIC_CACHE": str(folder / "cache")}


@dataclass(frozen=True)
class FirstLife:
    """A conversation that a server had before it ended; its folder."""

    folder: Path
    messages: list[ChatCompletionMessageParam]
    first: ChatCompletion
    witness: ChatCompletion
    """What another agent was answered at the end of it."""


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> FirstLife:
    folder = tmp_path_factory.mktemp("sdks")
    messages = [said(talk.HELLO), *answer(talk.HELLO_ANSWER), said(talk.reading("diary"))]
    with started(folder) as (_, clients):
        first = clients.chat(*messages, agent=AGENT)
        messages += [*answer(first.choices[0].message.content or ""), said(talk.NAME)]
        witness = clients.chat(*messages, agent="witness")
    return FirstLife(folder, messages, first, witness)


@pytest.fixture(scope="module")
def server(life: FirstLife) -> Iterator[tuple[ServeProcess, Clients]]:
    """The server that goes on with what the first one kept, and its clients."""
    with started(life.folder) as found:
        yield found


@pytest.fixture(scope="module")
def clients(server: tuple[ServeProcess, Clients]) -> Clients:
    return server[1]


def said(text: str) -> ChatCompletionMessageParam:
    return {"role": "user", "content": text}


def told(text: str) -> MessageParam:
    return {"role": "user", "content": text}


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def cached(reply: ChatCompletion) -> int:
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    return reply.usage.prompt_tokens_details.cached_tokens or 0


# --- OpenAI -----------------------------------------------------------------------------------


def test_a_chat_completion_and_its_stream_say_the_same(clients: Clients) -> None:
    reply = clients.chat(said(talk.HELLO))
    chunks = list(
        clients.openai.chat.completions.create(
            model=talk.MODEL,
            messages=[said(talk.HELLO)],
            max_tokens=60,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert reply.choices[0].message.content == "".join(texts) == talk.HELLO_ANSWER
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == reply.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_completion_and_its_stream_say_the_same(clients: Clients) -> None:
    prompt = f"<|user|>{talk.HELLO}<|end|><|assistant|>"
    whole = clients.openai.completions.create(model=talk.MODEL, prompt=prompt, max_tokens=60)
    pieces = clients.lenient.completions.create(
        model=talk.MODEL, prompt=prompt, max_tokens=60, stream=True
    )
    streamed = "".join(piece.choices[0].text for piece in pieces if piece.choices)
    assert whole.choices[0].text == streamed == talk.HELLO_ANSWER


def test_a_scored_prompt_has_a_value_for_every_token(clients: Clients) -> None:
    reply = clients.lenient.completions.create(
        model=talk.MODEL, prompt=[[3, 34, 50]], echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == 4


def test_a_structured_answer_is_parsed(clients: Clients) -> None:
    reply = clients.openai.chat.completions.parse(
        model=talk.MODEL,
        messages=[said(talk.WEATHER)],
        response_format=Place,
        max_tokens=talk.ROOM_FOR_JSON,
    )
    assert isinstance(reply.choices[0].message.parsed, Place)


def test_a_forced_tool_call_can_be_answered(clients: Clients) -> None:
    chunks = clients.openai.chat.completions.create(
        model=talk.MODEL,
        messages=[said(talk.WEATHER)],
        tools=OPENAI_TOOLS,
        tool_choice={"type": "function", "function": {"name": "weather"}},
        parallel_tool_calls=False,
        max_tokens=talk.ROOM_FOR_JSON,
        stream=True,
    )
    call_id, arguments, finish = "", "", None
    for chunk in chunks:
        for part in chunk.choices[0].delta.tool_calls or ():
            call_id = part.id or call_id
            assert part.function is not None
            arguments += part.function.arguments or ""
        finish = chunk.choices[0].finish_reason or finish
    assert finish == "tool_calls"
    assert json.loads(arguments)["city"] in talk.CITIES
    answer = clients.chat(
        said(talk.WEATHER),
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": "weather", "arguments": arguments},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call_id, "content": talk.WEATHER_FOUND},
    )
    assert answer.choices[0].message.content


def test_a_call_that_is_cut_is_streamed_as_far_as_it_goes(clients: Clients) -> None:
    def create(*messages: object, **more: Any) -> Any:
        tool = {"type": "function", "function": {"name": "write", "parameters": NOTE}}
        create: Any = clients.openai.chat.completions.create
        return create(model=talk.MODEL, messages=messages, tools=[tool], **more)

    forced = {"tool_choice": "required", "max_tokens": CUT}
    (whole,) = create(said(talk.WEATHER), **forced).choices
    chunks = list(create(said(talk.WEATHER), stream=True, **forced))
    assert whole.finish_reason == chunks[-1].choices[0].finish_reason == "length"
    first, *more = [part for one in chunks for part in one.choices[0].delta.tool_calls or ()]
    (call,) = whole.message.tool_calls
    assert (first.type, first.function.name, first.function.arguments) == ("function", "write", "")
    assert "".join(part.function.arguments for part in more) == call.function.arguments
    assert '"note"' in call.function.arguments
    assert len(more) > 2
    again = create(
        said(talk.WEATHER),
        {"role": "assistant", "tool_calls": [call.to_dict()]},
        {"role": "tool", "tool_call_id": call.id, "content": "The call was cut."},
        max_tokens=5,
    )
    assert again.usage.completion_tokens
    assert cached(again) >= again.usage.prompt_tokens - 40, "the cut call as it was computed"


@pytest.mark.parametrize("most", [600, 30], ids=["whole", "cut"])
def test_a_custom_call_goes_on_as_it_was_computed(clients: Clients, most: int) -> None:
    tool = {"type": "custom", "custom": {"name": "run", "description": "Runs."}}

    def create(*messages: object, **more: Any) -> Any:
        create: Any = clients.lenient.chat.completions.create
        return create(model=talk.MODEL, messages=messages, tools=[tool], **more)

    forced = {"tool_choice": tool, "max_tokens": most, "parallel_tool_calls": False}
    first = create(said(talk.WEATHER), **forced)
    (choice,) = first.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == ("tool_calls" if most == 600 else "length")
    assert (call.type, call.custom.name) == ("custom", "run")
    chunks = list(create(said(talk.WEATHER), stream=True, **forced))
    (part,) = [part for one in chunks for part in one.choices[0].delta.tool_calls or ()]
    assert (part.type, part.custom["input"]) == ("custom", call.custom.input)
    again = create(
        said(talk.WEATHER),
        {"role": "assistant", "tool_calls": [call.to_dict()]},
        {"role": "tool", "tool_call_id": call.id, "content": "Done."},
        max_tokens=5,
    )
    assert cached(again) >= first.usage.total_tokens - 1, "the call as it was computed"


def test_errors_are_of_the_sdks_classes(clients: Clients) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        clients.openai.chat.completions.create(
            model=talk.MODEL, messages=[said(talk.HELLO)], temperature=-1
        )
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        clients.openai.chat.completions.create(model="nobody", messages=[said(talk.HELLO)])
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 8192") as long:
        clients.chat(said(talk.TOO_LONG))
    assert long.value.code == "context_length_exceeded"


def test_eight_clients_at_once_get_their_own_answers(clients: Clients) -> None:
    async def all_of_them() -> list[str | None]:
        async with openai.AsyncOpenAI(
            base_url=clients.openai.base_url, api_key="none", max_retries=0
        ) as client:
            replies = await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model=talk.MODEL, messages=[said(talk.counting(first)[0])]
                    )
                    for first in range(1, 9)
                )
            )
        return [reply.choices[0].message.content for reply in replies]

    assert asyncio.run(all_of_them()) == [talk.counting(first)[1] for first in range(1, 9)]


# --- Anthropic --------------------------------------------------------------------------------


def test_a_message_and_its_stream_say_the_same(clients: Clients) -> None:
    reply = clients.message(told(talk.HELLO))
    with clients.anthropic.messages.stream(
        model=talk.MODEL, messages=[told(talk.HELLO)], max_tokens=60
    ) as stream:
        streamed = stream.get_final_message()
    assert text_of(reply) == text_of(streamed) == talk.HELLO_ANSWER
    assert reply.stop_reason == streamed.stop_reason == "end_turn"
    assert streamed.usage.output_tokens == reply.usage.output_tokens


def test_tokens_are_counted_as_they_are_used(clients: Clients) -> None:
    counted = clients.anthropic.messages.count_tokens(model=talk.MODEL, messages=[told(talk.COUNT)])
    usage = clients.message(told(talk.COUNT)).usage
    used = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert counted.input_tokens == used + (usage.cache_creation_input_tokens or 0)


def test_a_stop_sequence_is_told(clients: Clients) -> None:
    reply = clients.anthropic.messages.create(
        model=talk.MODEL,
        messages=[told(talk.COUNT)],
        stop_sequences=[talk.COUNT_STOP],
        max_tokens=60,
    )
    assert text_of(reply) == talk.COUNT_TO_STOP
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", talk.COUNT_STOP)


def test_a_structured_message_is_parsed(clients: Clients) -> None:
    reply = clients.anthropic.messages.parse(
        model=talk.MODEL,
        messages=[told(talk.WEATHER)],
        output_format=Place,
        max_tokens=talk.ROOM_FOR_JSON,
    )
    assert isinstance(reply.parsed_output, Place)


def test_a_forced_tool_use_can_be_answered(clients: Clients) -> None:
    with clients.anthropic.messages.stream(
        model=talk.MODEL,
        messages=[told(talk.WEATHER)],
        tools=ANTHROPIC_TOOLS,
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        max_tokens=talk.ROOM_FOR_JSON,
    ) as stream:
        reply = stream.get_final_message()
    call = reply.content[-1]
    assert reply.stop_reason == "tool_use"
    assert call.type == "tool_use"
    assert call.input["city"] in talk.CITIES
    answer = clients.message(
        told(talk.WEATHER),
        {"role": "assistant", "content": reply.content},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": call.id, "content": talk.WEATHER_FOUND}
            ],
        },
    )
    assert text_of(answer)


def test_a_tool_of_anthropics_that_the_client_runs_can_be_used(clients: Clients) -> None:
    create: Any = clients.anthropic.messages.create
    bash = {"type": "bash_20250124", "name": "bash"}
    reply = create(
        model=talk.MODEL,
        messages=[told(talk.WEATHER)],
        tools=[bash],
        tool_choice={"type": "tool", "name": "bash", "disable_parallel_tool_use": True},
        max_tokens=talk.ROOM_FOR_JSON,
    )
    (call,) = reply.content
    assert (call.type, call.name) == ("tool_use", "bash")
    assert call.input.keys() <= {"command", "restart"}


def test_a_tool_use_that_is_cut_is_streamed_as_far_as_it_goes(clients: Clients) -> None:
    def create(*messages: object, **more: Any) -> Any:
        tool = {"name": "write", "input_schema": NOTE}
        create: Any = clients.anthropic.messages.create
        return create(model=talk.MODEL, messages=messages, tools=[tool], **more)

    forced = {"tool_choice": {"type": "any"}, "max_tokens": CUT}
    whole = create(told(talk.WEATHER), **forced)
    events = list(create(told(talk.WEATHER), stream=True, **forced))
    parts = [
        event.delta.partial_json
        for event in events
        if event.type == "content_block_delta" and event.delta.type == "input_json_delta"
    ]
    assert whole.stop_reason == "max_tokens"
    assert events[-2].delta.stop_reason == "max_tokens"
    assert events[-2].usage.output_tokens == CUT
    (call,) = whole.content
    assert (call.type, call.name, len(parts) > 2) == ("tool_use", "write", True)
    assert from_json("".join(parts), allow_partial=True) == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "The call was cut."}
    again = create(
        told(talk.WEATHER),
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [result]},
        max_tokens=5,
    )
    assert again.usage.output_tokens


def test_errors_are_of_the_other_sdks_classes_too(clients: Clients) -> None:
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        clients.message()
    with pytest.raises(anthropic.NotFoundError, match="nobody"):
        clients.anthropic.messages.create(model="nobody", messages=[told(talk.HELLO)], max_tokens=9)
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 8192 "):
        clients.message(told(talk.TOO_LONG))


# --- both -------------------------------------------------------------------------------------


def test_models_are_listed_for_both(clients: Clients) -> None:
    assert {model.id for model in clients.openai.models.list()} == {talk.MODEL, "default"}
    assert {model.id for model in clients.anthropic.models.list()} == {talk.MODEL, "default"}
    assert clients.openai.models.retrieve("default").id == "default"
    assert clients.anthropic.models.retrieve("default").id == "default"


def test_an_agent_goes_on_in_another_process(
    life: FirstLife, server: tuple[ServeProcess, Clients]
) -> None:
    """What was computed before the restart is not computed again, and the answer is the same."""
    process, clients = server
    assert life.first.usage is not None
    n_first = life.first.usage.prompt_tokens
    assert talk.tokens_when_idle(process.url, AGENT) >= n_first
    resumed = clients.chat(*life.messages, agent=AGENT)
    assert cached(life.first) == 0
    assert cached(resumed) >= n_first
    assert resumed.choices[0].message.content == talk.NAME_ANSWER
    assert resumed.choices[0].message == life.witness.choices[0].message


def answer(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "assistant", "content": text}]
