"""A folder for a store, and the store in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from semantic.adapters.stores.disk import DiskStore
from tests.unit.adapters.disk.support import PLENTY


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> Iterator[DiskStore]:
    opened = DiskStore.open(root, PLENTY)
    yield opened
    opened.close()
