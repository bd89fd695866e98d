"""One S3 server for the tests of a module."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.fleet.seaweed import PROGRAM, Seaweed


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """A server, and its keys in the environment."""
    assert PROGRAM in os.environ, "run `make test-fleet`"
    server = Seaweed(tmp_path_factory.mktemp("weed"))
    kept = dict(os.environ)
    os.environ.update(server.environment)
    server.start()
    yield server
    server.stop()
    os.environ.clear()
    os.environ.update(kept)
