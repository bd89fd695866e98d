"""Agents that a client forks without a word: they are children of the agent they go on from."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.server_model import words
from tests.support.http_server import RunningServer
from tests.support.model_folder import small_model
from tests.support.served_store import served

pytestmark = pytest.mark.process

Message = dict[str, str]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("forks")
    with served(folder, small_model(folder / "model")) as found:
        yield found


def agents(server: RunningServer) -> dict[str, dict[str, object]]:
    """All agents by name."""
    data = server.ask("GET", "/v1/agents?limit=1000").json["data"]
    assert isinstance(data, list)
    return {one["id"]: one for one in data}


def said(server: RunningServer, messages: list[Message], agent: str | None = None) -> str:
    body = {"model": "default_model", "messages": messages, "max_tokens": 8, "temperature": 0}
    headers = {} if agent is None else {"X-Agent-ID": agent}
    reply = server.ask("POST", "/v1/chat/completions", body, headers)
    assert reply.status == 200, reply.json
    choices = reply.json["choices"]
    assert isinstance(choices, list)
    text = choices[0]["message"]["content"]
    assert isinstance(text, str)
    return text


def talked(
    server: RunningServer, topic: str, turns: int, agent: str | None = None
) -> list[Message]:
    """A conversation of `turns`, and the agent's name, if it has none of its own."""
    messages = [{"role": "system", "content": words(40, "rules")}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{topic} {turn}: {words(20, topic)}"})
        messages.append({"role": "assistant", "content": said(server, messages, agent)})
    return messages


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("is_named", [True, False])
def test_who_goes_on_from_a_conversation_is_its_child(
    server: RunningServer, turns: int, *, is_named: bool
) -> None:
    topic = f"topic {turns} {is_named}"
    before = set(agents(server))
    main = f"main {topic}" if is_named else None
    begun = talked(server, topic, turns, main)
    talked(server, f"another {topic}", turns, None if main is None else f"another {topic}")
    first = [name for name in agents(server) if name not in before]
    assert len(first) == 2
    tasks = [
        [*begun, {"role": "user", "content": f"Task {i}: {words(6, str(i))}"}] for i in range(4)
    ]
    names = [f"sub {topic} {i}" if is_named else None for i in range(4)]
    with ThreadPoolExecutor(len(tasks)) as pool:
        list(pool.map(said, [server] * len(tasks), tasks, names))
    known = agents(server)
    children = {name: known[name]["parent"] for name in known if name not in {*before, *first}}
    # Without names, the first request goes on as the agent itself.
    assert len(children) == (4 if is_named else 3)
    (parent,) = set(children.values())
    assert parent in first
    assert is_named is (parent == main)
    assert [known[name]["parent"] for name in first] == [None, None]
    assert known[parent]["children"] == sorted(children)


def test_a_conversation_of_its_own_has_no_parent(server: RunningServer) -> None:
    before = set(agents(server))
    for name in ("one", "two"):
        talked(server, f"alone {name}", 2, name)
    # The same question, and what the client wrote itself: no answer of this server is continued.
    talked(server, "alone one", 1, "three")
    written = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "So it is."}]
    said(server, [*written, {"role": "user", "content": "Go on."}], "four")
    said(server, [*written, {"role": "user", "content": "And then?"}], "five")
    known = agents(server)
    assert {known[name]["parent"] for name in set(known) - before} == {None}
