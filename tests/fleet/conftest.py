"""One S3 server for the tests of a module."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.fleet.seaweed import Seaweed


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """A server, and its keys in the environment."""
    from tests.fleet.seaweed import PROGRAM, Seaweed  # its client is no part of every environment

    assert PROGRAM in os.environ, "run `make test-fleet`"
    server = Seaweed(tmp_path_factory.mktemp("weed"))
    kept = dict(os.environ)
    os.environ.update(server.environment)
    server.start()
    yield server
    server.stop()
    os.environ.clear()
    os.environ.update(kept)
