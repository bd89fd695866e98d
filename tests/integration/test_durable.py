"""Agents on real models outlive the engine, the pool and the process: same bytes, same tokens.

Every answer here equals that of plain mlx-lm without any cache, and the work was really saved.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from semantic.adapters.exchange.transfer import export_agent, import_agent
from semantic.domain.block_hash import HEAD_TOKENS
from semantic.domain.match import MatchEnd
from semantic.domain.prefix import common_prefix
from semantic.domain.stored import Tier
from semantic.domain.value_objects import BLOCK_TOKENS
from tests.support.durable import (
    EVERY_ARCHITECTURE,
    TINY_MEMORY,
    Asked,
    Durable,
    edited,
    history,
    plain,
    running,
    text,
)
from tests.support.http_server import until
from tests.support.in_pages import SUFFIX
from tests.support.lanes import THOROUGH, examples, more, more_rows
from tests.support.rig import Done

ONE_OF_A_KIND = ("llama", "gemma3", "lfm2", "recurrent_gemma")
"""One of each kind of caches."""


def kinds(*usual: str) -> pytest.MarkDecorator:
    """These architectures; all of them in the thorough lane."""
    others = [name for name in EVERY_ARCHITECTURE if name not in usual]
    return pytest.mark.parametrize("architecture", [*usual, *more(*others)])


def few(*usual: str) -> pytest.MarkDecorator:
    """These architectures; one of each kind in the thorough lane."""
    others = [name for name in ONE_OF_A_KIND if name not in usual]
    return pytest.mark.parametrize("architecture", [*usual, *more(*others)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def lengths_at_edges(life: Durable) -> list[int]:
    """Where blocks and windows begin and end, one before and one after."""
    windows = {layer.window for layer in life.backend.cache_spec().layers if layer.window}
    if not THOROUGH and life.architecture not in ("llama", "gemma3"):
        return sorted({257, *windows, *(1 + window for window in windows)})
    edges = {256, *windows}
    if THOROUGH:
        edges |= {512, *(256 + window for window in windows)}
    return sorted({edge + offset for edge in edges for offset in (-1, 0, 1)})


def require_reused(done: Done, n_tokens: int, source: str = "disk") -> None:
    """So many tokens were not computed again."""
    assert done.match is not None
    assert (done.cached_tokens, done.match.source) == (n_tokens, source), done.match


def is_written(life: Durable) -> bool:
    """Whether nothing waits to be written: `kill -9` loses nothing of what was saved."""
    queue = next(one for one in life.store.stats() if one.tier is Tier.QUEUE)
    return not (queue.n_blocks or queue.n_agents)


# Restart


@pytest.mark.parametrize("architecture", EVERY_ARCHITECTURE)
def test_agents_of_all_lengths_go_on_after_a_restart(architecture: str, folder: Path) -> None:
    with running(architecture, folder) as life:
        n = 3
        asked = [
            Asked(f"agent-{length}", text(length - n, seed=length), n)
            for length in (4, *lengths_at_edges(life))
        ]
        done = life.ask_all(asked)
        saved = {one.agent: life.bodies(one.agent) for one in asked}
    with running(architecture, folder) as again:
        for one in asked:
            assert again.bodies(one.agent) == saved[one.agent]
            assert again.restored_bodies(one.agent) == saved[one.agent]
        past = [history(one.prompt, end) for one, end in zip(asked, done, strict=True)]
        onward = [
            Asked(one.agent, (*tokens, *text(1 + i % 7, seed=i)), 4)
            for i, (one, tokens) in enumerate(zip(asked, past, strict=True))
        ]
        for end, tokens in zip(again.ask_all(onward, steps_between=1), past, strict=True):
            require_reused(end, len(tokens))
            assert end.match is not None
            assert end.match.end is MatchEnd.COMPLETE
        assert again.counts()["damaged"] == 0


@pytest.mark.process
@kinds("gemma3", "lfm2")
def test_a_turn_after_a_restart_leaves_the_bytes_of_one_without(
    architecture: str, folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    prompt = text(600, seed=1)
    with running(architecture, folder, chunk=128) as life:
        past = history(prompt, life.ask("ann", prompt, 20))
        until(lambda: is_written(life))  # without a flush
        shutil.copytree(folder, other)
        onward = (*past, *text(300, seed=2))
        require_reused(life.ask("ann", onward, 20), len(past), "pool")
        uninterrupted = life.bodies("ann")
    with running(architecture, other, chunk=128) as again:
        require_reused(again.ask("ann", onward, 20), len(past))
        assert again.bodies("ann") == uninterrupted


@kinds("llama", "recurrent_gemma")
def test_a_conversation_with_a_restart_before_each_turn(architecture: str, folder: Path) -> None:
    past: tuple[int, ...] = ()
    for turn, n_more in enumerate((250, 1, 270, 90)):
        prompt = (*past, *text(n_more, seed=turn))
        with running(architecture, folder) as life:
            done = life.ask("ann", prompt, 5)
            require_reused(done, len(past), "disk" if past else "none")
        past = history(prompt, done)


@pytest.mark.parametrize("architecture", ["gemma3", *more("llama", "windows")])
def test_what_one_form_of_caches_saved_another_goes_on_with(
    architecture: str, folder: Path
) -> None:
    past: tuple[int, ...] = ()
    for turn, (form, n_more) in enumerate(
        [(SUFFIX, 250), ("", 1), (SUFFIX, 270), (SUFFIX, 90), ("", 5)]
    ):
        prompt = (*past, *text(n_more, seed=turn))
        with running(architecture + form, folder) as life:
            assert life.backend.in_pages == bool(form)
            done = life.ask("ann", prompt, 5)
            require_reused(done, len(past), "disk" if past else "none")
        past = history(prompt, done)


@pytest.mark.parametrize("architecture", ["llama", *more("quantized", "qwen2", "qwen3", "moe")])
def test_any_prefix_is_reused_where_any_can_be_begun_with(architecture: str, folder: Path) -> None:
    prompt = text(700, seed=1)
    with running(architecture, folder) as life:
        past = history(prompt, life.ask("ann", prompt, 20))
    with running(architecture, folder) as again:
        require_reused(again.ask("ann", prompt, 20), len(prompt) - 1)  # the same once more
    for at in (20, 255, 256, 300, 511, 512, 710) if THOROUGH else (20, 255, 512, 710):
        with running(architecture, folder) as again:
            done = again.ask("ann", edited(past, at), 5)
            require_reused(done, at)
            assert done.match is not None
        with running(architecture, folder) as again:
            again.ask("ann", past, 1)


@pytest.mark.parametrize(
    "architecture",
    ["gemma3", "lfm2", "qwen3_next in pages", *more("gpt_oss", "windows", "falcon_h1")],
)
def test_others_begin_at_a_junction_after_it_was_met(architecture: str, folder: Path) -> None:
    shared = text(600, seed=1)
    reused = []
    for number in range(3):
        with running(architecture, folder) as life:
            done = life.ask(f"agent-{number}", (*shared, *text(50, seed=number + 2)))
            reused.append(done.cached_tokens)
            assert done.match is not None
    # The second continues from a checkpoint of the grid, if that is not sparser than its prompt.
    assert reused in ([0, 0, 600], [0, 512, 600])
    with running(architecture, folder) as life:
        require_reused(life.ask("agent-2", (*shared, *text(50, seed=9))), 600)


@pytest.mark.parametrize(
    ("in_block", "architecture"),
    [
        *((1, "gemma3"), (16, "lfm2"), (255, "gemma3")),
        *more_rows(*((1, "lfm2"), (15, "gemma3"), (15, "lfm2"), (16, "gemma3"), (255, "lfm2"))),
    ],
)
def test_the_turn_before_is_gone_back_to_when_a_longer_block_has_replaced_its_last(
    architecture: str, in_block: int, folder: Path
) -> None:
    prompt = text(256 + in_block - 4, seed=1)
    with running(architecture, folder) as life:
        before = history(prompt, life.ask("ann", prompt, 4))
        life.ask("ann", (*before, 1, 2, 3), 20)
    with running(architecture, folder) as again:
        require_reused(again.ask("ann", (*before, 7, 7)), len(before))


# Eviction


@few("lfm2")
def test_agents_that_the_pool_and_the_memory_have_no_room_for_are_read_from_disk(
    architecture: str, folder: Path
) -> None:
    past: dict[str, tuple[int, ...]] = {}
    with running(architecture, folder, columns=3, memory_bytes=TINY_MEMORY) as life:
        for turn in range(examples(2, thorough=3)):
            for number in range(4):
                agent = f"agent-{number}"
                before = past.get(agent, ())
                prompt = (*before, *text(200, seed=10 * number + turn))
                done = life.ask(agent, prompt)
                life.engine.flush()  # what waits to be written is not on disk yet
                require_reused(done, len(before), "disk" if before else "none")
                past[agent] = history(prompt, done)
            assert life.counts()["dropped"] == 0


@pytest.mark.parametrize("architecture", ["lfm2", "gemma3 in pages", *more("gemma3", "llama")])
def test_preempted_requests_come_back_with_the_same_tokens(architecture: str, folder: Path) -> None:
    asked = [Asked(f"agent-{i}", text(220 + 10 * i, seed=i), 45) for i in range(5)]
    with running(architecture, folder, columns=6, memory_bytes=TINY_MEMORY) as life:
        done = life.ask_all(asked)
        assert life.engine.preemptions > 0
    with running(architecture, folder) as again:
        for one, end in zip(asked, done, strict=True):
            past = history(one.prompt, end)
            require_reused(again.ask(one.agent, (*past, 1)), len(past))


@pytest.mark.parametrize("architecture", ["gemma3", *more("llama")])
def test_a_disk_with_room_for_few_costs_time_and_no_token(architecture: str, folder: Path) -> None:
    budget = 1_760_000
    past: dict[int, tuple[int, ...]] = {}
    for turn in range(2):
        with running(
            architecture, folder, columns=8, memory_bytes=TINY_MEMORY, disk_bytes=budget
        ) as life:
            for number in range(5):
                prompt = (*past.get(number, ()), *text(500, seed=10 * number + turn))
                past[number] = history(prompt, life.ask(f"agent-{number}", prompt))
            life.engine.flush()
            (disk,) = (one for one in life.store.stats() if one.tier is Tier.DISK)
            assert disk.n_bytes <= budget
            assert disk.counts["damaged"] == 0
            assert disk.counts["evicted"] > 0


# Fork, export, import


@kinds("llama", "recurrent_gemma")
def test_forks_go_their_own_ways_before_and_after_a_restart(
    architecture: str, folder: Path
) -> None:
    prompt = text(500, seed=1)
    with running(architecture, folder) as life:
        past = history(prompt, life.ask("ann", prompt, 20))
        life.engine.fork("ann", "ben")
        life.engine.fork("ann", "cay")
        onward = [
            Asked(agent, (*past, *text(40, seed=seed)), 8)
            for seed, agent in enumerate(("ann", "ben"))
        ]
        ended = life.ask_all(onward)
        for end in ended:
            assert end.cached_tokens == len(past)
    with running(architecture, folder) as again:
        again.engine.fork("ben", "dan")
        for one, end in zip(onward, ended, strict=True):
            whole = history(one.prompt, end)
            require_reused(again.ask(one.agent, (*whole, 7)), len(whole))
        for agent, whole in (("cay", past), ("dan", history(onward[1].prompt, ended[1]))):
            assert again.manifest(agent).token_ids == whole
            require_reused(again.ask(agent, (*whole, 9, 9)), len(whole))
            assert again.manifest(agent).parent == {"cay": "ann", "dan": "ben"}[agent]


@kinds("gemma3", "lfm2")
def test_an_exported_agent_goes_on_in_another_store(
    architecture: str, folder: Path, tmp_path: Path
) -> None:
    prompt = text(600, seed=1)
    with running(architecture, folder) as life:
        past = history(prompt, life.ask("ann", prompt, 10))
        bodies = list(life.bodies("ann").values())
        exported = export_agent(life.store, life.manifest("ann"), tmp_path / "ann")
        assert exported.missing_blocks == 0
        secret = life.store.secret
    with running(architecture, tmp_path / "other") as other:
        assert other.store.secret != secret
        import_agent(other.store, tmp_path / "ann", name="eve")
    with running(architecture, tmp_path / "other") as again:
        assert sorted(again.bodies("eve").values()) == sorted(bodies)
        assert sorted(again.restored_bodies("eve").values()) == sorted(bodies)
        require_reused(again.ask("eve", (*past, 5), 10), len(past))


@pytest.mark.parametrize("architecture", ["lfm2", *more("llama")])
def test_an_import_changes_nothing_that_another_agent_gets(
    architecture: str, folder: Path, tmp_path: Path
) -> None:
    """Nor does what the imported agent and its forks compute onwards, nor a new one of its name."""
    prompt, store = text(600, seed=1), tmp_path / "other"
    with running(architecture, folder) as life:
        past = history(prompt, life.ask("ann", prompt, 10))
        export_agent(life.store, life.manifest("ann"), tmp_path / "ann")
    with running(architecture, store) as other:
        import_agent(other.store, tmp_path / "ann", name="eve")
        assert other.engine.forget("eve")
        assert other.ask("eve", (*past, 3)).cached_tokens == 0
    with running(architecture, tmp_path / "third") as third:
        import_agent(third.store, tmp_path / "ann", name="eve")
        onward = (*past, *text(300, seed=2))
        whole = history(onward, third.ask("eve", onward, 10))
        third.engine.fork("eve", "eva")
        assert third.ask("eva", (*whole, 5)).cached_tokens == len(whole)
        assert third.ask("bob", (*whole, 5)).cached_tokens == 0
    with running(architecture, tmp_path / "third") as again:
        again.engine.fork("eva", "evi")
        for name in ("eve", "eva", "evi"):
            assert again.ask(name, (*whole, 7)).cached_tokens == len(whole), name
        again.engine.forget("bob")
        assert again.ask("cay", (*whole, 5)).cached_tokens >= 768, "of bob's blocks"


# Many at once


class Crowd:
    """Agents that begin with one of two system prompts and do something at random each turn."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.systems = [text(self.draw.choice([255, 256, 300, 513]), seed + i) for i in range(2)]
        self.past: dict[str, tuple[int, ...]] = {}
        self.asked: dict[str, tuple[int, ...]] = {}

    def next_turn(self, n_agents: int) -> list[Asked]:
        """What each of `n_agents` asks next."""
        agents = self.draw.sample(range(8), n_agents)
        return [Asked(f"agent-{i}", self._prompt(f"agent-{i}"), self._n()) for i in agents]

    def least_reused(self, one: Asked, *, needs_checkpoint: bool) -> int:
        """How many tokens an agent that is asked `one` must not compute again."""
        past = self.past.get(one.agent, ())
        if not needs_checkpoint:
            shared = min(common_prefix(past, one.prompt), len(one.prompt) - 1)
            in_block = shared % BLOCK_TOKENS
            # Blocks that share no more than their head are not found by it.
            return shared if in_block >= HEAD_TOKENS or shared == len(past) else shared - in_block
        goes_on = one.prompt[: len(past)] == past and len(one.prompt) > len(past)
        return len(past) if goes_on else 0

    def note(self, asked: Iterable[Asked], done: Iterable[Done]) -> None:
        """Remember what was said."""
        for one, end in zip(asked, done, strict=True):
            self.asked[one.agent] = one.prompt
            self.past[one.agent] = history(one.prompt, end)

    def _n(self) -> int:
        return self.draw.choice([1, 2, 8, 30])

    def _prompt(self, agent: str) -> tuple[int, ...]:
        more = text(self.draw.choice([1, 5, 40, 200]), self.draw.randrange(10**6))
        past = self.past.get(agent)
        if past is None or len(past) > 1200:
            return (*self.draw.choice(self.systems), *more)
        match self.draw.randrange(4):
            case 0:
                return self.asked[agent]
            case 1:
                return (*edited(past, self.draw.randrange(len(past))), *more)
            case 2:
                others = list(self.past.values())
                return (*self.draw.choice(others)[: self.draw.randrange(1, len(past))], *more)
            case _:
                return (*past, *more)


@kinds("llama", "gemma3", "lfm2")
def test_one_to_eight_agents_at_once_do_what_they_like(architecture: str, folder: Path) -> None:
    crowd = Crowd(seed=EVERY_ARCHITECTURE.index(architecture))
    lives = [(n, (0, 3)) for n in (8, 1, 4)] if THOROUGH else [(8, (0,)), (3, (3, 0))]
    for n_agents, turns in lives:
        options = {
            "columns": crowd.draw.choice([14, 200]),
            "chunk": crowd.draw.choice([64, 256, 300]),
            "memory_bytes": crowd.draw.choice([TINY_MEMORY, 1 << 24]),
        }
        with running(architecture, folder, **options) as life:
            for steps_between in turns:
                asked = crowd.next_turn(n_agents)
                done = life.ask_all(asked, steps_between=steps_between)
                life.engine.flush()
                for one, end in zip(asked, done, strict=True):
                    least = crowd.least_reused(one, needs_checkpoint=life.needs_checkpoint)
                    assert end.cached_tokens >= least, (one.agent, end.match)
                crowd.note(asked, done)
            assert life.counts()["damaged"] == 0


@pytest.mark.parametrize("architecture", ["gemma3", *more("lfm2", "llama")])
def test_a_cancelled_load_harms_nobody(architecture: str, folder: Path) -> None:
    prompts = [text(700, seed=i) for i in range(3)]
    with running(architecture, folder) as life:
        ended = life.ask_all([Asked(f"agent-{i}", p) for i, p in enumerate(prompts)])
    for steps in (0, 1, 2, 3) if THOROUGH else (0, 2):
        with running(architecture, folder, memory_bytes=TINY_MEMORY) as again:
            uids = [
                again.submit(Asked(f"agent-{i}", (*history(p, end), 3), 8))
                for i, (p, end) in enumerate(zip(prompts, ended, strict=True))
            ]
            for _ in range(steps):
                again.engine.step_once()
            assert again.engine.cancel(uids[1])
            done = {end.uid: end for end in again.engine.step()}
            again.engine.check_integrity()
            assert done[uids[1]].finish_reason == "cancelled"
            for i in (0, 2):
                prompt = (*history(prompts[i], ended[i]), 3)
                assert done[uids[i]].tokens == plain(architecture, prompt, 8)
            again.ask("agent-1", (*history(prompts[1], ended[1]), 3), 8)


@pytest.mark.measured_reads
@pytest.mark.parametrize("architecture", ["gemma3", *more("llama")])
def test_with_measured_rates_the_tokens_are_the_same(architecture: str, folder: Path) -> None:
    """Whether the disk is read or passed over is a question of time alone."""
    past = [text(600, seed=i) for i in range(4)]
    for turn in range(examples(2, thorough=4)):
        with running(architecture, folder, columns=8, memory_bytes=TINY_MEMORY) as life:
            for _ in range(2 if THOROUGH else 1):
                asked = [Asked(f"agent-{i}", (*p, turn), 4) for i, p in enumerate(past)]
                done = life.ask_all(asked)
                past = [history(one.prompt, end) for one, end in zip(asked, done, strict=True)]
