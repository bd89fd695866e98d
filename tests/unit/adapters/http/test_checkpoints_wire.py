"""Checkpoints, forks, families and differences over HTTP."""

from __future__ import annotations

import pytest

from tests.support.http_server import Reply, RunningServer, error
from tests.support.served_agents import AgentsWorld, path

pytestmark = pytest.mark.process

STRANGE = ["ada", "a/b", "x/checkpoints", "y/family", "z/diff", "🦊 ä", "a?b#c", "%2F"]


def data(reply: Reply) -> list[dict[str, object]]:
    """The list in a reply."""
    assert reply.status == 200, reply.json
    found = reply.json["data"]
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("agent", STRANGE)
def test_checkpoint_fork_restore_and_compare(
    server: RunningServer, served: AgentsWorld, agent: str
) -> None:
    served.turn(agent, 600)
    made = server.ask("POST", path(agent, "/checkpoints"), {"name": "the/plan"})
    assert made.status == 200, made.json
    shown = made.json
    created = shown.pop("created")
    assert isinstance(created, float)
    n_bytes = shown.pop("bytes")
    assert shown.pop("shared_bytes") == n_bytes != 0
    assert shown == {
        "object": "agent.checkpoint",
        "name": "the/plan",
        "agent": agent,
        "tokens": 604,
        "turns": 1,
        "blocks": {"pool": 0, "memory": 3, "disk": 0, "remote": 0, "missing": 0},
        "pinned": False,
    }
    listed = server.ask("GET", path(agent, "/checkpoints"))
    assert [one["name"] for one in data(listed)] == ["the/plan"]
    assert listed.json["turns"] == [{"turn": 1, "prompt_tokens": 600, "tokens": 604}]
    served.turn(agent, 900)
    body = {"new_ids": ["s1", "s2"], "checkpoint": "the/plan"}
    forked = data(server.ask("POST", path(agent, "/fork"), body))
    assert [(one["id"], one["parent"], one["tokens"]) for one in forked] == [
        ("s1", agent, 604),
        ("s2", agent, 604),
    ]
    family = data(server.ask("GET", path(agent, "/family")))
    assert [(one["id"], one["depth"]) for one in family] == [(agent, 0), ("s1", 1), ("s2", 1)]
    diff = server.ask("GET", path(agent, "/diff?other=s1")).json
    # A prompt of this world leaves the answer before it.
    assert (diff["common_tokens"], diff["tokens"], diff["other_tokens"]) == (600, 904, 604)
    assert diff["shared_blocks"] == 2
    assert isinstance(diff["text"], str)
    back = server.ask("POST", path(agent, "/restore"), {"checkpoint": "the/plan"})
    assert (back.status, back.json["id"], back.json["tokens"]) == (200, agent, 604)
    assert server.ask("GET", path(agent)).json["tokens"] == 604
    gone = server.ask("DELETE", path(agent, "/checkpoints?name=the%2Fplan"))
    assert gone.json["deleted"] is True
    assert data(server.ask("GET", path(agent, "/checkpoints"))) == []
    deleted = server.ask("DELETE", path(agent, "?family=true"))
    assert deleted.json["descendants"] == ["s1", "s2"]
    assert data(server.ask("GET", "/v1/agents")) == []


def test_a_name_may_end_like_a_route(server: RunningServer, served: AgentsWorld) -> None:
    for action in ("checkpoints", "family", "diff"):
        name = f"x/{action}"
        served.turn(name, 20)
        assert server.ask("GET", path(name)).json["id"] == name
        assert server.ask("DELETE", path(name)).json["id"] == name


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "expected either new_id or new_ids"),
        ({"new_id": "a", "new_ids": ["b"]}, "expected either new_id or new_ids"),
        ({"new_ids": []}, "new_ids must have 1 to 256 names, got 0"),
        ({"new_ids": ["b", "b"]}, "new_ids must be different names"),
        ({"new_id": "ada"}, "new_id: agent 'ada' already exists"),
        ({"new_id": "b", "turn": 2}, "turn must be 1 to 1"),
        ({"new_id": "b", "turn": "1"}, "turn"),
        ({"new_id": "b", "checkpoint": "no"}, "has no checkpoint 'no'"),
    ],
)
def test_what_is_no_fork(
    server: RunningServer, served: AgentsWorld, body: dict[str, object], said: str
) -> None:
    served.turn("ada", 20)
    status, message = error(server.ask("POST", path("ada", "/fork"), body))
    assert status in (400, 404, 422)
    assert said in message
    assert [one["id"] for one in data(server.ask("GET", "/v1/agents"))] == ["ada"]


def test_what_is_unknown(server: RunningServer, served: AgentsWorld) -> None:
    served.turn("ada", 20)
    for reply in (
        server.ask("GET", path("eve", "/checkpoints")),
        server.ask("POST", path("eve", "/checkpoints"), {"name": "a"}),
        server.ask("POST", path("ada", "/restore"), {"checkpoint": "a"}),
        server.ask("DELETE", path("ada", "/checkpoints?name=a")),
        server.ask("GET", path("eve", "/family")),
        server.ask("GET", path("ada", "/diff?other=eve")),
    ):
        assert error(reply)[0] == 404
    assert error(server.ask("GET", path("ada", "/diff")))[1].startswith("other must be the name")
    assert error(server.ask("DELETE", path("ada", "/checkpoints")))[1].startswith("name must be")
