"""Random schedules of sequences whose steps check drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence

from semantic.adapters.mlx.backend import MLXBackend
from semantic.domain.value_objects import SampledToken, SamplingParams, SequenceId, whole_blocks
from tests.support.drafted import Oracle
from tests.support.preempted import preempted, resumed
from tests.support.tiny_models import VOCAB


def run_schedules(backend: MLXBackend, n: int) -> None:
    """Every answer has the tokens and log-probabilities that it has alone without drafts."""
    n_checked = n_accepted = 0
    for seed in range(n):
        draw = random.Random(seed)
        schedule = Schedule(backend, [Talk(draw) for _ in range(draw.randint(1, 4))], draw)
        schedule.run()
        n_checked += sum(one.n_checked for one in schedule.oracles)
        n_accepted += sum(one.n_accepted for one in schedule.oracles)
    assert 0 < n_accepted < n_checked


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
