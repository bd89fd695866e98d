"""Stores on disk with agents in them, made without a model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from semantic.composition.engine_settings import Settings
from semantic.composition.process_stores import default_store_folder, open_disk
from semantic.domain.block_hash import Scope, namespace_of, tenant_tag
from semantic.domain.stored import Manifest
from semantic.ports.store import StorePort
from tests.support.store_blocks import LAYOUT, block, saved_agents, text

N_TOKENS = 700
BLOCKS = 3
BODY_BYTES = N_TOKENS * 14
"""What the bodies of `N_TOKENS` tokens have in all."""


@contextmanager
def disk_store(folder: Path | None = None) -> Iterator[StorePort]:
    """The store that commands of this test use, or another one."""
    store = open_disk(Settings(use_disk=True, store=folder, disk_bytes=64 << 20))
    try:
        yield store
    finally:
        store.close()


def new_agent(
    store: StorePort,
    name: str = "ada",
    *,
    model: str = "tiny",
    tenant: str = "",
    seed: int = 0,
    n_tokens: int = N_TOKENS,
) -> Manifest:
    """An agent with all its blocks in `store`; agents of one seed share them."""
    namespace = namespace_of(model, LAYOUT.name)
    scope = Scope(namespace, tenant_tag(store.secret, tenant))
    agent = Manifest(
        scope, name, text(n_tokens, seed), prompt_tokens=n_tokens - 100, model=model, note="hello"
    )
    for link in scope.chain(agent.token_ids):
        assert store.put(block(link))
    assert store.agents.save(agent)
    return agent


def changed(name: str, **fields: object) -> None:
    """Save an agent again with other fields."""
    with disk_store() as store:
        (agent,) = (one for one in saved_agents(store) if one.agent_id == name)
        assert store.agents.save(replace(agent, **fields))  # type: ignore[arg-type]  # any of its fields


def block_files() -> list[Path]:
    """The files of bodies in the store of this test."""
    return sorted((default_store_folder() / "blocks").rglob("*.full"))


def everything(folder: Path) -> dict[str, int]:
    """Every path below a folder and its mode: what must be as it was."""
    return {str(path): os.lstat(path).st_mode for path in sorted(folder.rglob("*"))}
