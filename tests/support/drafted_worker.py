"""A process whose agents' answers are drafted from their histories, on a tiny model and a store.

    python -m tests.support.drafted_worker KIND

It says "loaded" and reads lines with a life each: the store's folder, a seed, and the number of
turns, without end if null. It says what it finds in the store, each turn that is asked for, the
tokens of each step, each turn's end, each flush, and that the life is over. A process may be
killed in the middle of all this.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from semantic import CompletedGeneration
from semantic.adapters.mlx.batch.decode_batch import ContinuousBatch
from semantic.adapters.mlx.batch.draft_costs import StepSeconds
from semantic.adapters.mlx.model import lanes
from semantic.adapters.stores.histories import Histories
from semantic.composition.engine_settings import Settings
from semantic.composition.process_stores import open_store
from semantic.domain.stored import Manifest, Tier
from semantic.domain.value_objects import SamplingParams, TokenEvent
from tests.support.always_read import always_read
from tests.support.drafted import DRAFTED
from tests.support.durable import MIB, TINY_MEMORY, edited, text
from tests.support.durable_worker import say
from tests.support.rig import Rig
from tests.support.tiny_models import VOCAB

AGENTS = ("ann", "ben", "cay", "dan")
FORKS = tuple(f"{agent}'s fork" for agent in AGENTS)
LONGEST_ANSWER = 40
_LONGEST = 700
"""A longer history begins anew."""
_SYSTEMS = (40, 255, 256, 300, 490)
"""Tokens of the texts with which prompts begin."""
_CROWDED = 250
"""Tokens of a prompt whose answer needs a further block. A small pool lacks that for three."""
_TOGETHER = 5
"""That many requests run at once. With more than four there are no drafts."""

_MOST_ROWS = (8, 64)
"""The rows of a step: parts of a saved answer are drafted, or all of it."""


class Life(NamedTuple):
    """A life of an engine, as it is asked for."""

    folder: str
    seed: str
    n_turns: int | None


def params_of(prompt: Sequence[int]) -> SamplingParams:
    """The options of a prompt's request: the same prompt has the same answer, greedy or seeded."""
    draw = random.Random(str(list(prompt)))
    if draw.random() < 0.4:
        return SamplingParams()
    return SamplingParams(
        temperature=draw.choice((0.0, 1.0, 1.0)),
        seed=draw.randrange(1 << 40),
        top_k=draw.choice((0, 20)),
        frequency_penalty=draw.choice((0.0, 0.0, 0.7)),
        repetition_penalty=draw.choice((None, None, 1.3)),
    )


class Turns:
    """One life of agents over a store."""

    def __init__(self, kind: str, life: Life) -> None:
        self._draw = draw = random.Random(life.seed)
        memory = draw.choice((TINY_MEMORY, 64 * MIB))
        self._store = open_store(
            Settings(
                use_disk=True, store=Path(life.folder), memory_bytes=memory, disk_bytes=256 * MIB
            )
        )
        columns, chunk = draw.choice((3, 4, 40)), draw.choice((64, 300, 5000))
        self._rig = Rig(kind + DRAFTED, columns=columns, chunk=chunk, prefix_store=self._store)
        batch = self._rig.backend._batch
        assert isinstance(batch, ContinuousBatch)
        batch._lane = replace(batch._lane, most=draw.choice(_MOST_ROWS))
        self._engine = self._rig.engine
        self._histories = Histories(1 << 22)
        self._engine.draft_from(self._histories)
        self._running: dict[str, tuple[str, Sequence[int]]] = {}

    def begin(self) -> None:
        """Say what is saved. If there are answers, ask for the longest again, else for some."""
        saved = {agent: one for agent in (*AGENTS, *FORKS) if (one := self._saved(agent))}
        found = {agent: one.token_ids for agent, one in saved.items()}
        say(event="opened", found=found)
        if not saved:
            for agent in AGENTS[:2]:
                self._ask(agent, self._beginning(), "new", LONGEST_ANSWER // 2)
                self.finish()
            self._flush()
            return
        self._histories.drafter("", ())
        self._histories.wait()  # it has recalled what is saved
        longest = max(saved.values(), key=lambda one: len(one.token_ids) - one.prompt_tokens)
        prompt = longest.token_ids[: longest.prompt_tokens]
        n_tokens = len(longest.token_ids) - longest.prompt_tokens
        self._ask(self._draw.choice(AGENTS), prompt, "recalled", n_tokens)
        self.finish()

    def run(self, n_turns: int | None) -> None:
        """Ask for turns at random steps, and let them run, be cancelled and be saved."""
        draw, n_asked = self._draw, 0
        while n_turns is None or n_asked < n_turns:
            rarely = 0.2 if len(self._running) < 3 else 0.03
            if not self._running or (len(self._running) < _TOGETHER and draw.random() < rarely):
                n_asked += self._ask_anything()
            self._step()
            if draw.random() < 0.02:
                self._cancel()
            if draw.random() < 0.02:
                self._flush()
        self.finish()

    def _cancel(self) -> None:
        """Cancel a request, if possible one with accepted drafts that no step returned yet."""
        drafted = [one.uid for one in self._engine.requests if one.accepted_at]
        if self._running:
            self._engine.cancel(self._draw.choice(drafted or list(self._running)))

    def finish(self) -> None:
        """Step until all turns have ended."""
        while self._engine.has_work:
            self._step()

    def close(self) -> None:
        """End in order."""
        counts = next(one.counts for one in self._store.stats() if one.tier is Tier.DISK)
        damaged, preempted = counts["damaged"], self._engine.preemptions
        self._engine.close()
        say(event="closed", damaged=damaged, preempted=preempted)

    # Asking

    def _ask_anything(self) -> bool:
        draw, engine = self._draw, self._engine
        busy = {agent for agent, _ in self._running.values()}
        free = [one for one in (*AGENTS, *FORKS) if one not in busy]
        agent = draw.choice(free)
        saved, past, n = self._saved(agent), self._past(agent), draw.randint(3, LONGEST_ANSWER)
        more = text(draw.choice((1, 2, 20)), seed=draw.randrange(3))
        how = draw.choice(
            ("new", "again", "again", "on", "on", "edit", "fork", "twin", "forget", "crowd")
        )
        fork = f"{agent}'s fork"
        if how == "crowd":
            for one in draw.sample(free, 3):
                self._ask(one, text(_CROWDED, seed=draw.randrange(5)), how, LONGEST_ANSWER)
        elif how == "twin" and self._running:
            _, prompt = draw.choice(list(self._running.values()))
            self._ask(agent, prompt, how, n)
        elif saved is None or past is None or len(past) > _LONGEST or how in {"new", "twin"}:
            self._ask(agent, self._beginning(), "new", n)
        elif how == "again":
            self._ask(agent, saved.token_ids[: saved.prompt_tokens], how, n)
        elif how == "edit":
            self._ask(agent, (*edited(past, draw.randrange(len(past))), *more), how, n)
        elif how == "fork" and agent in AGENTS and self._past(fork) is None:
            engine.fork(agent, fork)
            self._ask(fork, (*past, *more), how, n)
        elif how == "forget" and draw.random() < 0.3:
            engine.forget(agent)
            return False
        else:
            self._append(agent, past, more, n)
        return True

    def _beginning(self) -> Sequence[int]:
        draw = self._draw
        system = text(draw.choice(_SYSTEMS), seed=draw.randrange(2))
        return (*system, *(draw.randrange(VOCAB) for _ in range(draw.choice((1, 5, 30)))))

    def _ask(self, agent: str, prompt: Sequence[int], how: str, n: int) -> None:
        params = params_of(prompt)
        uid = self._engine.submit(agent, prompt, max_tokens=n, sampling=params)
        self._asked(uid, agent, prompt, how, n)

    def _append(self, agent: str, past: Sequence[int], more: Sequence[int], n: int) -> None:
        prompt = (*past, *more)
        uid = self._engine.submit(
            agent, more, max_tokens=n, sampling=params_of(prompt), append=True
        )
        self._asked(uid, agent, prompt, "on", n)

    def _asked(self, uid: str, agent: str, prompt: Sequence[int], how: str, n: int) -> None:
        self._running[uid] = agent, prompt
        say(event="asked", uid=uid, agent=agent, prompt=prompt, how=how, n=n)

    def _saved(self, agent: str) -> Manifest | None:
        return self._engine.manifest(agent)

    def _past(self, agent: str) -> Sequence[int] | None:
        """All tokens that the agent has cached."""
        for cache in self._engine.caches_of("", [agent]):
            return cache.token_ids
        saved = self._saved(agent)
        return None if saved is None else saved.token_ids

    # Running

    def _step(self) -> None:
        tokens: dict[str, list[int]] = {}
        ended: list[CompletedGeneration] = []
        for event in self._engine.step_once():
            if isinstance(event, TokenEvent):
                tokens.setdefault(event.uid, []).append(event.token)
            elif isinstance(event, CompletedGeneration):
                ended.append(event)
        drafted = {one.uid: [one.drafted, one.accepted] for one in self._engine.requests}
        say(event="said", tokens=tokens, drafted=drafted)
        for done in ended:
            self._end(done)

    def _end(self, done: CompletedGeneration) -> None:
        del self._running[done.uid]
        assert done.error is None, done.error
        say(
            event="turn",
            uid=done.uid,
            tokens=done.tokens,
            reason=done.finish_reason,
            cached=done.cached_tokens,
            source=done.match.source if done.match else "",
            counts=[done.drafted, done.accepted],
        )
        self._rig.check()

    def _flush(self) -> None:
        self._engine.flush()
        say(event="safe")


def main(kind: str) -> None:
    """See the module."""
    always_pays: Callable[..., float] = lambda *_, **__: 1.0  # noqa: E731
    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(StepSeconds, "of", always_pays))
        patched.enter_context(mock.patch.object(lanes, "_COMPARED", (2, 3, 8)))
        patched.enter_context(mock.patch.object(lanes, "_PROMPT", 40))
        patched.enter_context(always_read())
        Rig(kind + DRAFTED)  # compiles and chooses what later engines keep to
        say(event="loaded")
        for line in sys.stdin:
            life = Life(**json.loads(line))
            turns = Turns(kind, life)
            turns.begin()
            turns.run(life.n_turns)
            turns.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
