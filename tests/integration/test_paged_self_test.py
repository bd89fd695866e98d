"""What computes over pages is not believed: whatever is wrong with it, caches are not in pages."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest

from semantic.adapters.mlx.kv_cache.paged.attention import (
    Appended,
    DecodeStep,
    PortableAttention,
    PrefillChunk,
)
from semantic.adapters.mlx.kv_cache.paged.page_pool import PagePool
from semantic.adapters.mlx.model.provider import wrap_model
from tests.support.tiny_models import tiny_model


class Attends(PortableAttention):
    """Attends wrongly, as subclasses say; itself it is right."""

    def attend(self, step: DecodeStep) -> mx.array:
        return self.told(super().attend(step._replace(sinks=self.given(step.sinks))))

    def given(self, sinks: mx.array | None) -> mx.array | None:
        return sinks

    def told(self, found: mx.array) -> mx.array:
        return found


class LosesAHead(Attends):
    def told(self, found: mx.array) -> mx.array:
        found[:, 0] = 0
        return found


class GivesNaN(Attends):
    def told(self, found: mx.array) -> mx.array:
        found[-1, -1] = float("nan")
        return found


class IsAPercentOff(Attends):
    def told(self, found: mx.array) -> mx.array:
        return found * 1.02


class DoesNotCompile(Attends):
    def told(self, found: mx.array) -> mx.array:  # noqa: ARG002
        raise RuntimeError("a kernel did not compile")


class IgnoresSinks(Attends):
    def given(self, sinks: mx.array | None) -> None:  # noqa: ARG002
        return None


class Appends(PortableAttention):
    """Puts chunks into pages wrongly, as subclasses say; itself it is right."""

    def append(self, chunk: PrefillChunk) -> Appended:
        k, v, at = self.given(chunk.k, chunk.v, chunk.at)
        return self.told(super().append(chunk._replace(k=k, v=v, at=at)))

    def given(self, k: mx.array, v: mx.array, at: int) -> tuple[mx.array, mx.array, int]:
        return k, v, at

    def told(self, added: Appended) -> Appended:
        return added


class SwapsKeysAndValues(Appends):
    def given(self, k: mx.array, v: mx.array, at: int) -> tuple[mx.array, mx.array, int]:
        return v, k, at


class GathersWrongly(Appends):
    def told(self, added: Appended) -> Appended:
        return added._replace(k=added.k[:, :, ::-1])


class StoresWrongly(PortableAttention):
    def store(self, pool: PagePool, pages: list[int], data: mx.array) -> mx.array:
        return super().store(pool, sorted(pages), data)


class CopiesNothing(PortableAttention):
    def copy(self, pool: PagePool, pages: list[int], to: list[int]) -> mx.array:
        return super().copy(pool, pages, pages[: len(to)])


WRONG = [
    LosesAHead, GivesNaN, IsAPercentOff, DoesNotCompile, IgnoresSinks, SwapsKeysAndValues,
    GathersWrongly, StoresWrongly, CopiesNothing,
]  # fmt: skip


def in_pages(attention: Callable[[], PortableAttention], architecture: str) -> bool:
    return wrap_model(tiny_model(architecture), attention=lambda _: attention()).in_pages


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_what_is_right_is_believed(architecture: str) -> None:
    assert in_pages(PortableAttention, architecture)


@pytest.mark.parametrize("attention", WRONG)
def test_what_is_wrong_is_not(attention: type[PortableAttention]) -> None:
    assert not in_pages(attention, "gpt_oss")


def test_sinks_are_tested_only_where_a_model_has_them() -> None:
    assert in_pages(IgnoresSinks, "gemma3")


def test_one_kind_of_layers_without_kernels_keeps_all_out_of_pages() -> None:
    backend = wrap_model(
        tiny_model("gemma3"),
        attention=lambda kind: PortableAttention() if kind.window is None else None,
    )
    assert not backend.in_pages
