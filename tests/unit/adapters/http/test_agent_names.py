"""An agent's name is the same wherever it stands: in a header, in a body, in a path."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from fastapi import Request

from semantic.domain.answer import Usage
from semantic_server.http.answer_records import AnswerRecord
from semantic_server.http.errors import FieldError
from semantic_server.http.identity import agent_of
from semantic_server.http.metrics import Metrics
from tests.support.http_server import RunningServer
from tests.support.served_agents import AgentsWorld
from tests.support.store_blocks import saved_agents


def named(header: bytes) -> str | None:
    """The agent of a request with this header."""
    return agent_of(Request({"type": "http", "headers": [(b"x-agent-id", header)]}), {})


@pytest.mark.parametrize("name", ["ada", "ä", "🦊", "Жанна", "a\u0301", "名"])
def test_a_header_is_utf_8_as_everything_else_is(name: str) -> None:
    assert named(name.encode()) == name
    request = Request({"type": "http", "headers": []})
    assert agent_of(request, {"agent_id": name}) == name


def test_a_header_in_the_old_encoding_is_read_as_it_was() -> None:
    assert named("Jörg".encode("latin-1")) == "Jörg"


@pytest.mark.parametrize("header", [b"", b"\x85", "\u202e".encode(), "ä".encode() * 257])
def test_what_is_no_name_is_refused(header: bytes) -> None:
    with pytest.raises(FieldError, match="X-Agent-ID must have 1 to 256 printable"):
        named(header)


@pytest.mark.process
@pytest.mark.parametrize(
    ("action", "body"), [("fork", {"new_id": "copy"}), ("pin", {"pinned": True})]
)
def test_a_word_that_is_part_of_a_name_is_done_to_nobody(
    server: RunningServer, served: AgentsWorld, action: str, body: dict[str, object]
) -> None:
    served.turn("ada", 300)
    before = saved_agents(served.store)
    reply = server.ask("POST", f"/v1/agents/{quote(f'ada/{action}', safe='')}", body)
    assert reply.status == 400
    assert saved_agents(served.store) == before
    assert server.ask("POST", f"/v1/agents/ada/{action}", body).status == 200


def test_a_cancelled_answer_is_no_miss_of_the_cache() -> None:
    metrics = Metrics("m", lambda: None)
    metrics.finished("u", AnswerRecord(usage=Usage(100, 0, 0)))
    metrics.finished("v", AnswerRecord(usage=Usage(100, 60, 3), finish="stop"))
    lines = metrics.text().decode().splitlines()
    assert 'vllm:prompt_tokens_total{model_name="m"} 200.0' in lines
    assert 'vllm:prefix_cache_queries_total{model_name="m"} 100.0' in lines
    assert 'vllm:prefix_cache_hits_total{model_name="m"} 60.0' in lines
