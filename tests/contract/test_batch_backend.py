"""What every `BatchBackend` does: the fake in plain Python and the real one over mlx-lm.

A backend is taken for right about tokens when a sequence that was interrupted in some way goes on
exactly as one that was not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Literal, NewType, cast

import pytest

from semantic.domain.block_hash import Part
from semantic.domain.entities import AgentBlocks, KVBlock
from semantic.domain.errors import BackendError, CacheReconstructionError, InvalidRequestError
from semantic.domain.grammar import Grammar
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import (
    LayerKind,
    ModelCacheSpec,
    SampledToken,
    SamplingParams,
    SequenceId,
    TokenLogprob,
    whole_blocks,
)
from semantic.ports.generation import BatchBackend
from tests.support.bodies import exported, fill, put
from tests.support.fake_backend import FULL, STATE, FakeBackend, window
from tests.support.lanes import THOROUGH, more, more_rows
from tests.support.rig import cache_bytes

if TYPE_CHECKING:
    from semantic.adapters.mlx.backend import MLXBackend

Opaque = NewType("Opaque", object)
"""What a backend puts into blocks: no test here looks inside."""

Blocks = list[list[KVBlock]]
GREEDY = SamplingParams()


@dataclass
class Subject:
    """A backend under test. `held_bytes` is what its open sequences hold."""

    backend: BatchBackend
    held_bytes: Callable[[], int]
    name: str = ""
    """Subjects with the same name give the same answers and bodies; "" keeps none of them."""
    pool: BlockPool = field(init=False)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.spec, 10_000)

    @property
    def spec(self) -> ModelCacheSpec:
        return self.backend.cache_spec()

    @property
    def cuttable(self) -> bool:
        """Whether its caches can be cut; a state cannot."""
        return LayerKind.STATE not in self.spec.layer_types

    def close_all(self) -> None:
        """Leave an empty backend behind, or none if caches of it are still held."""
        if not isinstance(self.backend, FakeBackend):
            for sequence in list(cast("MLXBackend", self.backend)._sequences):
                self.backend.close(sequence)
            if self.held_bytes():
                _backend.cache_clear()

    def tokens(self, n: int, seed: int = 0) -> list[int]:
        return [(seed + i * i * 7 + i * 3) % self.backend.vocab_size for i in range(n)]

    def blocks_for(self, capacity: int) -> Blocks:
        return self.pool.allocate_layers(self.spec.blocks_for(capacity), "a")

    def prefilled(self, tokens: Sequence[int], capacity: int, chunk: int = 200) -> SequenceId:
        sequence = self.backend.open(capacity)
        self.prefill(sequence, tokens, chunk)
        return sequence

    def prefill(self, sequence: SequenceId, tokens: Sequence[int], chunk: int = 200) -> None:
        for i in range(0, len(tokens), chunk):
            self.backend.prefill(sequence, tokens[i : i + chunk])

    def go_on(
        self,
        sequence: SequenceId,
        tokens: Sequence[int],
        n: int,
        params: SamplingParams = GREEDY,
        drawn: int = 0,
    ) -> list[int]:
        """The next `n` tokens of a sequence that holds all of `tokens` but the last."""
        assert self.backend.length(sequence) == len(tokens) - 1
        self.backend.start(sequence, tokens[-1], tokens[:-1], params, drawn)
        return self.decode(sequence, n)

    def decode(self, sequence: SequenceId, n: int) -> list[int]:
        sampled: list[SampledToken] = []
        while len(sampled) < n:
            sampled += [one for one in self.backend.decode() if one.sequence == sequence]
        return [one.token for one in sampled]

    def answer(self, tokens: Sequence[int], n: int, params: SamplingParams = GREEDY) -> list[int]:
        """What an uninterrupted sequence of its own answers to `tokens`.

        A process computes it once for each model, and in the thorough lane each time.
        """
        key = self.name, tuple(tokens), repr(params)
        if len(known := _answers.get(key, ())) >= n:
            return list(known[:n])
        sequence = self.prefilled(tokens[:-1], whole_blocks(len(tokens) + n))
        said = self.go_on(sequence, tokens, n, params)
        self.backend.close(sequence)
        if self.name and not THOROUGH:
            _answers[key] = tuple(said)
        return said

    def cached(self, tokens: Sequence[int]) -> AgentBlocks:
        """A cache of `tokens`, as an ended sequence leaves it."""
        capacity = whole_blocks(len(tokens))
        return self.extract(self.prefilled(tokens, capacity), tokens, self.blocks_for(capacity))

    def extract(self, sequence: SequenceId, tokens: Sequence[int], mine: Blocks) -> AgentBlocks:
        unused = self.backend.extract(sequence, mine)
        self.pool.free(unused, "a")
        blocks = AgentBlocks("a", token_ids=tuple(tokens), model_id=self.backend.model_id)
        gone = {block.block_id for block in unused}
        for layer in mine:
            for block in layer:
                if block.block_id not in gone:
                    blocks.add_block(block)
        return blocks


_answers: dict[tuple[str, tuple[int, ...], str], tuple[int, ...]] = {}
"""The longest answers so far, by the subject's name, the prompt and the sampling."""


def fake(*layers: str, silent_steps: int = 0, cost_beside: float | None = None) -> Subject:
    kinds = {"full": FULL, "state": STATE, "window": window(300), "narrow": window(16)}
    spec = ModelCacheSpec(tuple(kinds[layer] for layer in layers))
    backend = FakeBackend(spec, silent_steps=silent_steps, cost_beside=cost_beside)
    return Subject(cast("BatchBackend", backend), lambda: backend.held_bytes)


@cache
def _backend(architecture: str) -> MLXBackend:
    from tests.support.in_pages import tiny_backend

    return tiny_backend(architecture)


def real(architecture: str) -> Subject:
    """Tests share the backend of a model; in the thorough lane each builds its own."""
    if THOROUGH:
        _backend.cache_clear()
    backend = _backend(architecture)
    return Subject(cast("BatchBackend", backend), partial(cache_bytes, backend), architecture)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "fake full": lambda: fake("full", "full"),
    "fake windows": lambda: fake("window", "full", "narrow", silent_steps=1),
    "fake state": lambda: fake("full", "state"),
    "mlx llama": lambda: real("llama"),
    "mlx gemma3": lambda: real("gemma3"),
    "mlx gemma3 in pages": lambda: real("gemma3 in pages"),
}

# Models whose sequences are only saved and loaded here: all kinds of layers, and half precision.
SAVED: dict[str, Callable[[], Subject]] = {
    **SUBJECTS,
    "fake state alone": lambda: fake("state"),
    "fake state beside": lambda: fake("full", "state", cost_beside=0.5),
    "mlx lfm2 in pages": lambda: real("lfm2 in pages"),
    "mlx llama bf16": lambda: real("llama bf16"),
    "mlx gemma3 bf16": lambda: real("gemma3 bf16"),
    "mlx gpt_oss": lambda: real("gpt_oss"),
    "mlx lfm2": lambda: real("lfm2"),
    "mlx recurrent_gemma": lambda: real("recurrent_gemma"),
    "mlx stablelm": lambda: real("stablelm"),
    "mlx falcon_h1": lambda: real("falcon_h1"),
    "mlx windows": lambda: real("windows"),
    "mlx llama padded": lambda: real("llama padded"),
    "mlx llama in pages": lambda: real("llama in pages"),
    "mlx gemma3 bf16 in pages": lambda: real("gemma3 bf16 in pages"),
}


_FURTHER = {
    "mlx gemma3 bf16",
    "mlx gemma3 bf16 in pages",
    "mlx stablelm",
    "mlx recurrent_gemma",
    "mlx windows",
    "mlx llama padded",
    "mlx llama in pages",
}
"""Further models of kinds that the others have; for the thorough lane."""


def params_of(names: Iterable[str], further: set[str] = _FURTHER) -> list[object]:
    """These subjects, `further` ones in the thorough lane; `make quick` runs the fakes."""
    marks = {name: [pytest.mark.mlx] if name.startswith("mlx ") else [] for name in names}
    for name in further & marks.keys():
        marks[name].append(pytest.mark.thorough)
    return [pytest.param(name, marks=own) for name, own in marks.items()]


@pytest.fixture(params=params_of(SUBJECTS))
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    made = SAVED[cast(str, request.param)]()
    yield made
    made.close_all()
    made.pool.check_integrity()


def only(*names: str) -> pytest.MarkDecorator:
    """Run a test for these subjects."""
    return pytest.mark.parametrize("subject", params_of(names), indirect=True)


every_decoder = pytest.mark.parametrize(
    "subject", params_of(SUBJECTS, {"mlx gemma3"}), indirect=True
)
"""Contiguous caches and pages: what is sampled or scored knows no window."""
FULL_ALONE = ("fake full", "mlx llama")
WINDOWED = ("fake windows", "mlx gemma3")
STATEFUL = ("fake state",)
CUTTABLE = (*FULL_ALONE, *WINDOWED)


# Opening


def test_a_new_sequence_is_empty(subject: Subject) -> None:
    sequence = subject.backend.open(512)
    assert subject.backend.length(sequence) == 0


def test_sequences_are_told_apart(subject: Subject) -> None:
    assert len({subject.backend.open(256) for _ in range(5)}) == 5


def test_the_model_describes_itself_alike_each_time(subject: Subject) -> None:
    assert subject.backend.cache_spec() == subject.backend.cache_spec()
    assert subject.backend.model_id
    assert subject.backend.model_id == subject.backend.model_id
    assert subject.backend.vocab_size > 1
    assert subject.backend.best_chunk >= 1


# Memory


@pytest.mark.parametrize("capacity", [256, 512, 1024])
def test_an_open_sequence_holds_the_bytes_of_its_capacity(subject: Subject, capacity: int) -> None:
    sequence = subject.prefilled(subject.tokens(250), capacity)
    assert subject.held_bytes() == subject.spec.bytes_for(capacity)
    subject.backend.close(sequence)
    assert subject.held_bytes() == 0


def test_reserving_grows_and_never_shrinks(subject: Subject) -> None:
    tokens = subject.tokens(250)
    expected = subject.answer(tokens, 20)
    sequence = subject.prefilled(tokens[:-1], 256)
    for capacity in (768, 256, 512):
        subject.backend.reserve(sequence, capacity)
        assert subject.held_bytes() == subject.spec.bytes_for(768)
    assert subject.go_on(sequence, tokens, 20) == expected
    assert subject.held_bytes() == subject.spec.bytes_for(768)


def test_reserving_while_decoding_changes_no_token(subject: Subject) -> None:
    tokens = subject.tokens(251)
    expected = subject.answer(tokens, 20)
    sequence = subject.prefilled(tokens[:-1], 256)
    said = subject.go_on(sequence, tokens, 5)
    subject.backend.reserve(sequence, 512)
    assert said + subject.decode(sequence, 15) == expected


@only(*CUTTABLE)
def test_a_copied_sequence_holds_the_bytes_of_its_own_capacity(subject: Subject) -> None:
    tokens = subject.tokens(1000)
    blocks = subject.cached(tokens[:400])
    before = subject.held_bytes()
    subject.backend.restore(blocks, 399, 512, exclusive=False)
    subject.backend.restore(blocks, 399, 1024, exclusive=False)
    added = subject.held_bytes() - before
    assert added == subject.spec.bytes_for(512) + subject.spec.bytes_for(1024)


@only(*FULL_ALONE)
def test_a_copy_of_a_short_beginning_holds_no_bytes_for_the_rest(subject: Subject) -> None:
    blocks = subject.cached(subject.tokens(1000))
    before = subject.held_bytes()
    subject.backend.restore(blocks, 100, 256, exclusive=False)
    assert subject.held_bytes() - before == subject.spec.bytes_for(256)


# Prefilling and decoding


@pytest.mark.parametrize("chunk", [1, 64, 300, *more(7)])
def test_chunks_of_any_size_give_the_same_answer(subject: Subject, chunk: int) -> None:
    tokens = subject.tokens(330)
    expected = subject.answer(tokens, 8)
    sequence = subject.backend.open(512)
    begun = 250 if chunk == 1 and not THOROUGH else 0  # before the first edge
    subject.prefill(sequence, tokens[:begun])
    subject.prefill(sequence, tokens[begun:-1], chunk)
    assert subject.backend.length(sequence) == 329
    assert subject.go_on(sequence, tokens, 8) == expected


@pytest.mark.parametrize("sizes", [(1, 1), (5, 30, 2), (20,) * 7], ids=str)
def test_prompts_computed_in_one_pass_answer_as_alone(
    subject: Subject, sizes: tuple[int, ...]
) -> None:
    prompts = [subject.tokens(size + 1, seed=seed) for seed, size in enumerate(sizes)]
    expected = [subject.answer(prompt, 6) for prompt in prompts]
    opened = [subject.backend.open(256) for _ in prompts]
    joining = [
        (sequence, prompt[:-1])
        for sequence, prompt in zip(opened, prompts, strict=True)
        if subject.backend.joins(sequence, len(prompt) - 1)
    ]
    if not joining:
        pytest.skip("these caches are prefilled one by one")
    subject.backend.prefill_together(joining)
    for sequence, prompt, answer in zip(opened, prompts, expected, strict=True):
        if sequence not in dict(joining):
            subject.prefill(sequence, prompt[:-1])
        assert subject.go_on(sequence, prompt, 6) == answer


def test_prompts_that_begin_with_a_cache_are_computed_in_one_pass_too(subject: Subject) -> None:
    pasts = [subject.tokens(n, seed=n) for n in (300, 255, 30)]
    prompts = [[*past, *subject.tokens(9, seed=i)] for i, past in enumerate(pasts)]
    expected = [subject.answer(prompt, 6) for prompt in prompts]
    opened = [subject.prefilled(past, 512) for past in pasts]
    joining = [
        (sequence, prompt[len(past) : -1])
        for sequence, past, prompt in zip(opened, pasts, prompts, strict=True)
        if subject.backend.joins(sequence, 8)
    ]
    if not joining:
        pytest.skip("these caches are prefilled one by one")
    subject.backend.prefill_together(joining)
    for sequence, past, prompt, answer in zip(opened, pasts, prompts, expected, strict=True):
        if sequence not in dict(joining):
            subject.prefill(sequence, prompt[len(past) : -1])
        assert subject.go_on(sequence, prompt, 6) == answer


def test_a_sequence_that_decodes_joins_no_pass_and_the_others_stay_as_they_were(
    subject: Subject,
) -> None:
    prompt = subject.tokens(12)
    expected = subject.answer(prompt, 4)
    waiting, busy = subject.backend.open(256), subject.prefilled(subject.tokens(5), 256)
    if not subject.backend.joins(waiting, 11):
        pytest.skip("these caches are prefilled one by one")
    subject.backend.start(busy, 1, subject.tokens(5), GREEDY, 0)
    with pytest.raises(BackendError):
        subject.backend.prefill_together([(waiting, prompt[:-1]), (busy, [1, 2])])
    assert subject.backend.length(waiting) == 0
    subject.prefill(waiting, prompt[:-1])
    assert subject.go_on(waiting, prompt, 4) == expected


@only("fake state beside", "mlx lfm2 in pages")
@pytest.mark.parametrize("sizes", [(0, 0), (0, 30, 120, 0, 55)], ids=str)
@pytest.mark.parametrize("even", [True, False], ids=["even", "padded"])
def test_prompts_computed_side_by_side_answer_as_alone(
    subject: Subject, sizes: tuple[int, ...], even: bool
) -> None:
    """Some begin with a cache, of any length, and none ends where another one does."""
    backend = subject.backend
    prompts = [subject.tokens(size + 12 + i, seed=i) for i, size in enumerate(sizes)]
    expected = [subject.answer(prompt, 6) for prompt in prompts]
    opened = [
        subject.prefilled(prompt[:size], 512) if size else backend.open(512)
        for prompt, size in zip(prompts, sizes, strict=True)
    ]
    assert backend.pads_chunks
    for n_tokens in (4, 7):
        assert all(backend.side_by_side(sequence, n_tokens) for sequence in opened)
        chunks = []
        for i, (sequence, prompt) in enumerate(zip(opened, prompts, strict=True)):
            at = backend.length(sequence)
            chunks.append((sequence, prompt[at : at + n_tokens - (0 if even else i % 3)]))
        backend.prefill_together(chunks)
    for sequence, prompt, answer in zip(opened, prompts, expected, strict=True):
        if rest := prompt[backend.length(sequence) : -1]:
            subject.prefill(sequence, rest)
        assert subject.go_on(sequence, prompt, 6) == answer


def test_a_single_token_needs_no_prefill(subject: Subject) -> None:
    expected = subject.answer([5], 6)
    sequence = subject.backend.open(256)
    assert subject.go_on(sequence, [5], 6) == expected


def test_the_cache_holds_every_token_that_was_returned(subject: Subject) -> None:
    tokens = subject.tokens(20)
    sequence = subject.prefilled(tokens[:-1], 256)
    subject.backend.start(sequence, tokens[-1], tokens[:-1], GREEDY, 0)
    said = 0
    for _ in range(6):
        said += len(subject.backend.decode())
        assert subject.backend.length(sequence) == 20 + said
    assert said == 6, "alone, it has no reason to be silent"


def test_nothing_started_gives_no_tokens(subject: Subject) -> None:
    assert subject.backend.decode() == []
    subject.prefilled(subject.tokens(9), 256)
    assert subject.backend.decode() == []


def test_a_newcomer_is_silent_at_first_and_then_never(subject: Subject) -> None:
    heard: set[SequenceId] = set()
    for n in (3, 40, 7):
        tokens = subject.tokens(n, seed=n)
        sequence = subject.prefilled(tokens[:-1], 256)
        subject.backend.start(sequence, tokens[-1], tokens[:-1], GREEDY, 0)
        for _ in range(4):
            sampled = [one.sequence for one in subject.backend.decode()]
            assert len(sampled) == len(set(sampled)), "two tokens of one sequence in one step"
            assert heard <= set(sampled), "a sequence fell silent"
            heard.update(sampled)
        assert sequence in heard


def test_a_batch_answers_as_each_alone(subject: Subject) -> None:
    prompts = [subject.tokens(n, seed=n) for n in (2, 60, 310)]
    expected = [subject.answer(prompt, 10) for prompt in prompts]
    said: dict[SequenceId, list[int]] = {}
    for prompt in prompts:
        sequence = subject.prefilled(prompt[:-1], whole_blocks(len(prompt) + 12))
        subject.backend.start(sequence, prompt[-1], prompt[:-1], GREEDY, 0)
        said[sequence] = []
        for one in subject.backend.decode():
            said[one.sequence].append(one.token)
    while min(map(len, said.values())) < 10:
        for one in subject.backend.decode():
            said[one.sequence].append(one.token)
    assert [tokens[:10] for tokens in said.values()] == expected


def test_others_go_on_when_one_is_closed(subject: Subject) -> None:
    first, second = subject.tokens(30), subject.tokens(50, seed=3)
    expected = subject.answer(first, 10)
    one = subject.prefilled(first[:-1], 256)
    other = subject.prefilled(second[:-1], 256)
    subject.backend.start(other, second[-1], second[:-1], GREEDY, 0)
    said = subject.go_on(one, first, 4)
    subject.backend.close(other)
    assert said + subject.decode(one, 6) == expected


@every_decoder
@pytest.mark.parametrize("when", ["opened", "prefilled", "started", "decoded"])
def test_a_sequence_can_be_closed_at_any_time(subject: Subject, when: str) -> None:
    tokens = subject.tokens(20)
    sequence = subject.backend.open(256)
    if when != "opened":
        subject.backend.prefill(sequence, tokens[:-1])
    if when in ("started", "decoded"):
        subject.backend.start(sequence, tokens[-1], tokens[:-1], GREEDY, 0)
    if when == "decoded":
        subject.backend.decode()
    subject.backend.close(sequence)
    assert subject.backend.decode() == []
    assert subject.held_bytes() == 0


# Sampling


@every_decoder
def test_a_seed_fixes_the_answer_in_any_company(subject: Subject) -> None:
    params = SamplingParams(temperature=1.0, seed=7)
    tokens, others = subject.tokens(20), subject.tokens(33, seed=5)
    expected = subject.answer(tokens, 12, params)
    company = subject.prefilled(others[:-1], 256)
    subject.backend.start(company, others[-1], others[:-1], replace(params, seed=8), 0)
    subject.backend.decode()
    sequence = subject.prefilled(tokens[:-1], 256)
    assert subject.go_on(sequence, tokens, 12, params) == expected


@every_decoder
def test_another_seed_gives_another_answer(subject: Subject) -> None:
    tokens = subject.tokens(20)
    answers = [
        subject.answer(tokens, 12, SamplingParams(temperature=1.5, seed=seed)) for seed in (1, 2, 3)
    ]
    assert len(set(map(tuple, answers))) > 1


@every_decoder
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=7),
        SamplingParams(temperature=0.8, seed=2**63 - 1, top_k=20),
        SamplingParams(repetition_penalty=1.5, repetition_context=30),
        SamplingParams(presence_penalty=1.5, frequency_penalty=0.5),
    ],
    ids=["seed", "largest seed", "penalty", "penalties of the answer"],
)
def test_an_answer_computed_again_from_its_middle_goes_on_as_before(
    subject: Subject, params: SamplingParams
) -> None:
    tokens = subject.tokens(20)
    expected = subject.answer(tokens, 12, params)
    half = [*tokens, *expected[:5]]
    sequence = subject.prefilled(half[:-1], 256)
    assert subject.go_on(sequence, half, 7, params, drawn=5) == expected[5:]


@every_decoder
def test_a_bias_forbids_a_token(subject: Subject) -> None:
    tokens = subject.tokens(20)
    wanted = subject.answer(tokens, 1)[0] ^ 1
    params = SamplingParams(logit_bias={wanted: 1e9})
    if isinstance(subject.backend, FakeBackend):
        assert subject.answer(tokens, 12, params) != subject.answer(tokens, 12)
    else:
        assert subject.answer(tokens, 3, params) == [wanted] * 3


@every_decoder
@pytest.mark.parametrize("n_top", [0, 3])
def test_log_probabilities_come_when_asked_for(subject: Subject, n_top: int) -> None:
    tokens = subject.tokens(20)
    sequence = subject.prefilled(tokens[:-1], 256)
    params = SamplingParams(logprobs=n_top)
    subject.backend.start(sequence, tokens[-1], tokens[:-1], params, 0)
    (sampled,) = subject.backend.decode() or subject.backend.decode()
    assert sampled.logprob is not None
    assert sampled.logprob.token == sampled.token
    assert sampled.logprob.logprob <= 0
    assert len(sampled.logprob.top) == n_top
    assert list(sampled.logprob.top) == sorted(sampled.logprob.top, key=lambda pair: -pair[1])
    if n_top:
        assert sampled.logprob.top[0][0] == sampled.token


@every_decoder
def test_no_log_probabilities_come_unasked(subject: Subject) -> None:
    tokens = subject.tokens(20)
    sequence = subject.prefilled(tokens[:-1], 256)
    subject.backend.start(sequence, tokens[-1], tokens[:-1], GREEDY, 0)
    (sampled,) = subject.backend.decode() or subject.backend.decode()
    assert sampled.logprob is None


# Scoring


def score(subject: Subject, tokens: Sequence[int], *chunks: int) -> list[TokenLogprob]:
    """All scores of `tokens`, in chunks of these sizes, with another sequence beside it."""
    subject.prefilled(subject.tokens(30, seed=9), 256)
    sequence = subject.backend.open(whole_blocks(len(tokens)))
    scores: list[TokenLogprob] = []
    for chunk in chunks:
        scores += subject.backend.score(sequence, tokens[len(scores) : len(scores) + chunk + 1], 3)
    assert subject.backend.length(sequence) == len(tokens) - 1 == sum(chunks)
    return scores


@every_decoder
def test_every_token_but_the_first_is_scored(subject: Subject) -> None:
    tokens = subject.tokens(80)
    scores = score(subject, tokens, 40, 39)
    assert [one.token for one in scores] == tokens[1:]
    assert all(one.logprob <= 0 and len(one.top) == 3 for one in scores)
    assert all(one.top == tuple(sorted(one.top, key=lambda pair: -pair[1])) for one in scores)


def test_scores_are_the_same_bits_each_time(subject: Subject) -> None:
    tokens = subject.tokens(300)
    first = score(subject, tokens, 128, 128, 43)
    assert score(subject, tokens, 128, 128, 43) == first
    other = [*tokens[:-1], (tokens[-1] + 1) % subject.backend.vocab_size]
    assert score(subject, other, 128, 128, 43)[:-1] == first[:-1]


def test_a_sequence_that_was_scored_goes_on_as_one_that_was_prefilled(subject: Subject) -> None:
    tokens = subject.tokens(60)
    expected = subject.answer(tokens, 8)
    sequence = subject.backend.open(256)
    subject.backend.score(sequence, tokens[:31], 0)
    subject.backend.score(sequence, tokens[30:], 0)
    assert subject.go_on(sequence, tokens, 8) == expected


@every_decoder
def test_a_sequence_that_decodes_is_not_scored(subject: Subject) -> None:
    tokens = subject.tokens(20)
    sequence = subject.prefilled(tokens[:-1], 256)
    subject.backend.start(sequence, tokens[-1], tokens[:-1], GREEDY, 0)
    with pytest.raises(BackendError, match="pause it first"):
        subject.backend.score(sequence, tokens, 0)


@every_decoder
@pytest.mark.parametrize("kind", ["json_schema", "lark"])
def test_without_texts_no_grammar_can_be_enforced(
    subject: Subject, kind: Literal["json_schema", "lark"]
) -> None:
    with pytest.raises(InvalidRequestError, match="grammar"):
        subject.backend.check_grammar(Grammar(kind, "{}"))


# Extracting


@pytest.mark.parametrize("n", [1, 255, 256, 257, 600])
def test_blocks_say_which_tokens_they_hold(subject: Subject, n: int) -> None:
    tokens = subject.tokens(n)
    blocks = subject.cached(tokens)
    for i, layer in enumerate(subject.spec.layers):
        chain = blocks.blocks_for_layer(i)
        assert all(block.layer_data is not None and block.token_count for block in chain)
        assert all(block.layer_id == i for block in chain)
        assert all(left.stop == right.start for left, right in itertools.pairwise(chain))
        held = blocks.token_range(i)
        assert held.stop == n
        assert held.start <= max(0, n - (layer.window or n) + 1)
        assert layer.window is not None or held.start == 0


def test_blocks_that_were_not_needed_come_back(subject: Subject) -> None:
    tokens = subject.tokens(100)
    sequence = subject.prefilled(tokens, 768)
    mine = subject.blocks_for(768)
    given = {block.block_id for layer in mine for block in layer}
    unused = subject.backend.extract(sequence, mine)
    needed = {layer[0].block_id for layer in mine}
    assert {block.block_id for block in unused} == given - needed


def test_an_empty_sequence_needs_no_block(subject: Subject) -> None:
    sequence = subject.backend.open(512)
    mine = subject.blocks_for(512)
    unused = subject.backend.extract(sequence, mine)
    assert {b.block_id for b in unused} == {b.block_id for layer in mine for b in layer}


def test_an_extracted_sequence_is_closed(subject: Subject) -> None:
    tokens = subject.tokens(30)
    sequence = subject.prefilled(tokens[:-1], 256)
    subject.backend.start(sequence, tokens[-1], tokens[:-1], GREEDY, 0)
    said = subject.decode(sequence, 3)
    subject.extract(sequence, [*tokens, *said], subject.blocks_for(256))
    assert subject.backend.decode() == []


def test_a_sequence_extracted_before_its_first_step_holds_what_was_prefilled(
    subject: Subject,
) -> None:
    tokens = subject.tokens(30)
    expected = subject.answer(tokens, 6)
    sequence = subject.prefilled(tokens[:-1], 256)
    subject.backend.start(sequence, tokens[-1], tokens[:-1], GREEDY, 0)
    assert subject.backend.length(sequence) == 29
    blocks = subject.extract(sequence, tokens[:-1], subject.blocks_for(256))
    again = subject.backend.restore(blocks, 29, 256, exclusive=True)
    assert subject.go_on(again, tokens, 6) == expected


def test_a_silent_newcomer_can_be_extracted(subject: Subject) -> None:
    others, tokens = subject.tokens(15, seed=4), subject.tokens(30)
    expected = [*tokens, *subject.answer(tokens, 6)]
    company = subject.prefilled(others[:-1], 256)
    subject.go_on(company, others, 2)
    sequence = subject.prefilled(tokens[:-1], 256)
    subject.backend.start(sequence, tokens[-1], tokens[:-1], GREEDY, 0)
    said = sum(one.sequence == sequence for one in subject.backend.decode())
    length = subject.backend.length(sequence)
    assert length in (29, 30) if not said else length == 30 + said
    blocks = subject.extract(sequence, expected[:length], subject.blocks_for(256))
    again = subject.backend.restore(blocks, length, 256, exclusive=True)
    assert subject.go_on(again, expected[: length + 1], 4) == expected[length + 1 : length + 5]


# Restoring


@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize("n", [1, 301, *more(60, 256, 600)])
def test_a_restored_sequence_goes_on_as_if_never_interrupted(
    subject: Subject, n: int, exclusive: bool
) -> None:
    tokens = subject.tokens(n)
    expected = subject.answer(tokens, 15)
    room = whole_blocks(n + 15)
    mine = subject.blocks_for(room)
    sequence = subject.prefilled(tokens[:-1], room)
    said = subject.go_on(sequence, tokens, 6)
    whole = [*tokens, *said]
    blocks = subject.extract(sequence, whole, mine)
    again = subject.backend.restore(blocks, len(whole), room, exclusive=exclusive)
    more = [*whole, *expected[6:8]]
    subject.backend.prefill(again, more[len(whole) : -1])
    assert subject.go_on(again, more, 7) == expected[8:]


@only(*CUTTABLE)
@pytest.mark.parametrize(
    ("n", "length", "exclusive"),
    [
        *((700, 690, True), (700, 690, False), (257, 256, False), (256, 255, True)),
        *((250, 3, False), (2, 1, True)),
        *more_rows((257, 256, True), (256, 255, False), (250, 3, True), (2, 1, False)),
    ],
)
def test_a_cache_cut_short_gives_what_it_held_then(
    subject: Subject, n: int, length: int, exclusive: bool
) -> None:
    tokens = subject.tokens(n)
    edited = [*tokens[:length], *subject.tokens(30, seed=50)]
    expected = subject.answer(edited, 12)
    blocks = subject.cached(tokens)
    room = whole_blocks(len(edited) + 12)
    sequence = subject.backend.restore(blocks, length, room, exclusive=exclusive)
    assert subject.backend.length(sequence) == length
    subject.prefill(sequence, edited[length:-1])
    assert subject.go_on(sequence, edited, 12) == expected


@only(*CUTTABLE)
def test_a_copied_cache_stays_as_it_is(subject: Subject) -> None:
    tokens = subject.tokens(420)
    others = [[*tokens[:400], *subject.tokens(30, seed=seed)] for seed in (1, 2, 3)]
    expected = [subject.answer(other, 10) for other in others]
    blocks = subject.cached(tokens)
    before = [(b.block_id, b.start, b.token_count) for b in blocks.all_blocks()]
    sequences = [
        subject.backend.restore(blocks, 400, 512, exclusive=False) for _ in range(len(others))
    ]
    for sequence, other in zip(sequences, others, strict=True):
        subject.prefill(sequence, other[400:-1])
    said = [
        subject.go_on(sequence, other, 10)[:10]
        for sequence, other in zip(sequences, others, strict=True)
    ]
    assert said == expected
    assert [(b.block_id, b.start, b.token_count) for b in blocks.all_blocks()] == before
    again = subject.backend.restore(blocks, 400, 512, exclusive=True)
    subject.prefill(again, others[0][400:-1])
    assert subject.go_on(again, others[0], 10) == expected[0]


def test_a_cache_can_be_taken_over_again_and_again(subject: Subject) -> None:
    tokens = subject.tokens(240)
    expected = subject.answer(tokens, 61)
    mine = subject.blocks_for(512)
    sequence = subject.prefilled(tokens[:-1], 512)
    whole = [*tokens, *subject.go_on(sequence, tokens, 1)]
    for done in range(1, 61, 10):
        blocks = subject.extract(sequence, whole, mine)
        sequence = subject.backend.restore(blocks, len(whole), 512, exclusive=True)
        subject.pool.free(blocks.all_blocks(), "a")
        mine = subject.blocks_for(512)
        subject.backend.prefill(sequence, [expected[done]])
        whole = [*whole, expected[done], expected[done + 1]]
        whole += subject.go_on(sequence, whole, 8)
    assert whole[240:] == expected[: len(whole) - 240]
    assert len(whole) == 240 + 61


# What cannot be restored


def without(blocks: AgentBlocks, layer: int, index: int) -> AgentBlocks:
    """`blocks` without one block of one layer."""
    rest = AgentBlocks("a", token_ids=blocks.token_ids, model_id=blocks.model_id)
    lost = blocks.blocks_for_layer(layer)[index]
    for block in blocks.all_blocks():
        if block is not lost:
            rest.add_block(block)
    return rest


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_chain_with_a_missing_block_is_refused(subject: Subject, index: int) -> None:
    layer = subject.spec.layer_types.index(LayerKind.FULL)
    blocks = subject.cached(subject.tokens(700))
    with pytest.raises(CacheReconstructionError):
        subject.backend.restore(without(blocks, layer, index), 700, 768, exclusive=False)


def test_a_layer_without_blocks_is_refused(subject: Subject) -> None:
    blocks = subject.cached(subject.tokens(100))
    with pytest.raises(CacheReconstructionError):
        subject.backend.restore(without(blocks, 0, 0), 100, 256, exclusive=False)


def test_more_tokens_than_the_cache_holds_are_refused(subject: Subject) -> None:
    blocks = subject.cached(subject.tokens(100))
    with pytest.raises(CacheReconstructionError):
        subject.backend.restore(blocks, 101, 256, exclusive=False)


@only(*WINDOWED)
def test_a_window_that_slid_past_the_cut_is_refused(subject: Subject) -> None:
    blocks = subject.cached(subject.tokens(1500))
    with pytest.raises(CacheReconstructionError):
        subject.backend.restore(blocks, 700, 768, exclusive=False)


@only(*STATEFUL)
def test_a_state_is_not_restored_in_part(subject: Subject) -> None:
    blocks = subject.cached(subject.tokens(100))
    with pytest.raises(CacheReconstructionError):
        subject.backend.restore(blocks, 99, 256, exclusive=False)


def test_empty_blocks_are_refused(subject: Subject) -> None:
    blocks = AgentBlocks("a", token_ids=tuple(subject.tokens(100)))
    for layer in subject.blocks_for(256):
        blocks.add_block(layer[0])
    with pytest.raises(CacheReconstructionError):
        subject.backend.restore(blocks, 100, 256, exclusive=False)


@only(*CUTTABLE)
def test_a_refused_cache_is_unharmed(subject: Subject) -> None:
    tokens = subject.tokens(120)
    expected = subject.answer(tokens, 6)
    blocks = subject.cached(tokens[:100])
    with pytest.raises(CacheReconstructionError):
        subject.backend.restore(blocks, 101, 256, exclusive=True)
    sequence = subject.backend.restore(blocks, 100, 256, exclusive=True)
    subject.prefill(sequence, tokens[100:-1])
    assert subject.go_on(sequence, tokens, 6) == expected


# Bodies


@dataclass
class Saved:
    """A sequence as bodies: FULL ones of all its blocks, WINDOW ones where it needs them."""

    length: int
    full: list[bytes]
    window: list[bytes]
    window_start: int
    checkpoint: bytes | None


def block_ranges(start: int, stop: int) -> list[tuple[int, int]]:
    return [(at, min(at + 256, stop)) for at in range(start, stop, 256)]


def save(subject: Subject, sequence: SequenceId) -> Saved:
    backend, layout = subject.backend, subject.backend.layout()
    length = backend.length(sequence)
    first = max(0, length - (layout.window_tokens or 1) + 1)
    window_start = whole_blocks(first)
    return Saved(
        length,
        [exported(backend, sequence, Part.FULL, *r) for r in block_ranges(0, length)],
        [
            exported(backend, sequence, Part.WINDOW, *r)
            for r in block_ranges(window_start, length)
            if layout.window
        ],
        window_start,
        backend.export_checkpoint(sequence) if layout.needs_checkpoint else None,
    )


_saved: dict[tuple[str, tuple[int, ...]], Saved] = {}


def saved_of(subject: Subject, tokens: Sequence[int]) -> Saved:
    """`save` of a sequence of its own, that holds `tokens`; as `Subject.answer`, once."""
    key = subject.name, tuple(tokens)
    if key in _saved:
        return _saved[key]
    sequence = subject.prefilled(tokens, whole_blocks(len(tokens) + 12))
    saved = save(subject, sequence)
    subject.backend.close(sequence)
    if subject.name and not THOROUGH:
        _saved[key] = saved
    return saved


def load_saved(subject: Subject, saved: Saved, capacity: int) -> SequenceId:
    backend = subject.backend
    sequence = backend.open(capacity)
    fill(backend.loading(sequence, Part.FULL, 0, saved.length), saved.full)
    if saved.window:
        views = backend.loading(sequence, Part.WINDOW, saved.window_start, saved.length)
        fill(views, saved.window)
    backend.loaded(sequence, saved.length, saved.checkpoint)
    return sequence


EVERYTHING = tuple(SAVED)
NO_CHECKPOINT = (
    *("fake full", "mlx llama", "mlx llama bf16", "mlx llama in pages", "mlx stablelm"),
    "mlx llama padded",
)
WITH_CHECKPOINT = tuple(name for name in SAVED if name not in NO_CHECKPOINT)


_LIKE_OTHERS = ("gemma3 bf16 in pages", "gpt_oss", "falcon_h1", "lfm2", "llama bf16")
"""Models whose edges are those of another one: few lengths, but in the thorough lane."""


def lengths_at_edges(subject: Subject) -> list[int]:
    """Where blocks and the subject's windows end, and one before and after; then longer ones."""
    windows = {layer.window for layer in subject.spec.layers if layer.window}
    edges = {256, *windows}
    if not THOROUGH and subject.name in _LIKE_OTHERS:
        return [1, *sorted(edge + 1 for edge in edges), 775]
    lengths = {1, 556, 775} | {edge + offset for edge in edges for offset in (-1, 0, 1)}
    return sorted(lengths | {511 + size for size in windows})


@only(*EVERYTHING)
def test_a_loaded_sequence_goes_on_and_is_saved_as_the_same_bytes(subject: Subject) -> None:
    lengths = lengths_at_edges(subject)
    room = whole_blocks(max(lengths) + 12)
    for length in lengths:
        tokens = subject.tokens(length + 1)
        sequence = subject.prefilled(tokens[:-1], room)
        saved = save(subject, sequence)
        expected = subject.go_on(sequence, tokens, 5)
        subject.backend.close(sequence)
        again = load_saved(subject, saved, room)
        assert subject.backend.length(again) == length
        assert save(subject, again) == saved
        assert subject.go_on(again, tokens, 5) == expected, f"{length} tokens"
        subject.backend.close(again)


@only(*EVERYTHING)
def test_bodies_are_as_long_as_the_layout_says(subject: Subject) -> None:
    layout = subject.backend.layout()
    assert layout == subject.backend.layout()
    assert layout.name
    saved = save(subject, subject.prefilled(subject.tokens(700), 768))
    full = [layout.body_bytes(Part.FULL, n) for n in (256, 256, 188)]
    assert [len(body) for body in saved.full] == full
    sizes = [
        layout.body_bytes(Part.WINDOW, stop - start)
        for start, stop in block_ranges(saved.window_start, 700)
        if layout.window
    ]
    assert [len(body) for body in saved.window] == sizes
    assert layout.needs_checkpoint == (saved.checkpoint is not None)


@only(*EVERYTHING)
def test_what_was_decoded_is_saved_too(subject: Subject) -> None:
    tokens = subject.tokens(250)
    sequence = subject.prefilled(tokens[:-1], 512)
    whole = [*tokens, *subject.go_on(sequence, tokens, 20)]
    subject.backend.pause(sequence)
    assert subject.backend.length(sequence) == len(whole)
    again = load_saved(subject, save(subject, sequence), 512)
    more = [*whole, 5, 6]
    expected = subject.answer(more, 8)
    for each in (sequence, again):
        subject.prefill(each, [5])
        assert subject.go_on(each, more, 8) == expected


@only(*EVERYTHING)
def test_a_loaded_sequence_decodes_in_company_and_can_be_extracted(subject: Subject) -> None:
    tokens, others = subject.tokens(300), subject.tokens(40, seed=3)
    expected = subject.answer(tokens, 10)
    company = subject.prefilled(others[:-1], 256)
    subject.backend.start(company, others[-1], others[:-1], GREEDY, 0)
    saved = saved_of(subject, tokens[:-1])
    sequence = load_saved(subject, saved, 512)
    whole = [*tokens, *subject.go_on(sequence, tokens, 5)]
    assert whole[300:] == expected[:5]
    blocks = subject.extract(sequence, whole, subject.blocks_for(512))
    again = subject.backend.restore(blocks, len(whole), 512, exclusive=True)
    subject.prefill(again, [expected[5]])
    assert subject.go_on(again, [*whole, *expected[5:7]], 3) == expected[7:]


@only(*EVERYTHING)
def test_others_decode_while_a_sequence_is_loaded(subject: Subject) -> None:
    tokens, others = subject.tokens(301), subject.tokens(40, seed=3)
    expected, theirs = subject.answer(tokens, 6), subject.answer(others, 12)
    saved = saved_of(subject, tokens[:-1])
    company = subject.prefilled(others[:-1], 256)
    said = subject.go_on(company, others, 4)
    sequence = subject.backend.open(512)
    full = subject.backend.loading(sequence, Part.FULL, 0, 300)
    window = []
    if saved.window:
        window = subject.backend.loading(sequence, Part.WINDOW, saved.window_start, 300)
    said += subject.decode(company, 4)
    put(full, saved.full)
    put(window, saved.window)
    del full, window
    said += subject.decode(company, 4)
    subject.backend.loaded(sequence, 300, saved.checkpoint)
    assert said == theirs
    assert subject.go_on(sequence, tokens, 6) == expected


@only(*EVERYTHING)
def test_a_load_can_be_given_up(subject: Subject) -> None:
    tokens = subject.tokens(30)
    expected = subject.answer(tokens, 5)
    sequence = subject.backend.open(512)
    fill(subject.backend.loading(sequence, Part.FULL, 0, 300), [b""] * 2)
    subject.backend.loaded(sequence, 0)
    assert subject.backend.length(sequence) == 0
    subject.prefill(sequence, tokens[:-1])
    assert subject.go_on(sequence, tokens, 5) == expected
    other = subject.backend.open(512)
    targets = subject.backend.loading(other, Part.FULL, 0, 300)
    subject.backend.close(other)
    for target in targets:
        for segment in target.open():
            segment[:] = bytes(len(segment))
        target.close(256)


@only(*NO_CHECKPOINT)
def test_what_was_not_proven_is_computed(subject: Subject) -> None:
    tokens = subject.tokens(640)
    saved = saved_of(subject, tokens[:-1])
    expected = subject.answer(tokens, 6)
    for good in (0, 256, 511, 512, 600):
        sequence = subject.backend.open(768)
        bodies = [
            body if i * 256 < good else b"\xff" * len(body) for i, body in enumerate(saved.full)
        ]
        fill(subject.backend.loading(sequence, Part.FULL, 0, 639), bodies)
        subject.backend.loaded(sequence, good)
        assert subject.backend.length(sequence) == good
        subject.prefill(sequence, tokens[good:-1])
        assert subject.go_on(sequence, tokens, 6) == expected, good
        subject.backend.close(sequence)


@only(*NO_CHECKPOINT)
def test_a_sequence_is_loaded_in_portions(subject: Subject) -> None:
    tokens = subject.tokens(800)
    expected = subject.answer(tokens, 6)
    saved = saved_of(subject, tokens[:-1])
    sequence = subject.prefilled(tokens[:256], 1024)
    for start, stop in ((256, 512), (512, 799)):
        views = subject.backend.loading(sequence, Part.FULL, start, stop)
        fill(views, saved.full[start // 256 : -(-stop // 256)])
        subject.backend.loaded(sequence, stop)
    assert subject.go_on(sequence, tokens, 6) == expected


@only(*NO_CHECKPOINT)
def test_the_beginning_of_a_longer_block_can_be_used(subject: Subject) -> None:
    tokens = subject.tokens(400)
    edited = [*tokens[:300], *subject.tokens(9, seed=60)]
    expected = subject.answer(edited, 6)
    saved = saved_of(subject, tokens[:-1])
    sequence = subject.backend.open(512)
    fill(subject.backend.loading(sequence, Part.FULL, 0, 399), saved.full)
    subject.backend.loaded(sequence, 300)
    subject.prefill(sequence, edited[300:-1])
    assert subject.go_on(sequence, edited, 6) == expected


@only(*EVERYTHING)
@pytest.mark.parametrize("part", [Part.FULL, Part.WINDOW, Part.CHECKPOINT])
def test_a_body_that_belongs_elsewhere_changes_the_answer(subject: Subject, part: Part) -> None:
    tokens, others = subject.tokens(331), subject.tokens(331, seed=9)
    saved, foreign = saved_of(subject, tokens[:-1]), saved_of(subject, others[:-1])
    if part is Part.FULL:
        mixed = replace(saved, full=[*saved.full[:-1], foreign.full[-1]])
    elif part is Part.WINDOW:
        mixed = replace(saved, window=foreign.window)
    else:
        mixed = replace(saved, checkpoint=foreign.checkpoint)
    if mixed == saved:
        pytest.skip(f"this model needs no {part} here")
    expected = subject.answer(tokens, 30)
    sequence = load_saved(subject, mixed, 512)
    said = subject.go_on(sequence, tokens, 1)
    while said == expected[: len(said)]:  # usually the first token is another
        assert len(said) < 30, "the answer is the same"
        said += subject.decode(sequence, 1)


@only(*EVERYTHING)
def test_a_sequence_is_loaded_and_saved_only_at_rest(subject: Subject) -> None:
    backend, tokens = subject.backend, subject.tokens(30)
    sequence = subject.prefilled(tokens[:-1], 256)
    backend.start(sequence, tokens[-1], tokens[:-1], GREEDY, 0)
    for _ in range(2):
        with pytest.raises(BackendError, match="decoding"):
            exported(backend, sequence, Part.FULL, 0, 20)
        with pytest.raises(BackendError, match="decoding"):
            backend.export_checkpoint(sequence)
        with pytest.raises(BackendError, match="decoding"):
            backend.loading(sequence, Part.FULL, 0, 256)
        backend.decode()


@only(*EVERYTHING)
def test_what_is_no_block_of_the_sequence_is_not_saved(subject: Subject) -> None:
    sequence = subject.prefilled(subject.tokens(400), 512)
    wrong = [(0, 0), (0, 257), (255, 257), (-1, 5), (256, 401), (20, 10), (512, 513)]
    for start, stop in wrong:
        with pytest.raises(BackendError):
            exported(subject.backend, sequence, Part.FULL, start, stop)


@only(*EVERYTHING)
def test_an_empty_sequence_has_nothing_to_save(subject: Subject) -> None:
    sequence = subject.backend.open(256)
    with pytest.raises(BackendError):
        exported(subject.backend, sequence, Part.FULL, 0, 1)
    with pytest.raises(BackendError):
        subject.backend.export_checkpoint(sequence)


@only("fake windows", "mlx gemma3", "mlx gpt_oss")
def test_a_window_that_slid_on_is_not_saved(subject: Subject) -> None:
    sequence = subject.prefilled(subject.tokens(1500), 1536)
    with pytest.raises(BackendError):
        exported(subject.backend, sequence, Part.WINDOW, 0, 256)


@only(*EVERYTHING)
@pytest.mark.parametrize(("start", "stop"), [(1, 200), (256, 300), (0, 0), (-256, 10)])
def test_a_load_begins_where_the_sequence_ends(subject: Subject, start: int, stop: int) -> None:
    sequence = subject.backend.open(512)
    with pytest.raises(BackendError):
        subject.backend.loading(sequence, Part.FULL, start, stop)
    assert subject.backend.length(sequence) == 0


@only("fake full", "fake windows", "mlx llama", "mlx gemma3")
def test_a_load_needs_room(subject: Subject) -> None:
    sequence = subject.backend.open(512)
    with pytest.raises(BackendError, match=r"cannot load .* tokens into"):
        subject.backend.loading(sequence, Part.FULL, 0, 513)


@only(*WITH_CHECKPOINT)
def test_a_checkpoint_fits_its_position_only(subject: Subject) -> None:
    tokens = subject.tokens(331)
    expected = subject.answer(tokens, 6)
    room = 512
    saved, shorter = saved_of(subject, tokens[:-1]), saved_of(subject, tokens[:-2])
    hostile: list[bytes | None] = [None, b"", b"\0" * 8, shorter.checkpoint]
    assert saved.checkpoint is not None
    size = len(saved.checkpoint)
    hostile += [saved.checkpoint[:n] for n in (1, 8, size // 2, size - 1)]
    hostile += [saved.checkpoint + b"\0", b"\xff" * size]
    for checkpoint in hostile:
        with pytest.raises(CacheReconstructionError):
            load_saved(subject, replace(saved, checkpoint=checkpoint), room)
    sequence = subject.backend.open(room)
    fill(subject.backend.loading(sequence, Part.FULL, 0, 330), saved.full)
    with pytest.raises(CacheReconstructionError):
        subject.backend.loaded(sequence, 330, shorter.checkpoint)
    assert subject.backend.length(sequence) == 0
    subject.prefill(sequence, tokens[:-1])
    assert subject.go_on(sequence, tokens, 6) == expected


# Pausing


@only(*(name for name in EVERYTHING if "bf16" not in name))  # beside others halves round otherwise
@pytest.mark.parametrize("n", [1, 4])
def test_a_pause_returns_the_token_that_comes_next(subject: Subject, n: int) -> None:
    params = SamplingParams(temperature=0.8, seed=5, logprobs=2, repetition_penalty=1.2)
    tokens, others = subject.tokens(120), subject.tokens(40, seed=3)
    expected = subject.answer(tokens, 9, params)
    company = subject.prefilled(others[:-1], 256)
    subject.backend.start(company, others[-1], others[:-1], GREEDY, 0)
    sequence = subject.prefilled(tokens[:-1], 256)
    said = subject.go_on(sequence, tokens, n, params)
    in_flight = subject.backend.pause(sequence)
    assert subject.backend.length(sequence) == 120 + n
    assert in_flight is not None
    assert in_flight.sequence == sequence
    assert in_flight.logprob is not None
    assert in_flight.logprob.token == in_flight.token
    said.append(in_flight.token)
    assert said + subject.go_on(sequence, [*tokens, *said], 8 - n, params, n + 1) == expected


@only(*EVERYTHING)
def test_a_pause_before_the_first_step_changes_nothing(subject: Subject) -> None:
    tokens = subject.tokens(30)
    expected = subject.answer(tokens, 5)
    sequence = subject.backend.open(256)
    subject.backend.pause(sequence)
    subject.prefill(sequence, tokens[:-1])
    subject.backend.pause(sequence)
    subject.backend.start(sequence, tokens[-1], tokens[:-1], GREEDY, 0)
    subject.backend.pause(sequence)
    assert subject.backend.decode() == []
    assert subject.backend.length(sequence) == 29
    assert subject.go_on(sequence, tokens, 5) == expected
