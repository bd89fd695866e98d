"""`semantic demo`: it shows what it promises, and notices when it does not hold."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from semantic.cli import demo
from semantic.cli.demo import CAST, Answer, Recall, child, script, table
from semantic.composition.engine_settings import Settings
from semantic.composition.process_stores import default_store_folder
from semantic.domain.errors import BackendError
from tests.cli.support import semantic
from tests.support.lanes import more

pytestmark = pytest.mark.process

_STYLE = re.compile(r"\x1b\[[0-9;]*m")
COLD = Answer("Your name is Vera.", 300, 0, 1.0)
CACHED = Answer("Your name is Vera.", 300, 290, 0.1)
RECALL = Recall("ada", "What is my name?", CACHED, CACHED, (COLD, COLD), ())


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
    assert document["interrupted"].startswith("1, 2,")
    for agent in document["agents"]:
        for answer, cold in zip((agent["resumed"], agent["restored"]), agent["cold"], strict=True):
            assert answer["text"] == cold["text"]
            assert answer["prompt_tokens"] == cold["prompt_tokens"]
            assert answer["prompt_tokens"] - answer["cached_tokens"] < 30
            assert cold["cached_tokens"] == 0
            assert answer["seconds"] > 0
    assert not default_store_folder().exists()
    assert list(tmp_path.glob("semantic-demo-*")) == []


def test_it_tells_and_fails_when_an_agent_forgot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "CAST", (CAST[0]._replace(words=("Vera", "Basel")),))
    ran = semantic("demo")
    assert ran.code == 1
    assert "ada: Once there was a dragon." in ran.out
    assert "ada: What is my name" in ran.out
    assert "FAILED: ada was told Basel but did not say so" in ran.out
    assert "Vera and did not" not in ran.out


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


def test_what_depends_on_a_cache_is_named() -> None:
    assert RECALL.failures == []
    other = replace(COLD, text="Your name is Kai.")
    found = replace(RECALL, cold=(other, COLD)).failures
    assert found == ["ada resumed answers differently without a cache: Your name is Kai."]
    found = replace(RECALL, restored=COLD, missing=("Vera",)).failures
    assert found == [
        "ada was told Vera but did not say so",
        "ada restored computes everything again",
    ]


def test_the_table_has_a_line_for_each_way() -> None:
    cold, resumed, restored, batch = (_STYLE.sub("", line) for line in table([RECALL, RECALL], 80))
    assert cold == "without a cache     600 tokens computed, first tokens after 2.00 s"
    assert resumed.endswith("20 tokens computed, first tokens after 200.0 ms, 10.0 x sooner")
    assert restored.startswith("after kill -9")
    assert batch.endswith("2 agents, 80 tokens/s together")


def test_a_script_says_the_facts_first_and_ends_with_the_task() -> None:
    for role in CAST:
        said = script(role)
        assert said[0]["content"] == role.told
        assert said[-1]["content"] == role.task
        assert [one["role"] for one in said[:-1]] == ["user", "assistant"] * (len(said) // 2)
