"""Requests that begin alike, where a sequence resumes only at checkpoints.

One computes what they share and the others wait for its checkpoints: whatever happens to it, none
waits for ever, none gets another token, and what can be reused is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from semantic.adapters.stores.memory import MemoryStore
from semantic.application.cache import shared_prefill
from semantic.application.cache.checkpoint_plan import FEWEST_TOKENS
from semantic.application.cache.loading import Terms
from semantic.application.cache.shared_prefill import CommonPrefixes, computes_before
from semantic.application.engine.scheduler import Chunk, Step
from semantic.application.request import Phase, Request
from semantic.domain.block_hash import BlockKey, BlockLink, Part
from semantic.domain.stored import BlockHeader, BlockRead, StoredBlock, Tier
from semantic.domain.value_objects import LayerKind, LayerSpec, ModelCacheSpec, SamplingParams
from tests.support.char_tokenizer import CharTokenizer
from tests.support.fake_backend import FULL, STATE
from tests.support.lanes import more_rows
from tests.support.late_reads import LateReads
from tests.unit.application.world import SPECS, World, completions, expected, text_of

AMPLE = 1 << 30
WITH_CHECKPOINTS = {name: layers for name, layers in SPECS.items() if name != "full"}
with_checkpoints = pytest.mark.parametrize(
    "layers", WITH_CHECKPOINTS.values(), ids=WITH_CHECKPOINTS.keys()
)


def world(
    layers: Sequence[LayerSpec] = (FULL, STATE),
    store: MemoryStore | None = None,
    *,
    total_blocks: int = 4000,
    largest_chunk: int = 100,
    max_batch: int = 8,
) -> World:
    return World(
        ModelCacheSpec(tuple(layers)),
        total_blocks,
        largest_chunk=largest_chunk,
        max_batch=max_batch,
        prefix_store=MemoryStore(AMPLE) if store is None else store,
    )


def reused(of: World, prompts: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Submit all, run to the end, compare the answers; tokens reused, by agent."""
    for agent, prompt in prompts.items():
        of.engine.submit(agent, prompt, max_tokens=3)
    done = {end.agent_id: end for end in of.finish()}
    for agent, prompt in prompts.items():
        assert done[agent].tokens == expected(of.spec, prompt, 3).tokens
    return {agent: end.cached_tokens for agent, end in done.items()}


def request(number: int, prompt: Sequence[int], tenant: str = "") -> Request:
    return Request(
        f"r{number}",
        number,
        f"agent-{number}",
        tuple(prompt),
        4,
        SamplingParams(),
        frozenset(),
        CharTokenizer().detokenizer(),
        tenant=tenant,
    )


def recorded_checkpoints(of: World) -> list[BlockLink]:
    """What is put into the store from now on."""
    store = of.prefix_store
    assert isinstance(store, MemoryStore)
    taken: list[BlockLink] = []
    put = store.put

    def recorded(block: StoredBlock) -> bool:
        if block.header.part is Part.CHECKPOINT:
            taken.append(block.header.link)
        return put(block)

    store.put = recorded  # type: ignore[method-assign]
    return taken


class Unreadable(MemoryStore):
    """Keeps everything and reads nothing."""

    def resident(self, headers: Sequence[BlockHeader]) -> dict[BlockKey, bytes | memoryview]:  # noqa: ARG002
        return {}

    def read_into(self, reads: Sequence[BlockRead]) -> Sequence[bool]:
        return [False for _ in reads]


# What is reused


@with_checkpoints
@pytest.mark.parametrize("apart", [1, 2, 63, 64])
def test_prompts_that_part_at_neighbouring_positions_share_the_first(
    layers: tuple[LayerSpec, ...], apart: int
) -> None:
    of = world(layers)
    head = text_of(1, 700 + apart)
    other = (head[700] + 1) % 90
    cached = reused(
        of,
        {
            "ann": (*head, 91, *text_of(2, 90)),
            "ben": (*head[:700], other, *text_of(3, 90)),
            "cay": (*head, 92, *text_of(4, 90)),
        },
    )
    assert sorted(cached.values())[1] >= 700


@with_checkpoints
def test_requests_that_wait_for_blocks_find_what_was_computed_meanwhile(
    layers: tuple[LayerSpec, ...],
) -> None:
    of = world(layers, total_blocks=sum(ModelCacheSpec(layers).blocks_for(1024)))
    head = text_of(1, 700)
    cached = reused(of, {agent: (*head, *[ord(agent)] * 40) for agent in "[]^_"})
    assert sorted(cached.values())[1:] == [700, 700, 700]


@with_checkpoints
@pytest.mark.parametrize("n", [1, 2, 3, 63, 64, 65, 66, 70, 255, 256, 257, 258, 320, 321])
def test_prompts_of_any_length_at_once(layers: tuple[LayerSpec, ...], n: int) -> None:
    of = world(layers)
    prompt = text_of(1, n)
    same = {f"same-{i}": prompt for i in range(3)}
    longer = {f"longer-{i}": (*prompt, *[i] * i) for i in range(3)}
    cached = reused(of, same | longer)
    if n > FEWEST_TOKENS:
        assert sum(value > 0 for value in cached.values()) >= len(cached) - 1


def test_two_hundred_requests_compute_once_what_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    def counted(left: Request, right: Request) -> bool:
        nonlocal compared
        compared += 1
        return computes_before(left, right)

    monkeypatch.setattr(shared_prefill, "computes_before", counted)
    of = world(max_batch=32, total_blocks=40_000, largest_chunk=512)
    prompts = {f"agent-{i}": (*text_of(1, 700), *[i % 90, i // 90] * 20) for i in range(200)}
    reused(of, prompts)
    assert of.backend.prefilled_tokens <= 700 + 200 * 40 + 700
    # Each of 200 requests with a few others at a time, and not with all in each pass.
    assert compared < 200 * 200


def test_a_conversation_takes_two_checkpoints_in_a_turn() -> None:
    of = world(largest_chunk=512)
    taken = recorded_checkpoints(of)
    prompt = text_of(1, 1000)
    for turn in range(20):
        taken.clear()
        of.engine.submit("ann", prompt, max_tokens=30)
        (done,) = of.finish()
        if turn:
            # At the prompt's end, at the turn's, and where the grid is not near either.
            assert len(taken) <= 3
            assert taken[0].stop >= done.cached_tokens + FEWEST_TOKENS
        prompt = (*prompt, *done.tokens, *text_of(turn, 100))


def test_checkpoints_where_prompts_part_take_bytes_in_proportion_to_what_is_computed() -> None:
    large = LayerSpec(LayerKind.STATE, state_bytes=200_000)
    of = world((FULL, large), total_blocks=4000, largest_chunk=512, max_batch=64)
    taken = recorded_checkpoints(of)
    junctions = range(100, 700, 10)
    path = text_of(1, 800)
    prompts = {f"leaf-{at}": (*path[:at], 90 + at % 5, *text_of(2, 8)) for at in junctions}
    reused(of, {"path": path} | prompts)
    at_junctions = [link for link in taken if link.stop in junctions]
    n_bytes = sum(large.state_bytes + 4 * (len(link.tokens) % 256) for link in at_junctions)
    computed = 4 * of.backend.prefilled_tokens  # bytes of their keys and values
    assert n_bytes <= 8 * computed + 4 * (large.state_bytes + 4 * 255)
    assert at_junctions


# No request waits for ever


@with_checkpoints
@pytest.mark.parametrize(
    ("store", "cancels"),
    [
        *((MemoryStore, False), (Unreadable, True)),
        *more_rows((MemoryStore, True), (Unreadable, False)),
    ],
)
def test_a_stream_of_short_prompts_does_not_starve_a_long_one(
    layers: tuple[LayerSpec, ...], store: type[MemoryStore], cancels: bool
) -> None:
    of = world(layers, store(AMPLE))
    head = text_of(1, 200)
    of.engine.submit("long", (*head, *text_of(2, 600)), max_tokens=1)
    last = None
    for step in range(400):
        if last is not None and cancels:
            of.engine.cancel(last)
        last = of.engine.submit(f"short-{step}", (*head, *text_of(step + 3, 70)), max_tokens=1)
        if any(end.agent_id == "long" for end in completions(of.engine.step_once())):
            return
    raise AssertionError("the long prompt waits for ever")


@with_checkpoints
@pytest.mark.parametrize("how", ["cancel", "preempt", "fail"])
def test_followers_go_on_when_the_first_one_ends_early(
    layers: tuple[LayerSpec, ...], how: str
) -> None:
    of = world(layers)
    head = text_of(1, 900)
    prompts = {agent: (*head, *[ord(agent)] * 30) for agent in "[]^_"}
    for agent, prompt in prompts.items():
        of.engine.submit(agent, prompt, max_tokens=3)
    while max(one.computed for one in of.engine.requests) < 400:
        of.engine.step_once()
    first = max(of.engine.requests, key=lambda one: one.computed)
    if how == "cancel":
        of.engine.cancel(first.uid)
    elif how == "preempt":
        of.engine._preempt(first)
        of.engine._scheduler._preempt(first)
    else:
        of.backend.fail_next("prefill")
    done = {end.agent_id: end for end in of.finish()}
    whole = [agent for agent, end in done.items() if end.finish_reason == "length"]
    assert len(whole) >= (4 if how == "preempt" else 3)
    for agent in whole:
        assert done[agent].tokens == expected(of.spec, prompts[agent], 3).tokens
    # The head twice at most: once up to where the first one was, and once from a checkpoint.
    assert of.backend.prefilled_tokens <= 2 * 900 + 4 * 30


def test_a_short_prompt_does_not_wait_for_the_turn_of_a_long_one() -> None:
    of = world(max_batch=16, total_blocks=40_000, largest_chunk=256)
    head = text_of(1, 1500)
    prompts = [(*head, *text_of(2, 6000)), *[text_of(10 + i, 8000) for i in range(7)]]
    for number, prompt in enumerate(prompts):
        of.engine.submit(f"long-{number}", prompt, max_tokens=1)
    first = of.engine.requests[0]
    while first.computed < 100:
        of.engine.step_once()
    before = of.backend.prefilled_tokens
    short = of.engine.submit("short", (*head, *text_of(4, 70)), max_tokens=1)
    while short not in {end.uid for end in completions(of.engine.step_once())}:
        # One chunk in four goes to the request that has waited longest.
        assert of.backend.prefilled_tokens - before < 2 * 1570


# Beginning anew


def reading_anew(of: World) -> tuple[Request, Request]:
    """Two requests: one that computes, and one with fewer tokens that waits for its checkpoint."""
    head = text_of(1, 1000)
    of.engine.submit("leader", (*head, *text_of(5, 20)), max_tokens=2)
    (leader,) = of.engine.requests
    while leader.computed < 300:
        of.engine.step_once()
    of.engine.submit("follower", (*head, *text_of(6, 30)), max_tokens=2)
    follower = of.engine.requests[-1]
    of.engine.step_once()
    prefixes = of.engine._prefixes
    assert prefixes is not None
    prefixes.wait_for_load([follower], 60)
    while leader.computed < 800:
        of.engine.step_once()
    assert follower.phase is Phase.PREFILL
    assert 0 < follower.computed < 512
    assert leader.computed < 1000
    return leader, follower


def test_a_sequence_that_is_read_anew_counts_no_tokens_backwards() -> None:
    of = world(largest_chunk=64)
    reading_anew(of)
    counted: list[int] = []
    account = of.engine._scheduler.prefilled

    def recorded(step: Step, n_tokens: Sequence[tuple[Request, int]], n_bytes: int = 0) -> None:
        counted.extend(n for _, n in n_tokens)
        account(step, n_tokens, n_bytes)

    of.engine._scheduler.prefilled = recorded  # type: ignore[method-assign]
    cached = {end.agent_id: end.cached_tokens for end in of.finish()}
    assert cached["follower"] == 1000
    assert min(counted) >= 0


@pytest.mark.parametrize("method", ["open", "loading", "close", "loaded"])
def test_a_sequence_that_cannot_be_read_anew_fails_alone(method: str) -> None:
    of = world(largest_chunk=64)
    leader, follower = reading_anew(of)
    of.backend.fail_next(method)
    done = {end.uid: end for end in of.finish()}
    assert done[leader.uid].tokens == expected(of.spec, leader.prompt, 2).tokens
    if done[follower.uid].finish_reason != "error":
        assert done[follower.uid].tokens == expected(of.spec, follower.prompt, 2).tokens


def test_a_joint_pass_that_cannot_open_a_sequence_fails_no_other() -> None:
    of = world(largest_chunk=64)
    leader, follower = reading_anew(of)
    prefixes = of.engine._prefixes
    assert prefixes is not None
    prefixes.shared.look_again(follower)  # it looks now, and finds the grid's last checkpoint
    of.backend._joint_chunk = 2000
    of.backend.fail_next("open")
    results = of.engine._sequences.prefill([Chunk(leader, 10), Chunk(follower, 10)])
    assert [one.error for one in results] == [None, None]
    assert (results[0].n_tokens, results[1].n_tokens) == (10, 0)
    done = {end.agent_id: end for end in of.finish()}
    for one in (leader, follower):
        assert done[one.agent_id].tokens == expected(of.spec, one.prompt, 2).tokens


@with_checkpoints
def test_a_request_finds_what_was_computed_while_it_read(layers: tuple[LayerSpec, ...]) -> None:
    of = world(layers, largest_chunk=64)
    prefixes = of.engine._prefixes
    assert prefixes is not None
    reads = prefixes._loader._threads = LateReads()
    head = text_of(1, 600)
    of.engine.submit("leader", (*head, *text_of(5, 700)), max_tokens=1)
    (leader,) = of.engine.requests
    while leader.computed < 300:
        of.engine.step_once()
    of.engine.submit("reader", (*head, *text_of(6, 30)), max_tokens=1)
    while leader.computed < 800:
        of.engine.step_once()
    reader = of.engine.requests[-1]
    assert reader.phase is Phase.LOAD
    while of.engine.has_work:
        reads.arrive()
        of.engine.step_once()
    assert of.backend.prefilled_tokens == 1299 + 29
    assert reader.cached_tokens == 600


def test_reading_is_compared_with_what_is_left_to_compute() -> None:
    of = world(largest_chunk=64)
    _, follower = reading_anew(of)
    prefixes = of.engine._prefixes
    assert prefixes is not None
    asked: list[int] = []
    terms = prefixes.break_even.terms

    def recorded(n_bytes: Mapping[Tier, int], n_tokens: int) -> Terms | None:
        asked.append(n_tokens)
        return terms(n_bytes, n_tokens)

    prefixes.break_even.terms = recorded  # type: ignore[method-assign]
    held = follower.computed
    of.finish()
    assert asked[0] == 1000 - held


# Which are compared


def test_a_crowd_of_others_does_not_hide_those_that_begin_alike() -> None:
    common = CommonPrefixes()
    for number in range(300):
        common.add(request(number, text_of(1, 100), tenant="x"))
        common.add(request(1000 + number, text_of(number % 80 + 2, 100)))
    left, right = request(2000, text_of(1, 200)), request(2001, text_of(1, 300))
    common.add(left)
    common.add(right)
    assert [(one.uid, n) for one, n in common.of(left)] == [(right.uid, 199)]
    common.remove(right)
    assert not list(common.of(left))


def test_running_requests_are_compared_before_waiting_ones() -> None:
    common = CommonPrefixes()
    crowd = [request(number, (*text_of(1, 200), number)) for number in range(400)]
    for one in crowd:
        common.add(one)
    crowd[399].phase = Phase.PREFILL
    last = request(400, text_of(1, 150))
    common.add(last)
    assert crowd[399] in [one for one, _ in common.of(last)]
    for one in (*crowd, last):
        common.remove(one)
    assert not common._live
    assert not common._groups
