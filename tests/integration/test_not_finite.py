"""NaN and infinite values: the answer ends with an error, and nothing computed for it is reused.

One token's embedding is NaN, so a prompt or an answer with it is computed from NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast
from unittest import mock

import mlx.core as mx
import pytest
from mlx.nn.layers.embedding import Embedding

from semantic import BlockPool, BlockPoolBatchEngine, CompletedGeneration, SamplingParams
from semantic.adapters.mlx.batch.decode_batch import ContinuousBatch
from semantic.adapters.mlx.batch.generator_batch import GeneratorBatch, OneByOne
from semantic.adapters.mlx.batch.padded_batch import PaddedBatch
from semantic.adapters.mlx.sampling.sampler import SeededSampler, draw
from semantic.adapters.stores.background import BackgroundStore
from semantic.adapters.stores.memory import MemoryStore
from semantic.domain.errors import NOT_FINITE
from semantic.domain.value_objects import BLOCK_TOKENS, ThinkingBudget
from semantic.ports.generation import EngineEvent
from tests.integration.test_exactness import prompts
from tests.support.char_tokenizer import CharTokenizer
from tests.support.in_pages import tiny_backend
from tests.support.lanes import more_rows
from tests.support.pools import holders
from tests.support.tiny_models import VOCAB

Done = CompletedGeneration
BAD = VOCAB // 2
SEEDED = SamplingParams(temperature=1.0, seed=5)
BIASED = SamplingParams(logit_bias={1: 0.5})

FORMS = {
    "qwen2": ContinuousBatch,
    "qwen2 padded": PaddedBatch,
    "qwen2 one by one": OneByOne,
    "gemma3 in pages": ContinuousBatch,
    "adds to keys": GeneratorBatch,
}
every_form = pytest.mark.parametrize("form", [form for form in FORMS if "pages" not in form])


@contextmanager
def poisoned(token: int = BAD, value: float = math.nan) -> Iterator[None]:
    """The model computes `value` from `token`."""
    embed = cast("Callable[[Embedding, mx.array], mx.array]", Embedding.__call__)

    def embedded(layer: Embedding, tokens: mx.array) -> mx.array:
        found = embed(layer, tokens)
        return mx.where((tokens == token)[..., None], mx.array(value, found.dtype), found)

    with mock.patch.object(Embedding, "__call__", embedded):
        yield


class World:
    """An engine with a store of its own."""

    def __init__(self, form: str) -> None:
        backend = tiny_backend(form.removesuffix(" one by one"), f"tiny:{form}")
        if FORMS.get(form) is OneByOne:
            backend._batch = OneByOne(backend.model)
        assert type(backend._batch) is FORMS.get(form, ContinuousBatch)
        spec = backend.cache_spec()
        self.pool = BlockPool(spec, 100 * spec.n_layers)
        self.store = BackgroundStore(MemoryStore(1 << 30), 1 << 30)
        self.engine = BlockPoolBatchEngine(
            backend, CharTokenizer(), self.pool, spec, store=self.store
        )

    def answer(
        self, agent: str, prompt: Sequence[int], n: int = 8, sampling: SamplingParams | None = None
    ) -> Done:
        self.engine.submit(agent, prompt, max_tokens=n, sampling=sampling)
        (done,) = self.engine.step()
        return done

    def close(self) -> None:
        self.engine.check_integrity()
        self.engine.close()


@pytest.fixture
def world(form: str) -> Iterator[World]:
    made = World(form)
    yield made
    made.close()


def clean(*lengths: int, seed: int) -> list[list[int]]:
    """Prompts of the first half of the vocabulary."""
    return [[token % BAD for token in prompt] for prompt in prompts(*lengths, seed=seed)]


def with_bad(prompt: Sequence[int], at: int, token: int = BAD) -> list[int]:
    return [*prompt[:at], token, *prompt[at + 1 :]]


def failed(done: Done) -> bool:
    return (done.finish_reason, done.error) == ("error", NOT_FINITE)


@pytest.mark.parametrize(
    ("form", "params"),
    [
        *((form, SamplingParams()) for form in FORMS),
        *(("qwen2", SEEDED), ("adds to keys", BIASED)),
        *more_rows(("qwen2", BIASED), ("adds to keys", SEEDED)),
    ],
)
def test_a_poisoned_prompt_ends_alone_with_an_error_and_nothing_of_it_is_kept(
    world: World, params: SamplingParams
) -> None:
    first, second, bad = clean(300, 20, 600, seed=57)
    alone = [
        world.answer(f"alone {i}", one, 12, sampling=params)
        for i, one in enumerate((first, second))
    ]
    answered = {token for one in alone for token in one.tokens}
    token = next(one for one in range(BAD, VOCAB) if one not in answered)
    bad = with_bad(bad, 550, token)
    for i in range(2):
        world.engine.forget(f"alone {i}")
    with poisoned(token):
        for turn in range(2):
            uids = [
                world.engine.submit(f"{name} {turn}", one, max_tokens=12, sampling=params)
                for name, one in (("a", first), ("bad", bad), ("c", second))
            ]
            done = {end.uid: end for end in world.engine.step()}
            ended = [done[uid] for uid in uids]
            assert failed(ended[1])
            assert ended[1].tokens == ()
            assert ended[1].cached_tokens == 0
            assert ended[1].blocks is None
            assert [ended[0].tokens, ended[2].tokens] == [one.tokens for one in alone]
    assert not any(agent.startswith("bad") for agent in holders(world.pool))
    # What memory the sequence has left is not read by the next one.
    again = world.answer("again", first, 12, sampling=params)
    assert again.tokens == alone[0].tokens


@every_form
def test_an_answer_ends_where_it_becomes_nan(world: World) -> None:
    (prompt,) = clean(300, seed=51)
    alone = world.answer("ann", prompt, 16)
    at, token = next(pair for pair in enumerate(alone.tokens) if pair[1] not in prompt)
    with poisoned(token):
        done = world.answer("ben", prompt, 16)
        assert failed(done)
        assert done.tokens == alone.tokens[: at + 1]
        # The last token of an answer may be the first to be computed from NaN.
        cut = world.answer("cay", prompt, at + 1)
        assert (cut.finish_reason, cut.tokens) == ("length", done.tokens)
        assert cut.blocks is None
    more = [*prompt, *alone.tokens]
    assert world.answer("cay", more, 4).tokens == world.answer("ann", more, 4).tokens


@every_form
def test_a_thought_that_is_cut_where_it_becomes_nan_leaves_no_cache(world: World) -> None:
    (prompt,) = clean(300, seed=51)
    alone = world.answer("ann", prompt, 16)
    at, token = next(pair for pair in enumerate(alone.tokens) if pair[1] not in prompt)
    end = tuple(one for one in range(VOCAB) if one != token)[:3]
    budget = ThinkingBudget(at + 1, "\0", "".join(chr(32 + one) for one in end), end, opened=True)
    limited = SamplingParams(thinking=budget)
    for n_forced in (1, 3, 9):
        with poisoned(token):
            done = world.answer("ben", prompt, at + 1 + n_forced, sampling=limited)
        assert failed(done)
        assert done.blocks is None
    more = [*prompt, *alone.tokens]
    assert world.answer("ben", more, 4).tokens == world.answer("ann", more, 4).tokens


@pytest.mark.parametrize("form", ["qwen2", "lfm2", "gemma3", "adds to keys"])
def test_blocks_that_were_stored_before_it_showed_are_dropped_when_it_shows(
    form: str, world: World
) -> None:
    (prompt,) = clean(700, seed=52)
    prompt = with_bad(prompt, 10)
    fine = World(form)
    alone = fine.answer("ann", prompt)
    fine.close()
    with poisoned(value=math.inf):
        uid = world.engine.submit("ann", prompt, max_tokens=8)
        events: list[EngineEvent] = []
        while not events:
            events = world.engine.step_once()
            world.engine.cancel(uid)
        list(world.engine.step())
    world.engine.forget("ann")
    done = world.answer("ben", prompt)
    if failed(done):  # it was restored
        done = world.answer("ben", prompt)
        assert done.cached_tokens == 0
    assert (done.error, done.tokens) == (None, alone.tokens)


@pytest.mark.parametrize("form", ["qwen2"])
def test_no_log_probabilities_of_a_prompt_are_nan(world: World) -> None:
    (prompt,) = clean(400, seed=53)
    prompt = with_bad(prompt, 300)
    with poisoned():
        done = world.answer("ann", prompt, 2, sampling=SamplingParams(prompt_logprobs=1))
    assert failed(done)
    assert world.answer("ann", prompt[:300], 1).cached_tokens == 0


@pytest.mark.parametrize("form", ["qwen2"])
def test_what_others_have_stored_of_its_beginning_stays(world: World) -> None:
    (prompt,) = clean(2 * BLOCK_TOKENS + 90, seed=54)
    longer = with_bad([*prompt, *prompt], 600)
    world.answer("ann", prompt)
    world.engine.forget("ann")
    with poisoned():
        assert failed(world.answer("ben", longer))
    done = world.answer("cay", longer)
    assert done.error is None
    assert 2 * BLOCK_TOKENS <= done.cached_tokens < len(prompt)


def test_a_row_of_nan_draws_a_token_of_the_vocabulary() -> None:
    rows = mx.concatenate([mx.full((1, 50), math.nan), mx.zeros((1, 50))])
    samplers = [SeededSampler(SEEDED, drawn) for drawn in range(2)]
    assert all(token < 50 for token in cast("list[int]", draw(samplers, rows).tolist()))
