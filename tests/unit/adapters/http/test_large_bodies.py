"""Large bodies are read one after the other where they would not fit into memory together."""

from __future__ import annotations

import asyncio

import pytest

from semantic.domain.errors import OverloadedError
from semantic_server.http.request_body import LargeBodies


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_bodies_wait_in_their_order_and_none_overtakes() -> None:
    async def scenario() -> None:
        of, read = LargeBodies(20, timeout=60), []

        async def body(name: str, n_bytes: int, end: asyncio.Event) -> None:
            await of.take(n_bytes)
            read.append(name)
            await end.wait()
            of.give(n_bytes)

        ends = {name: asyncio.Event() for name in "abcd"}
        sizes = {"a": 6, "b": 3, "c": 8, "d": 1}
        tasks = [asyncio.create_task(body(one, sizes[one], ends[one])) for one in sizes]
        await settled()
        assert read == ["a", "b"]
        ends["a"].set()
        await settled()
        assert read == ["a", "b"], "c does not fit yet, and d is behind it"
        ends["b"].set()
        await settled()
        assert read == ["a", "b", "c", "d"]
        for end in ends.values():
            end.set()
        await asyncio.gather(*tasks)
        await of.take(20)  # nothing was lost

    asyncio.run(scenario())


def test_a_client_that_leaves_makes_room_and_one_that_waits_too_long_is_refused() -> None:
    async def scenario() -> None:
        of = LargeBodies(20, timeout=60)
        await of.take(8)
        left, behind = (asyncio.create_task(of.take(n)) for n in (9, 2))
        await settled()
        left.cancel()
        await settled()
        assert behind.done()
        of.give(8)
        of.give(2)
        await of.take(20)
        impatient = LargeBodies(1, timeout=0)
        await impatient.take(1)
        with pytest.raises(OverloadedError, match="other large requests"):
            await impatient.take(1)
        impatient.give(1)
        await impatient.take(1)

    asyncio.run(scenario())


def test_bodies_of_one_tenant_that_never_come_leave_room_for_others() -> None:
    async def scenario() -> None:
        of = LargeBodies(80, timeout=60)
        stalled = [asyncio.create_task(of.take(10, "a")) for _ in range(12)]
        await settled()
        assert [one.done() for one in stalled] == [True] * 4 + [False] * 8
        for tenant in "bcd":
            await of.take(10, tenant)
        for one in stalled:
            one.cancel()
        await settled()
        for tenant in "bcd":
            of.give(10, tenant)
        for _ in range(4):
            of.give(10, "a")
        await of.take(80, "e")

    asyncio.run(scenario())
