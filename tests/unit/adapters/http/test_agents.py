"""/v1/agents over HTTP: a real engine's agents, whatever they are called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import SecretStr

from semantic.adapters.stores.memory import MemoryStore
from semantic.domain.block_hash import tenant_id, tenant_tag
from semantic.domain.match import CacheMiss, MatchEnd, MatchReport
from semantic.domain.request_parts import Change, Difference, PartKind
from semantic_server.http.agents import _last_turn
from semantic_server.http.app import create_app
from semantic_server.http.context import ServerContext
from semantic_server.http.identity import tenant_name
from semantic_server.http.settings import ServerSettings
from tests.support.fake_serving import FakeServing
from tests.support.http_server import Reply, RunningServer, error, running
from tests.support.served_agents import AgentsWorld, path
from tests.support.store_blocks import saved_agents

pytestmark = pytest.mark.process

STRANGE = ["a/b", "why/fork", "x/why", "🦊 ä", "a.b", "a?b#c", "%2F", "'\"", "x" * 256]


def test_a_list_of_agents(server: RunningServer, served: AgentsWorld) -> None:
    nothing: dict[str, object] = {"data": [], "first_id": None, "last_id": None, "has_more": False}
    assert server.ask("GET", "/v1/agents").json == {"object": "list", **nothing}
    served.turn("ada", 600)
    served.turn("ada", 600)
    data = server.ask("GET", "/v1/agents").json["data"]
    assert isinstance(data, list)
    (ada,) = data
    last_used, n_bytes, pool_bytes = (ada.pop(key) for key in ("last_used", "bytes", "pool_bytes"))
    assert min(last_used, n_bytes, pool_bytes) > 0
    assert ada["last_turn"].pop("seconds") >= 0
    assert ada == {
        "object": "agent",
        "id": "ada",
        "model": "tiny",
        "client": None,
        "session": None,
        "parent": None,
        "children": [],
        "state": "idle",
        "tokens": 604,
        "blocks": {"pool": 3, "memory": 0, "disk": 0, "remote": 0, "missing": 0},
        "shared_bytes": 0,
        "pinned": False,
        "turns": 2,
        "last_turn": {
            "prompt_tokens": 600,
            "cached_tokens": 599,
            "cached_share": 599 / 600,
            "reason": "The prompt reused every matching cached token.",
            "lost_tokens": 0,
            "lost_seconds": 0.0,
        },
    }


@pytest.mark.parametrize("agent", STRANGE)
def test_any_name_will_do(server: RunningServer, served: AgentsWorld, agent: str) -> None:
    served.turn(agent, 300)
    shown = server.ask("GET", path(agent))
    assert (shown.status, shown.json["id"]) == (200, agent)
    chain = shown.json["chain"]
    assert isinstance(chain, list)
    assert [(block["start"], block["stop"], block["place"]) for block in chain] == [
        (0, 256, "pool"),
        (256, 304, "pool"),
    ]
    assert server.ask("GET", path(agent, "/why")).json["id"] == agent
    forked = server.ask("POST", path(agent, "/fork"), {"new_id": "copy"})
    assert server.ask("GET", path(agent)).json["children"] == ["copy"]
    assert (forked.status, forked.json["id"], forked.json["parent"]) == (200, "copy", agent)
    assert server.ask("POST", path(agent, "/pin"), {"pinned": True}).json["pinned"] is True
    deleted = server.ask("DELETE", path(agent))
    assert deleted.json == {"object": "agent.deleted", "id": agent, "deleted": True}
    assert error(server.ask("GET", path(agent)))[0] == 404
    assert server.ask("GET", path("copy")).status == 200


def test_slashes_need_no_code(server: RunningServer, served: AgentsWorld) -> None:
    served.turn("team/ada", 20)
    assert server.ask("GET", "/v1/agents/team/ada").json["id"] == "team/ada"
    assert server.ask("GET", "/v1/agents/team/ada/why").json["object"] == "agent.match"


def test_why(server: RunningServer, served: AgentsWorld) -> None:
    served.turn("ada", 600)
    served.turn("ada", 600, first=33)
    match = server.ask("GET", path("ada", "/why")).json["match"]
    assert isinstance(match, dict)
    seconds = match.pop("seconds")
    assert seconds > 0
    assert match == {
        "prompt_tokens": 600,
        "reused_tokens": 0,
        "computed_tokens": 600,
        "end": "diverged",
        "reason": "The prompt differs from the agent's history.",
        "source": "none",
        "differs_at": 0,
        "expected": 0,
        "got": 33,
        "expected_text": "\0",
        "got_text": "!",
        "lost": {
            "tokens": 599,
            "seconds": seconds,
            "differs_at": 0,
            "part": None,
            "end": "diverged",
            "reason": "The prompt differs from the agent's history.",
        },
    }
    server.ask("POST", path("ada", "/fork"), {"new_id": "bob"})
    assert server.ask("GET", path("bob", "/why")).status == 200


def test_nobody_of_that_name(server: RunningServer) -> None:
    for method, action, body in (
        ("GET", "", None),
        ("GET", "/why", None),
        ("POST", "/fork", {"new_id": "bob"}),
        ("POST", "/pin", {"pinned": True}),
        ("DELETE", "", None),
    ):
        reply = server.ask(method, path("eve", action), body)
        assert error(reply) == (404, "there is no agent 'eve'")
        assert reply.json["error"]["code"] == "agent_not_found"  # type: ignore[index]  # an object


@pytest.mark.parametrize(
    ("action", "body"),
    [
        ("/fork", {}),
        ("/fork", {"new_id": 3}),
        ("/fork", {"new_id": ""}),
        ("/fork", {"new_id": "a\nb"}),
        ("/fork", {"new_id": "x" * 257}),
        ("/fork", {"new_id": "ada"}),
        ("/fork", {"new_id": "bob", "more": 1}),
        ("/pin", {"pinned": "yes"}),
        ("/pin", {}),
        ("/pin", []),
        ("/pin", None),
    ],
)
def test_wrong_bodies_change_nothing(
    server: RunningServer, served: AgentsWorld, action: str, body: object
) -> None:
    served.turn("ada", 20)
    before = saved_agents(served.store)
    assert error(server.ask("POST", path("ada", action), body))[0] == 400
    assert saved_agents(served.store) == before


def test_while_it_has_a_request_it_is_not_forgotten(
    server: RunningServer, served: AgentsWorld
) -> None:
    served.turn("ada", 20)
    served.submit("ada", 30)
    status, message = error(server.ask("DELETE", path("ada")))
    assert (status, message) == (400, "agent 'ada' has a request: wait until it finishes")


def test_before_the_model_is_there() -> None:
    with running(app=create_app()) as server:
        reply = server.ask("GET", "/v1/agents")
    assert error(reply) == (503, "the model is loading")
    assert reply.headers["retry-after"]


def test_another_tenants_agent_is_not_there(served: AgentsWorld) -> None:
    keys = SecretStr("key-of-a" * 4), SecretStr("key-of-b" * 4)
    served.turn("ada", 20, tenant=tenant_name(keys[0].get_secret_value()))
    app = create_app(
        settings=ServerSettings(api_keys=keys),
        context=ServerContext(FakeServing(), agents=served.agents),
    )
    with running(app=app) as server:
        a, b = ({"authorization": f"Bearer {key.get_secret_value()}"} for key in keys)
        assert server.ask("GET", "/v1/agents").status == 401
        assert server.ask("GET", path("ada"), headers=a).status == 200
        assert server.ask("GET", path("ada"), headers=b).status == 404
        assert server.ask("DELETE", path("ada"), headers=b).status == 404
        assert server.ask("GET", "/v1/agents", headers=b).json["data"] == []
        assert server.ask("GET", path("ada"), headers=a).status == 200


class Tenants:
    """A server of two tenants, each with an agent "ada" of a length of its own, and an operator."""

    def __init__(self, served: AgentsWorld, server: RunningServer) -> None:
        secret = served.store.secret
        self.served = served
        self.names = [tenant_name(key) for key in KEYS[:2]]
        self.ids = [tenant_id(secret, tenant_tag(secret, name)) for name in self.names]
        self._server = server

    def ask(self, key: str, method: str, path: str, body: object = None) -> Reply:
        return self._server.ask(method, path, body, headers={"x-api-key": key})

    def listed(self, query: str = "") -> dict[str, tuple[object, ...]]:
        """Tokens and pins of the agents that an operator sees, by tenant."""
        data = self.ask(OPERATOR, "GET", f"/v1/agents{query}").json["data"]
        assert isinstance(data, list)
        return {one["tenant"]: (one["id"], one["tokens"], one["pinned"]) for one in data}


KEYS = "key-of-a" * 4, "key-of-b" * 4, "key-of-an-operator"
OPERATOR = KEYS[2]


@pytest.fixture
def tenants(served: AgentsWorld) -> Iterator[Tenants]:
    a, b, operator = map(SecretStr, KEYS)
    app = create_app(
        settings=ServerSettings(api_keys=(a, b), operator_keys=(operator,)),
        context=ServerContext(FakeServing(), agents=served.agents),
    )
    with running(app=app) as server:
        found = Tenants(served, server)
        for name, n in zip(found.names, (20, 30), strict=True):
            served.turn("ada", n, tenant=name)
        yield found


def test_an_operator_sees_the_agents_of_all_tenants(tenants: Tenants) -> None:
    a, b = tenants.ids
    assert tenants.listed() == {a: ("ada", 24, False), b: ("ada", 34, False)}
    assert tenants.listed(f"?tenant={b}") == {b: ("ada", 34, False)}
    assert tenants.listed(f"?tenant={b}&limit=1") == {b: ("ada", 34, False)}
    shown = tenants.ask(OPERATOR, "GET", f"/v1/agents/ada?tenant={a}").json
    assert (shown["tokens"], shown["tenant"]) == (24, a)


def test_an_operator_takes_back_what_a_tenant_has_pinned(tenants: Tenants) -> None:
    a, b = tenants.ids
    tenants.ask(KEYS[0], "POST", "/v1/agents/ada/pin", {"pinned": True})
    unpinned = tenants.ask(OPERATOR, "POST", f"/v1/agents/ada/pin?tenant={a}", {"pinned": False})
    assert (unpinned.status, unpinned.json["pinned"]) == (200, False)
    assert tenants.ask(OPERATOR, "DELETE", f"/v1/agents/ada?tenant={a}").status == 200
    assert tenants.listed() == {b: ("ada", 34, False)}
    assert tenants.ask(KEYS[0], "GET", "/v1/agents/ada").status == 404


def test_an_operator_manages_the_agents_of_a_key_that_is_gone(served: AgentsWorld) -> None:
    served.turn("ada", 20, tenant="of a key that is no longer used")
    (saved,) = saved_agents(served.store)
    later = AgentsWorld(served.store)  # after a restart no request names the tenant
    operators = (SecretStr(OPERATOR),)
    app = create_app(
        settings=ServerSettings(api_keys=(SecretStr(KEYS[0]),), operator_keys=operators),
        context=ServerContext(FakeServing(), agents=later.agents),
    )
    of = tenant_id(served.store.secret, saved.scope.tenant)
    with running(app=app) as server:
        tenants = Tenants(later, server)
        assert tenants.listed() == {of: ("ada", 24, False)}
        tenants.ask(OPERATOR, "POST", f"/v1/agents/ada/pin?tenant={of}", {"pinned": True})
        assert tenants.listed(f"?tenant={of}") == {of: ("ada", 24, True)}
        assert tenants.ask(OPERATOR, "DELETE", f"/v1/agents/ada?tenant={of}").status == 200
        assert tenants.listed() == {}
        gone = tenants.ask(OPERATOR, "DELETE", f"/v1/agents/ada?tenant={of}")
        assert error(gone) == (404, f"tenant {of!r} has no agents")


def test_an_operator_reads_no_text_and_forks_nothing(tenants: Tenants) -> None:
    at = f"?tenant={tenants.ids[0]}"
    assert tenants.ask(OPERATOR, "GET", f"/v1/agents/ada/why{at}").status == 403
    assert tenants.ask(OPERATOR, "POST", f"/v1/agents/ada/fork{at}", {"new_id": "x"}).status == 403
    nameless = tenants.ask(OPERATOR, "DELETE", "/v1/agents/ada")
    assert error(nameless) == (400, "tenant must be the id of the agent's tenant")
    assert len(tenants.listed()) == 2


def test_a_tenant_names_no_other_one(tenants: Tenants) -> None:
    at = f"?tenant={tenants.ids[0]}"
    asked = [("GET", f"/v1/agents{at}", None), ("GET", f"/v1/agents/ada/why{at}", None)]
    asked += [("GET", f"/v1/agents/ada{at}", None), ("DELETE", f"/v1/agents/ada{at}", None)]
    for method, path_, body in [*asked, ("POST", f"/v1/agents/ada/pin{at}", {"pinned": True})]:
        refused = tenants.ask(KEYS[1], method, path_, body)
        assert error(refused) == (403, "tenant: expected an operator's key, see --operator-key")
    assert len(tenants.listed()) == 2
    assert "tenant" not in tenants.ask(KEYS[1], "GET", "/v1/agents").body.decode()


def test_each_sees_its_own_requests_and_an_operator_those_of_all(tenants: Tenants) -> None:
    for name, agent in zip(tenants.names, ("bob", "eve"), strict=True):
        tenants.served.submit(agent, 600, tenant=name)
    a, b = tenants.ids
    (bob,) = requests_of(tenants, KEYS[0])
    assert bob.pop("seconds") >= 0
    uid = bob.pop("id")
    assert bob == {
        "object": "request",
        "agent": "bob",
        "model": "tiny",
        "state": "prefill",
        "prompt_tokens": 600,
        "read_tokens": 0,
        "cached_tokens": 0,
        "generated_tokens": 0,
        "preemptions": 0,
    }
    found = [(one["agent"], one["tenant"]) for one in requests_of(tenants, OPERATOR)]
    assert found == [("bob", a), ("eve", b)]
    found = [
        (one["agent"], one["tenant"]) for one in requests_of(tenants, OPERATOR, f"?tenant={b}")
    ]
    assert found == [("eve", b)]
    assert tenants.ask(KEYS[0], "GET", f"/v1/requests?tenant={b}").status == 403
    assert tenants.ask(KEYS[1], "DELETE", f"/v1/requests/{uid}").status == 404
    assert len(requests_of(tenants, OPERATOR)) == 2
    assert tenants.ask(KEYS[0], "DELETE", f"/v1/requests/{uid}").json["id"] == uid
    (eve,) = requests_of(tenants, KEYS[1])
    assert tenants.ask(OPERATOR, "DELETE", f"/v1/requests/{eve['id']}").status == 200
    reasons = [done.finish_reason for done in tenants.served.world.finish()]
    assert reasons == ["cancelled", "cancelled"]
    assert requests_of(tenants, OPERATOR) == []
    assert tenants.ask(KEYS[0], "DELETE", f"/v1/requests/{uid}").status == 404


def test_an_operator_is_told_why_without_what_a_tool_is_called(tenants: Tenants) -> None:
    data = tenants.ask(OPERATOR, "GET", f"/v1/agents?tenant={tenants.ids[0]}").json["data"]
    assert isinstance(data, list)
    (ada,) = data
    assert ada["last_turn"]["reason"] == "No cached prefix matches it."
    lost = CacheMiss(512, 1.5, Difference(PartKind.TOOL, Change.CHANGED, 7, "Bash"))
    match = MatchReport(1000, 256, MatchEnd.DIVERGED, "pool", seconds=3.0, lost=lost)
    of_tenant = _last_turn(match, for_operator=False)
    assert of_tenant["reason"] == "Tool 7 (Bash) changed."
    assert (of_tenant["lost_tokens"], of_tenant["lost_seconds"]) == (512, 1.5)
    of_operator = _last_turn(match, for_operator=True)
    assert of_operator == {**of_tenant, "reason": "The prompt differs from the agent's history."}


def requests_of(tenants: Tenants, key: str, query: str = "") -> list[dict[str, Any]]:
    data = tenants.ask(key, "GET", f"/v1/requests{query}").json["data"]
    assert isinstance(data, list)
    return data


def test_a_list_is_filtered_by_what_the_query_says(
    server: RunningServer, served: AgentsWorld
) -> None:
    for name in ("a/1", "a/2", "b"):
        served.turn(name, 20)
    for query in ("?prefix=a/", "?prefix=a%2F&limit=5&state=idle&pinned=false"):
        data = server.ask("GET", f"/v1/agents{query}").json["data"]
        assert isinstance(data, list)
        assert sorted(one["id"] for one in data) == ["a/1", "a/2"]
    refused = server.ask("GET", "/v1/agents?state=asleep")
    assert refused.status == 400
    assert "'idle', 'queued', 'prefill' or 'decode'" in refused.body.decode()
    assert server.ask("GET", "/v1/agents?parent=b").json["data"] == []


def test_an_operators_page_of_all_tenants_is_bounded(tenants: Tenants) -> None:
    for at, name in enumerate(tenants.names):
        tenants.served.turn("bob", 20, tenant=name, first=at)
    expected = [(tenant, agent) for tenant in sorted(tenants.ids) for agent in ("bob", "ada")]
    for limit, more in ((1, True), (2, True), (3, True), (4, False), (1000, False)):
        page = tenants.ask(OPERATOR, "GET", f"/v1/agents?limit={limit}").json
        data, expected = (
            page["data"],
            [(id_, agent) for id_ in sorted(tenants.ids) for agent in ("bob", "ada")],
        )
        assert isinstance(data, list)
        assert [(one["tenant"], one["id"]) for one in data] == expected[:limit]
        assert (page["first_id"], page["last_id"], page["has_more"]) == (None, None, more)


def test_a_list_without_a_limit_is_a_page(server: RunningServer, served: AgentsWorld) -> None:
    for number in range(21):
        served.turn(f"a{number}", 20, first=number)
    page = server.ask("GET", "/v1/agents").json
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("a20", "a1", True)
    rest = server.ask("GET", "/v1/agents?after=a1").json
    assert (rest["first_id"], rest["last_id"], rest["has_more"]) == ("a0", "a0", False)


def test_beside_others_a_tenant_pins_no_more_than_its_part(tenants: Tenants) -> None:
    store = tenants.served.store
    assert isinstance(store, MemoryStore)
    ample = store._order.max_bytes
    n_bytes = tenants.ask(KEYS[0], "GET", "/v1/agents/ada").json["bytes"]
    assert isinstance(n_bytes, int)
    store._order.max_bytes = 2 * n_bytes - 1
    refused = tenants.ask(KEYS[0], "POST", "/v1/agents/ada/pin", {"pinned": True})
    message = (
        f"cannot pin agent 'ada' of {n_bytes} bytes: you have pinned 0 of at most {n_bytes - 1} "
        "bytes; unpin another agent"
    )
    assert error(refused) == (403, message)
    assert refused.json["error"]["code"] == "pin_limit_exceeded"  # type: ignore[index]  # an object
    assert tenants.ask(KEYS[0], "GET", "/v1/agents/ada").json["pinned"] is False
    store._order.max_bytes = ample
    assert tenants.ask(KEYS[0], "POST", "/v1/agents/ada/pin", {"pinned": True}).status == 200


def test_alone_a_tenant_may_pin_everything(server: RunningServer, served: AgentsWorld) -> None:
    served.turn("ada", 600)
    assert isinstance(served.store, MemoryStore)
    served.store._order.max_bytes = served.store.stats()[0].n_bytes
    assert server.ask("POST", path("ada", "/pin"), {"pinned": True}).status == 200
