"""Embeddings are computed once, in batches, in turns, and apart for each tenant."""

from __future__ import annotations

import asyncio
from typing import ParamSpec, TypeVar

import pytest

from semantic.application import embeddings
from semantic.application.embeddings import Embeddings, batches
from semantic.domain.errors import ContextOverflowError, InvalidRequestError, OverloadedError
from semantic.ports.embedding import Embedded
from tests.support.fake_embedder import MODEL, FakeEmbedder, at_once, counted
from tests.support.served_agents import AtOnce

P = ParamSpec("P")
T = TypeVar("T")


@pytest.fixture
def fake() -> FakeEmbedder:
    return FakeEmbedder()


@pytest.fixture
def served(fake: FakeEmbedder) -> Embeddings:
    return Embeddings(MODEL, fake, at_once, AtOnce(), AtOnce())


def test_vectors_are_in_the_order_of_their_texts(fake: FakeEmbedder, served: Embeddings) -> None:
    texts = ("abca", "b", "dd", "b")
    found = asyncio.run(served.embed(texts))
    assert found.vectors == tuple(map(counted, texts))
    assert found.tokens == 4 + 1 + 2 + 1 + 4  # each with the one that ends it
    assert fake.batches == [["b", "dd", "abca"]], "each text once, the shortest first"


def test_what_is_known_is_not_computed_again(fake: FakeEmbedder, served: Embeddings) -> None:
    async def run() -> tuple[Embedded, Embedded]:
        return await served.embed(("ab", "c")), await served.embed(("c", "d", "ab"))

    first, second = asyncio.run(run())
    assert (first.computed, second.computed) == (5, 2)
    assert second.vectors == tuple(map(counted, ("c", "d", "ab")))
    assert fake.batches == [["c", "ab"], ["d"]]


def test_tenants_share_no_vector(fake: FakeEmbedder, served: Embeddings) -> None:
    async def run() -> None:
        for tenant in ("ann", "ben", "ann"):
            await served.embed(("ab",), tenant)

    asyncio.run(run())
    assert fake.batches == [["ab"], ["ab"]]


def test_what_is_not_kept_adds_nothing_to_the_cache(fake: FakeEmbedder, served: Embeddings) -> None:
    async def run() -> None:
        for keep in (False, True, False):
            await served.embed(("ab",), keep=keep)

    asyncio.run(run())
    assert fake.batches == [["ab"], ["ab"]]


def test_another_model_has_vectors_of_its_own(fake: FakeEmbedder, served: Embeddings) -> None:
    async def run() -> None:
        await served.embed(("ab",))
        fake.model_id = "another"
        await served.embed(("ab",))

    asyncio.run(run())
    assert len(fake.batches) == 2


def test_the_first_dimensions_have_length_1(served: Embeddings) -> None:
    [vector] = asyncio.run(served.embed(("aabbcd",), dimensions=2)).vectors
    assert vector.tolist() == pytest.approx([0.5**0.5, 0.5**0.5])
    [whole] = asyncio.run(served.embed(("aabbcd",), dimensions=4)).vectors
    assert whole == counted("aabbcd")


def test_a_text_that_is_too_long_is_cut_or_refused(fake: FakeEmbedder, served: Embeddings) -> None:
    for n in (20, 30, 1000):
        with pytest.raises(ContextOverflowError, match=r"input\[1\]: expected at most 20 tokens"):
            asyncio.run(served.embed(("a", "b" * n)))
        found = asyncio.run(served.embed(("b" * n,), truncate=True))
        assert found.tokens == 20
    assert fake.batches == [["b" * 19]]
    assert asyncio.run(served.embed(("b" * 19,))).computed == 0


@pytest.mark.parametrize("dimensions", [0, 5, -1])
def test_dimensions_that_are_not_there_are_refused(served: Embeddings, dimensions: int) -> None:
    with pytest.raises(InvalidRequestError, match="dimensions: expected 1 to 4"):
        asyncio.run(served.embed(("a",), dimensions=dimensions))


def test_an_empty_text_is_refused(fake: FakeEmbedder, served: Embeddings) -> None:
    with pytest.raises(InvalidRequestError, match=r"input\[1\]"):
        asyncio.run(served.embed(("a", "")))
    assert fake.batches == []


def test_requests_take_turns_by_chunk(fake: FakeEmbedder, served: Embeddings) -> None:
    """A long text does not keep others waiting until its end."""

    async def run() -> None:
        await asyncio.gather(served.embed(("a" * 9,)), served.embed(("bb",)))

    asyncio.run(run())
    assert fake.steps.index("bb") < 4
    assert fake.steps.count("a" * 9) == 9


def test_a_request_whose_client_leaves_is_not_computed_on(
    fake: FakeEmbedder, served: Embeddings
) -> None:
    async def run() -> None:
        task = asyncio.ensure_future(served.embed(("a" * 15,)))
        while len(fake.steps) < 2:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))

    asyncio.run(run())
    assert len(fake.steps) < 15
    assert asyncio.run(served.embed(("b",))).computed == 2


def test_too_many_requests_of_a_tenant_are_refused_and_another_one_is_served(
    fake: FakeEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "_MOST_WAITING", 2)
    served = Embeddings(MODEL, fake, at_once, AtOnce(), AtOnce())

    async def run() -> None:
        first = asyncio.ensure_future(served.embed(("a",), "one"))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await served.embed(("b",), "one")
        await served.embed(("b",), "two")
        await first
        await served.embed(("b",), "one")

    asyncio.run(run())


def test_batches_are_bounded_with_what_pads_them() -> None:
    lengths = [1] * 100 + [1000] * 5 + [9000]
    rows = [(str(i).encode(), (7,) * n) for i, n in enumerate(lengths)]
    found = list(batches(rows))
    assert sorted(key for batch in found for key, _ in batch) == sorted(key for key, _ in rows)
    for batch in found:
        longest = max(len(tokens) for _, tokens in batch)
        assert len(batch) <= 64
        assert len(batch) == 1 or longest * len(batch) <= 4096
