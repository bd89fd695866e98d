"""Forks in pages use their parent's whole pages: the pool counts these once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from semantic import CompletedGeneration
from semantic.adapters.stores.memory import MemoryStore
from semantic.domain.value_objects import TokenEvent
from tests.support.in_pages import tiny_backend
from tests.support.lanes import more
from tests.support.reference import is_answer
from tests.support.rig import Done, Rig
from tests.support.tiny_models import VOCAB

_FORKS, _NEW = 8, 12
_OWN = 2
"""The blocks of a layer that a fork writes to: the parent's last one, and the next."""


def text(seed: int, n: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(VOCAB) for _ in range(n))


def columns(architecture: str, n_tokens: int) -> int:
    """The smallest pool for a parent of `n_tokens` and its forks, in blocks of every layer."""
    spec = tiny_backend(architecture).cache_spec()
    whole = spec.blocks_for(n_tokens)
    forks = [
        count if layer.max_blocks is not None else _OWN
        for layer, count in zip(spec.layers, whole, strict=True)
    ]
    return -(-(sum(whole) + _FORKS * sum(forks)) // spec.n_layers)


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("architecture", ["llama in pages", *more("gemma3 in pages")])
def test_forks_run_together_in_a_pool_for_one_and_their_own_tokens(
    architecture: str, *, is_named: bool
) -> None:
    """Also agents that only begin with the same tokens."""
    rig = Rig(architecture, columns=columns(architecture, 1000))
    first = rig.answer("root", text(1, 980), 8)
    history = (*text(1, 980), *first.tokens)
    prompts = {f"fork-{i}": (*history, *text(10 + i, 20)) for i in range(_FORKS)}
    for agent, prompt in prompts.items():
        if is_named:
            rig.engine.fork("root", agent)
        rig.engine.submit(agent, prompt, max_tokens=_NEW)
    together, done = steps(rig)
    assert together == _FORKS
    for agent, prompt in prompts.items():
        assert done[agent].cached_tokens == len(history)
        assert source(done[agent]) == "pool"
        assert is_answer(rig.model, prompt, done[agent].tokens, _NEW)
    # Neither the parent nor a fork lost a token to another.
    onward = (*prompts["fork-3"], *done["fork-3"].tokens, *text(30, 9))
    last = rig.answer("fork-3", onward, _NEW)
    assert last.cached_tokens >= len(prompts["fork-3"])
    assert is_answer(rig.model, onward, last.tokens, _NEW)
    assert is_answer(rig.model, history, rig.answer("root", history, _NEW).tokens, _NEW)
    rig.check()


def test_agents_of_other_tenants_and_imports_share_no_pages() -> None:
    store = MemoryStore(64 << 20)
    rig = Rig("llama in pages", prefix_store=store)
    rig.answer("root", text(1, 600), 4)
    prompt = (*text(1, 600), *text(2, 40))
    uid = rig.engine.submit("other", prompt, max_tokens=4, tenant="other")
    assert rig.run()[uid].cached_tokens == 0
    saved = rig.engine.manifest("root")
    assert saved is not None
    rig.forget_all()
    salted = replace(saved, scope=replace(saved.scope, salt=b"1" * 32), agent_id="imported")
    store.agents.save(salted)
    rig.answer("imported", prompt, 4)
    assert source(rig.answer("like it", prompt, 4)) == "memory"


def source(done: Done) -> str | None:
    """Where the reused tokens of an answer's prompt came from."""
    return None if done.match is None else done.match.source


def steps(rig: Rig) -> tuple[int, dict[str, Done]]:
    """Run to the end; the most agents that got a token in one step, and the answers."""
    most, done = 0, dict[str, Done]()
    while rig.engine.has_work:
        events: Sequence[object] = rig.engine.step_once()
        most = max(most, len({one.agent_id for one in events if isinstance(one, TokenEvent)}))
        done |= {one.agent_id: one for one in events if isinstance(one, CompletedGeneration)}
        rig.check()
    return most, done
