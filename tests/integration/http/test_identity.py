"""Clients that say who they are without being asked: a real model, real requests, a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from semantic_server.http.settings import ServerSettings
from tests.support.http_server import RunningServer
from tests.support.served_store import served

pytestmark = pytest.mark.process

Json = dict[str, object]

SYSTEM = " ".join(f"Rule {i} is that {i} plus {i} is {2 * i}." for i in range(60))
READ: Json = {"name": "read", "description": "Reads a file.", "parameters": {"type": "object"}}
OPENCODE = {"x-session-id": "ses_1", "x-session-affinity": "ses_1"}
SUBAGENT = {"x-session-id": "ses_2", "x-session-affinity": "ses_2", "x-parent-session-id": "ses_1"}
CLAUDE = {"x-claude-code-session-id": "c1"}
CLAUDE_SUB = {**CLAUDE, "x-claude-code-agent-id": "a1"}


def chat(server: RunningServer, headers: dict[str, str], *said: str) -> tuple[str, int, int]:
    """The answer, and how many prompt tokens were cached of how many."""
    return _chat(server, headers, SYSTEM, [{"type": "function", "function": READ}], said)


def title(server: RunningServer, headers: dict[str, str], said: str) -> tuple[str, int, int]:
    return _chat(server, headers, "Write a title for this conversation.", [], (said,))


def _chat(
    server: RunningServer, headers: dict[str, str], system: str, tools: list[Json], said: object
) -> tuple[str, int, int]:
    assert isinstance(said, tuple)
    messages = [{"role": "system", "content": system}]
    messages += [
        {"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(said)
    ]
    body = {"model": "default", "messages": messages, "max_tokens": 8, "temperature": 0}
    body |= {"tools": tools, "tool_choice": "none"} if tools else {}
    reply = server.ask("POST", "/v1/chat/completions", body, headers)
    assert reply.status == 200, reply.body
    (choice,), usage = reply.json["choices"], reply.json["usage"]  # type: ignore[misc]
    cached = usage["prompt_tokens_details"]["cached_tokens"]  # type: ignore[index]
    return choice["message"]["content"], cached, usage["prompt_tokens"]  # type: ignore[has-type,index]


def message(server: RunningServer, headers: dict[str, str], said: str) -> None:
    tool = {"name": "read", "input_schema": {"type": "object"}}
    body = {"model": "default", "max_tokens": 8, "system": SYSTEM, "tools": [tool]}
    asked = {**body, "messages": [{"role": "user", "content": said}]}
    assert server.ask("POST", "/v1/messages", asked, headers).status == 200


def agents(server: RunningServer, headers: dict[str, str] | None = None) -> dict[str, Json]:
    data = server.ask("GET", "/v1/agents", headers=headers).json["data"]
    assert isinstance(data, list)
    return {one["id"]: one for one in data}


def test_a_session_is_a_tree_that_survives_a_restart(tmp_path: Path) -> None:
    said = ["What is rule 3?"]
    with served(tmp_path) as server:
        title(server, OPENCODE, said[0])
        answer, _, _ = chat(server, OPENCODE, *said)
        said += [answer, "And rule 4?"]
        answer, cached, prompt = chat(server, OPENCODE, *said)
        assert cached >= 0.9 * prompt
        chat(server, SUBAGENT, "Look for rule 5.")
        message(server, CLAUDE, "Hello")
        message(server, CLAUDE_SUB, "Look around.")
        server.ask("POST", "/v1/agents/opencode%2Fses_1/pin", {"pinned": True})
        before = agents(server)
    tree = {name: (one["parent"], one["children"]) for name, one in before.items()}
    assert tree == {
        "opencode/ses_1": (None, ["opencode/ses_2"]),
        "opencode/ses_1~2": (None, []),
        "opencode/ses_2": ("opencode/ses_1", []),
        "claude-code/c1": (None, ["claude-code/c1/a1"]),
        "claude-code/c1/a1": ("claude-code/c1", []),
    }
    assert {(one["client"], one["session"]) for one in before.values()} == {
        ("opencode", "ses_1"), ("opencode", "ses_2"), ("claude-code", "c1"),
    }  # fmt: skip

    said += [answer, "And rule 6?"]
    with served(tmp_path) as server:
        listed = agents(server)
        for name, one in before.items():
            for key in ("client", "session", "parent", "children", "turns", "pinned", "tokens"):
                assert listed[name][key] == one[key]
        title(server, OPENCODE, "something else altogether")
        answer, cached, prompt = chat(server, OPENCODE, *said)
        assert cached >= 0.9 * prompt
        chat(server, OPENCODE, *said[:2], "And rule 40?")  # an edited turn
        after = agents(server)
    assert after.keys() == before.keys()
    # Turns that follow each other faster than they are saved are saved as one.
    for name, most in (("opencode/ses_1", 5), ("opencode/ses_1~2", 2)):
        assert int(str(before[name]["turns"])) < int(str(after[name]["turns"])) <= most
    assert after["opencode/ses_1"]["pinned"] is True


def test_a_forged_id_gives_a_plain_computation(tmp_path: Path) -> None:
    keys = SecretStr("key-of-a" * 4), SecretStr("key-of-b" * 4)
    settings = ServerSettings(api_keys=keys)
    a, b = ({"authorization": f"Bearer {key.get_secret_value()}"} for key in keys)
    with served(tmp_path, settings=settings) as server:
        answer, cold, _ = chat(server, {**a, **OPENCODE}, "What is rule 3?")
        assert chat(server, {**b, **OPENCODE}, "What is rule 3?")[:2] == (answer, cold)
        assert agents(server, b)["opencode/ses_1"]["turns"] == 1
        other = title(server, {**a, **CLAUDE}, "What is rule 3?")[0]
        forged = title(server, {**a, **OPENCODE}, "What is rule 3?")
        assert forged[0] == other
        assert agents(server, a)["opencode/ses_1"]["turns"] == 1
