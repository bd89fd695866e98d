"""`semantic demo`: it shows what it promises, and notices when it does not hold."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from semantic.cli import demo
from semantic.cli.demo import CAST, Answer, Recall, child, script, shown, table
from semantic.composition.engine_settings import Settings
from semantic.composition.process_stores import default_store_folder
from semantic.domain.errors import BackendError
from tests.cli.support import semantic
from tests.support.lanes import more

pytestmark = pytest.mark.process

_STYLE = re.compile(r"\x1b\[[0-9;]*m")
COLD = Answer("Your name is Vera.", 300, 0, 1.0)
CACHED = Answer("Your name is Vera.", 300, 290, 0.1)
RECALL = Recall(CAST[0]._replace(words=("Vera",)), CACHED, CACHED, COLD)


@pytest.mark.exact
@pytest.mark.parametrize("sums", [(1, 2, 3), *more((5, 40, 100))])
def test_it_prints_one_document_with_every_number(
    sums: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cast = [role._replace(n_sums=n) for role, n in zip(CAST, sums, strict=True)]
    monkeypatch.setattr(demo, "CAST", tuple(cast))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ran = semantic("demo", "--json")
    assert (ran.code, ran.err) == (0, "")
    document = json.loads(ran.out)
    assert document["passed"] is True
    assert document["failures"] == []
    assert list(document["batch"]["texts"]) == ["ada", "ben", "cleo"]
    assert document["interrupted"].startswith("Once there was a fox.")
    for agent in document["agents"]:
        cold = agent["cold"]
        assert agent["role"]["question"].startswith("What is my ")
        assert cold["cached_tokens"] == 0
        for answer in (agent["resumed"], agent["restored"]):
            assert answer["text"] == cold["text"]
            assert answer["prompt_tokens"] == cold["prompt_tokens"]
            assert answer["prompt_tokens"] - answer["cached_tokens"] < 30
            assert answer["seconds"] > 0
    assert not default_store_folder().exists()
    assert list(tmp_path.glob("semantic-demo-*")) == []


def test_it_tells_and_fails_when_an_agent_forgot(monkeypatch: pytest.MonkeyPatch) -> None:
    # An answer of a few words: the process answers again until the demo kills it.
    role = CAST[0]._replace(task="What is 3 plus 4?", words=("Vera", "Basel"))
    monkeypatch.setattr(demo, "CAST", (role,))
    ran = semantic("demo")
    assert ran.code == 1
    assert "\n      > 3 plus 4 is 7.\n" in ran.out
    assert "\n      > 3 plus 4 is 7.3 plus" in ran.out
    assert "\nada   < What is my name, my city and my pet?\n      > Your name is Vera." in ran.out
    assert "\nFAILED: ada was told Basel but did not say so\n" in ran.out
    assert "told Vera" not in ran.out


def test_every_agent_has_its_own_story_and_no_line_wraps() -> None:
    assert len({word for role in CAST for word in role.words}) == sum(len(r.words) for r in CAST)
    for role in CAST:
        assert all(word in role.told for word in role.words)
        long = shown(role.agent, role.told, "A long answer.\n" * 20).splitlines()
        assert long[0].endswith(f" < {role.told}")
        assert long[1].endswith(" A long …")
        assert max(map(len, long)) < 80


def test_a_process_that_ends_by_itself_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with child(Settings("nowhere"), CAST) as lines, pytest.raises(typer.Exit) as ended:
        next(lines)
    assert ended.value.exit_code == 2
    monkeypatch.setattr("sys.executable", "true")
    with (
        child(Settings(), CAST) as lines,
        pytest.raises(BackendError, match="ended before it had answered"),
    ):
        next(lines)


def test_ctrl_c_does_not_reach_the_process_that_the_demo_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\nimport os\nprint(os.getpgrp() == os.getpid())\n")
    program.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(program))
    with child(Settings(), CAST) as lines:
        assert next(lines) == "True\n"


def test_what_depends_on_a_cache_is_named() -> None:
    assert RECALL.failures == []
    other = replace(CACHED, text="Your name is Kai.")
    found = replace(RECALL, resumed=other).failures
    assert found == ["ada resumed answers differently without a cache: Your name is Vera."]
    told = CAST[0]._replace(words=("Vera", "Lisbon"))
    found = replace(RECALL, role=told, restored=COLD).failures
    assert found == [
        "ada was told Lisbon but did not say so",
        "ada restored computes everything again",
    ]


def test_the_table_has_a_line_for_each_way() -> None:
    lines = table([RECALL, RECALL], 80)
    cold, resumed, restored, batch = (_STYLE.sub("", line) for line in lines)
    assert cold == "without a cache     600 tokens computed, text after 2.00 s"
    assert resumed.endswith("20 tokens computed, text after 200.0 ms, 10.0 x sooner")
    assert "\x1b[1m10.0 x\x1b[0m" in lines[1]
    assert restored.startswith("after kill -9")
    assert batch.endswith("2 agents, 80 tokens/s together")


def test_a_script_says_the_facts_first_and_ends_with_the_task() -> None:
    for role in CAST:
        said = script(role)
        assert said[0]["content"] == role.told
        assert said[-1]["content"] == role.task
        assert [one["role"] for one in said[:-1]] == ["user", "assistant"] * (len(said) // 2)
