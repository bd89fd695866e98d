"""The plan's six integration tests (plan 003, task 5.3), and answers in a batch that changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from experiments.subjects import Subject
from semantic import BlockPool, BlockPoolBatchEngine
from semantic.composition.engine_settings import Settings
from semantic.composition.process_stores import open_store
from semantic.domain.errors import InvalidRequestError, PoolExhaustedError
from semantic.domain.value_objects import CompletedGeneration
from semantic.ports.store import StorePort
from tests.real.likely import answers, tokenizer_of
from tests.support.pools import available

_BLOCKS = 3000
_NEW = 24
_STORY = "The quick brown fox lives in a wood near the river. "
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    f"{_STORY * 12} Where does the fox live?",
    "Write one sentence about the sea.",
    f"{_STORY * 30} Who is quick?",
    "Say hello in Spanish.",
)


def engine_of(subject: Subject, store: StorePort | None = None) -> BlockPoolBatchEngine:
    spec = subject.backend.cache_spec()
    pool = BlockPool(spec, total_blocks=_BLOCKS)
    return BlockPoolBatchEngine(subject.backend, tokenizer_of(subject), pool, spec, store=store)


def is_right(subject: Subject, prompt: Sequence[int], done: CompletedGeneration, n: int) -> bool:
    assert done.text == tokenizer_of(subject).decode(spoken(subject, done))
    return spoken(subject, done) in answers(subject, prompt, n)


def spoken(subject: Subject, done: CompletedGeneration) -> tuple[int, ...]:
    """Its tokens without the end token."""
    return tuple(one for one in done.tokens if one not in tokenizer_of(subject).eos_token_ids)


def turn(subject: Subject, before: Sequence[int], text: str) -> list[int]:
    """`before`, which an answer ends, and what a user says then."""
    tokenizer = tokenizer_of(subject)
    ended = f"<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return [*before, *tokenizer.encode(ended)]


def test_one_agent_answers_as_mlx_lm(subject: Subject) -> None:
    prompt = subject.prompt(QUESTIONS[0], 0)
    engine = engine_of(subject)
    engine.submit("agent_1", prompt, max_tokens=_NEW)
    (done,) = engine.step()
    assert is_right(subject, prompt, done, _NEW)
    assert "Paris" in done.text


def test_one_agent_goes_on_from_its_cache(subject: Subject) -> None:
    prompt, engine = subject.prompt(QUESTIONS[2], 0), engine_of(subject)
    engine.submit("agent_1", prompt, max_tokens=_NEW)
    (first,) = engine.step()
    said = spoken(subject, first)
    second = turn(subject, [*prompt, *said], "Is it far from there to the river?")
    engine.submit("agent_1", second, cache=first.blocks, max_tokens=_NEW)
    (done,) = engine.step()
    assert is_right(subject, second, done, _NEW)
    assert done.cached_tokens >= len(prompt) + len(said) - 1


def test_agents_join_a_batch_and_leave_it(subject: Subject) -> None:
    engine, done = engine_of(subject), []
    prompts = {f"agent_{i}": subject.prompt(text, 0) for i, text in enumerate(QUESTIONS)}
    lengths = {agent: 8 + 6 * i for i, agent in enumerate(prompts)}
    waiting = list(prompts)
    while engine.has_work or waiting:
        if waiting:
            agent = waiting.pop(0)
            engine.submit(agent, prompts[agent], max_tokens=lengths[agent])
        for _ in range(3):
            done += [one for one in engine.step_once() if isinstance(one, CompletedGeneration)]
    assert len(done) == len(prompts)
    for one in done:
        agent = one.agent_id
        assert is_right(subject, prompts[agent], one, lengths[agent]), agent


def test_agents_leave_the_pool_as_it_was(subject: Subject) -> None:
    engine = engine_of(subject)
    free = available(engine.pool)
    for i in range(4):
        engine.submit(f"agent_{i}", subject.prompt(QUESTIONS[i], 0), max_tokens=4)
    assert len(list(engine.step())) == 4
    assert available(engine.pool) < free
    for i in range(4):
        assert engine.forget(f"agent_{i}")
    assert available(engine.pool) == free


def test_an_exhausted_pool_is_refused(subject: Subject) -> None:
    spec = subject.backend.cache_spec()
    pool: BlockPool = BlockPool(spec, total_blocks=10)
    engine = BlockPoolBatchEngine(subject.backend, tokenizer_of(subject), pool, spec)
    with pytest.raises(PoolExhaustedError, match=r"^Cannot allocate .*blocks"):
        engine.submit("agent_1", "Hello", max_tokens=256)
    assert not engine.has_work


def test_an_empty_prompt_is_refused(subject: Subject) -> None:
    engine = engine_of(subject)
    with pytest.raises(InvalidRequestError, match="prompt must not be empty"):
        engine.submit("agent_1", "")
    assert engine.pool.used_blocks == 0


def test_agents_go_on_after_a_restart(subject: Subject, tmp_path: Path) -> None:
    prompts = {f"agent_{i}": subject.prompt(QUESTIONS[i], 0) for i in (2, 4)}
    said: dict[str, tuple[int, ...]] = {}
    for is_first in (True, False):
        store = open_store(Settings(use_disk=True, store=tmp_path / "store"))
        engine = engine_of(subject, store)
        for agent, prompt in prompts.items():
            given = prompt if is_first else turn(subject, [*prompt, *said[agent]], "Why?")
            engine.submit(agent, given, max_tokens=_NEW)
        for done in engine.step():
            prompt = prompts[done.agent_id]
            if is_first:
                said[done.agent_id] = spoken(subject, done)
            else:
                given = turn(subject, [*prompt, *said[done.agent_id]], "Why?")
                assert is_right(subject, given, done, _NEW)
                assert done.cached_tokens >= len(prompt) - 1
        engine.close()
        store.close()
