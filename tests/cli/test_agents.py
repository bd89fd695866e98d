"""`semantic agents`: what the store keeps is listed, shown, forked, pinned, moved and explained."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from semantic.application.cache.agent_notes import origin_of
from semantic.cli import agents as agents_command
from semantic.cli.agents import AGENT_COMMANDS
from semantic.cli.report import columns, fitted, show_age, show_name
from semantic.domain.block_hash import tenant_id
from semantic.domain.identity import Identity
from semantic.domain.match import CacheMiss, MatchEnd, MatchReport
from semantic.domain.request_parts import Change, Difference, PartKind
from semantic.domain.stored import Manifest
from tests.cli.stocked import (
    BLOCKS,
    BODY_BYTES,
    N_TOKENS,
    block_files,
    changed,
    disk_store,
    new_agent,
)
from tests.cli.support import Ran, environment, process, semantic
from tests.support.store_blocks import header, saved_agents

HOSTILE = [
    "../../../../etc/passwd",
    "/etc",
    "a\nb",
    "\x1b[31mred",
    "🦊🦊",
    "x" * 10_000,
    "-x",
    "a b",
]
LISTED = {
    "name", "model", "model_id", "tokens", "blocks", "stored_blocks", "bytes", "shared_bytes",
    "pinned", "turns", "parent", "session", "client", "saved_at",
}  # fmt: skip


def agents(*arguments: str) -> Ran:
    return semantic("agents", *arguments)


def asked(*arguments: str) -> dict[str, object]:
    """The document that a command prints with --json."""
    ran = agents(arguments[0], "--json", *arguments[1:])
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.count("\n") == 1
    document = json.loads(ran.out)
    assert isinstance(document, dict)
    return document


def names() -> list[object]:
    listed = asked("ls")["agents"]
    assert isinstance(listed, list)
    return [one["name"] for one in listed]


@pytest.fixture
def ada() -> Manifest:
    with disk_store() as store:
        return new_agent(store)


# Looking


def test_an_empty_store_has_no_agents() -> None:
    assert agents("ls").out == "no agents\n"
    assert asked("ls") == {"agents": [], "other_tenants": 0}


def test_ls_lists_what_each_agent_has_and_shares() -> None:
    with disk_store() as store:
        new_agent(store, "ada")
        new_agent(store, "ben", seed=1)
        new_agent(store, "secret", tenant="somebody")
    assert agents("fork", "ada", "eve").code == 0
    document = asked("ls")
    assert document["other_tenants"] == 1
    listed = document["agents"]
    assert isinstance(listed, list)
    assert all(set(one) == LISTED for one in listed)
    assert [one["name"] for one in listed] == ["eve", "ben", "ada"]
    eve, ben, ada = listed
    assert (ada["tokens"], ada["blocks"], ada["stored_blocks"]) == (N_TOKENS, BLOCKS, BLOCKS)
    assert (ada["bytes"], ada["shared_bytes"]) == (BODY_BYTES, BODY_BYTES)
    assert (ben["bytes"], ben["shared_bytes"]) == (BODY_BYTES, 0)
    assert (eve["parent"], ada["parent"]) == ("ada", None)
    text = agents("ls").out.splitlines()
    assert text[0].split() == [
        "name", "tokens", "saved", "blocks", "on", "disk", "turns", "pinned", "shared", "parent",
        "client", "session", "model", "model", "id",
    ]  # fmt: skip
    assert [line.split()[0] for line in text[1:]] == ["eve", "ben", "ada", "and"]
    assert "secret" not in agents("ls").out


@pytest.mark.parametrize("width", [60, 80, 120])
def test_ls_fits_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names stay apart by their ends; a pipe gets every name and column whole."""
    with disk_store() as store:
        given = [f"project/{'sub' * 13}/agent-{number}" for number in range(2)]
        for seed, name in enumerate(given):
            new_agent(store, name, seed=seed)
    piped = agents("ls").out
    monkeypatch.setattr("semantic.cli.agents.terminal_width", lambda: width)
    head, *rows = agents("ls").out.splitlines()
    assert head.split()[:3] == ["name", "tokens", "saved"]
    assert ("on disk" in head, "shared" in head) == (True, width > 80)
    assert [re.findall(r"^project/.*/agent-(\d)  ", row) for row in rows] == [["1"], ["0"]]
    assert max(map(len, (head, *rows))) <= width
    assert agents("ls", "--wide").out == piped
    assert all(name in piped for name in given)


def test_a_table_fits_wide_characters_and_the_narrowest_terminal() -> None:
    rows = [("name", "n", "more"), ("语" * 40, "12", "x" * 30), ("a", "3", "")]
    assert fitted(rows, None) == columns(rows)
    assert fitted(rows, 100)[1].startswith("语" * 16 + "…" + "语" * 15)
    assert fitted(rows, 30) == [
        "name".ljust(25) + "  n",
        "语" * 6 + "…" + "语" * 6 + "  12",
        "a".ljust(25) + "  3",
    ]
    assert fitted(rows, 10) == ["name", "语语…语语", "a"]


def test_the_owner_of_the_folder_manages_the_agents_of_every_tenant() -> None:
    with disk_store() as store:
        new_agent(store, "ada")
        agent = new_agent(store, "secret", tenant="somebody")
        of = tenant_id(store.secret, agent.scope.tenant)
    changed("secret", pinned=True)
    listed = asked("ls", "--all-tenants")["agents"]
    assert isinstance(listed, list)
    found = {one["name"]: (one["tenant"], one["pinned"]) for one in listed}
    assert found == {"ada": ("local", False), "secret": (of, True)}
    assert agents("ls", "--all-tenants").out.splitlines()[1].startswith(f"secret  {of}")
    assert asked("ls", "--tenant", "local")["other_tenants"] == 1
    assert asked("show", "secret", "--tenant", of)["pinned"] is True
    assert agents("pin", "secret", "--off", "--tenant", of).code == 0
    assert asked("show", "secret", "--tenant", of)["pinned"] is False
    assert agents("rm", "secret", "--tenant", "x").code == 2
    assert agents("rm", "secret").code == 2
    assert asked("rm", "secret", "--tenant", of)["removed"] is True
    assert asked("ls", "--all-tenants")["other_tenants"] == 0
    assert (
        f"there are no agents of tenant {of}; expected one of local"
        in agents("ls", "--tenant", of).err
    )


def test_ls_says_whose_agents_they_are() -> None:
    asker = Identity("ses_1", "opencode", None, "opencode/ses_0")
    with disk_store() as store:
        new_agent(store, asker.name)
    changed(asker.name, note=origin_of(asker, None).note())
    listed = asked("ls")["agents"]
    assert isinstance(listed, list)
    told = [(one["session"], one["client"], one["parent"]) for one in listed]
    assert told == [("ses_1", "opencode", "opencode/ses_0")]
    line = agents("ls").out.splitlines()[1]
    assert re.search("opencode/ses_0 +opencode +ses_1", line)


def test_show_says_which_blocks_are_there(ada: Manifest) -> None:
    block_files()[0].unlink()
    document = asked("show", "ada")
    assert set(document) == LISTED | {"prompt_tokens", "note", "match", "chain"}
    chain = document["chain"]
    assert isinstance(chain, list)
    assert [(one["start"], one["stop"]) for one in chain] == [(0, 256), (256, 512), (512, 700)]
    links = list(ada.scope.chain(ada.token_ids))
    assert [one["hash"] for one in chain] == [link.hash.hex() for link in links]
    assert [bool(one["parts"]) for one in chain].count(False) == 1
    assert agents("show", "ada").out.count("missing") == 1
    assert "2 of 3" in agents("ls").out


@pytest.mark.process
def test_looking_loads_no_framework_and_no_model(ada: Manifest) -> None:
    code = (
        "import sys; from semantic.cli.main import app; "
        "app(['agents', 'ls'], standalone_mode=False); app(['agents', 'why', 'ada'], "
        "standalone_mode=False); print([m for m in ('mlx', 'mlx_lm', 'transformers', 'numpy') "
        "if m in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment()
    )
    assert ran.stdout.endswith("[]\n")
    assert ada.agent_id in ran.stdout


@pytest.mark.process
def test_a_program_lists_too(ada: Manifest) -> None:
    ran = process("agents", "ls")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines()[1].startswith(ada.agent_id)


# Finding the agent that is meant


def test_an_unknown_name_is_an_error_of_the_request() -> None:
    for command in ("show", "pin", "rm", "why"):
        ran = agents(command, "nobody")
        assert (ran.code, ran.out) == (2, "")
        assert ran.err == (
            "error: no agent nobody in this store; `semantic agents ls` lists them\n"
        )


def test_an_agent_of_another_tenant_is_unknown() -> None:
    with disk_store() as store:
        new_agent(store, "ada", tenant="somebody")
    assert agents("show", "ada").code == 2
    assert agents("rm", "ada").code == 2


def test_of_several_models_one_must_be_named(ada: Manifest) -> None:
    with disk_store() as store:
        other = new_agent(store, "ada", model="other")
    ran = agents("rm", "ada")
    assert ran.code == 2
    own, others = (one.scope.namespace.hex() for one in (ada, other))
    assert "exists for several of these models: " in ran.err
    assert f"{own[:12]} (tiny)" in ran.err
    assert f"{others[:12]} (other)" in ran.err
    assert len(ran.error_lines) == 1
    assert "'zz' begins the id of none" in agents("rm", "ada", "--model-id", "zz").err
    assert agents("rm", "ada", "--model-id", others[:6].upper()).code == 0
    assert asked("show", "ada")["model"] == "tiny"


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_only_a_name(ada: Manifest, name: str, tmp_path: Path) -> None:
    assert agents("fork", ada.agent_id, "--", name).code == 0
    assert name in names()
    assert asked("show", "--", name)["name"] == name
    for line in agents("ls").out.splitlines():
        assert line.isprintable()
        assert len(line) < 300
    assert agents("export", "--", name, str(tmp_path / "out")).code == 0
    assert agents("rm", "--", name).code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.safetensors"]


def test_a_zero_byte_in_a_name_is_only_a_character(ada: Manifest) -> None:
    assert agents("fork", ada.agent_id, "a\0b").code == 0
    assert r"a\x00b" in agents("ls").out
    assert agents("show", "a\0").code == 2


# Changing


def test_a_fork_has_everything_and_copies_nothing(ada: Manifest) -> None:
    changed("ada", pinned=True, turns=3, match=MatchReport(5, 0, MatchEnd.NEW, "none"))
    files = block_files()
    before = time.time()
    assert asked("fork", "ada", "eve") == {"name": "eve", "parent": "ada", "tokens": N_TOKENS}
    assert block_files() == files
    eve = asked("show", "eve")
    assert (eve["tokens"], eve["note"], eve["prompt_tokens"]) == (N_TOKENS, "hello", N_TOKENS - 100)
    assert (eve["parent"], eve["pinned"], eve["turns"]) == ("ada", False, 0)
    assert eve["match"] is None
    assert before - 1 <= float(str(eve["saved_at"])) <= time.time() + 1, "whole seconds, or parts"
    with disk_store() as store:
        for link in ada.scope.chain(ada.token_ids):
            assert store.read(header(link)) is not None


def test_a_pin_is_no_turn(ada: Manifest) -> None:
    changed(ada.agent_id, turns=3)
    assert agents("pin", "ada").code == agents("pin", "ada", "--off").code == 0
    assert asked("show", "ada")["turns"] == 3


def test_a_fork_never_takes_the_place_of_an_agent(ada: Manifest) -> None:
    with disk_store() as store:
        new_agent(store, "ben", seed=1)
    ran = agents("fork", "ada", "ben")
    assert (ran.code, ran.err) == (2, "error: an agent ben of this model exists already\n")
    assert agents("fork", "ada", "ada").code == 2
    assert agents("fork", "ada", "").code == 2
    assert asked("show", "ben")["parent"] is None
    assert ada.parent is None


def test_a_pin_is_kept_and_taken_off(ada: Manifest) -> None:
    assert asked("pin", "ada") == {"name": "ada", "pinned": True}
    assert asked("show", "ada")["pinned"] is True
    assert asked("show", "ada")["saved_at"] == ada.saved_at
    assert agents("pin", "ada").out == "ada is now pinned\n"
    with disk_store() as store:
        (saved,) = saved_agents(store)
    assert saved.generation == 2  # what is pinned already is not saved again
    assert agents("pin", "ada", "--off").out == "ada is no longer pinned\n"
    assert asked("show", "ada")["pinned"] is False


def test_rm_forgets_the_agent_and_leaves_its_blocks_to_others(ada: Manifest) -> None:
    assert agents("fork", "ada", "eve").code == 0
    assert asked("rm", "ada") == {"name": "ada", "removed": True}
    assert agents("rm", "ada").code == 2
    assert names() == ["eve"]
    assert asked("show", "eve")["bytes"] == BODY_BYTES
    assert ada.agent_id == "ada"


@pytest.fixture
def several(ada: Manifest) -> Manifest:
    """Beside ada: a1, a2 and b, which comes from ada; a2 is pinned."""
    for name in ("a1", "a2", "b"):
        assert agents("fork", "ada", name).code == 0
    changed("a1", parent=None)
    changed("a2", parent=None, pinned=True)
    return ada


def test_rm_takes_several_names_and_asks_once(
    several: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = agents("rm", "b", "a1")
    assert (refused.code, refused.out) == (2, "")
    assert (
        refused.err
        == "error: cannot ask whether to forget 2 agents: b, a1: no terminal; add --yes\n"
    )
    monkeypatch.setattr(agents_command, "is_interactive", lambda: True)
    no = semantic("agents", "rm", "b", "a1", stdin="n\n")
    assert no.code == 1
    assert no.err.startswith("Forget 2 agents: b, a1? [y/N]")
    assert sorted(map(str, names())) == ["a1", "a2", "ada", "b"]
    yes = semantic("agents", "rm", "b", "a1", "b", stdin="y\n")
    assert yes.code == 0
    assert yes.out.endswith("b is forgotten\na1 is forgotten\n")
    assert sorted(map(str, names())) == ["a2", several.agent_id]


def test_with_an_unknown_name_nothing_is_forgotten(several: Manifest) -> None:
    ran = agents("rm", "a1", "nobody", several.agent_id, "--yes")
    assert (ran.code, ran.out) == (2, "")
    assert "no agent nobody in this store" in ran.err
    assert len(names()) == 4


@pytest.mark.parametrize(
    ("only", "forgotten"),
    [
        (("--prefix", "a"), ["a1", "a2", "ada"]),
        (("--prefix", "a", "--unpinned"), ["a1", "ada"]),
        (("--pinned",), ["a2"]),
        (("--parent", "ada"), ["b"]),
        (("--prefix", "x"), []),
        (("--prefix", "a", "--model-id", "zz"), []),
    ],
)
def test_rm_takes_the_filters_of_ls(
    several: Manifest, only: tuple[str, ...], forgotten: list[str]
) -> None:
    del several
    everybody = ["a1", "a2", "ada", "b"]
    if "--model-id" not in only:
        listed = asked("ls", *only)
        assert sorted(one["name"] for one in listed["agents"]) == forgotten  # type: ignore[attr-defined]
    assert agents("rm", *only).code == (2 if forgotten else 0)
    assert sorted(map(str, names())) == everybody
    removed = asked("rm", *only, "--yes")["agents"]
    assert isinstance(removed, list)
    assert sorted(one["name"] for one in removed) == forgotten
    assert all(one["removed"] for one in removed)
    assert sorted(map(str, names())) == [one for one in everybody if one not in forgotten]


def test_rm_needs_names_or_a_filter(ada: Manifest) -> None:
    for given in ((), (ada.agent_id, "--pinned"), ("--yes",)):
        ran = agents("rm", *given)
        assert ran.code == 2
        assert "expected either names of agents, or --prefix, --parent or --pinned" in ran.err
    assert names() == [ada.agent_id]


def test_a_filtered_list_says_how_many_more_there_are(several: Manifest) -> None:
    del several
    found = asked("ls", "--prefix", "a", "--limit", "2")
    assert (len(found["agents"]), found["more"]) == (2, 1)  # type: ignore[arg-type]


# Moving


def test_an_agent_moves_to_another_store(ada: Manifest, tmp_path: Path) -> None:
    written = asked("export", "ada", str(tmp_path / "ada.json"))
    assert written == {
        "name": "ada",
        "blocks": BLOCKS,
        "stored_blocks": BLOCKS,
        "bytes": BODY_BYTES,
        "files": [str(tmp_path / "ada.safetensors"), str(tmp_path / "ada.json")],
    }
    there = ("--store", str(tmp_path / "other"))
    read = asked("import", str(tmp_path / "ada.safetensors"), *there)
    assert read == {
        "name": "ada",
        "model_id": ada.scope.namespace.hex(),
        "tokens": N_TOKENS,
        "bodies": BLOCKS,
        "bytes": BODY_BYTES,
    }
    shown = asked("show", "ada", *there)
    assert (shown["tokens"], shown["bytes"], shown["note"]) == (N_TOKENS, BODY_BYTES, "hello")
    with disk_store() as here, disk_store(tmp_path / "other") as other:
        (moved,) = saved_agents(other)
        chains = (agent.scope.chain(agent.token_ids) for agent in (ada, moved))
        for ours, theirs in zip(*chains, strict=True):
            assert ours.hash != theirs.hash
            assert here.read(header(ours)) == other.read(header(theirs)) is not None


def test_an_export_names_the_model_and_not_its_folder(ada: Manifest, tmp_path: Path) -> None:
    changed("ada", model="/folders/models/tiny")
    assert agents("export", "ada", str(tmp_path / "x")).code == 0
    for path in tmp_path.iterdir():
        assert b"/folders" not in path.read_bytes()
    assert json.loads((tmp_path / "x.json").read_bytes())["model"] == "tiny"
    there = ("--store", str(tmp_path / "other"))
    assert agents("import", str(tmp_path / "x"), *there).code == 0
    assert asked("show", "ada", *there)["model"] == "tiny"
    # Beside an agent of that model it is read from where that one's is.
    assert agents("import", str(tmp_path / "x"), "--as", "eve").code == 0
    assert asked("show", "eve")["model"] == asked("show", ada.agent_id)["model"]


def test_an_import_never_takes_the_place_of_an_agent(ada: Manifest, tmp_path: Path) -> None:
    file = str(tmp_path / "x")
    assert agents("export", ada.agent_id, file).code == 0
    ran = agents("import", file)
    assert (ran.code, ran.out) == (2, "")
    assert "use --as to rename it" in ran.err
    assert agents("import", file, "--as", "eve").out.startswith("eve: 700 tokens, ")
    assert sorted(map(str, names())) == ["ada", "eve"]


def test_a_damaged_file_is_refused_with_one_line(ada: Manifest, tmp_path: Path) -> None:
    assert agents("export", ada.agent_id, str(tmp_path / "x")).code == 0
    bodies = tmp_path / "x.safetensors"
    data = bytearray(bodies.read_bytes())
    data[-1] ^= 1
    bodies.write_bytes(data)
    ran = agents("import", str(bodies), "--as", "eve")
    assert (ran.code, ran.out) == (2, "")
    assert re.fullmatch(
        r"error: .*x\.safetensors: body 000002\.full is damaged: its checksum does not match\n",
        ran.err,
    )
    assert names() == ["ada"]
    assert agents("export", ada.agent_id, str(bodies)).code == 2


# Why


def test_why_knows_nothing_of_an_agent_that_was_not_asked_yet(ada: Manifest) -> None:
    assert agents("why", ada.agent_id).out == ("ada has had no prompt since its fork or import\n")
    assert asked("why", ada.agent_id) == {"name": "ada", "match": None, "prompt": None}


def test_why_says_where_a_prompt_parted_and_what_that_cost(ada: Manifest) -> None:
    match = MatchReport(900, 512, MatchEnd.DIVERGED, "disk", 512, 17, 23, 1.5)
    changed(ada.agent_id, match=match)
    assert agents("why", "ada").out.splitlines() == [
        "ada's last prompt: 900 tokens, 512 reused from disk, 388 computed, which took 1.50 s",
        "The prompt differs from the agent's history.",
        "At position 512 the agent had token 17, the prompt has token 23.",
    ]
    document = asked("why", "ada")["match"]
    assert isinstance(document, dict)
    assert document == {
        "prompt_tokens": 900, "reused_tokens": 512, "end": "diverged", "source": "disk",
        "differs_at": 512, "expected": 17, "got": 23, "seconds": 1.5, "computed_tokens": 388,
        "expected_text": None, "got_text": None,
        "reason": "The prompt differs from the agent's history.",
        "lost": None, "any_chip": False,
    }  # fmt: skip


@pytest.mark.parametrize("end", list(MatchEnd))
def test_every_end_has_words(ada: Manifest, end: MatchEnd) -> None:
    changed(ada.agent_id, match=MatchReport(9, 0, end, "none", differs_at=4))
    first, reason, last = agents("why", "ada").out.splitlines()
    assert first == "ada's last prompt: 9 tokens, 0 reused, 9 computed, which took 0.0 ms"
    assert reason.endswith(".")
    assert "position 4, where one ends" in last


def test_why_names_the_part_that_changed_and_what_it_cost(ada: Manifest) -> None:
    tool = Difference(PartKind.TOOL, Change.CHANGED, 7, "Bash")
    lost = CacheMiss(380, 1.25, tool)
    match = MatchReport(900, 512, MatchEnd.DIVERGED, "disk", 512, 17, 23, 1.5, lost)
    changed(ada.agent_id, match=match)
    assert agents("why", "ada").out.splitlines()[2:] == [
        "At position 512 the agent had token 17, the prompt has token 23.",
        "The model computed 380 cached tokens again in 1.25 s: Tool 7 (Bash) changed.",
    ]
    document = asked("why", "ada")["match"]
    assert isinstance(document, dict)
    assert document["lost"] == {
        "tokens": 380,
        "seconds": 1.25,
        "part": {"kind": "tool", "change": "changed", "number": 7, "name": "Bash"},
        "reason": "Tool 7 (Bash) changed.",
    }


def test_why_says_that_nothing_changed_and_the_cache_lacks_something(ada: Manifest) -> None:
    match = MatchReport(900, 256, MatchEnd.MISSING, "disk", seconds=1.5, lost=CacheMiss(400, 1.25))
    changed(ada.agent_id, match=match)
    assert agents("why", "ada").out.splitlines()[-1] == (
        "The model computed 400 cached tokens again in 1.25 s: "
        "The next block is missing: evicted, dropped or never saved."
    )


def test_why_reads_tokens_as_text_when_asked(ada: Manifest) -> None:
    match = MatchReport(900, 512, MatchEnd.DIVERGED, "disk", 512, 300, 301, 1.5)
    changed(ada.agent_id, match=match, model="semantic-tiny")
    assert re.search(r"token 300 \('.+'\), the prompt has token 301 \('.+'\)",
                     agents("why", "ada", "--text").out)  # fmt: skip


def test_why_says_which_model_has_no_tokenizer(ada: Manifest) -> None:
    ran = agents("why", ada.agent_id, "--prompt", "hello")
    assert ran.code == 2
    assert len(ran.error_lines) == 1
    assert "no model folder 'tiny'" in ran.err


# Helps and numbers


@pytest.mark.parametrize("command", list(AGENT_COMMANDS))
def test_every_command_explains_itself(command: str) -> None:
    ran = agents(command, "--help")
    assert ran.code == 0
    first = (AGENT_COMMANDS[command].__doc__ or "").split("\n")[0].split(".")[0].split(",")[0]
    assert first in " ".join(ran.out.split())
    for option in ("--store", "--json", "--disk-gb"):
        assert option in ran.out


def test_the_store_may_be_named_before_the_command(ada: Manifest, tmp_path: Path) -> None:
    with disk_store(tmp_path / "s"):
        pass
    assert semantic("--store", str(tmp_path / "s"), "agents", "ls").out == "no agents\n"
    assert ada.agent_id in agents("ls").out


def test_a_name_shows_no_control_characters_and_ends() -> None:
    assert show_name("é 🦊") == "é 🦊"
    assert show_name("a\x1b[0m\n\u202e\ud800") == r"a\x1b[0m\n\u202e\ud800"
    assert len(show_name("x" * 1000)) == 61


def test_ages_are_rough(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    ages = [show_age(now - seconds) for seconds in (-5, 1, 60, 200, 8000, 900_000)]
    assert ages == ["now", "now", "60 seconds ago", "3 minutes ago", "2 hours ago", "10 days ago"]


def test_columns_line_up() -> None:
    assert columns([("a", "b"), ("long", "c")]) == ["a     b", "long  c"]
