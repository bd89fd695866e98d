"""Bodies out of pages are those out of buffers, and each form reads what the other wrote."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.kv_cache.paged.layers import PagedLayers, RowCosts
from semantic.domain.block_hash import Part
from semantic.domain.errors import BackendError, CacheReconstructionError
from semantic.domain.value_objects import SamplingParams, SequenceId, whole_blocks
from tests.support.bodies import exported, fill
from tests.support.in_pages import SUFFIX, tiny_backend
from tests.support.lanes import THOROUGH, more
from tests.support.preempted import preempted, resumed
from tests.support.rig import cache_bytes
from tests.support.tiny_models import VOCAB

BY_WINDOW = {
    "llama": (),
    "llama bf16": (),
    "gemma3": (300,),
    "gemma3 bf16": (300,),
    "gpt_oss": (128,),
    "windows": (40, 300),
    "deepseek_v3": (),  # latents and rope keys, of two widths
}
_LIKE_OTHERS = ("llama bf16", "gemma3")
"""Halves as in the other bf16, and windows as in the others."""
every_architecture = pytest.mark.parametrize("architecture", list(BY_WINDOW))
every_kind = pytest.mark.parametrize(
    "architecture",
    [*("gemma3 bf16", "gpt_oss", "windows", "deepseek_v3"), *more("llama", "llama bf16", "gemma3")],
)
"""One of each kind of caches that is in pages: halves, sinks, several windows, and latents."""


def lengths_of(architecture: str) -> list[int]:
    """Around the edges of blocks and windows, and long enough for each ring to go round."""
    windows = BY_WINDOW[architecture]
    edges = {256, *windows, *(256 + window for window in windows)}
    if not THOROUGH and (architecture.endswith("bf16") or architecture == "deepseek_v3"):
        return [1, 257, 700]
    if not THOROUGH and architecture != "windows":
        return [1, *sorted(edge + 1 for edge in (256, *windows)), 1030]
    offsets = (-1, 0, 1) if THOROUGH else (1,)
    return [1, *sorted({edge + i for edge in edges for i in offsets}), 1030]


@functools.cache
def backend(name: str) -> MLXBackend:
    """The tiny model with that name; it computes the same chunks in both forms."""
    built = tiny_backend(name, f"tiny:{name}")
    if isinstance(built._layers, PagedLayers):
        built._layers.costs = RowCosts(alone=0, joined=0)
    return built


def tokens(n: int, seed: int = 0) -> list[int]:
    return [(seed + i * i * 7 + i * 3) % VOCAB for i in range(n)]


def prefilled(
    model: MLXBackend, prompt: Sequence[int], chunk: int = 200, begun: int = 0
) -> SequenceId:
    """A sequence that holds `prompt`, computed in chunks after its first `begun` tokens."""
    sequence = model.open(whole_blocks(len(prompt) + 60))
    if begun:
        model.prefill(sequence, prompt[:begun])
    for i in range(begun, len(prompt), chunk):
        model.prefill(sequence, prompt[i : i + chunk])
    return sequence


@dataclass(frozen=True)
class Saved:
    """All bodies of a sequence from which it can be loaded."""

    length: int
    full: tuple[bytes, ...]
    window: tuple[bytes, ...]
    window_start: int
    checkpoint: bytes | None


def ranges(start: int, stop: int) -> list[tuple[int, int]]:
    return [(at, min(at + 256, stop)) for at in range(start, stop, 256)]


def save(model: MLXBackend, sequence: SequenceId) -> Saved:
    layout, length = model.layout(), model.length(sequence)
    start = whole_blocks(max(0, length - (layout.window_tokens or 1) + 1))
    window = ranges(start, length) if layout.window else []
    return Saved(
        length,
        tuple(exported(model, sequence, Part.FULL, *r) for r in ranges(0, length)),
        tuple(exported(model, sequence, Part.WINDOW, *r) for r in window),
        start,
        model.export_checkpoint(sequence) if layout.needs_checkpoint else None,
    )


def load(model: MLXBackend, saved: Saved) -> SequenceId:
    sequence = model.open(whole_blocks(saved.length + 60))
    fill(model.loading(sequence, Part.FULL, 0, saved.length), saved.full)
    if saved.window:
        views = model.loading(sequence, Part.WINDOW, saved.window_start, saved.length)
        fill(views, saved.window)
    model.loaded(sequence, saved.length, saved.checkpoint)
    return sequence


def decode(model: MLXBackend, sequence: SequenceId, last: int, n: int) -> list[int]:
    history = tokens(model.length(sequence))
    model.start(sequence, last, history, SamplingParams(), 0)
    said: list[int] = []
    while len(said) < n:
        said += [one.token for one in model.decode() if one.sequence == sequence]
    return said


@every_architecture
def test_the_layouts_are_the_same(architecture: str) -> None:
    assert backend(architecture).layout() == backend(architecture + SUFFIX).layout()


@pytest.mark.parametrize(
    "architecture",
    [*(name for name in BY_WINDOW if name not in _LIKE_OTHERS), *more(*_LIKE_OTHERS)],
)
def test_each_form_reads_the_bytes_that_the_other_writes(architecture: str) -> None:
    buffers, pages = backend(architecture), backend(architecture + SUFFIX)
    for length in lengths_of(architecture):
        prompt = tokens(length)
        one, other = prefilled(buffers, prompt), prefilled(pages, prompt)
        saved = save(buffers, one)
        assert save(pages, other) == saved, length
        there, back = load(pages, saved), load(buffers, save(pages, other))
        assert save(pages, there) == saved, length
        assert save(buffers, back) == saved, length
        for sequence in (there, other):  # the prompt goes on with another chunk
            pages.prefill(sequence, tokens(40, seed=3))
        buffers.prefill(back, tokens(40, seed=3))
        buffers.prefill(one, tokens(40, seed=3))
        assert save(pages, there) == save(pages, other) == save(buffers, one), length
        assert save(buffers, back) == save(buffers, one), length
        expected = decode(buffers, one, 5, 4)
        assert decode(pages, there, 5, 4) == expected, length
        assert decode(buffers, back, 5, 4) == expected, length
        for sequence in (one, back):
            buffers.close(sequence)
        for sequence in (other, there):
            pages.close(sequence)


@pytest.mark.parametrize("architecture", ["windows", *more("llama", "gemma3")])
@pytest.mark.parametrize("chunk", [1, 37, 600, *more(256)])
def test_chunks_of_any_size_leave_the_same_bytes_in_both_forms(
    architecture: str, chunk: int
) -> None:
    prompt = tokens(310 if chunk == 1 else 700)
    buffers, pages = backend(architecture), backend(architecture + SUFFIX)
    begun = 200 if chunk == 1 and not THOROUGH else 0  # before the edges of blocks and windows
    one, other = (prefilled(model, prompt, chunk, begun) for model in (buffers, pages))
    assert save(buffers, one) == save(pages, other)
    buffers.close(one)
    pages.close(other)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_load_that_was_given_up_leaves_an_empty_sequence(architecture: str) -> None:
    pages = backend(architecture + SUFFIX)
    saved = save(pages, held := prefilled(pages, tokens(400)))
    pages.close(held)
    sequence = pages.open(512)
    fill(pages.loading(sequence, Part.FULL, 0, 400), saved.full)
    pages.loaded(sequence, 0)
    assert pages.length(sequence) == 0
    pages.prefill(sequence, tokens(200))
    pages.prefill(sequence, tokens(400)[200:])
    assert save(pages, sequence) == saved
    pages.close(sequence)


@pytest.mark.parametrize("architecture", ["gemma3", "gpt_oss", "windows"])
def test_a_load_that_lacks_something_is_refused_and_nothing_stays_behind(architecture: str) -> None:
    pages = backend(architecture + SUFFIX)
    before = cache_bytes(pages)
    saved = save(pages, held := prefilled(pages, tokens(700)))
    pages.close(held)
    assert saved.checkpoint is not None
    lacking = [
        Saved(700, saved.full, saved.window, saved.window_start, None),
        Saved(700, saved.full, saved.window, saved.window_start, saved.checkpoint[:-1]),
    ]
    if saved.window:
        lacking.append(Saved(700, saved.full, (), saved.window_start, saved.checkpoint))
    for one in lacking:
        with pytest.raises(CacheReconstructionError):
            load(pages, one)
    for sequence in list(pages._sequences):
        pages.close(sequence)
    assert cache_bytes(pages) == before


def test_what_slid_out_of_a_window_is_not_written() -> None:
    pages = backend("gemma3" + SUFFIX)
    sequence = prefilled(pages, tokens(1100))
    with pytest.raises(BackendError, match="holds tokens"):
        exported(pages, sequence, Part.WINDOW, 256, 512)
    pages.close(sequence)


@every_kind
def test_a_sequence_that_was_preempted_has_the_bytes_of_one_that_was_not(architecture: str) -> None:
    model = backend(architecture + SUFFIX)
    prompt = tokens(250)
    portions = (5, 1, 30, 44) if THOROUGH or architecture == "windows" else (5, 1, 14)
    n_new = sum(portions)
    whole = prefilled(model, prompt[:-1])
    said = decode(model, whole, prompt[-1], n_new)
    model.pause(whole)
    parts = prefilled(model, prompt[:-1])
    history = list(prompt)
    for n in portions:
        history += decode(model, parts, history[-1], n)
        # The last token stays out: it is what the sequence goes on with.
        capacity = whole_blocks(len(history) + 60)
        parts = resumed(model, preempted(model, parts, history, capacity), capacity)
    assert history[250:] == said
    model.prefill(parts, history[-1:])
    ended = prefilled(model, prompt[:-1])
    decode(model, ended, prompt[-1], n_new - 1)
    model.pause(ended)
    model.prefill(ended, said[-1:])
    assert save(model, parts) == save(model, ended)
    for sequence in (whole, parts, ended):
        model.close(sequence)
