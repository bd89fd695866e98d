"""Greedy tokens equal those of mlx-lm alone: the cases that must never break, one by one."""

from __future__ import annotations

import itertools
import random

import pytest

from semantic import CompletedGeneration, SamplingParams
from semantic.domain.value_objects import BLOCK_TOKENS
from tests.support.eight_bits import EIGHT_BITS
from tests.support.in_pages import IN_PAGES, SUFFIX
from tests.support.lanes import THOROUGH, examples, more
from tests.support.reference import generate, is_answer
from tests.support.rig import Done, Rig
from tests.support.tiny_models import ARCHITECTURES, VOCAB, tiny_model

# Where caches lie does not matter to what gpt_oss has besides windows; it is the slowest.
_IN_PAGES = [name for name in IN_PAGES if "gpt_oss" not in name]

# The kinds of caches: full attention, windows, windows in pages, and states beside latent keys; the
# rest is like one of them.
_KINDS = ["llama", *_IN_PAGES]
_OTHERS = (
    "qwen3_next", "nemotron_h", "recurrent_gemma", "deepseek_v3", "falcon_h1",
    "recurrent_gemma in pages", "falcon_h1 in pages",
)  # fmt: skip
_WITH_STATES = (
    "kimi_linear", "qwen3_next", "qwen3_next in pages", "nemotron_h", "recurrent_gemma",
)  # fmt: skip
_EIGHT_BITS = ("llama of 64 in 8 bits", "gemma3 of 64 in 8 bits in pages")
every_kind = pytest.mark.parametrize(
    "architecture",
    [
        *_KINDS,
        "kimi_linear",
        "qwen3_next in pages",
        *_EIGHT_BITS,
        *more(*(name for name in ARCHITECTURES if name not in _KINDS), *_OTHERS),
    ],
)


def kinds(*usual: str) -> pytest.MarkDecorator:
    """These architectures; one of every kind, and the others, in the thorough lane."""
    known = (*_KINDS, "kimi_linear", "qwen3_next in pages", *ARCHITECTURES, *_OTHERS)
    known = (*known, *EIGHT_BITS, *(name + SUFFIX for name in EIGHT_BITS))
    others = [name for name in dict.fromkeys(known) if name not in usual]
    return pytest.mark.parametrize("architecture", [*usual, *more(*others)])


in_one_form = kinds("llama", "qwen3_next in pages")
in_other_forms = kinds("gemma3 in pages", "kimi_linear")
"""Keys alone and beside states, in buffers and in pages; tests that differ little take turns."""


def prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB) for _ in range(length)] for length in lengths]


def check_batch(architecture: str, lengths: tuple[int, ...], n_new: tuple[int, ...]) -> None:
    """Prompts of these lengths at once, with these many new tokens."""
    rig = Rig(architecture)
    asked = prompts(*lengths)
    uids = [
        rig.engine.submit(f"agent-{i}", prompt, max_tokens=n)
        for i, (prompt, n) in enumerate(zip(asked, n_new, strict=True))
    ]
    done = rig.run()
    for uid, prompt, n in zip(uids, asked, n_new, strict=True):
        assert is_answer(rig.model, prompt, done[uid].tokens, n), len(prompt)


@pytest.mark.parametrize(
    "architecture",
    ["llama", "gemma3", "quantized", *_IN_PAGES, *more("qwen2", "qwen3", "gpt_oss", "moe")],
)
def test_a_batch_of_eight_from_1_to_3000_tokens(architecture: str) -> None:
    if THOROUGH:
        lengths, n_new = (700, 1500, 3000), (60, 1, 20, 40, 300, 25, 20, 10)
    else:
        # The longest where attention over it costs least; others go round their windows.
        longest = {"llama": 3000, "gemma3 in pages": 1100}.get(architecture, 700)
        lengths, n_new = (400, 513, longest), (30, 1, 10, 20, 60, 15, 10, 5)
    check_batch(architecture, (1, 2, 255, 256, 257, *lengths), n_new)


@every_kind
def test_joining_and_leaving_at_random_steps(architecture: str) -> None:
    rig = Rig(architecture, chunk=100)
    draw = random.Random(3)
    lengths = [draw.choice([1, 30, 256, 400]) for _ in range(examples(8, thorough=12))]
    asked = prompts(*lengths, seed=4)
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


@in_other_forms
def test_a_conversation_continues_without_computing_its_past_again(architecture: str) -> None:
    rig = Rig(architecture)
    (prompt, *turns) = prompts(600, 20, 300, 1, seed=5)
    for turn in ([], *turns):
        prompt = prompt + turn
        end = rig.answer("ann", prompt, 12)
        assert is_answer(rig.model, prompt, end.tokens, 12)
        assert end.cached_tokens == (len(prompt) - len(turn) if turn else 0)
        prompt = prompt + list(end.tokens)


@pytest.mark.parametrize("architecture", ["llama", "quantized", *more("qwen3", "moe")])
def test_a_repeated_prompt_computes_one_token_and_an_edited_one_from_the_edit(
    architecture: str,
) -> None:
    rig = Rig(architecture)
    (prompt,) = prompts(700, seed=6)
    cold = rig.answer("ann", prompt, 15)
    again = rig.answer("ann", prompt, 15)
    assert again.tokens == cold.tokens
    assert again.cached_tokens == len(prompt) - 1
    edited = [*prompt[:400], (prompt[400] + 1) % VOCAB, *prompt[401:]]
    changed = rig.answer("ann", edited, 15)
    assert is_answer(rig.model, edited, changed.tokens, 15)
    assert changed.cached_tokens == 400


@in_one_form
def test_a_cancelled_request_leaves_what_it_computed_and_the_others_alone(
    architecture: str,
) -> None:
    rig = Rig(architecture, chunk=128)
    first, second = prompts(900, 50, seed=7)
    cancelled = rig.engine.submit("ann", first, max_tokens=50)
    other = rig.engine.submit("bob", second, max_tokens=40)
    for _ in range(5):
        rig.engine.step_once()
    assert rig.engine.cancel(cancelled)
    done = rig.run()
    rig.check()
    assert done[cancelled].finish_reason == "cancelled"
    assert is_answer(rig.model, second, done[other].tokens, 40)
    retried = rig.answer("ann", first, 20)
    assert is_answer(rig.model, first, retried.tokens, 20)
    assert retried.cached_tokens > 0


@every_kind
def test_requests_preempted_for_want_of_blocks_go_on_with_the_same_tokens(
    architecture: str,
) -> None:
    rig = Rig(architecture, columns=5 if architecture in _WITH_STATES else 6)
    asked = prompts(500, 490, 260, seed=8)
    n_new = 130 if THOROUGH else 40
    uids = [rig.engine.submit(f"agent-{i}", p, max_tokens=n_new) for i, p in enumerate(asked)]
    done = {}
    while rig.engine.has_work:
        for event in rig.engine.step_once():
            if isinstance(event, CompletedGeneration):
                done[event.uid] = event
        rig.check()
    assert rig.engine.preemptions > 0
    for uid, prompt in zip(uids, asked, strict=True):
        assert is_answer(rig.model, prompt, done[uid].tokens, n_new)


@in_other_forms
def test_another_agent_may_begin_with_a_cache_that_stays_where_it_is(architecture: str) -> None:
    rig = Rig(architecture)
    (prompt,) = prompts(520, seed=9)
    first = rig.answer("ann", prompt, 20)
    whole = [*prompt, *first.tokens]
    branches = [[*whole, *tail] for tail in prompts(3, 40, seed=10)]
    uids = [
        rig.engine.submit(f"fork-{i}", branch, cache=first.blocks, max_tokens=12)
        for i, branch in enumerate(branches)
    ]
    done = rig.run()
    rig.check()
    for uid, branch in zip(uids, branches, strict=True):
        assert is_answer(rig.model, branch, done[uid].tokens, 12)
        assert done[uid].cached_tokens == len(whole)
    # The original was read, not used up.
    onward = [*whole, 1, 2]
    last = rig.answer("ann", onward, 8)
    assert is_answer(rig.model, onward, last.tokens, 8)
    assert last.cached_tokens == len(whole)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gemma3 in pages"])
def test_append_follows_the_cached_tokens(architecture: str) -> None:
    rig = Rig(architecture)
    prompt, more = prompts(300, 12, seed=11)
    first = rig.answer("ann", prompt, 10)
    uid = rig.engine.submit("ann", more, cache=first.blocks, max_tokens=20, append=True)
    whole = [*prompt, *first.tokens, *more]
    end = rig.run()[uid]
    assert end.prompt_tokens == len(whole)
    assert is_answer(rig.model, whole, end.tokens, 20)


def test_an_answer_ends_at_an_end_token_which_is_not_text() -> None:
    (prompt,) = prompts(40, seed=12)
    free = generate(tiny_model("llama"), prompt, 40)
    eos = next(token for token in free[3:] if free.index(token) >= 3)
    rig = Rig("llama", eos=frozenset({eos}))
    end = rig.answer("ann", prompt, 40)
    expected = free[: free.index(eos) + 1]
    assert list(end.tokens) == expected
    assert end.finish_reason == "stop"
    assert end.text == rig.tokenizer.decode(expected[:-1])


def test_a_stop_string_over_two_tokens_is_never_emitted() -> None:
    rig = Rig("llama")
    (prompt,) = prompts(40, seed=13)
    text = rig.tokenizer.decode(generate(rig.model, prompt, 40))
    stop = text[10:13]
    uid = rig.engine.submit(
        "ann", prompt, max_tokens=40, sampling=SamplingParams(stop=("never", stop))
    )
    emitted, end = "", None
    while end is None:
        for event in rig.engine.step_once():
            if isinstance(event, CompletedGeneration):
                end = event
            else:
                emitted += getattr(event, "text", "")
    assert end.uid == uid
    assert end.text == emitted == text[: text.index(stop)]
    assert end.finish_reason == "stop"


@pytest.mark.parametrize("architecture", ["llama", *more("gpt_oss")])
def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_preempted(architecture: str) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, min_p=0.01, seed=42)
    asked = prompts(500, 490, 260, seed=14)
    n_new = 150 if THOROUGH else 25

    def tokens(rig: Rig) -> list[tuple[int, ...]]:
        uids = [
            rig.engine.submit(f"agent-{i}", p, max_tokens=n_new, sampling=params)
            for i, p in enumerate(asked)
        ]
        done = rig.run()
        return [done[uid].tokens for uid in uids]

    alone = [tokens_of(Rig(architecture), prompt, params, n_new) for prompt in asked]
    assert tokens(Rig(architecture)) == alone
    small = Rig(architecture, columns=5)
    assert tokens(small) == alone
    assert small.engine.preemptions > 0
    other = tokens_of(Rig(architecture), asked[0], SamplingParams(temperature=0.9, seed=43), n_new)
    assert other != alone[0]


def tokens_of(
    rig: Rig, prompt: list[int], params: SamplingParams, max_tokens: int
) -> tuple[int, ...]:
    uid = rig.engine.submit("ann", prompt, max_tokens=max_tokens, sampling=params)
    return rig.run()[uid].tokens


def test_the_cache_covers_exactly_the_tokens_it_says() -> None:
    rig = Rig("gemma3")
    (prompt,) = prompts(700, seed=15)
    end = rig.answer("ann", prompt, 100)
    blocks = end.blocks
    assert blocks is not None
    assert blocks.token_ids == (*prompt, *end.tokens)
    for layer_id, layer in enumerate(rig.spec.layers):
        held = blocks.token_range(layer_id)
        chain = blocks.blocks_for_layer(layer_id)
        assert held.stop == 800
        assert all(b.start == a.stop for a, b in itertools.pairwise(chain))
        if layer.window is None:
            assert held.start == 0
            assert [block.token_count for block in chain] == [256, 256, 256, 32]
        else:
            assert layer.window <= len(held) <= layer.window + BLOCK_TOKENS
