"""Drafts change no token and no bit of an answer, whatever they propose."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import mlx.core as mx
import pytest

from semantic.adapters.mlx.batch.batch_rows import BatchRows
from semantic.adapters.mlx.batch.decode_batch import ContinuousBatch
from semantic.adapters.mlx.batch.draft_costs import StepSeconds, Waiting
from semantic.adapters.mlx.kv_cache.paged.layers import first_paged
from semantic.adapters.mlx.model import lanes
from semantic.adapters.stores.histories import Histories
from semantic.application.engine.submission import Submission
from semantic.domain.grammar import Grammar
from semantic.domain.identity import Hints
from semantic.domain.value_objects import Lane, SamplingParams, SequenceId, ThinkingBudget
from semantic.ports.generation import Draft
from tests.support.drafted import DRAFTED, drafted_backend
from tests.support.drafted_schedules import run_schedules
from tests.support.in_pages import tiny_backend
from tests.support.lanes import THOROUGH
from tests.support.rig import Done, Rig
from tests.support.text_tokenizer import text_tokenizer

KINDS = ("llama", "gemma3", "deepseek_v3", "moe", "llama of 64 in 8 bits")
"""Full attention, windows, latents, experts, and caches of 8 bits."""
SCHEDULES = 200 if THOROUGH else 10


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepSeconds, "of", lambda *_, **__: 1.0)  # drafts always pay
    if not THOROUGH:
        monkeypatch.setattr(lanes, "_COMPARED", (2, 3, 8))
        monkeypatch.setattr(lanes, "_PROMPT", 40)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_answer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, draw = drafted_backend(kind + DRAFTED), random.Random(0)
    assert not backend.drafts_problem
    monkeypatch.setattr(Waiting, "pays", lambda *_: draw.random() < 0.5)
    run_schedules(backend, SCHEDULES)


def test_a_recurrent_model_says_why_it_has_no_drafts() -> None:
    backend = tiny_backend("qwen3_next in pages")
    assert "recurrent state" in backend.drafts_problem


def test_without_a_lane_there_are_no_drafts() -> None:
    assert tiny_backend("gemma3 in pages").drafts_problem == "--exact-batch is off"


def options() -> dict[str, SamplingParams]:
    """Each changes which tokens an answer has, or how many."""
    schema = {"enum": ["one apple", "two apples", "no apples at all"]}
    grammar = Grammar("json_schema", json.dumps(schema))
    late = Grammar("json_schema", json.dumps(schema), after="a")
    sampled = SamplingParams(temperature=1.0, seed=5)
    return {
        "grammar": SamplingParams(grammar=grammar),
        "seeded grammar": replace(sampled, grammar=grammar, logprobs=2),
        "grammar after text": replace(sampled, grammar=late),
        "stop string": replace(sampled, stop=("e", "q")),
        "thinking": replace(sampled, thinking=ThinkingBudget(4, "~", "@", (9, 8, 7), opened=True)),
        "penalties": replace(sampled, presence_penalty=1.5, frequency_penalty=0.5),
        "repetition": SamplingParams(repetition_penalty=1.8, logprobs=1),
        "bias": replace(sampled, logit_bias={5: 4.0, 6: -100.0}),
    }


@pytest.mark.parametrize("name", options())
def test_an_option_has_its_effect_with_drafts(name: str) -> None:
    params, texts = options()[name], text_tokenizer()
    asked = [[(agent + i * i) % 90 for i in range(40 + agent)] for agent in range(3)]
    plain = Rig("llama in pages", texts=texts)
    expected = [plain.answer("ann", prompt, 30, sampling=params) for prompt in asked]

    def known(tokens: Sequence[int]) -> Sequence[int]:
        [at] = [i for i, prompt in enumerate(asked) if list(tokens[: len(prompt)]) == prompt]
        return expected[at].tokens[len(tokens) - len(asked[at]) :]

    rig = Rig("llama in pages drafted", texts=texts, answers=known)
    uids = [
        rig.engine.submit(f"agent-{i}", prompt, max_tokens=30, sampling=params)
        for i, prompt in enumerate(asked)
    ]
    done = rig.run()
    rig.check()
    for uid, one in zip(uids, expected, strict=True):
        mine = done[uid]
        assert (mine.tokens, mine.text, mine.finish_reason) == (
            one.tokens, one.text, one.finish_reason,
        )  # fmt: skip
        assert [one.token for one in mine.logprobs] == [one.token for one in one.logprobs]
    assert 0 < sum(one.accepted for one in done.values()) <= sum(x.drafted for x in done.values())


def test_a_request_without_drafts_has_none() -> None:
    rig = Rig("llama in pages drafted")
    submission = Submission("ann", list(range(1, 30)), 20, hints=Hints(drafts=False))
    uid = rig.engine.enqueue(submission)
    assert rig.run()[uid].drafted == 0


PROMPT = list(range(1, 30))


@contextmanager
def after_ann() -> Iterator[tuple[Rig, Done]]:
    """An engine with histories, in which ann's answer to the prompt is one of 40 tokens."""
    rig = Rig("llama in pages drafted")
    histories = Histories(1 << 20)
    rig.engine.draft_from(histories)
    first = rig.answer("ann", PROMPT, 40)
    histories.wait()
    yield rig, first
    rig.engine.close()


def test_an_agents_second_turn_comes_from_its_first() -> None:
    with after_ann() as (rig, first):
        again = rig.answer("ben", PROMPT, 40)
        assert again.tokens == first.tokens
        assert again.accepted > 20


def test_an_answer_may_be_predicted() -> None:
    expected = Rig("llama in pages").answer("ann", PROMPT, 40).tokens
    rig = Rig("llama in pages drafted")
    histories = Histories(1 << 20)
    rig.engine.draft_from(histories)
    predicted = (*expected[:20], 7, *expected[20:])
    uid = rig.engine.enqueue(Submission("ann", PROMPT, 40, predicted=predicted))
    done = rig.run()[uid]
    assert done.tokens == expected
    assert done.accepted > 20
    rig.engine.close()


def test_no_draft_lies_behind_the_end_of_an_answer() -> None:
    with after_ann() as (rig, first):
        again = rig.answer("ben", PROMPT, 12)
        assert again.tokens == first.tokens[:12]
        assert 6 < again.accepted <= again.drafted < 12


def test_drafts_of_a_cancelled_answer_are_not_accepted() -> None:
    with after_ann() as (rig, _):
        uid = rig.engine.submit("ben", PROMPT, max_tokens=40)
        while not any(one.drafted for one in rig.engine.requests):
            rig.engine.step_once()
        rig.engine.cancel(uid)
        again = rig.run()[uid]
        assert again.accepted <= len(again.tokens) < again.drafted


class Once:
    """Knows an answer, and drafts three of its tokens after the fifth."""

    def __init__(self, answer: Sequence[int]) -> None:
        self._answer = answer
        self.n_read = self.n_accepted = 0

    def propose(self, most: int) -> Draft:
        return Draft(self._answer[5:8][:most] if self.n_read == 5 else (), 1.0)

    def read(self, tokens: Sequence[int], n_drafted: int, /) -> None:
        self.n_read += len(tokens)
        self.n_accepted += min(n_drafted, len(tokens) - 1)


@pytest.mark.parametrize("waits", [False, True])
def test_a_step_that_waits_checks_the_first_drafts(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Waiting, "pays", lambda *_: waits)
    answer = Rig("llama in pages").answer("ann", PROMPT, 20).tokens
    backend, once = drafted_backend("llama" + DRAFTED), Once(answer)
    sequence = backend.open(256)
    backend.prefill(sequence, PROMPT[:-1])
    backend.start(sequence, PROMPT[-1], PROMPT[:-1], SamplingParams(), 0, once)
    found: list[int] = []
    while len(found) < 20:
        found += [one.token for one in backend.decode()]
    assert tuple(found[:20]) == answer
    assert once.n_accepted == (3 if waits else 0)


class Bold:
    """Drafts as much as it may."""

    def propose(self, most: int) -> Draft:
        return Draft([1] * most, 1.0)

    def read(self, tokens: Sequence[int], n_drafted: int, /) -> None:
        pass


def checked_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each step that checks drafts from now on."""
    rows: list[int] = []
    drafted_logits = BatchRows.drafted_logits

    def counted(self: BatchRows, tokens: Sequence[int], counts: Sequence[int]) -> mx.array:
        rows.append(len(tokens))
        return drafted_logits(self, tokens, counts)

    monkeypatch.setattr(BatchRows, "drafted_logits", counted)
    return rows


def test_an_answer_begins_before_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = drafted_backend("llama" + DRAFTED)
    rows = checked_rows(monkeypatch)
    sequence = backend.open(256)
    backend.prefill(sequence, PROMPT[:-1])
    backend.start(sequence, PROMPT[-1], PROMPT[:-1], SamplingParams(), 0, Bold())
    first = backend.decode()
    assert first
    assert len(rows) == 1, "the first step checks drafts, and no other step is launched"


def test_drafts_stay_in_the_lane_and_the_memory_when_others_join(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = drafted_backend("llama" + DRAFTED)
    backend._batch = ContinuousBatch(backend.model, lane=Lane(2, 6))
    rows = checked_rows(monkeypatch)
    sequences: list[SequenceId] = []
    for agent in range(5):
        sequence = backend.open(256)
        backend.prefill(sequence, range(200 + agent))
        backend.start(sequence, 1, range(200 + agent), SamplingParams(), 0, Bold())
        sequences.append(sequence)
        before = len(rows)
        for _ in range(9):
            backend.decode()
        n_checked = len(rows) - before
        assert (n_checked > 1) if agent < 4 else not n_checked, "only four sequences have drafts"
    assert max(rows) == 6
    backend.close(sequences.pop())
    for sequence in sequences[1:]:
        backend.close(sequence)
    while backend.length(sequences[0]) < 255:
        backend.decode()
    refs = first_paged(backend.sequences()[0]).table.refs
    assert len(refs) == 1, "a draft lies beyond the sequence's memory"


class Noting:
    """Proposes nothing, and notes what it is asked and told."""

    def __init__(self) -> None:
        self.n_calls = 0
        self.known: list[int] = []

    def propose(self, _most: int) -> Draft:
        """See `Drafter.propose`."""
        self.n_calls += 1
        return Draft((), 0.0)

    def read(self, tokens: Sequence[int], _n_drafted: int, /) -> None:
        """See `Drafter.read`."""
        self.n_calls += 1
        self.known += tokens


def test_a_full_batch_calls_no_drafter_and_a_small_one_tells_it_all() -> None:
    backend = drafted_backend("llama" + DRAFTED)
    said: dict[SequenceId, list[int]] = {}
    drafters = [Noting() for _ in range(6)]

    def decode(n_tokens: int) -> None:
        while min(map(len, said.values())) < n_tokens:
            for token in backend.decode():
                said[token.sequence].append(token.token)

    for drafter in drafters:
        sequence = backend.open(256)
        backend.prefill(sequence, [1, 2, 3])
        backend.start(sequence, 4, [1, 2, 3], SamplingParams(), 0, drafter)
        said[sequence] = []
    decode(5)
    before = [one.n_calls for one in drafters]
    decode(9)
    assert [one.n_calls for one in drafters] == before
    first, *others = list(said)
    for sequence in others[2:]:
        backend.close(sequence)
        del said[sequence]
    decode(12)
    assert len(drafters[0].known) >= 9
    assert drafters[0].known == said[first][: len(drafters[0].known)]
