"""What an agent says of itself in the field `semantic` or in headers, on every wire."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi import Request

from semantic.domain.identity import NO_HINTS, Hints
from semantic_server.http.app import create_app
from semantic_server.http.context import ServerContext
from semantic_server.http.errors import FieldError
from semantic_server.http.request_fields.table import own_field_of
from tests.support.fake_serving import FakeServing
from tests.support.http_server import RunningServer, running

Json = dict[str, object]

CHAT: Json = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
WIRES: dict[str, Json] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": CHAT,
    "/api/chat": {"messages": CHAT["messages"], "stream": False},
    "/api/generate": {"prompt": "Hello", "stream": False},
}


def said(own: object = None, **headers: str) -> Hints:
    """The hints of a request with this field and these headers."""
    return own_field_of(request(**headers), {} if own is None else {"semantic": own}).hints


def request(**headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), text.encode()) for name, text in headers.items()]
    return Request({"type": "http", "headers": raw})


def test_nothing_has_to_be_said() -> None:
    assert said() == said({}) == said({"done": None, "back_in": None, "keep": True}) == NO_HINTS


def test_a_member_stands_in_the_body_or_in_a_header() -> None:
    assert said({"done": True}) == said(x_semantic_done="true") == Hints(done=True)
    assert said({"back_in": 2.5}) == said(x_semantic_back_in="2.5") == Hints(back_in=2.5)
    assert said({"priority": -8}) == said(x_semantic_priority="-8") == Hints(priority=-8)
    assert said({"back_in": 0}) == Hints(back_in=0)
    assert said({"drafts": False}) == said(x_semantic_drafts="false") == Hints(drafts=False)


def test_the_body_precedes_the_header() -> None:
    assert said({"done": False}, x_semantic_done="true") == NO_HINTS
    assert said({"back_in": 1}, x_semantic_back_in="2") == Hints(back_in=1)


def test_a_request_is_kept_unless_one_of_both_says_no() -> None:
    no, yes = {"semantic": {"keep": False}}, {"semantic": {"keep": True}}
    assert own_field_of(request(), {}).keep
    assert not own_field_of(request(x_semantic_keep="true"), no).keep
    assert not own_field_of(request(x_semantic_keep="False"), yes).keep


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("done", "semantic: expected an object"),
        ({"done": 1}, "semantic.done: expected a valid boolean"),
        ({"back_in": "5"}, "semantic.back_in: expected a valid number"),
        ({"back_in": True}, "semantic.back_in: expected a valid number"),
        ({"back_in": -1}, "semantic.back_in: expected greater than or equal to 0"),
        ({"back_in": float("nan")}, "semantic.back_in: expected less than or equal to 86400"),
        ({"back_in": 10**400}, "semantic.back_in: expected a valid number"),
        ({"back_in": 86401}, "semantic.back_in: expected less than or equal to 86400"),
        ({"priority": "high"}, "semantic.priority: expected a valid integer"),
        ({"priority": 9}, "semantic.priority: expected less than or equal to 8"),
        ({"priority": 0.5}, "semantic.priority: expected a valid integer"),
        ({"priority": False}, "semantic.priority: expected a valid integer"),
        ({"done": True, "back_in": 5}, "semantic.back_in: not allowed with semantic.done"),
        (
            {"don": True},
            "semantic.don: unknown field; expected keep, done, back_in, priority or drafts",
        ),
    ],
)
def test_a_wrong_member_is_named_with_what_was_expected(own: object, message: str) -> None:
    with pytest.raises(FieldError) as raised:
        said(own)
    assert str(raised.value) == message


def test_what_has_no_effect_is_validated_too() -> None:
    with pytest.raises(FieldError, match=r"semantic.back_in: expected a valid number"):
        own_field_of(request(), {"semantic": {"back_in": "5"}})


@pytest.mark.parametrize(
    ("header", "text"),
    [("done", "yes"), ("back_in", "soon"), ("back_in", "inf"), ("priority", "-9")],
)
def test_a_wrong_header_is_named(header: str, text: str) -> None:
    with pytest.raises(FieldError, match=f"^X-Semantic-{header.title().replace('_', '-')}: exp"):
        said(**{f"x_semantic_{header}": text})


@pytest.fixture(scope="module")
def serving() -> FakeServing:
    return FakeServing()


@pytest.fixture(scope="module")
def server(serving: FakeServing) -> Iterator[RunningServer]:
    with running(app=create_app(context=ServerContext(serving))) as found:
        yield found


@pytest.mark.process
@pytest.mark.parametrize("path", WIRES)
def test_every_wire_passes_hints_on(server: RunningServer, serving: FakeServing, path: str) -> None:
    body = {"model": "default", **WIRES[path]}
    reply = server.ask("POST", path, body | {"semantic": {"back_in": 30, "priority": 2}})
    assert reply.status == 200, reply.body
    assert serving.asked[-1].hints == Hints(back_in=30, priority=2)
    assert server.ask("POST", path, body, {"x-semantic-done": "true"}).status == 200
    assert serving.asked[-1].hints == Hints(done=True)
    n_asked = len(serving.asked)
    assert server.ask("POST", path, body | {"semantic": {"back_in": "x"}}).status == 400
    assert len(serving.asked) == n_asked
