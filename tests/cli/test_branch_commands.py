"""`semantic agents checkpoint`, `restore`, `fork`, `tree`, `diff` and `done`."""

from __future__ import annotations

import json

import pytest

from semantic.cli.branch_commands import BRANCH_COMMANDS
from semantic.domain.stored import Manifest, TurnEnd
from tests.cli.stocked import N_TOKENS, changed, disk_store, new_agent
from tests.cli.support import Ran, semantic
from tests.support.store_blocks import saved_agents

FIRST = N_TOKENS // 2


def agents(*arguments: str) -> Ran:
    return semantic("agents", *arguments)


def asked(*arguments: str) -> dict[str, object]:
    """The document that a command prints with --json."""
    ran = agents(arguments[0], "--json", *arguments[1:])
    assert (ran.code, ran.err) == (0, "")
    document = json.loads(ran.out)
    assert isinstance(document, dict)
    return document


def refused(*arguments: str) -> str:
    """The error of a command that changes nothing."""
    with disk_store() as store:
        before = set(saved_agents(store))
    ran = agents(*arguments)
    assert ran.code == 2
    with disk_store() as store:
        assert set(saved_agents(store)) == before
    return ran.err


def saved(name: str) -> Manifest:
    with disk_store() as store:
        (found,) = (one for one in saved_agents(store) if one.agent_id == name)
    return found


@pytest.fixture(autouse=True)
def ada() -> None:
    """An agent with two turns."""
    with disk_store() as store:
        new_agent(store)
    changed("ada", earlier=(TurnEnd(FIRST - 10, FIRST),), turns=2)


def test_a_checkpoint_is_made_listed_restored_and_deleted() -> None:
    assert agents("checkpoint", "ada", "early", "--turn", "1").out == (
        f"checkpoint early has the {FIRST} tokens of ada\n"
    )
    assert asked("checkpoint", "ada", "now") == {"name": "now", "agent": "ada", "tokens": N_TOKENS}
    listed = asked("checkpoint", "ada")
    found = listed["checkpoints"]
    assert isinstance(found, list)
    assert [(one["name"], one["tokens"]) for one in found] == [("early", FIRST), ("now", N_TOKENS)]
    assert listed["turns"] == [{"turn": 1, "tokens": FIRST}, {"turn": 2, "tokens": N_TOKENS}]
    lines = agents("checkpoint", "ada").out.splitlines()
    assert [line.split()[0] for line in lines] == ["checkpoint", "early", "now", "turns"]
    # Lists of agents leave them out.
    assert [line.split()[0] for line in agents("ls").out.splitlines()] == ["name", "ada"]
    assert agents("restore", "ada", "early").out == f"ada is back at early, with {FIRST} tokens\n"
    assert len(saved("ada").token_ids) == FIRST
    assert saved("ada").turn_ends == (TurnEnd(FIRST - 10, FIRST),)
    assert asked("checkpoint", "ada", "early", "--delete")["deleted"] is True
    assert "has no checkpoint 'early'; it has 'now'" in refused("restore", "ada", "early")


def test_several_forks_of_a_checkpoint_or_turn() -> None:
    agents("checkpoint", "ada", "early", "--turn", "1")
    document = asked("fork", "ada", "b", "c", "--at", "early")
    assert document == {
        "agents": [{"name": name, "parent": "ada", "tokens": FIRST} for name in ("b", "c")]
    }
    assert agents("fork", "ada", "d", "--turn", "1").out == (
        f"d begins with the {FIRST} tokens of ada\n"
    )
    assert agents("fork", "ada", "e", "f").out == f"e, f begin with the {N_TOKENS} tokens of ada\n"
    assert {saved(name).parent for name in "bcdef"} == {"ada"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("fork", "ada", "b", "b"), "the new agents' names must differ"),
        (("fork", "ada", "b", "ada"), "exists already"),
        (("fork", "ada", "a\x1eb"), "must not be empty or a checkpoint's"),
        (("fork", "ada", "b", "--turn", "3"), "turn must be 1 to 2"),
        (("fork", "ada", "b", "--at", "x"), "has no checkpoint 'x'; it has none"),
        (("checkpoint", "ada", "a\nb"), "printable"),
        (("checkpoint", "ada", "--turn", "1"), "expected the name of a CHECKPOINT"),
        (("checkpoint", "ada", "--delete"), "expected the name of a CHECKPOINT"),
        (("checkpoint", "eve", "x"), "no agent eve"),
        (("done", "eve"), "no agent eve"),
        (("diff", "ada", "eve"), "no agent eve"),
    ],
)
def test_what_cannot_be(arguments: tuple[str, ...], said: str) -> None:
    assert said in refused(*arguments)


def test_a_taken_name_is_not_taken_again() -> None:
    agents("checkpoint", "ada", "x")
    assert "ada has a checkpoint x already" in refused("checkpoint", "ada", "x")


def test_a_tree_of_all_agents_or_of_one() -> None:
    with disk_store() as store:
        new_agent(store, "other", seed=3)
    agents("fork", "ada", "b", "c")
    agents("fork", "b", "b1")
    agents("checkpoint", "b", "mark")
    lines = agents("tree", "ada").out.splitlines()
    shown = [line.partition(f"{N_TOKENS} tokens")[0].rstrip() for line in lines]
    assert shown == ["ada", "  b", "    @mark", "    b1", "  c"]
    found = asked("tree")["agents"]
    assert isinstance(found, list)
    rows = {(one["name"], one["depth"], one["checkpoint"]) for one in found}
    assert rows == {
        ("ada", 0, False), ("b", 1, False), ("b1", 2, False), ("mark", 2, True), ("c", 1, False),
        ("other", 0, False),
    }  # fmt: skip


def test_a_family_that_is_done_is_forgotten_whole() -> None:
    agents("fork", "ada", "b", "c")
    agents("checkpoint", "b", "mark")
    assert "no terminal; add --yes" in refused("done", "ada")
    assert agents("done", "b").out == "b is forgotten\n"
    assert agents("done", "ada", "--yes").out == "ada is forgotten\nc is forgotten\n"
    with disk_store() as store:
        assert list(saved_agents(store)) == []


def test_rm_takes_checkpoints_along() -> None:
    agents("checkpoint", "ada", "mark")
    assert agents("rm", "ada").code == 0
    with disk_store() as store:
        assert list(saved_agents(store)) == []


def test_a_diff_says_where_two_histories_part() -> None:
    agents("fork", "ada", "b", "--turn", "1")
    document = asked("diff", "ada", "b")
    assert (document["common_tokens"], document["other_tokens"]) == (FIRST, FIRST)
    assert document["shared_blocks"] == FIRST // 256
    assert document["other_token"] is None
    assert isinstance(document["token"], int)
    assert agents("diff", "ada", "b").out.splitlines() == [
        f"both begin with {FIRST} tokens and share {FIRST // 256} blocks",
        f"ada has {N_TOKENS} tokens, next token {document['token']}",
        f"b has {FIRST} tokens, and ends there",
    ]


def test_every_command_is_tested_here() -> None:
    assert set(BRANCH_COMMANDS) == {"checkpoint", "restore", "tree", "diff"}
