"""Batches that decode padded in turns: the same tokens, the room that was reserved, no memory lost.

Each model here is compared with mlx-lm alone, as in `test_exactness`; that batches were padded at
all is counted.
"""

from __future__ import annotations

import gc
import random

import mlx.core as mx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test

from semantic import CompletedGeneration, SamplingParams
from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.batch.padded_batch import PaddedBatch, PaddedLayer
from semantic.adapters.mlx.kv_cache.contiguous.cache import FullCache, LentBuffer
from semantic.domain.errors import BackendError
from semantic.domain.value_objects import SequenceId, whole_blocks
from tests.integration.test_exactness import prompts
from tests.integration.test_exactness_machine import Machine
from tests.support.lanes import THOROUGH, examples, more
from tests.support.own_process import in_own_process
from tests.support.padded import PADDED, padded_backend
from tests.support.reference import is_answer
from tests.support.rig import Done, Rig, cache_bytes

FULL = ("llama", "qwen2", "qwen3", "moe", "quantized")
"""Architectures all of whose layers keep every token."""

some_full = pytest.mark.parametrize("architecture", ["llama", *more("moe")])
GREEDY = SamplingParams()


class Switches:
    """How often layers were padded and given back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.padded = 0
        self.given_back = 0
        pad, give_back = PaddedLayer.__init__, PaddedLayer.given_back

        def counted_pad(layer: PaddedLayer, rows: list[FullCache]) -> None:
            self.padded += 1
            pad(layer, rows)

        def counted_give_back(layer: PaddedLayer) -> object:
            self.given_back += 1
            return give_back(layer)

        monkeypatch.setattr(PaddedLayer, "__init__", counted_pad)
        monkeypatch.setattr(PaddedLayer, "given_back", counted_give_back)


@pytest.fixture
def switches(monkeypatch: pytest.MonkeyPatch) -> Switches:
    return Switches(monkeypatch)


def padded_rig(
    architecture: str, *, calm: int | None = None, columns: int = 200, chunk: int | None = None
) -> Rig:
    """`calm` steps before a batch is padded, if not as many as always."""
    rig = Rig(architecture + PADDED, columns=columns, chunk=chunk)
    if calm is not None:
        batch_of(rig)._stable_steps = calm
    return rig


def batch_of(rig: Rig) -> PaddedBatch:
    batch = rig.backend._batch
    assert isinstance(batch, PaddedBatch)
    return batch


def finish(rig: Rig, *, checked: bool = True) -> dict[str, Done]:
    """Run until nothing is left; every account is checked after every step."""
    done: dict[str, Done] = {}
    while rig.engine.has_work:
        for event in rig.engine.step_once():
            if isinstance(event, CompletedGeneration):
                done[event.uid] = event
        if checked:
            rig.check()
    return done


def run_until_both_are_padded(rig: Rig) -> None:
    while not batch_of(rig).padded or len(batch_of(rig)) < 2:
        assert rig.engine.has_work, "both have ended"
        rig.engine.step_once()


# The same tokens


@pytest.mark.parametrize(
    ("architecture", "calm"),
    [("llama", 4), *((architecture, 0) for architecture in FULL if THOROUGH)],
)
def test_a_batch_of_eight_from_1_to_3000_tokens(
    architecture: str, calm: int, switches: Switches
) -> None:
    rig = padded_rig(architecture, calm=calm)
    asked = prompts(1, 2, 255, 256, 257, 700, *((1500, 3000) if THOROUGH else (900, 1100)))
    n_new = [60, 1, 20, 40, 300 if THOROUGH else 80, 25, 20, 10]
    uids = [
        rig.engine.submit(f"agent-{i}", prompt, max_tokens=n)
        for i, (prompt, n) in enumerate(zip(asked, n_new, strict=True))
    ]
    done = finish(rig)
    for uid, prompt, n in zip(uids, asked, n_new, strict=True):
        assert is_answer(rig.model, prompt, done[uid].tokens, n), len(prompt)
    assert switches.padded == switches.given_back > 0


@pytest.mark.parametrize("architecture", ["llama", "glm_moe_dsa", *more("moe")])
def test_joining_and_leaving_at_random_steps(architecture: str, switches: Switches) -> None:
    rig = padded_rig(architecture, calm=1, chunk=100)
    draw = random.Random(3)
    asked = prompts(
        *(draw.choice([1, 30, 256, 400]) for _ in range(examples(8, thorough=12))), seed=4
    )
    done: dict[str, Done] = {}
    wanted: dict[str, tuple[list[int], int]] = {}
    while len(done) < len(asked):
        if len(wanted) < len(asked):
            prompt, n = asked[len(wanted)], draw.randrange(1, 50)
            uid = rig.engine.submit(f"agent-{len(wanted)}", prompt, max_tokens=n)
            wanted[uid] = prompt, n
        for _ in range(draw.randrange(1, 12)):
            for event in rig.engine.step_once():
                if isinstance(event, CompletedGeneration):
                    done[event.uid] = event
            rig.check()
    for uid, (prompt, n) in wanted.items():
        assert is_answer(rig.model, prompt, done[uid].tokens, n)
    assert switches.padded > 0


def test_a_cancelled_request_leaves_what_it_computed_and_the_others_alone() -> None:
    rig = padded_rig("llama", calm=0)
    first, second = prompts(300, 50, seed=7)
    cancelled = rig.engine.submit("ann", first, max_tokens=50)
    other = rig.engine.submit("bob", second, max_tokens=80)
    run_until_both_are_padded(rig)
    assert rig.engine.cancel(cancelled)
    done = finish(rig)
    assert done[cancelled].finish_reason == "cancelled"
    assert is_answer(rig.model, second, done[other].tokens, 80)
    retried = rig.answer("ann", first, 50)
    assert is_answer(rig.model, first, retried.tokens, 50)
    assert retried.cached_tokens == len(first) - 1


@some_full
def test_requests_preempted_for_want_of_blocks_go_on_with_the_same_tokens(
    architecture: str, switches: Switches
) -> None:
    rig = padded_rig(architecture, columns=6)
    asked = prompts(500, 400, 260, seed=8)
    uids = [rig.engine.submit(f"agent-{i}", p, max_tokens=130) for i, p in enumerate(asked)]
    done = finish(rig)
    assert rig.engine.preemptions > 0
    assert switches.padded > 0
    for uid, prompt in zip(uids, asked, strict=True):
        assert is_answer(rig.model, prompt, done[uid].tokens, 130)


def test_a_conversation_goes_on_from_what_a_padded_batch_computed() -> None:
    rig = padded_rig("llama", calm=0)
    prompt, other, *turns = prompts(600, 90, 20, 300, 1, seed=5)
    for turn in ([], *turns):
        prompt = prompt + turn
        ann = rig.engine.submit("ann", prompt, max_tokens=30)
        rig.engine.submit("bob", other, max_tokens=60)
        end = finish(rig)[ann]
        assert is_answer(rig.model, prompt, end.tokens, 30)
        assert end.cached_tokens == (len(prompt) - len(turn) if turn else 0)
        prompt = prompt + list(end.tokens)


def test_a_seed_gives_the_same_tokens_padded_and_one_by_one() -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, min_p=0.01, seed=42)
    asked = prompts(500, 400, 260, seed=14)

    def tokens(rig: Rig) -> list[tuple[int, ...]]:
        uids = [
            rig.engine.submit(f"agent-{i}", p, max_tokens=100, sampling=params)
            for i, p in enumerate(asked)
        ]
        done = rig.run()
        return [done[uid].tokens for uid in uids]

    assert tokens(padded_rig("llama")) == tokens(Rig("llama"))


class PaddedMachine(Machine):
    """The same agents, whose batches are padded after one step."""

    @initialize(columns=st.sampled_from([6, 8, 40]), chunk=st.sampled_from([7, 64, 300, 5000]))
    def build(self, columns: int, chunk: int) -> None:
        super().build(columns, chunk)
        self.rig = padded_rig(self.architecture, calm=1, columns=columns, chunk=chunk)


def test_whatever_agents_do_together(switches: Switches) -> None:
    chosen = settings(
        max_examples=examples(2, thorough=20),
        stateful_step_count=examples(12, thorough=25),
        deadline=None,
        database=None,
    )
    run_state_machine_as_test(PaddedMachine, settings=chosen)
    assert switches.padded > 0


# When a batch is padded


def started(*lengths: int) -> tuple[list[SequenceId], PaddedBatch, MLXBackend, list[list[int]]]:
    """Sequences of so many tokens that have begun to decode, and their prompts."""
    backend = padded_backend("llama")
    asked = prompts(*lengths, seed=20)
    sequences = []
    for prompt in asked:
        sequence = backend.open(whole_blocks(len(prompt)))
        backend.prefill(sequence, prompt[:-1])
        backend.start(sequence, prompt[-1], prompt[:-1], GREEDY, 0)
        sequences.append(sequence)
    batch = backend._batch
    assert isinstance(batch, PaddedBatch)
    return sequences, batch, backend, asked


def test_only_a_batch_that_was_calm_is_padded() -> None:
    sequences, batch, backend, _ = started(10, 20)
    backend.decode()  # two steps of the batch: newcomers are silent in their first
    backend.decode()
    backend.decode()
    assert not batch.padded
    backend.decode()
    assert batch.padded
    backend.pause(sequences[0])
    for _ in range(4):
        assert not batch.padded
        backend.decode()
    assert not batch.padded
    backend.decode()
    assert batch.padded


# What was reserved


def test_rows_lend_their_buffers_and_get_them_back_as_large_as_was_reserved() -> None:
    rig = padded_rig("llama", calm=0)
    rig.engine.submit("ann", [5] * 250, max_tokens=40)
    rig.engine.submit("bob", [7] * 20, max_tokens=40)
    run_until_both_are_padded(rig)
    caches = [cache for row in rig.backend.sequences() for cache in row]
    assert all(isinstance(cache, FullCache) for cache in caches)
    assert all(isinstance(c.buffer, LentBuffer) for c in caches if isinstance(c, FullCache))
    ann, bob = rig.backend.sequences()
    before = [cache.nbytes for cache in ann]
    # While padded the longer one outgrows its first block: room for a second is reserved.
    while [cache.nbytes for cache in ann] == before:
        assert rig.engine.has_work
        rig.engine.step_once()
        rig.check()
    assert batch_of(rig).padded
    assert [cache.nbytes for cache in ann] == [2 * n for n in before]
    batch_of(rig)._unpad()
    for row, capacity in ((ann, 512), (bob, 256)):
        for cache in row:
            assert isinstance(cache, FullCache)
            assert type(cache.buffer) is not LentBuffer
            assert cache.buffer.k.shape[2] == cache.buffer.capacity == capacity
    finish(rig)


def test_room_that_was_reserved_while_it_was_padded_is_there_afterwards() -> None:
    sequences, batch, backend, _ = started(10, 20)
    for _ in range(6):
        backend.decode()
    assert batch.padded
    backend.reserve(sequences[0], 1024)
    backend.reserve(sequences[0], 512)
    backend.pause(sequences[0])
    capacities = [
        [cache.buffer.k.shape[2] for cache in caches if isinstance(cache, FullCache)]
        for caches in backend.sequences()
    ]
    assert capacities == [[1024] * 3, [256] * 3]


def test_a_row_is_given_all_its_tokens_though_less_was_reserved() -> None:
    backend = padded_backend("llama")
    (prompt,) = prompts(250, seed=21)
    sequence = backend.open(256)
    backend.prefill(sequence, prompt[:-1])
    backend.start(sequence, prompt[-1], prompt[:-1], GREEDY, 0)
    said: list[int] = []
    while len(said) < 20:
        said += [one.token for one in backend.decode()]
    backend.pause(sequence)
    (caches,) = backend.sequences()
    assert [cache.buffer.capacity for cache in caches if isinstance(cache, FullCache)] == [512] * 3
    assert is_answer(backend.model, prompt, said, 20)
    whole = [*prompt, *said, 5]
    backend.start(sequence, 5, whole[:-1], GREEDY, 0)
    said = []
    while len(said) < 20:
        said += [one.token for one in backend.decode()]
    assert is_answer(backend.model, whole, said, 20)


# Memory


@pytest.mark.process
def test_padded_rows_are_there_once_and_nothing_stays_behind() -> None:
    in_own_process("tests.integration.test_padded_batch:rounds_of_padded_rows")


def rounds_of_padded_rows() -> None:
    """Padded rows take no more memory than ragged ones, and give all of it back."""
    rig = padded_rig("llama")

    def round_of_four(n: int) -> list[tuple[bool, int]]:
        """What MLX holds beside the weights after each step, and whether the batch was padded."""
        held = []
        for i in range(4):
            rig.engine.submit(f"agent-{i}", [i + 1] * (700 + 4 * n), max_tokens=16)
        while rig.engine.has_work:
            rig.engine.step_once()
            mx.synchronize(rig.backend.stream)
            held.append((batch_of(rig).padded, mx.get_active_memory()))
        rig.forget_all()
        gc.collect()
        return held

    round_of_four(0)
    empty = mx.get_active_memory()
    held = round_of_four(1)
    assert cache_bytes(rig.backend) == 0
    most_padded = max(n for padded, n in held if padded) - empty
    most_ragged = max(n for padded, n in held if not padded) - empty
    assert most_padded <= 1.1 * most_ragged
    for n in range(2, 4):
        round_of_four(n)
    assert rig.pool.used_blocks == 0
    assert mx.get_active_memory() <= empty + 4096


@pytest.mark.process
def test_a_switch_copies_at_once_and_has_no_more_than_one_layer_twice() -> None:
    in_own_process("tests.integration.test_padded_batch:two_switches")


def two_switches() -> None:
    """Each copies one layer after the other, and keeps nothing twice."""
    _, batch, backend, _ = started(1500, 1500, 1500, 1500)
    backend.decode()
    layer_bytes = cache_bytes(backend) // backend.cache_spec().n_layers
    for switch in (batch._pad, batch._unpad):
        mx.synchronize(backend.stream)
        gc.collect()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        with mx.stream(backend.stream):
            switch()
        mx.synchronize(backend.stream)
        # Not later: an idle cache that still refers to the batch's arrays would keep them.
        assert 0.9 * layer_bytes <= mx.get_peak_memory() - before <= 1.5 * layer_bytes
        assert mx.get_active_memory() <= before + 0.1 * layer_bytes


# What fails


def test_a_layer_that_cannot_be_given_back_stays_padded_and_the_batch_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sequences, batch, backend, asked = started(40, 300)
    said: dict[SequenceId, list[int]] = {one: [] for one in sequences}

    def step() -> None:
        for one in backend.decode():
            said[one.sequence].append(one.token)

    for _ in range(6):
        step()
    assert batch.padded
    give_back, calls = PaddedLayer.given_back, 0

    def second_fails(layer: PaddedLayer) -> object:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("out of memory")
        return give_back(layer)

    monkeypatch.setattr(PaddedLayer, "given_back", second_fails)
    with pytest.raises(BackendError, match="out of memory"):
        backend.pause(sequences[0])
    for _ in range(3):
        step()
    backend.pause(sequences[0])
    while len(said[sequences[1]]) < 20:
        step()
    for sequence, prompt in zip(sequences, asked, strict=True):
        tokens = said[sequence]
        assert is_answer(backend.model, prompt, tokens, len(tokens))
        assert backend.length(sequence) == len(prompt) + len(tokens)
