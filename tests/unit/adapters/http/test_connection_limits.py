"""Connections beside all other open files: whatever the system's limit is, both have room."""

from __future__ import annotations

import resource

import pytest

from semantic_server.http.server import connections_within_file_limit

pytestmark = pytest.mark.process

INFINITE = resource.RLIM_INFINITY


class System:
    """A system's limit of open files."""

    def __init__(self, soft: int, hard: int, *, refuses: bool = False) -> None:
        self.limit = (soft, hard)
        self.refuses = refuses

    def get(self, _: int) -> tuple[int, int]:
        return self.limit

    def set(self, _: int, limit: tuple[int, int]) -> None:
        if self.refuses:
            raise ValueError("current limit exceeds maximum limit")
        self.limit = limit


@pytest.mark.parametrize(
    ("system", "room", "soft"),
    [
        (System(20_000, 20_000), 2048, 20_000),
        (System(INFINITE, INFINITE), 2048, INFINITE),
        (System(256, INFINITE), 2048, 2304),
        (System(1024, 4096), 2048, 2304),
        (System(1024, 1024), 768, 1024),
        (System(1024, 4096, refuses=True), 768, 1024),
        (System(256, 256), 128, 256),
        (System(1, 1), 1, 1),
    ],
)
def test_the_limit_is_raised_as_far_as_it_goes_and_connections_fit_below_it(
    monkeypatch: pytest.MonkeyPatch, system: System, room: int, soft: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", system.get)
    monkeypatch.setattr(resource, "setrlimit", system.set)
    assert connections_within_file_limit(2048) == room
    assert system.limit[0] == soft
