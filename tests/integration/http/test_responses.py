"""OpenAI's SDK and /v1/responses of a started server, with the model inside the package.

With `_strict_response_validation` the SDK validates whatever it gets. What is kept must be there
after a restart, and what was computed before it must not be computed again.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, cast

import openai
import pytest
from openai import OpenAI
from openai.types.responses import (
    FunctionToolParam,
    Response,
    ResponseFunctionToolCall,
    ResponseInputParam,
)
from openai.types.responses.response import IncompleteDetails
from pydantic import BaseModel

from semantic.adapters.stores.disk.store import DiskStore
from tests.clients import talk
from tests.support.serve_process import OURS, ServeProcess, served

pytestmark = pytest.mark.process

Item = dict[str, object]

FILE = "responses.db"
KEYS = ("key-a", "key-b")
WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "weather",
    "parameters": dict(talk.CITY_SCHEMA),
    "strict": True,
}


class Place(BaseModel):
    """What a structured answer says."""

    city: talk.City


def client_of(process: ServeProcess, key: str = KEYS[0]) -> OpenAI:
    return OpenAI(
        base_url=f"{process.url}/v1", api_key=key, max_retries=0, _strict_response_validation=True
    )


@contextmanager
def started(folder: Path) -> Iterator[ServeProcess]:
    """A server of two tenants that keeps everything in `folder`."""
    ours = {
        **OURS,
        "HOME": str(folder),
        "SEMANTIC_CACHE": str(folder / "cache"),
        "SEMANTIC_API_KEYS": ",".join(KEYS),
    }
    with served(folder / "store", environment=ours) as process:
        yield process


@dataclass(frozen=True)
class FirstLife:
    """What a server on a broken file said, and what its clients were given before it ended."""

    log: list[str]
    store: Path
    begun: Response
    witness: Response
    dropped: Response
    of_other: Response


def first_life(folder: Path) -> FirstLife:
    """A server that finds a broken file answers both tenants; then it ends."""
    store = folder / "store"
    DiskStore.open(store, 1 << 30).close()
    (store / FILE).write_bytes(Random(1).randbytes(20_000))
    (store / FILE).chmod(0o600)
    with (
        started(folder) as process,
        client_of(process) as client,
        client_of(process, KEYS[1]) as other,
    ):
        first = ask(client, talk.HELLO)
        begun = ask(client, talk.reading("diary"), first.id)
        witness = ask(client, talk.NAME, begun.id)
        dropped = ask(client, talk.HELLO)
        client.responses.delete(dropped.id)
        of_other = ask(other, talk.HELLO)
    return FirstLife(process.log, store, begun, witness, dropped, of_other)


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> FirstLife:
    return first_life(tmp_path_factory.mktemp("responses"))


@pytest.fixture(scope="module")
def process(life: FirstLife) -> Iterator[ServeProcess]:
    """The server that goes on with what the first one kept."""
    with started(life.store.parent) as found:
        yield found


@pytest.fixture(scope="module")
def client(process: ServeProcess) -> Iterator[OpenAI]:
    with client_of(process) as found:
        yield found


def ask(client: OpenAI, text: str, previous: str | None = None) -> Response:
    return client.responses.create(
        model=talk.MODEL, input=text, previous_response_id=previous, max_output_tokens=60
    )


def cached(response: Response) -> int:
    assert response.usage is not None
    return response.usage.input_tokens_details.cached_tokens


def prompt(response: Response) -> int:
    assert response.usage is not None
    return response.usage.input_tokens


def test_a_response_and_its_stream_say_the_same(client: OpenAI) -> None:
    reply = ask(client, talk.HELLO)
    with client.responses.stream(
        model=talk.MODEL, input=talk.HELLO, max_output_tokens=60
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert reply.output_text == final.output_text == "".join(deltas) == talk.HELLO_ANSWER
    assert reply.status == final.status == "completed"
    assert reply.usage is not None
    assert final.usage is not None
    assert reply.usage.output_tokens == final.usage.output_tokens


def test_a_conversation_goes_on_and_is_not_computed_again(client: OpenAI) -> None:
    first = ask(client, talk.HELLO)
    second = ask(client, talk.reading("garden"), first.id)
    third = ask(client, talk.NAME, second.id)
    assert third.output_text == talk.NAME_ANSWER
    assert cached(third) >= prompt(second)
    again = ask(client, talk.CITY, first.id)
    assert again.output_text == talk.CITY_ANSWER


def test_what_was_given_can_be_fetched_and_deleted(client: OpenAI) -> None:
    given = ask(client, talk.HELLO)
    assert client.responses.retrieve(given.id) == given
    [item] = client.responses.input_items.list(given.id).data
    assert item.type == "message"
    assert item.content[0].type == "input_text"
    assert item.content[0].text == talk.HELLO
    client.responses.delete(given.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.retrieve(given.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(given.id)
    with pytest.raises(openai.BadRequestError) as gone:
        ask(client, talk.NAME, given.id)
    assert gone.value.code == "previous_response_not_found"


def test_a_structured_answer_is_parsed(client: OpenAI) -> None:
    reply = client.responses.parse(
        model=talk.MODEL,
        input=talk.WEATHER,
        text_format=Place,
        max_output_tokens=talk.ROOM_FOR_JSON,
    )
    assert isinstance(reply.output_parsed, Place)


def call_of(response: Response) -> ResponseFunctionToolCall:
    call = response.output[-1]
    assert isinstance(call, ResponseFunctionToolCall)
    return call


def test_a_tool_loop_by_id_and_with_all_items_sent_back(client: OpenAI) -> None:
    """A forced call, its result, an answer: the same, whichever side keeps the history."""
    with client.responses.stream(
        model=talk.MODEL,
        input=talk.WEATHER,
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
        max_output_tokens=talk.ROOM_FOR_JSON,
    ) as stream:
        first = stream.get_final_response()
    call = call_of(first)
    assert json.loads(call.arguments)["city"] in talk.CITIES
    result: Item = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": talk.WEATHER_FOUND,
    }

    def answered(input_items: list[Item], previous: str | None) -> Response:
        return client.responses.create(
            model=talk.MODEL,
            input=cast("ResponseInputParam", input_items),
            previous_response_id=previous,
            tools=[WEATHER],
            tool_choice="none",
            max_output_tokens=60,
        )

    by_id = answered([result], first.id)
    items = [item.model_dump(exclude_none=True) for item in first.output]
    sent_back = answered([{"role": "user", "content": talk.WEATHER}, *items, result], None)
    assert by_id.output_text == sent_back.output_text != ""
    assert prompt(by_id) == prompt(sent_back)
    assert cached(sent_back) >= prompt(by_id) - 1, "token for token the same prompt"


def test_an_answer_that_was_cut_is_incomplete(client: OpenAI) -> None:
    reply = client.responses.create(model=talk.MODEL, input=talk.ENDLESS, max_output_tokens=5)
    assert reply.status == "incomplete"
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert reply.usage is not None
    assert reply.usage.output_tokens == 5


def test_a_call_that_was_cut_is_an_incomplete_item(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": talk.MODEL,
        "input": talk.WEATHER,
        "tools": [
            {
                "type": "function",
                "name": "write",
                "strict": False,
                "parameters": {
                    "type": "object",
                    "properties": {"note": {"type": "string"}},
                    "required": ["note"],
                },
            }
        ],
        "tool_choice": "required",
        "max_output_tokens": 60,
    }
    whole = client.responses.create(**asked)
    assert (whole.status, whole.incomplete_details) == (
        "incomplete",
        IncompleteDetails(reason="max_output_tokens"),
    )
    call = call_of(whole)
    assert (call.name, call.status) == ("write", "incomplete")
    events = list(client.responses.create(stream=True, **asked))
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert "".join(deltas) == done.arguments == call.arguments
    assert len(deltas) > 2
    assert events[-1].type == "response.incomplete"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It was cut."}
    again = client.responses.create(
        **{**asked, "input": [result], "tool_choice": "auto", "max_output_tokens": 5},
        previous_response_id=whole.id,
    )
    assert cached(again) >= prompt(again) - 40, "the cut call as it was computed"


@pytest.mark.parametrize(
    ("tool", "item_type", "most"),
    [
        ({"type": "custom", "name": "run"}, "custom_tool_call", 600),
        ({"type": "custom", "name": "run"}, "custom_tool_call", 30),
        ({"type": "shell"}, "shell_call", 600),
        ({"type": "shell"}, "function_call", 30),
    ],
    ids=["custom", "custom, cut", "shell", "shell, cut"],
)
def test_a_call_in_its_own_form_goes_on_as_it_was_computed(
    client: OpenAI, tool: Item, item_type: str, most: int
) -> None:
    """By id and with the items sent back."""
    create: Any = client.responses.create
    asked = {"model": talk.MODEL, "tools": [tool], "parallel_tool_calls": False}
    first = create(input=talk.WEATHER, tool_choice=tool, max_output_tokens=most, **asked)
    [call] = first.output
    assert (call.type, first.status == "completed") == (item_type, most == 600)
    *_, ended = create(
        input=talk.WEATHER, tool_choice=tool, max_output_tokens=most, stream=True, **asked
    )
    own = {"id", "call_id"}
    assert ended.response.output[0].model_dump(exclude=own) == call.model_dump(exclude=own)

    result: Item = {"type": f"{call.type}_output", "call_id": call.call_id, "output": "Done."}
    if item_type == "shell_call":
        outcome = {"type": "exit", "exit_code": 0}
        result["output"] = [{"stdout": "Done.", "stderr": "", "outcome": outcome}]
    more = {"max_output_tokens": 5, **asked}
    by_id = create(input=[result], previous_response_id=first.id, **more)
    item = call.model_dump(exclude_unset=True)
    sent_back = create(input=[{"role": "user", "content": talk.WEATHER}, item, result], **more)
    assert prompt(by_id) == prompt(sent_back)
    for reply in (by_id, sent_back):
        assert cached(reply) >= first.usage.total_tokens - 1, "the call as it was computed"


def test_the_tokens_of_a_prompt_are_counted_as_a_response_has_them(client: OpenAI) -> None:
    first = ask(client, talk.HELLO)
    for words, previous in ((None, None), ("Be brief.", None), (None, first.id)):
        count = client.responses.input_tokens.count(
            model=talk.MODEL, input=talk.NAME, instructions=words, previous_response_id=previous
        )
        reply = client.responses.create(
            model=talk.MODEL,
            input=talk.NAME,
            instructions=words,
            previous_response_id=previous,
            max_output_tokens=1,
        )
        assert reply.usage is not None
        assert count.input_tokens == reply.usage.input_tokens
    assert client.responses.input_tokens.count(input=talk.HELLO).input_tokens > 0


def test_compaction_is_refused_with_its_reason(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="has no /v1/responses/compact"):
        client.responses.compact(model=talk.MODEL, input=talk.HELLO)


def test_errors_are_of_the_sdks_classes(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.responses.create(model=talk.MODEL, input=talk.HELLO, background=True)
    assert wrong.value.param == "background"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 8192") as long:
        ask(client, talk.TOO_LONG)
    assert long.value.code == "context_length_exceeded"


def test_a_history_goes_on_in_another_process(life: FirstLife, client: OpenAI) -> None:
    """With its agent: what that one had computed is restored, and the answer is the same."""
    mode = stat.S_IMODE((life.store / FILE).stat().st_mode)
    assert mode == stat.S_IRUSR | stat.S_IWUSR
    assert client.responses.retrieve(life.begun.id) == life.begun
    third = ask(client, talk.NAME, life.begun.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(life.dropped.id)
    with pytest.raises(openai.BadRequestError):
        ask(client, talk.NAME, life.dropped.id)
    assert third.output_text == life.witness.output_text == talk.NAME_ANSWER
    assert cached(third) >= prompt(life.begun)


def test_a_broken_file_keeps_no_server_from_starting(life: FirstLife) -> None:
    assert life.witness.output_text == talk.NAME_ANSWER
    said = [line for line in life.log if "responses was broken" in line]
    assert len(said) == 1
    assert any(".bad-" in one.name for one in life.store.iterdir())


def test_where_the_store_is_refused_responses_are_kept_in_memory(tmp_path: Path) -> None:
    """Nothing is written where the default store may not be."""
    store = tmp_path / "semantic" / "store"
    store.mkdir(parents=True)
    store.chmod(0o777)
    ours = {**OURS, "XDG_CACHE_HOME": str(tmp_path), "SEMANTIC_API_KEYS": ",".join(KEYS)}
    with served(None, environment=ours) as process, client_of(process) as client:
        given = ask(client, talk.HELLO)
        assert ask(client, talk.NAME, given.id).output_text == talk.NAME_ANSWER
        client.responses.delete(given.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(given.id)
    assert not (store / FILE).exists()


def test_tenants_do_not_see_each_others_responses(
    life: FirstLife, process: ServeProcess, client: OpenAI
) -> None:
    with client_of(process, KEYS[1]) as theirs:
        assert ask(theirs, talk.NAME, life.of_other.id).output_text == talk.NAME_ANSWER
        for given in (life.begun, ask(client, talk.HELLO)):
            with pytest.raises(openai.NotFoundError):
                theirs.responses.retrieve(given.id)
            with pytest.raises(openai.NotFoundError):
                theirs.responses.delete(given.id)
            with pytest.raises(openai.BadRequestError):
                ask(theirs, talk.NAME, given.id)
            assert ask(client, talk.NAME, given.id).output_text == talk.NAME_ANSWER
    assert all(b"key-a" not in one.read_bytes() for one in life.store.glob(f"{FILE}*"))
