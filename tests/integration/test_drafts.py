"""Drafts change no token and no bit of an answer, whatever they propose."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import pytest

from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.batch.batch_rows import BatchRows
from semantic.adapters.mlx.batch.decode_batch import ContinuousBatch
from semantic.adapters.mlx.batch.draft_costs import StepSeconds
from semantic.adapters.mlx.kv_cache.paged.layers import first_paged
from semantic.adapters.mlx.model import lanes
from semantic.adapters.stores.histories import Histories
from semantic.application.engine.submission import Submission
from semantic.domain.grammar import Grammar
from semantic.domain.identity import Hints
from semantic.domain.value_objects import (
    Lane,
    SampledToken,
    SamplingParams,
    SequenceId,
    ThinkingBudget,
    whole_blocks,
)
from semantic.ports.generation import Draft
from tests.support.drafted import DRAFTED, Oracle, drafted_backend
from tests.support.in_pages import tiny_backend
from tests.support.lanes import THOROUGH
from tests.support.preempted import preempted, resumed
from tests.support.rig import Rig
from tests.support.text_tokenizer import text_tokenizer
from tests.support.tiny_models import VOCAB

KINDS = ("llama", "gemma3", "deepseek_v3", "moe")
"""Full attention, windows, latents and experts."""
SCHEDULES = 200 if THOROUGH else 10


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepSeconds, "of", lambda *_, **__: 1.0)  # drafts always pay
    if not THOROUGH:
        monkeypatch.setattr(lanes, "_COMPARED", (2, 3, 8))
        monkeypatch.setattr(lanes, "_PROMPT", 40)


def params_of(draw: random.Random) -> SamplingParams:
    """Greedy or seeded, with or without penalties and log-probabilities."""
    return SamplingParams(
        temperature=draw.choice((0.0, 1.0)),
        seed=draw.randrange(1 << 40),
        top_k=draw.choice((0, 20)),
        frequency_penalty=draw.choice((0.0, 0.0, 0.7)),
        repetition_penalty=draw.choice((None, None, 1.3)),
        logprobs=draw.choice((None, 1)),
    )


class Talk:
    """A sequence from its prompt to the end of its answer."""

    def __init__(self, draw: random.Random) -> None:
        self.prompt = [draw.randrange(VOCAB) for _ in range(draw.choice((5, 40, 255, 300)))]
        self.params = params_of(draw)
        self.n_tokens = draw.randint(3, 20)
        self.said: list[SampledToken] = []

    @property
    def history(self) -> list[int]:
        return [*self.prompt, *(one.token for one in self.said)]


def begin(
    backend: MLXBackend, talk: Talk, sequence: SequenceId, oracle: Oracle | None = None
) -> None:
    *before, last = talk.history
    backend.start(sequence, last, before, talk.params, len(talk.said), oracle)


def opened(backend: MLXBackend, talk: Talk) -> SequenceId:
    sequence = backend.open(whole_blocks(len(talk.prompt) + 2))
    backend.prefill(sequence, talk.prompt[:-1])
    return sequence


def alone(backend: MLXBackend, talk: Talk) -> list[SampledToken]:
    """The answer without drafts and companions."""
    sequence = opened(backend, talk)
    begin(backend, talk, sequence)
    said: list[SampledToken] = []
    for _ in range(talk.n_tokens):
        backend.reserve(sequence, whole_blocks(len(talk.prompt) + len(said) + 2))
        said += backend.decode()
    backend.close(sequence)
    return said


class Schedule:
    """Talks that begin, pause, are preempted, go on and end at random steps."""

    def __init__(self, backend: MLXBackend, talks: Sequence[Talk], draw: random.Random) -> None:
        self._backend, self._draw = backend, draw
        self._expected = {id(talk): alone(backend, talk) for talk in talks}
        self._waiting = list(talks)
        self._running: dict[SequenceId, Talk] = {}
        self.oracles: list[Oracle] = []

    def run(self) -> None:
        while self._waiting or self._running:
            if self._waiting and (not self._running or self._draw.random() < 0.4):
                talk = self._waiting.pop()
                self._start(talk, opened(self._backend, talk))
            self._step()
            if self._running and self._draw.random() < 0.15:
                self._interrupt(self._draw.choice(list(self._running)))

    def _start(self, talk: Talk, sequence: SequenceId) -> None:
        answer = [one.token for one in self._expected[id(talk)]]
        self.oracles.append(Oracle(answer[len(talk.said) :], self._draw))
        if self._draw.random() < 0.2:
            begin(self._backend, talk, sequence)
        else:
            begin(self._backend, talk, sequence, self.oracles[-1])
        self._running[sequence] = talk

    def _step(self) -> None:
        for sequence, talk in self._running.items():
            self._backend.reserve(sequence, whole_blocks(len(talk.history) + 2))
        tokens = self._backend.decode()
        assert len({one.sequence for one in tokens}) == len(tokens)
        for one in tokens:
            talk = self._running[one.sequence]
            talk.said.append(one)
            if len(talk.said) == talk.n_tokens:
                self._end(one.sequence)

    def _interrupt(self, sequence: SequenceId) -> None:
        backend, talk = self._backend, self._running.pop(sequence)
        following = backend.pause(sequence)
        assert backend.length(sequence) == len(talk.history)
        expected = self._expected[id(talk)][len(talk.said)]
        assert following is None or following.token == expected.token
        if following is not None and len(talk.said) + 1 < talk.n_tokens:
            talk.said.append(following)
        else:
            capacity = whole_blocks(len(talk.history) + 2)
            blocks = preempted(backend, sequence, talk.history, capacity)
            sequence = resumed(backend, blocks, capacity)
        self._start(talk, sequence)

    def _end(self, sequence: SequenceId) -> None:
        talk = self._running.pop(sequence)
        assert self._backend.length(sequence) == len(talk.history)
        expected = self._expected[id(talk)]
        assert [one.token for one in talk.said] == [one.token for one in expected]
        assert [one.logprob for one in talk.said] == [one.logprob for one in expected]
        self._backend.close(sequence)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_answer(kind: str) -> None:
    backend = drafted_backend(kind + DRAFTED)
    assert not backend.drafts_problem
    n_checked = n_accepted = 0
    for seed in range(SCHEDULES):
        draw = random.Random(seed)
        schedule = Schedule(backend, [Talk(draw) for _ in range(draw.randint(1, 4))], draw)
        schedule.run()
        n_checked += sum(one.n_checked for one in schedule.oracles)
        n_accepted += sum(one.n_accepted for one in schedule.oracles)
    assert 0 < n_accepted < n_checked


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


def test_an_agents_second_turn_comes_from_its_first() -> None:
    rig = Rig("llama in pages drafted")
    histories = Histories(1 << 20)
    rig.engine.draft_from(histories)
    prompt = list(range(1, 30))
    first = rig.answer("ann", prompt, 40)
    histories.wait()
    again = rig.answer("ben", prompt, 40)
    assert again.tokens == first.tokens
    assert again.accepted > 20
    rig.engine.close()


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

    def counted(self: BatchRows, inputs: mx.array, counts: Sequence[int]) -> mx.array:
        rows.append(inputs.size)
        return drafted_logits(self, inputs, counts)

    monkeypatch.setattr(BatchRows, "drafted_logits", counted)
    return rows


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
