"""Names that want to be something else: no text of a user reaches a path, and no two are one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from semantic.adapters.stores.disk import DiskStore
from semantic.domain.block_hash import tenant_tag
from tests.faults.folder import delete_index, fast_folder, opened
from tests.support import store_blocks as make
from tests.support.lanes import examples
from tests.support.store_blocks import saved_agents

PLAIN = re.compile(
    rb"[0-9a-f]{2}|[0-9a-f]{16}|[0-9a-f]{64}\.(full|window|checkpoint|[0-9]{20})|[0-9]+"
    rb"|FORMAT|secret|lock|blocks|agents|bad|tmp|written\.json|index\.sqlite(-wal|-shm)?"
)
HOSTILE = [
    "", ".", "..", "../../../../tmp/evil", "/etc/passwd", "a/b", "a\0b", "\0", "\n", "-rf", "~",
    "%2e%2e", "x" * 10_000, "é" * 5_000, "🦊" * 2_500, "agent", "Agent", "AGENT",
    "ﬁ", "fi", "é", "e\u0301", "ß", "SS", "İ", "i", "\u202e", "\ufeff", "\ud800", "\udcff",
    "\ud83d\ude00", "😀", "\ude00\ud83d", "CON", "nul.txt", "index.sqlite", "a" * 64 + ".full",
    "'; DROP TABLE agents; --", "a ", " a", "a.",
]  # fmt: skip
"""Traversal, separators, length, case and normal forms that file systems fold, lone surrogates."""

ids = st.text(max_size=300) | st.text(st.characters(categories=["Cs", "Zs", "Cc"]), max_size=9)


def names_below(store_root: str) -> set[bytes]:
    return {name for _, folders, files in os.walk(os.fsencode(store_root))
            for name in (*folders, *files)}  # fmt: skip


def test_hostile_names_are_names_and_nothing_else() -> None:
    """Row 22, path traversal, NUL, 10 kB, emoji, case twins: each is an agent of its own, before
    and after a restart, and also when the index has to be made from the files.
    """
    with fast_folder() as folder:
        before = set(folder.iterdir())
        with opened(folder / "store") as store:
            for i, name in enumerate(HOSTILE):
                assert store.save(make.manifest(name, 1 + i, seed=i))
            assert_all_there(store)
        with opened(folder / "store") as store:
            assert_all_there(store)
        delete_index(folder / "store")
        with opened(folder / "store") as store:
            assert_all_there(store)
            assert {one.agent_id for one in saved_agents(store)} == set(HOSTILE)
        odd = {name for name in names_below(str(folder / "store")) if not PLAIN.fullmatch(name)}
        assert not odd
        assert set(folder.iterdir()) - before == {folder / "store"}


def assert_all_there(store: DiskStore) -> None:
    for i, name in enumerate(HOSTILE):
        found = store.manifest(make.SCOPE, name)
        assert found is not None, ascii(name)[:40]
        assert found.agent_id == name
        assert found.token_ids == make.text(1 + i, seed=i)


@pytest.fixture(scope="module")
def store() -> Iterator[DiskStore]:
    """One for all examples; it is a folder in memory and is closed with the process."""
    with fast_folder() as folder:
        store = DiskStore.open(folder / "store", 64 << 20, durable=False)
        yield store
        store.close()


@settings(
    max_examples=examples(150, thorough=3000),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(ids, ids, ids, ids)
@example("\ud83d\ude00", "\ud83d\ude00", "\ud83d\ude00", "\ud83d\ude00")
def test_any_text_comes_back_as_it_was(
    store: DiskStore, agent_id: str, note: str, parent: str, tenant: str
) -> None:
    """Row 22: any text is an id, a note, a parent and a tenant, whatever its code points."""
    scope = make.scope_of(tenant=tenant)
    saved = replace(make.manifest(agent_id, 3, scope=scope), note=note, parent=parent, model=parent)
    assert store.save(saved)
    found = store.manifest(scope, agent_id)
    assert found is not None
    assert replace(found, generation=0) == saved
    assert store.remove(scope, agent_id)
    assert store.manifest(scope, agent_id) is None


@settings(max_examples=examples(100, thorough=2000), deadline=None)
@given(st.lists(ids, min_size=2, max_size=6, unique=True))
@example(["agent", "Agent", "AGENT"])
@example(["e\u0301", "é"])
@example(["\ud83d\ude00", "😀"])
def test_twins_are_two(names: list[str]) -> None:
    """Row 22: names that a file system or a database might fold into one do not share a tenant."""
    assert len({tenant_tag(b"s" * 32, name) for name in names}) == len(names)
    scopes = {make.scope_of(tenant=name).root for name in names}
    assert len(scopes) == len(names)
