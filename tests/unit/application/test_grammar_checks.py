"""Grammars are checked fairly, once, and only while a request waits for the verdict."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from semantic.application.chat.grammar_checks import GrammarChecks, Verdicts
from semantic.domain.errors import (
    CapacityError,
    InvalidRequestError,
    OverloadedError,
    UncheckedGrammarError,
)
from semantic.domain.grammar import Grammar


class HeldProbe:
    """Implements `GrammarProbe`: a grammar whose text begins with "held" takes until `go` or
    `stop`; one with "bad" in it is refused."""

    def __init__(self, begun: list[str]) -> None:
        self.begun = begun
        self.stops = 0
        self._go = threading.Event()
        self._stopped = threading.Event()

    def problem(self, grammar: Grammar) -> str:
        """See `GrammarProbe.problem`."""
        self._stopped.clear()
        self.begun.append(grammar.text)
        if grammar.text.startswith("held"):
            self._go.wait()
            self._go.clear()
        if self._stopped.is_set():
            raise CapacityError("stopped")
        return f"{grammar.text} is refused" if "bad" in grammar.text else ""

    def go(self) -> None:
        """Let the held grammar end."""
        self._go.set()

    def stop(self) -> None:
        """See `GrammarProbe.stop`."""
        self.stops += 1
        self._stopped.set()
        self._go.set()

    def close(self) -> None:
        """See `GrammarProbe.close`."""


class World:
    """Checks over held probes, with what they did."""

    def __init__(self, n_probes: int) -> None:
        self.begun: list[str] = []
        self.compiled: list[str] = []
        self.verdicts = Verdicts()
        self.probes = [HeldProbe(self.begun) for _ in range(n_probes)]
        self.checks = GrammarChecks(
            self.probes, self.verdicts, lambda grammar: self.compiled.append(grammar.text)
        )

    def ask(
        self, text: str, tenant: str = "a", *, compiles: bool = True, own: bool = False
    ) -> asyncio.Task[None]:
        """A request that waits for one verdict; with `own` on its tenant's own grammar."""
        grammar = Grammar("json_schema", text, tenant=tenant if own else "")
        unchecked = UncheckedGrammarError([grammar], compiles=compiles)
        return asyncio.create_task(self.checks.check(unchecked, tenant))

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until `is_so`; other threads change it."""
        while not is_so():
            await asyncio.sleep(0.001)

    async def settled(self) -> None:
        """Let every task run up to where it waits."""
        for _ in range(5):
            await asyncio.sleep(0)


def grammar(text: str) -> Grammar:
    return Grammar("json_schema", text)


@contextmanager
def world(n_probes: int = 1) -> Iterator[World]:
    found = World(n_probes)
    try:
        yield found
    finally:
        found.checks.close()


def run(test: Callable[[World], Awaitable[None]], n_probes: int = 1) -> None:
    with world(n_probes) as found:
        asyncio.run(asyncio.wait_for(_awaited(test, found), 60))


async def _awaited(test: Callable[[World], Awaitable[None]], found: World) -> None:
    await test(found)


def test_a_verdict_is_remembered_and_what_is_accepted_is_compiled() -> None:
    async def test(of: World) -> None:
        for text in ("good", "bad", "good", "bad"):
            await of.ask(text)
        await of.ask("part", compiles=False)
        assert of.begun == ["good", "bad", "part"]
        assert of.compiled == ["good", "good"]
        problems = [of.verdicts.problem(grammar(text)) for text in ("good", "bad", "part", "new")]
        assert problems == ["", "bad is refused", "", None]

    run(test)


def test_tenants_share_neither_checks_nor_verdicts() -> None:
    async def test(of: World) -> None:
        one, other = (of.ask("held", tenant, own=True) for tenant in "ab")
        await of.until(lambda: len(of.begun) == 2)
        for probe in of.probes:
            probe.go()
        await asyncio.gather(one, other)
        await of.ask("held", "a", own=True)
        assert of.begun == ["held", "held"]

    run(test, 2)


def test_the_verdict_needed_longest_ago_is_forgotten() -> None:
    verdicts = Verdicts(most=2)
    for text in ("x", "y"):
        verdicts.remember(grammar(text), text)
    verdicts.problem(grammar("x"))
    verdicts.remember(grammar("z"), "z")
    assert [verdicts.problem(grammar(text)) for text in "xyz"] == ["x", None, "z"]


def test_each_tenant_has_one_check_at_a_time() -> None:
    async def test(of: World) -> None:
        tasks = [of.ask("held", "a")]
        await of.until(lambda: of.begun == ["held"])
        tasks.append(of.ask("later", "a"))
        await of.ask("b", "b")
        assert of.begun == ["held", "b"], "the other probe is for other tenants"
        for probe in of.probes:
            probe.go()
        await asyncio.gather(*tasks)
        assert of.begun == ["held", "b", "later"]

    run(test, n_probes=2)


def test_tenants_take_turns() -> None:
    async def test(of: World) -> None:
        tasks = [of.ask("held", "a")]
        await of.until(lambda: of.begun == ["held"])
        tasks += [of.ask(f"a{i}", "a") for i in range(3)]
        tasks += [of.ask(f"b{i}", "b") for i in range(2)]
        await of.settled()
        of.probes[0].go()
        await asyncio.gather(*tasks)
        assert of.begun == ["held", "a0", "b0", "a1", "b1", "a2"]

    run(test)


def test_a_check_that_no_request_waits_for_is_dropped_or_stopped() -> None:
    async def test(of: World) -> None:
        logged: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        running, waiting = of.ask("held", "a"), of.ask("dropped", "b")
        await of.until(lambda: of.begun == ["held"])
        waiting.cancel()
        running.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        await of.ask("next", "b")
        del running, waiting
        await of.settled()
        gc.collect()
        assert logged == []
        assert of.begun == ["held", "next"]
        assert of.probes[0].stops == 1
        assert of.verdicts.problem(grammar("held")) is None

    run(test)


def test_requests_share_a_check_and_the_last_to_leave_stops_it() -> None:
    async def test(of: World) -> None:
        tasks = [of.ask("held", tenant) for tenant in "ab"]
        await of.until(lambda: of.begun == ["held"])
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        of.probes[0].go()
        await tasks[1]
        assert (of.begun, of.probes[0].stops) == (["held"], 0)

    run(test)


def test_the_queue_is_bounded_for_each_tenant() -> None:
    async def test(of: World) -> None:
        tasks = [of.ask("held", "a")]
        await of.until(lambda: of.begun == ["held"])
        tasks += [of.ask(f"a{i}", "a") for i in range(32)]
        await of.settled()
        with pytest.raises(OverloadedError, match="too many schemas are waiting"):
            await of.ask("one more", "a")
        tasks += [of.ask(name, name) for name in "bcdef"]
        await of.settled()
        of.probes[0].go()
        await asyncio.gather(*tasks)

    run(test)


def test_a_request_has_few_refusals() -> None:
    async def test(of: World) -> None:
        many = UncheckedGrammarError([grammar(f"bad {i}") for i in range(9)], compiles=False)
        with pytest.raises(InvalidRequestError, match="bad 2 is refused"):
            await of.checks.check(many, "a")
        assert len(of.begun) == 3

    run(test)


def test_requests_that_wait_at_the_end_are_answered() -> None:
    async def test(of: World) -> None:
        tasks = [of.ask("held", "a"), of.ask("queued", "b")]
        await of.until(lambda: of.begun == ["held"])
        await asyncio.to_thread(of.checks.close)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in found] == [CapacityError, CapacityError]

    run(test)
