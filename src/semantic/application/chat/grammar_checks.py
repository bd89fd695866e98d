"""Checks clients' grammars in another process before this process compiles them."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from semantic.application.fair_threads import Failure, attempt
from semantic.domain.errors import (
    CapacityError,
    InvalidRequestError,
    OverloadedError,
    UncheckedGrammarError,
)
from semantic.domain.fair_share import FairLru, FairRoom
from semantic.domain.grammar import Grammar
from semantic.domain.identity import digest
from semantic.ports.generation import GrammarProbe

_REMEMBERED = 4096
"""The number of results of checks to remember."""
_MAX_WAITING = 64
_MAX_REFUSED = 3
"""The number of refused grammars after which a request ends."""
_RETRY_AFTER = 5
"""Retry-After, in seconds."""


class Verdicts:
    """The results of each tenant's recent checks. Thread-safe."""

    def __init__(self, most: int = _REMEMBERED) -> None:
        """Remember the results of at most `most` checks."""
        self._problems: FairLru[bytes, str] = FairLru(most)
        self._lock = threading.Lock()

    def problem(self, grammar: Grammar) -> str | None:
        """Return the problem with `grammar`; "" if the grammar is valid, None if it is unknown."""
        with self._lock:
            return self._problems.get(grammar.tenant, _key(grammar))

    def remember(self, grammar: Grammar, problem: str) -> None:
        """Record the result for `grammar`."""
        with self._lock:
            self._problems.put(grammar.tenant, _key(grammar), problem)


def _key(grammar: Grammar) -> bytes:
    return digest("grammar-v1", grammar.kind.encode(), grammar.text.encode("utf-8", "replace"))


@dataclass(eq=False, slots=True)
class _Check:
    grammar: Grammar
    compiles: bool
    tenant: str
    waiters: int = 0
    probe: GrammarProbe | None = None  # during its check
    has_ended: bool = False
    outcome: Future[str | Failure] = field(default_factory=Future)
    """A value, not an exception: asyncio would log an exception that no request awaits."""


class GrammarChecks:
    """Checks grammars, one at a time for each tenant. Skips a check that no request waits for."""

    def __init__(
        self,
        probes: Sequence[GrammarProbe],
        verdicts: Verdicts,
        compile_here: Callable[[Grammar], None],
    ) -> None:
        """`compile_here` compiles a checked grammar in this process."""
        self._probes = tuple(probes)
        self._idle = list(probes)
        self._verdicts = verdicts
        self._compile_here = compile_here
        self._threads = ThreadPoolExecutor(len(probes), thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._checks: dict[tuple[Grammar, bool], _Check] = {}
        self._waiting: OrderedDict[str, list[_Check]] = OrderedDict()  # by tenant, the next first
        self._busy: set[str] = set()  # tenants

    async def check(self, unchecked: UncheckedGrammarError, tenant: str) -> None:
        """Check the grammars in `unchecked`. Raises InvalidRequestError after several refusals, and
        OverloadedError if too many checks wait."""
        refused = 0
        for grammar in unchecked.grammars:
            problem = await self._problem(grammar, tenant, compiles=unchecked.compiles)
            refused += bool(problem)
            if refused == _MAX_REFUSED:
                raise InvalidRequestError(problem)

    def close(self) -> None:
        """Stop all checks. Call this last."""
        with self._lock:
            waiting = [check for queue in self._waiting.values() for check in queue]
            self._waiting.clear()
            for check in waiting:
                check.has_ended = True
        for check in waiting:
            check.outcome.set_result(Failure(CapacityError("the server is being stopped")))
        for probe in self._probes:
            probe.stop()
        self._threads.shutdown()
        for probe in self._probes:
            probe.close()

    async def _problem(self, grammar: Grammar, tenant: str, *, compiles: bool) -> str:
        check = self._join(grammar, tenant, compiles=compiles)
        try:
            outcome = await asyncio.shield(asyncio.wrap_future(check.outcome))
        finally:
            self._leave(check)
        if isinstance(outcome, Failure):
            raise outcome.error
        return outcome

    def _join(self, grammar: Grammar, tenant: str, *, compiles: bool) -> _Check:
        with self._lock:
            check = self._checks.get((grammar, compiles))
            if check is None:
                room = FairRoom(_MAX_WAITING)
                for name, queue in self._waiting.items():
                    room.take(name, len(queue))
                if not (room.fits(1) and room.leaves_room(tenant, 1)):
                    raise OverloadedError(
                        "too many schemas are waiting to be checked", retry_after=_RETRY_AFTER
                    )
                check = self._checks[grammar, compiles] = _Check(grammar, compiles, tenant)
                self._waiting.setdefault(tenant, []).append(check)
            check.waiters += 1
            self._start_some()
            return check

    def _leave(self, check: _Check) -> None:
        with self._lock:
            check.waiters -= 1
            if check.waiters or check.has_ended:
                return
            self._forget(check)
            if check.probe is not None:
                check.probe.stop()
                return
            queue = self._waiting.get(check.tenant, [])
            queue.remove(check)
            if not queue:
                del self._waiting[check.tenant]

    def _forget(self, check: _Check) -> None:
        key = (check.grammar, check.compiles)
        if self._checks.get(key) is check:
            del self._checks[key]

    def _start_some(self) -> None:
        # Callers hold the lock.
        for tenant in list(self._waiting):
            if not self._idle:
                return
            if tenant in self._busy:
                continue
            queue = self._waiting[tenant]
            check = queue.pop(0)
            self._waiting.move_to_end(tenant)
            if not queue:
                del self._waiting[tenant]
            self._busy.add(tenant)
            check.probe = self._idle.pop()
            self._threads.submit(self._run, check, check.probe)

    def _run(self, check: _Check, probe: GrammarProbe) -> None:
        outcome = attempt(lambda: self._verdict(check, probe))
        with self._lock:
            check.has_ended, check.probe = True, None  # another check may now use the probe
            self._forget(check)
            self._busy.discard(check.tenant)
            self._idle.append(probe)
            self._start_some()
        check.outcome.set_result(outcome)

    def _verdict(self, check: _Check, probe: GrammarProbe) -> str:
        problem = self._verdicts.problem(check.grammar)
        if problem is None:
            problem = probe.problem(check.grammar)
            self._verdicts.remember(check.grammar, problem)
        if check.compiles and not problem:
            self._compile_here(check.grammar)
        return problem
