"""Keys of requests in a fleet: one for each session, whatever its client sends it by."""

from __future__ import annotations

import pytest

from semantic.domain.identity import Identity, home_of
from semantic_fleet.replicas.fleet_edge import routing_key
from semantic_server.http.identity import Json
from semantic_server.http.openai.responses.output_items import new_response_id
from tests.unit.adapters.http.test_identity import CLIENTS, A, S

CHAT = "/v1/chat/completions"


def opening(*texts: object, **fields: object) -> Json:
    return {"messages": [{"role": "user", "content": text} for text in texts], **fields}


@pytest.mark.parametrize(("headers", "body", "identity"), CLIENTS)
def test_a_clients_session_is_the_key_of_all_its_requests(
    headers: dict[str, str], body: Json, identity: Identity | None
) -> None:
    one, other = (routing_key(CHAT, headers, {**body, **opening(text)}) for text in "ab")
    assert (one == other) == (identity is not None and not identity.shared)


def test_agents_of_a_session_and_requests_about_them_meet() -> None:
    main = routing_key("/v1/messages", {"x-claude-code-session-id": S}, {})
    headers = {"x-claude-code-session-id": S, "x-claude-code-agent-id": A}
    assert routing_key("/v1/messages", headers, {}) == main
    for name in (f"claude-code/{S}", f"claude-code/{S}~2", f"claude-code/{S}/{A}~3"):
        for path in ("", "/why", "/pin", "/fork", "/checkpoints", "/restore", "/family", "/diff"):
            assert routing_key(f"/v1/agents/{name}{path}", {}, {}) == main


def test_a_named_agent_is_found_by_header_body_and_path() -> None:
    by_header = routing_key(CHAT, {"x-agent-id": "team/ada"}, opening("a"))
    assert routing_key(CHAT, {}, {**opening("b"), "agent_id": "team/ada"}) == by_header
    assert routing_key("/v1/agents/team/ada/why", {}, {}) == by_header
    assert routing_key(CHAT, {"x-agent-id": "team/bob"}, opening("a")) != by_header


def test_tenants_and_names_are_apart() -> None:
    keys = {routing_key(CHAT, {"x-agent-id": name}, {}, tenant) for name, tenant in
            (("a", ""), ("a", "t"), ("a", "u"), ("b", "t"))}  # fmt: skip
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (opening("hi"), opening("hi", "and then?")),
        (opening("hi", system="s"), opening([{"type": "text", "text": "hi"}], "x", system="s")),
        (
            opening([{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]),
            opening([{"type": "text", "text": "hi"}], "x"),
        ),
        ({"input": "hi"}, {"input": [{"role": "user", "content": "hi"}, {"type": "reasoning"}]}),
        ({"prompt": "a" * 3000}, {"prompt": "a" * 3000 + "b"}),
        ({"prompt": [1] * 600}, {"prompt": [1] * 600 + [2]}),
    ],
    ids=["grows", "parts", "cache marks", "responses", "text", "tokens"],
)
def test_a_conversation_without_a_name_keeps_its_key(first: Json, later: Json) -> None:
    assert routing_key(CHAT, {}, first) == routing_key(CHAT, {}, later)


def test_rankings_of_the_same_documents_meet_where_their_vectors_are() -> None:
    asked: list[Json] = [
        {"query": "a", "documents": ["x", "y"]},
        {"query": "b", "documents": ["x", "y", "z"]},
        {"query": "c", "documents": [{"text": "x"}]},
    ]
    assert len({routing_key("/v1/rerank", {}, one) for one in asked}) == 1
    other = {"query": "a", "documents": ["y"]}
    assert routing_key("/v1/rerank", {}, other) != routing_key("/v1/rerank", {}, asked[0])


def test_conversations_without_names_differ_by_their_openings() -> None:
    bodies: list[Json] = [
        opening("hi"),
        opening("ho"),
        opening("hi", system="s"),
        {"input": "other"},
        {"prompt": "hi there"},
        {"prompt": [1, 2]},
        {"prompt": None},
        {},
    ]
    assert len({routing_key(CHAT, {}, body) for body in bodies}) == len(bodies)


def test_a_response_is_continued_where_its_request_was_routed() -> None:
    first = routing_key("/v1/responses", {}, {"input": "hi"}, "tenant")
    response = new_response_id(first)
    onward: Json = {"input": "and then?", "previous_response_id": response}
    assert routing_key("/v1/responses", {}, onward, "tenant") == first
    assert new_response_id(routing_key("/v1/responses", {}, onward, "tenant")).endswith(first)
    for path in (f"/v1/responses/{response}", f"/v1/responses/{response}/input_items"):
        assert routing_key(path, {}, {}, "tenant") == first
    assert routing_key("/v1/responses", {"x-agent-id": "ada"}, onward) == routing_key(
        "/v1/responses", {"x-agent-id": "ada"}, {}
    )


_OF_NO_FLEET = pytest.param(new_response_id(), id="of a server alone")


@pytest.mark.parametrize("given", [None, 7, "", "resp_", "resp_00", _OF_NO_FLEET, "x" * 9999])
def test_any_other_id_of_a_response_names_no_key(given: object) -> None:
    body: Json = {"input": "hi", "previous_response_id": given}
    assert routing_key("/v1/responses", {}, body) == routing_key(
        "/v1/responses", {}, {"input": "hi"}
    )


def test_a_thousand_conversations_with_one_system_prompt_have_keys_of_their_own() -> None:
    asked = [opening(f"task {number}", system="s" * 9999) for number in range(1000)]
    assert len({routing_key(CHAT, {}, one) for one in asked}) == 1000


def test_keys_show_nothing_of_what_was_sent() -> None:
    key = routing_key(CHAT, {"x-agent-id": "Ada"}, {}, "tenant")
    assert len(key) == 8
    assert set(key) <= set("0123456789abcdef")


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("claude-code/s/a~2", "claude-code/s"),
        ("session/s~12", "session/s"),
        ("codex/a%2Fb", "codex/a%2Fb"),
        ("ada", "ada"),
        ("team/ada~2", "team/ada~2"),
        ("codex/", "codex/"),
        ("codex", "codex"),
    ],
)
def test_the_home_of_a_name(name: str, home: str) -> None:
    assert home_of(name) == home
