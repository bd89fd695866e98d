"""An agent moves from one server to another over HTTP, and goes on there as it would have here."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from semantic.adapters.exchange.transfer import export_agent, import_agent
from semantic.adapters.stores.disk.store import DiskStore
from semantic.composition.named_models import model_name
from tests.support.http_server import RunningServer
from tests.support.model_folder import small_model
from tests.support.served_store import served
from tests.support.store_blocks import saved_agents

pytestmark = pytest.mark.process

Json = dict[str, object]

LONG = " ".join(f"Rule {i} is that {i} plus {i} is {2 * i}." for i in range(60))
QUOTA = 1 << 28


def say(server: RunningServer, agent: str, more: list[Json]) -> tuple[object, int]:
    """The answer to the conversation, and how many tokens of it were cached."""
    body = {"messages": [{"role": "user", "content": LONG}, *more], "max_tokens": 6}
    whole = {"model": "default", "temperature": 0, **body}
    reply = server.ask("POST", "/v1/chat/completions", whole, {"x-agent-id": agent})
    assert reply.status == 200, reply.body
    usage, choices = reply.json["usage"], reply.json["choices"]
    assert isinstance(usage, dict)
    assert isinstance(choices, list)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(cached, int)
    return choices[0]["message"]["content"], cached


def test_an_agent_goes_on_at_another_server(tmp_path: Path) -> None:
    model = small_model(tmp_path / "model")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with served(tmp_path / "a", model) as server:
        answer, _ = say(server, "team/ada", [])
        more: list[Json] = [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "And 7 plus 7?"},
        ]
        archive = server.ask("GET", "/v1/agents/team%2Fada/export").body
        expected, n_here = say(server, "team/ada", more)
    with served(tmp_path / "b", model) as server:
        imported = server.ask("POST", "/v1/agents/import", archive)
        assert imported.status == 200, imported.body
        # Written to the disk, past the memory tier and the queue, which drops what it cannot hold.
        blocks = imported.json["blocks"]
        assert isinstance(blocks, dict)
        assert (blocks["memory"], blocks["missing"], blocks["disk"] >= 4) == (0, 0, True)
        assert list((tmp_path / "b/store/tmp").glob("*/[0-9]*")) == []
    with served(tmp_path / "b", model) as server:
        assert say(server, "eve", more)[1] == 0
        there, n_there = say(server, "team/ada", more)
    assert there == expected
    assert n_there > 512
    assert 0 <= n_here - n_there < 16  # of the turn that is not recorded there


def test_both_kinds_of_export_hold_the_same_files(tmp_path: Path) -> None:
    model = small_model(tmp_path / "model")
    with served(tmp_path, model) as server:
        say(server, "ada", [])
        archive = server.ask("GET", "/v1/agents/ada/export").body
    store = DiskStore.open(tmp_path / "store", QUOTA)
    (manifest,) = saved_agents(store)
    named = replace(manifest, model=model_name(manifest.model))  # as the command line does
    files = export_agent(store, named, tmp_path / "agent").files
    with tarfile.open(fileobj=io.BytesIO(archive)) as made:
        for path in (files.document, files.bodies):
            member = made.extractfile(path.name)
            assert member is not None
            assert member.read() == path.read_bytes()
    assert import_agent(store, files.bodies, name="again").n_bodies > 0
    store.close()
