"""`semantic demo`: it shows what it promises, and notices when it does not hold."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from semantic.cli.conversation import message
from semantic.cli.demo import command as module
from semantic.cli.demo.command import Recall, Restart, Row, Survival, line_view, table_view
from semantic.cli.demo.script import CAST, script
from semantic.cli.demo.worker import Question, Setup, Worker
from semantic.composition.process_stores import default_store_folder
from semantic.domain.errors import BackendError
from tests.cli.support import semantic
from tests.support.fake_tokenizer import ByteTokenizer
from tests.support.lanes import more


def recall(missing: tuple[str, ...] = (), *, same_tokens: bool = True) -> Recall:
    return Recall(
        agent="ada",
        told="My name is Vera.",
        question="What is my name?",
        answer="Your name is Vera.",
        cold_answer="Your name is Kai.",
        missing=missing,
        same_tokens=same_tokens,
        prompt_tokens=300,
        cached_tokens=290,
        blocks=10,
        n_bytes=1000,
        ttft_cold_seconds=1.0,
        ttft_resumed_seconds=0.1,
    )


def test_it_ends_well_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CAST", (CAST[0], replace(CAST[1], tokens=200)))
    monkeypatch.setattr(module, "LATE", "ben")
    monkeypatch.setattr(module.Stage, "restart", lambda *_: Restart("1, 2,", (survival(),)))
    ran = semantic("demo")
    assert (ran.code, ran.err) == (0, "")
    assert "2 agents decoded in one batch; ben joined late." in ran.out
    assert "ben: prefill" in ran.out.split("ada: decode")[1]
    assert "ada: resumed" in ran.out
    for word in (*CAST[0].expected, *CAST[1].expected):
        assert word in ran.out.split("in one batch")[1]
    assert "restored: 290 of 300 prompt tokens from disk" in ran.out
    assert "every answer equals one without a cache" in ran.out


def survival(
    missing: tuple[str, ...] = (), *, same_tokens: bool = True, restored: int = 290
) -> Survival:
    return Survival(
        agent="ada",
        question="What is my name?",
        answer="Your name is Vera.",
        cold_answer="Your name is Kai.",
        missing=missing,
        same_tokens=same_tokens,
        prompt_tokens=300,
        restored_tokens=restored,
        source="disk" if restored else "none",
        ttft_cold_seconds=1.0,
        ttft_restored_seconds=0.1,
    )


def test_what_a_restart_lost_is_named() -> None:
    assert Restart("1, 2,", (survival(), survival())).failures == []
    assert survival(("Vera",)).failures == ["ada forgot Vera in the restart"]
    (difference,) = survival(same_tokens=False).failures
    assert "than without a cache: Your name is Kai." in difference
    assert survival(restored=0).failures == ["nothing of ada was restored from disk"]
    assert "restored: 290 of 300 prompt tokens from disk; 10 prefilled" in "\n".join(
        survival().lines()
    )


@pytest.mark.process
def test_a_worker_that_ends_by_itself_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("", encoding="ascii")
    setup = Setup("semantic-tiny", str(tmp_path))
    with Worker(setup) as worker, pytest.raises(BackendError, match="the worker process ended"):
        worker.answer(Question("ada", "Hello!", 4))


@pytest.mark.exact
@pytest.mark.process
def test_a_killed_worker_forgets_nothing_that_was_said_before(tmp_path: Path) -> None:
    setup = Setup("semantic-tiny", str(tmp_path / "store"), pool_blocks=100)
    history = [message("user", "My name is Kai."), message("assistant", "Nice to meet you, Kai.")]
    with Worker(setup) as worker:
        first = worker.answer(Question("kai", "What is 3 plus 4?", 64, history))
        replies = worker.replies(Question("kai", "Count to 99.", 400))
        assert "1" in str(next(replies))
        worker.kill()
    with Worker(setup) as worker:
        second = worker.answer(Question("kai", "What is my name?", 64))
    assert second.text == "Your name is Kai."
    assert second.source == "disk"
    before = [*first.prompt, *first.tokens]
    assert second.prompt[: len(before)] == before
    assert second.cached_tokens == len(before)


@pytest.mark.exact
@pytest.mark.process
@pytest.mark.parametrize("lengths", [(60, 120, 240), *more((120, 300, 600), (120, 800, 2000))])
def test_it_prints_one_document_with_every_number(
    lengths: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cast = [replace(role, tokens=n) for role, n in zip(CAST, lengths, strict=True)]
    monkeypatch.setattr(module, "CAST", tuple(cast))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ran = semantic("demo", "--json")
    assert (ran.code, ran.err) == (0, "")
    document = json.loads(ran.out)
    assert document["passed"] is True
    assert document["failures"] == []
    assert document["decoded_together"] == 3
    for agent, n in zip(document["agents"], lengths, strict=True):
        assert n < agent["prompt_tokens"] < 2 * n + 400
        assert agent["same_tokens"]
        assert agent["missing"] == []
        assert agent["prompt_tokens"] - agent["cached_tokens"] < 30
        assert agent["blocks"] * 64 * 2 * 2 * 256 * 4 == agent["n_bytes"]
        assert agent["ttft_resumed_seconds"] > 0
        assert agent["ttft_cold_seconds"] > 0
    assert document["restart"]["interrupted"].startswith("1, 2,")
    assert [agent["agent"] for agent in document["restart"]["agents"]] == ["ada", "ben", "cleo"]
    for agent in document["restart"]["agents"]:
        assert agent["same_tokens"]
        assert agent["missing"] == []
        assert agent["source"] == "disk"
        assert agent["prompt_tokens"] - agent["restored_tokens"] < 30
    assert not default_store_folder().exists()
    assert list(tmp_path.glob("semantic-demo-*")) == []


def test_an_agent_that_forgot_or_depends_on_its_cache_is_named() -> None:
    assert recall().failures == []
    assert recall(("Vera",)).failures == ["ada was told Vera and did not say so"]
    (difference,) = recall(same_tokens=False).failures
    assert "ada answered differently without a cache: Your name is Kai." in difference


def test_it_fails_when_an_agent_forgot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CAST", (replace(CAST[0], expected=("Basel",)),))
    monkeypatch.setattr(module, "LATE", "nobody")
    monkeypatch.setattr(module.Stage, "restart", lambda *_: Restart("", ()))
    ran = semantic("demo")
    assert ran.code == 1
    assert "FAILED: ada was told Basel and did not say so" in ran.out


def test_expected_words_are_found_in_any_case() -> None:
    assert CAST[0].misses("your name is VERA, of lisbon") == ("parrot",)


def test_a_script_is_as_long_as_its_role_says_and_says_the_facts_first() -> None:
    tokenizer = ByteTokenizer()
    for role in CAST:
        said = script(role, tokenizer)
        assert said[0]["content"] == role.told
        assert role.tokens <= len(tokenizer.render_chat(said)) < 1.5 * role.tokens + 200
        assert [one["role"] for one in said] == ["user", "assistant"] * (len(said) // 2)


def test_a_pipe_gets_a_line_when_a_state_changes(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row("ada")
    show = line_view()
    show([row])
    row.state, row.prompt_tokens = "decode", 7
    show([row])
    show([row])
    row.state, row.text = "done", "Hello!"
    show([row])
    assert capsys.readouterr().out == "ada: decode, 7 prompt tokens\nada: answered: Hello!\n"


def test_a_terminal_gets_a_table_with_the_end_of_a_long_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with table_view() as show:
        show([Row("ada", "decode", 7, 5, 3, "[first] " + "word " * 100 + "[last]")])
    shown = capsys.readouterr().out
    assert "[last]" in shown
    assert "[first]" not in shown
