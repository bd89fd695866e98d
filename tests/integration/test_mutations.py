"""The suite must notice what could go wrong: three faults, each put in on purpose and caught.

Each of them is the kind that gives a fluent wrong answer and no error.
"""

from __future__ import annotations

import mlx.core as mx
import pytest

from semantic.adapters.mlx.kv_cache.contiguous.cache import (
    FullCache,
    KVBuffer,
    RaggedBatch,
    WindowCache,
    _positions,
)
from tests.integration import test_exactness
from tests.support.rig import Rig


@pytest.fixture(autouse=True)
def probed() -> None:
    """The probe at load is behind these models: it would find a mutation before any answer does."""
    for architecture in ("llama", "gemma3"):
        Rig(architecture)


def check(architecture: str) -> None:
    """A short form of `test_a_batch_of_eight_from_1_to_3000_tokens`."""
    test_exactness.check_batch(architecture, (1, 255, 257, 513), (20, 10, 60, 10))


def test_a_window_mask_off_by_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = WindowCache.update_and_fetch

    def one_too_many(
        self: WindowCache, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        self.window += 1
        try:
            return right(self, keys, values)
        finally:
            self.window -= 1

    monkeypatch.setattr(WindowCache, "update_and_fetch", one_too_many)
    with pytest.raises(AssertionError):
        check("gemma3")


def test_a_stale_block_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    write = KVBuffer.write

    def lost_when_a_block_begins(
        self: KVBuffer, at: int, stop: int, k: mx.array, v: mx.array
    ) -> None:
        if at % 256 or not at:
            write(self, at, stop, k, v)

    monkeypatch.setattr(KVBuffer, "write", lost_when_a_block_begins)
    with pytest.raises(AssertionError):
        # Alone: a batch decodes without that write, and its chunks begin where the clock says.
        test_exactness.check_batch("llama", (255,), (20,))


def test_a_wrong_offset_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_late(self: RaggedBatch[FullCache]) -> object:
        return _positions(tuple(row.offset + 1 for row in self.rows))

    monkeypatch.setattr(RaggedBatch, "offset", property(one_late))
    with pytest.raises(AssertionError):
        check("llama")


def test_a_prefix_cut_one_token_late_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    trim = FullCache.trim

    def one_more(self: FullCache, length: int) -> None:
        trim(self, length + 1)
        self.offset = min(self.offset, length)
        self.buffer.k = self.buffer.k.at[..., length - 1, :].add(1.0)

    monkeypatch.setattr(FullCache, "trim", one_more)
    with pytest.raises(AssertionError):
        test_exactness.test_a_repeated_prompt_computes_one_token_and_an_edited_one_from_the_edit(
            "llama"
        )
