"""OpenAI's own client against a server with a scripted model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel

from semantic.domain.answer import (
    AnswerEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallFailed,
    ToolCallStarted,
)
from semantic.domain.chat import AnswerFormat, Chat, Tool, ToolCall
from semantic.domain.errors import ContextOverflowError, InvalidRequestError, OverloadedError
from semantic.domain.identity import Hints
from semantic.ports.serving import Ask
from tests.support.fake_serving import FakeServing, Script
from tests.support.http_server import RunningServer, running, until
from tests.unit.adapters.http.openai.wire import ScoringServing, spelled

pytestmark = pytest.mark.process

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]
LOOK: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string"}},
            "required": ["at"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
CALL = (
    ToolCallStarted(0, "call_1", "look"),
    ToolCallDelta(0, '{"at": '),
    ToolCallDelta(0, '"it"}'),
)


@pytest.fixture
def serving() -> FakeServing:
    return ScoringServing()


@pytest.fixture
def server(serving: FakeServing) -> Iterator[RunningServer]:
    with running(serving) as found:
        yield found


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def chat_of(ask: Ask) -> Chat:
    assert isinstance(ask.prompt, Chat)
    return ask.prompt


def test_create(client: openai.OpenAI, serving: FakeServing) -> None:
    serving.script = lambda _: Script(cached=2)
    reply = client.chat.completions.create(
        model="default",
        messages=HELLO,
        max_completion_tokens=50,
        stop=["END"],
        user="me",
        extra_body={"top_k": 5, "agent_id": "ada"},
    )
    assert reply.choices[0].message.content == "Hello."
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 2
    [ask] = serving.asked
    assert (ask.agent, ask.max_tokens) == ("ada", 50)
    assert (ask.sampling.stop, ask.sampling.top_k) == (("END",), 5)


def test_hints(client: openai.OpenAI, serving: FakeServing) -> None:
    said = {"semantic": {"back_in": 20, "priority": 1}}
    done = {"X-Semantic-Done": "true"}
    client.chat.completions.create(model="fake", messages=HELLO, extra_body=said)
    client.completions.create(model="fake", prompt="Hello", extra_body=said)
    client.responses.create(model="fake", input="Hello", extra_body=said)
    client.chat.completions.create(model="fake", messages=HELLO, extra_headers=done)
    client.completions.create(model="fake", prompt="Hello", extra_headers=done)
    client.responses.create(model="fake", input="Hello", extra_headers=done)
    expected = [Hints(back_in=20, priority=1)] * 3 + [Hints(done=True)] * 3
    assert [ask.hints for ask in serving.asked] == expected
    with pytest.raises(openai.BadRequestError, match=r"semantic\.back_in: expected a valid number"):
        client.responses.create(
            model="fake", input="Hello", extra_body={"semantic": {"back_in": "1"}}
        )


def test_stream(client: openai.OpenAI, serving: FakeServing) -> None:
    serving.script = lambda _: Script((ReasoningDelta("Hm."), TextDelta("He"), TextDelta("llo.")))
    stream = client.chat.completions.create(
        model="fake", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    texts = [chunk.choices[0].delta.content for chunk in chunks]
    assert texts == [None, None, "He", "llo.", None]
    assert chunks[1].choices[0].delta.model_extra == {
        "reasoning": "Hm.",
        "reasoning_content": "Hm.",
    }
    assert last.usage is not None
    assert last.usage.completion_tokens == 6
    assert not serving.cancelled


def test_a_loop_of_tools(client: openai.OpenAI, serving: FakeServing) -> None:
    def script(ask: Ask) -> Script:
        if chat_of(ask).messages[-1].role == "tool":
            return Script((TextDelta("It is there."),))
        return Script((ReasoningDelta("Where?"), *CALL), reason="tool_calls")

    serving.script = script
    history = list(HELLO)
    first = client.chat.completions.create(model="fake", messages=history, tools=[LOOK])
    assert first.choices[0].finish_reason == "tool_calls"
    message = first.choices[0].message
    history.append(message.model_dump(exclude_none=True))  # type: ignore[arg-type]
    history.append({"role": "tool", "tool_call_id": "call_1", "content": "there"})
    last = client.chat.completions.create(model="fake", messages=history, tools=[LOOK])
    assert last.choices[0].message.content == "It is there."
    chat = chat_of(serving.asked[-1])
    assert [tool.name for tool in chat.tools] == ["look"]
    assert chat.messages[1].reasoning == "Where?"
    assert chat.messages[1].tool_calls == (ToolCall("call_1", "look", '{"at": "it"}'),)


def test_the_stream_helper_adds_calls_up(client: openai.OpenAI, serving: FakeServing) -> None:
    serving.script = lambda _: Script((TextDelta("So."), *CALL), reason="tool_calls")
    with client.chat.completions.stream(model="fake", messages=HELLO, tools=[LOOK]) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds
    assert message.content == "So."
    assert message.tool_calls
    assert message.tool_calls[0].function.parsed_arguments == {"at": "it"}
    assert chat_of(serving.asked[0]).tools[0].strict


class Place(BaseModel):
    """What the answer must be."""

    name: str
    floor: int


def test_parse(client: openai.OpenAI, serving: FakeServing) -> None:
    serving.script = lambda _: Script((TextDelta('{"name": "attic", '), TextDelta('"floor": 3}')))
    reply = client.chat.completions.parse(model="fake", messages=HELLO, response_format=Place)
    assert reply.choices[0].message.parsed == Place(name="attic", floor=3)
    answer_format = chat_of(serving.asked[0]).answer_format
    assert isinstance(answer_format, AnswerFormat)
    assert answer_format.schema is not None
    assert answer_format.schema["required"] == ["name", "floor"]
    with client.chat.completions.stream(
        model="fake", messages=HELLO, response_format=Place
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == Place(
            name="attic", floor=3
        )


def test_parse_of_calls(client: openai.OpenAI, serving: FakeServing) -> None:
    tool = openai.pydantic_function_tool(Place, name="look")
    serving.script = lambda _: Script(
        (ToolCallStarted(0, "c", "look"), ToolCallDelta(0, '{"name": "a", "floor": 1}'))
    )
    reply = client.chat.completions.parse(model="fake", messages=HELLO, tools=[tool])
    calls = reply.choices[0].message.tool_calls
    assert calls
    assert calls[0].function.parsed_arguments == Place(name="a", floor=1)
    assert chat_of(serving.asked[0]).tools == (
        Tool(
            "look", "What the answer must be.", chat_of(serving.asked[0]).tools[0].parameters, True
        ),
    )


def test_logprobs(client: openai.OpenAI, serving: FakeServing) -> None:
    serving.script = lambda _: Script(spelled("ab"))
    reply = client.chat.completions.create(
        model="fake", messages=HELLO, logprobs=True, top_logprobs=1
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [(one.token, one.logprob) for one in logprobs.content] == [("a", -0.5), ("b", -0.5)]


def test_completions(client: openai.OpenAI, serving: FakeServing) -> None:
    serving.script = lambda ask: Script(spelled(str(ask.prompt)))
    reply = client.completions.create(model="fake", prompt=["one", "two"], echo=True, logprobs=1)
    assert [choice.text for choice in reply.choices] == ["oneone", "twotwo"]
    texts = ["", ""]
    for chunk in client.completions.create(model="fake", prompt=["one", "two"], stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["one", "two"]


# --- errors -------------------------------------------------------------------------------------


def test_errors_are_the_clients_own(client: openai.OpenAI, serving: FakeServing) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="fake", messages=HELLO, temperature=3)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-6", messages=HELLO)
    assert unknown.value.code == "model_not_found"
    overflow = ContextOverflowError("too long", prompt_tokens=9, limit=8)
    serving.script = lambda _: Script(failure=overflow)
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="fake", messages=HELLO, stream=True)
    assert long.value.code == "context_length_exceeded"
    serving.script = lambda _: Script(failure=OverloadedError("busy", retry_after=7))
    with pytest.raises(openai.InternalServerError) as busy:
        client.chat.completions.create(model="fake", messages=HELLO, stream=True)
    assert busy.value.status_code == 503
    assert busy.value.response.headers["retry-after"] == "7"
    serving.script = lambda _: Script(failure=InvalidRequestError("that schema cannot be kept"))
    with pytest.raises(openai.BadRequestError, match="that schema cannot be kept"):
        client.chat.completions.create(model="fake", messages=HELLO)


def test_what_is_no_call_is_text(client: openai.OpenAI, serving: FakeServing) -> None:
    pieces = (TextDelta("Let me "), ToolCallFailed("no JSON"), TextDelta("<tool>{x</tool>"))
    serving.script = lambda _: Script(pieces)
    reply = client.chat.completions.create(model="fake", messages=HELLO, tools=[LOOK])
    assert reply.choices[0].message.content == "Let me <tool>{x</tool>"
    assert reply.choices[0].finish_reason == "stop"
    response = client.responses.create(model="fake", input="Hello")
    assert response.output_text == "Let me <tool>{x</tool>"


def test_a_failure_of_the_model_is_asked_for_once(
    server: RunningServer, serving: FakeServing
) -> None:
    serving.script = lambda _: Script((TextDelta("a"),), reason="error")
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=3) as client,
        pytest.raises(openai.InternalServerError) as failed,
    ):
        client.chat.completions.create(model="fake", messages=HELLO)
    assert failed.value.response.headers["x-should-retry"] == "false"
    assert len(serving.asked) == 1


def test_a_cancelled_request_is_not_repeated(server: RunningServer, serving: FakeServing) -> None:
    serving.script = lambda _: Script((TextDelta("a"),), reason="cancelled")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=3) as client:
        for ask in (
            partial(client.chat.completions.create, model="fake", messages=HELLO),
            partial(client.completions.create, model="fake", prompt="Hello"),
            partial(client.responses.create, model="fake", input="Hello"),
        ):
            serving.asked.clear()
            with pytest.raises(openai.APIStatusError, match="the request was cancelled") as failed:
                ask()
            response = failed.value.response
            assert (response.status_code, response.headers["x-should-retry"]) == (499, "false")
            assert "retry-after" not in response.headers
            assert len(serving.asked) == 1


# --- clients that leave -------------------------------------------------------------------------


class Endless(FakeServing):
    """Never ends an answer, and says nothing either after its first word, unless it `talks`."""

    talks = False

    async def answer(self, ask: Ask) -> AsyncGenerator[AnswerEvent, None]:
        """See `ServingPort.answer`."""
        async with aclosing(super().answer(ask)) as events:
            async for event in events:
                yield event
                while isinstance(event, TextDelta):
                    await asyncio.sleep(0.001 if self.talks else 60)
                    yield event


@pytest.mark.parametrize("talks", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_who_leaves_cancels_all_choices(path: str, stream: bool, talks: bool) -> None:
    serving = Endless()
    serving.talks = talks
    what = {"messages": HELLO} if path.startswith("chat") else {"prompt": "Once"}
    body = json.dumps({"model": "fake", "n": 3, "stream": stream, **what}).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    with running(serving) as server:
        with server.connect() as connection:
            connection.sendall(head.encode() + body)
            until(lambda: len(serving.asked) == 3)
            if stream:
                assert connection.recv(64).startswith(b"HTTP/1.1 200")
        until(lambda: len(serving.cancelled) == 3)
