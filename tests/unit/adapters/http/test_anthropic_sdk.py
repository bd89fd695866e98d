"""Anthropic's own client against a server with a scripted model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass

import anthropic
import httpx2
import pytest
from anthropic.types import MessageParam, ToolParam
from anthropic.types.beta import BetaMessageParam

from semantic.domain.answer import (
    AnswerEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallFailed,
    ToolCallStarted,
)
from semantic.domain.chat import Chat, Message, Tool, ToolCall
from semantic.domain.errors import (
    NOT_FINITE,
    BackendError,
    ModelLoadError,
    OverloadedError,
    PoolExhaustedError,
    SemanticError,
    TenantLimitError,
)
from semantic.domain.identity import Hints
from semantic.ports.serving import Ask
from semantic_server.http.settings import ServerSettings
from tests.support.fake_serving import FakeServing, Script
from tests.support.http_server import RunningServer, running, until

pytestmark = pytest.mark.process

HELLO: MessageParam = {"role": "user", "content": "Hello"}
LOOK: ToolParam = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}


@pytest.fixture
def serving() -> FakeServing:
    return FakeServing()


@pytest.fixture
def server(serving: FakeServing) -> Iterator[RunningServer]:
    with running(serving) as found:
        yield found


@pytest.fixture
def client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as found:
        yield found


def chat_of(ask: Ask) -> Chat:
    assert isinstance(ask.prompt, Chat)
    return ask.prompt


def test_create(client: anthropic.Anthropic, serving: FakeServing) -> None:
    serving.script = lambda _: Script(cached=2)
    message = client.messages.create(
        model="default",
        max_tokens=50,
        system="Be brief.",
        messages=[HELLO],
        stop_sequences=["END"],
        extra_headers={"X-Agent-ID": "ada", "anthropic-beta": "new-2026-01-01,other"},
    )
    assert message.id.startswith("msg_")
    assert (message.model, message.role, message.stop_reason) == ("fake", "assistant", "end_turn")
    assert [block.type for block in message.content] == ["text"]
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (12, 2, 6)
    (ask,) = serving.asked
    assert (ask.agent, ask.max_tokens, ask.sampling.stop) == ("ada", 50, ("END",))
    assert chat_of(ask).messages == (Message("system", "Be brief."), Message("user", "Hello"))


def test_hints(client: anthropic.Anthropic, serving: FakeServing) -> None:
    def ask(own: object, headers: dict[str, str]) -> None:
        body = {} if own is None else {"semantic": own}
        client.messages.create(
            model="fake", max_tokens=5, messages=[HELLO], extra_body=body, extra_headers=headers
        )

    ask({"back_in": 20}, {})
    ask(None, {"X-Semantic-Done": "true", "X-Semantic-Priority": "-2"})
    assert [one.hints for one in serving.asked] == [
        Hints(back_in=20),
        Hints(done=True, priority=-2),
    ]
    with pytest.raises(anthropic.BadRequestError, match=r"semantic\.don: unknown field"):
        ask({"don": True}, {})


def test_stream(client: anthropic.Anthropic, serving: FakeServing) -> None:
    serving.script = lambda _: Script((ReasoningDelta("Hm."), TextDelta("He"), TextDelta("llo.")))
    with client.messages.stream(model="fake", max_tokens=50, messages=[HELLO]) as stream:
        assert list(stream.text_stream) == ["He", "llo."]
        message = stream.get_final_message()
    thought, text = message.content
    assert (thought.type, text.type) == ("thinking", "text")
    assert (thought.type == "thinking" and thought.thinking) == "Hm."
    assert message.stop_reason == "end_turn"
    assert not serving.cancelled


def test_a_loop_of_tools(client: anthropic.Anthropic, serving: FakeServing) -> None:
    def script(ask: Ask) -> Script:
        if chat_of(ask).messages[-1].role == "tool":
            return Script((TextDelta("It is there."),))
        call = ToolCallStarted(0, "call_1", "look"), ToolCallDelta(0, '{"for": "it"}')
        return Script((ReasoningDelta("Where?"), *call), reason="tool_calls")

    serving.script = script
    history = [HELLO]
    first = client.messages.create(model="fake", max_tokens=50, messages=history, tools=[LOOK])
    assert first.stop_reason == "tool_use"
    call = first.content[-1]
    assert call.type == "tool_use"
    history += [
        {"role": "assistant", "content": first.content},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "there"}],
        },
    ]
    last = client.messages.create(model="fake", max_tokens=50, messages=history, tools=[LOOK])
    assert last.stop_reason == "end_turn"
    chat = chat_of(serving.asked[-1])
    assert chat.tools == (Tool("look", "Looks.", {"type": "object"}),)
    assert chat.messages[1:] == (
        Message("assistant", "", "Where?", (ToolCall("call_1", "look", '{"for": "it"}'),)),
        Message("tool", "there", tool_call_id="call_1", name="look"),
    )


def test_beta_and_counting(client: anthropic.Anthropic) -> None:
    hello: BetaMessageParam = {"role": "user", "content": "Hello"}
    beta = client.beta.messages.create(
        model="fake", max_tokens=9, messages=[hello], betas=["context-1m-2025-08-07"]
    )
    assert beta.content[0].type == "text"
    count = client.messages.count_tokens(model="fake", messages=[HELLO], system="Be brief.")
    assert count.input_tokens == len("Be brief.Hello")
    assert client.beta.messages.count_tokens(model="fake", messages=[hello]).input_tokens == 5


def test_a_prompt_may_be_computed_ahead(client: anthropic.Anthropic, serving: FakeServing) -> None:
    message = client.messages.create(model="fake", max_tokens=0, messages=[HELLO])
    assert (message.content, message.stop_reason) == ([], "max_tokens")
    assert [ask.max_tokens for ask in serving.asked] == [1]


# Errors


def error_of(client: anthropic.Anthropic, **changes: object) -> anthropic.APIStatusError:
    """The error of a request, as a message and in a stream: both are the same."""
    asked = {"model": "fake", "max_tokens": 50, "messages": [HELLO], **changes}
    with pytest.raises(anthropic.APIStatusError) as streamed:
        client.post("/v1/messages", body={**asked, "stream": True}, cast_to=httpx2.Response)
    with pytest.raises(anthropic.APIStatusError) as caught:
        client.post("/v1/messages", body=asked, cast_to=httpx2.Response)
    assert streamed.value.status_code == caught.value.status_code
    assert told(streamed.value) == told(caught.value)
    return caught.value


def told(error: anthropic.APIStatusError) -> tuple[str, str]:
    """Kind and message of an error, whose body has the documented shape."""
    body = error.body
    assert isinstance(body, dict)
    assert set(body) == {"type", "error", "request_id"}
    assert body["request_id"] == error.request_id
    assert body["type"] == "error"
    return body["error"]["type"], body["error"]["message"]


def test_a_prompt_that_is_too_long_says_both_numbers(client: anthropic.Anthropic) -> None:
    error = error_of(client, messages=[{"role": "user", "content": "x" * 600}])
    assert error.status_code == 400
    assert told(error) == ("invalid_request_error", "prompt is too long: 600 tokens > 512 maximum")


def test_a_wrong_model_and_a_wrong_field(client: anthropic.Anthropic) -> None:
    unknown = error_of(client, model="claude")
    assert isinstance(unknown, anthropic.NotFoundError)
    assert told(unknown) == (
        "not_found_error",
        "model: there is no model 'claude'; this server has: fake, default",
    )
    wrong = error_of(client, temperature=2)
    assert isinstance(wrong, anthropic.BadRequestError)
    assert told(wrong)[0] == "invalid_request_error"
    assert "temperature" in told(wrong)[1]


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        (OverloadedError("busy", retry_after=7), 503, "overloaded_error"),
        (TenantLimitError("your part", retry_after=7), 429, "rate_limit_error"),
        (PoolExhaustedError("no room"), 503, "overloaded_error"),
        (ModelLoadError("secret", public="a cannot be loaded"), 503, "overloaded_error"),
        (BackendError("secret"), 500, "api_error"),
    ],
)
def test_failures_before_an_answer(
    client: anthropic.Anthropic,
    serving: FakeServing,
    failure: SemanticError,
    status: int,
    kind: str,
) -> None:
    serving.script = lambda _: Script(failure=failure)
    error = error_of(client)
    assert (error.status_code, told(error)[0]) == (status, kind)
    assert "secret" not in str(error)
    assert ("retry-after" in error.response.headers) == (status in (429, 503))


def test_a_cancelled_request_is_not_repeated(server: RunningServer, serving: FakeServing) -> None:
    serving.script = lambda _: Script((TextDelta("a"),), reason="cancelled")
    with (
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=3) as client,
        pytest.raises(anthropic.APIStatusError, match="the request was cancelled") as failed,
    ):
        client.messages.create(model="fake", max_tokens=50, messages=[HELLO])
    response = failed.value.response
    assert (response.status_code, response.headers["x-should-retry"]) == (499, "false")
    assert told(failed.value)[0] == "api_error"
    assert len(serving.asked) == 1


def test_a_failure_within_a_stream_is_its_last_event(
    client: anthropic.Anthropic, serving: FakeServing
) -> None:
    serving.script = lambda _: Script((TextDelta("He"),), reason="error", error="secret")
    read: list[str] = []
    with (
        pytest.raises(anthropic.APIStatusError) as caught,
        client.messages.stream(model="fake", max_tokens=50, messages=[HELLO]) as stream,
    ):
        read.extend(stream.text_stream)
    assert read == ["He"]
    assert told(caught.value)[0] == "api_error"
    assert "secret" not in str(caught.value)


def test_an_answer_computed_from_nan_says_so(
    client: anthropic.Anthropic, serving: FakeServing
) -> None:
    serving.script = lambda _: Script((TextDelta("He"),), reason="error", error=NOT_FINITE)
    with pytest.raises(anthropic.InternalServerError, match=NOT_FINITE):
        client.messages.create(model="fake", max_tokens=50, messages=[HELLO])


def test_what_is_no_call_is_text(client: anthropic.Anthropic, serving: FakeServing) -> None:
    written = ToolCallFailed("the JSON ends early"), TextDelta("<tool>{</tool>")
    serving.script = lambda _: Script(written)
    message = client.messages.create(model="fake", max_tokens=50, messages=[HELLO])
    assert [block.to_dict() for block in message.content] == [
        {"type": "text", "text": "<tool>{</tool>"}
    ]
    assert message.stop_reason == "end_turn"


@pytest.mark.parametrize("arguments", ["Oslo", "[1]", "3", '{"city": Oslo}'])
def test_arguments_that_are_no_object_are_a_field_of_one(
    client: anthropic.Anthropic, serving: FakeServing, arguments: str
) -> None:
    call = ToolCallStarted(0, "c1", "fly"), ToolCallDelta(0, arguments)
    serving.script = lambda _: Script(call, reason="tool_calls")
    message = client.messages.create(model="fake", max_tokens=50, messages=[HELLO])
    with client.messages.stream(model="fake", max_tokens=50, messages=[HELLO]) as stream:
        streamed = stream.get_final_message()
    for one in (message, streamed):
        (block,) = one.content
        assert isinstance(block, anthropic.types.ToolUseBlock)
        assert (block.name, block.input) == ("fly", {"raw_arguments": arguments})


def test_an_answer_ends_where_the_context_does(
    client: anthropic.Anthropic, serving: FakeServing
) -> None:
    serving.script = lambda _: Script((TextDelta("x" * 20),), reason="length")
    for asked, reason in ((20, "max_tokens"), (3000, "model_context_window_exceeded")):
        message = client.messages.create(model="fake", max_tokens=asked, messages=[HELLO])
        assert message.stop_reason == reason


# The wire itself


def test_events_are_named_as_their_data_says(server: RunningServer) -> None:
    body = {"model": "fake", "max_tokens": 9, "messages": [HELLO], "stream": True}
    reply = server.ask("POST", "/v1/messages?beta=true", body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["request-id"]
    events = [event.split("\n") for event in reply.body.decode().split("\n\n") if event]
    names = [name.removeprefix("event: ") for name, _ in events]
    assert names == [json.loads(data.removeprefix("data: "))["type"] for _, data in events]
    assert names == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


@dataclass
class SlowServing(FakeServing):
    """Takes its time for each event, as a model does."""

    pause: float = 0.01

    async def answer(self, ask: Ask) -> AsyncGenerator[AnswerEvent, None]:
        async with aclosing(super().answer(ask)) as events:
            async for event in events:
                yield event
                for _ in range(round(self.pause / 0.01)):  # each a turn for signs of life
                    await asyncio.sleep(0.01)


def test_pings_while_nothing_else_is_sent() -> None:
    serving = SlowServing(lambda _: Script((TextDelta("x"),)), pause=0.5)
    body = {"model": "fake", "max_tokens": 9, "messages": [HELLO], "stream": True}
    with running(serving, ServerSettings(keep_alive=0.05)) as server:
        reply = server.ask("POST", "/v1/messages", body)
        with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
            message = client.messages.create(
                model="fake", max_tokens=9, messages=[HELLO], stream=True
            )
            assert "ping" not in {event.type for event in message}
    assert reply.body.count(b'event: ping\ndata: {"type": "ping"}\n\n') > 3


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_request(stream: bool) -> None:
    serving = SlowServing(lambda _: Script(tuple(TextDelta("x") for _ in range(3000))))
    with running(serving) as server:
        url = f"{server.url}/v1/messages"
        body = {"model": "fake", "max_tokens": 9, "messages": [HELLO], "stream": stream}
        if stream:
            with httpx2.stream("POST", url, json=body) as response:
                next(response.iter_bytes())
        else:
            data = json.dumps(body).encode()
            head = f"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}"
            with server.connect() as connection:
                connection.sendall(head.encode() + b"\r\n\r\n" + data)
                until(lambda: bool(serving.asked))
        until(lambda: bool(serving.cancelled))
    assert serving.cancelled == ["request-0"]
