"""What the answers of the generated conversations rest on, and that no trial is training data."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from random import Random

import pytest

from tools.tiny_model import dialogues, seeds, trials, vocabulary
from tools.tiny_model.dialogues import Message, Scene
from tools.tiny_model.facts import BY_KEY, KINDS, FactKind

DRAWS = range(40)
KEYS = [kind.key for kind in KINDS]


def conversation(seed: object) -> list[Message]:
    return dialogues.dialogue(Random(f"test/{seed}"), 1500)


def words(text: str) -> int:
    return len(text.split())


def said_by_user(messages: Iterable[Message]) -> str:
    return " ".join(text for role, text in messages if role != "assistant").lower()


def test_a_seed_always_gives_the_same_conversation() -> None:
    assert [conversation(seed) for seed in DRAWS] == [conversation(seed) for seed in DRAWS]


def test_seeds_give_different_conversations() -> None:
    assert len({dialogues.render(conversation(seed)) for seed in DRAWS}) == len(DRAWS)


@pytest.mark.parametrize("seed", DRAWS)
def test_user_and_assistant_take_turns_behind_at_most_one_system_message(seed: int) -> None:
    roles = [role for role, _ in conversation(seed)]
    turns = roles[1:] if roles[0] == "system" else roles
    assert turns == ["user", "assistant"] * (len(turns) // 2)


@pytest.mark.parametrize("seed", DRAWS)
def test_messages_are_never_empty_and_never_spell_a_special_token(seed: int) -> None:
    assert all(text.strip() and "<|" not in text for _, text in conversation(seed))


@pytest.mark.parametrize("key", KEYS)
def test_an_answer_holds_the_value_stated_last(key: str) -> None:
    scene = Scene(Random(f"test/{key}"))
    dialogues.state_facts(scene, [key])
    first = scene.facts[key]
    dialogues.ask(scene, key)
    assert first in scene.messages[-1][1]
    scene.facts = {key: first}
    dialogues.correct(scene)
    second = scene.facts[key]
    assert second in scene.messages[-2][1]
    dialogues.ask(scene, key)
    assert scene.messages[-1] == ("assistant", BY_KEY[key].answered(second))


@pytest.mark.parametrize("key", KEYS)
def test_what_was_never_said_is_refused(key: str) -> None:
    scene = Scene(Random(f"test/{key}"))
    dialogues.ask(scene, key)
    assert scene.messages[-1] == ("assistant", BY_KEY[key].refusal)


@pytest.mark.parametrize("seed", DRAWS)
def test_every_fact_of_a_conversation_was_said_in_it(seed: int) -> None:
    scene = Scene(Random(f"test/{seed}"))
    dialogues.open_with_system(scene, 800)
    dialogues.lively(scene, 800)
    said = said_by_user(scene.messages)
    assert [value for value in scene.facts.values() if value.lower() not in said] == []


@pytest.mark.parametrize("kind", KINDS, ids=KEYS)
def test_statements_and_corrections_hold_the_value_letter_for_letter(kind: FactKind) -> None:
    for seed in DRAWS:
        rng = Random(f"test/{seed}")
        value, old = kind.draw(rng), kind.draw(rng)
        assert kind.said(value) in kind.statement(rng, value)
        assert kind.said(value) in kind.correction(rng, value, old)
        assert kind.said(value) in kind.answered(value)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.values], ids=KEYS[:-1])
def test_a_share_of_the_values_is_invented(kind: FactKind) -> None:
    rng = Random("test")
    drawn = [kind.draw(rng) for _ in range(400)]
    assert 0.3 < sum(value not in kind.values for value in drawn) / len(drawn) < 0.6
    assert any(words(value) > 1 for value in drawn)
    assert any("-" in value for value in drawn)


def test_words_of_any_length_can_be_altered() -> None:
    rng = Random("test")
    altered = [vocabulary.altered_word(rng, word) for word in ("a", "is", "cat", "hedgehog") * 50]
    assert all(altered)


def test_a_held_out_trial_is_the_same_each_time_and_asks_for_every_fact() -> None:
    trial = trials.recall_trial("test", 300, words)
    assert trial == trials.recall_trial("test", 300, words)
    assert sorted(question.topic for question in trial.questions) == sorted(KEYS)
    assert all(question.distance and question.distance >= 300 for question in trial.questions)


def test_trials_hold_out_their_seeds_and_values() -> None:
    drawn_from = {seeds.held_out("a").split("/")[0]}
    assert drawn_from.isdisjoint(
        {seeds.training(1, 2, 3, 4).split("/")[0], seeds.tokenizer(1).split("/")[0]}
    )
    listed = {value for kind in KINDS for value in kind.values}
    assert listed.isdisjoint(value for values in trials.UNSEEN.values() for value in values)


@pytest.mark.parametrize("topic", trials.BEHAVIOURS)
def test_every_behaviour_ends_in_one_question_with_one_answer(topic: str) -> None:
    trial = trials.behaviour_trial(topic, "test")
    assert len(trial.questions) == 1
    assert trial.questions[0].text
    assert trial.questions[0].answer


def test_consecutive_trials_differ() -> None:
    drawn = [trials.recall_trial(f"test/{index}", 200, words) for index in range(5)]
    assert all(one != other for one, other in pairwise(drawn))
