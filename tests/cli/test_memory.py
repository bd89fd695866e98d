"""`semantic memory` and /v1/memory: what a server's process has, and another limit for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pydantic import SecretStr

from semantic.application.engine.memory_guard import Memory, MemoryGuard
from semantic.application.engine.step_loop import StepLoop
from semantic_server.http.app import create_app
from semantic_server.http.context import ServerContext
from semantic_server.http.lifecycle import Lifecycle
from semantic_server.http.settings import ServerSettings
from tests.cli.support import semantic
from tests.support.http_server import RunningServer, running
from tests.support.model_server import KEY, OPERATOR
from tests.support.runnable_serving import RunnableFake

pytestmark = pytest.mark.process

GIB = 1 << 30
USED = 5 * GIB


class Process:
    """The memory of a process: a cache that is given up, and what cannot be."""

    def __init__(self) -> None:
        self.cache = 2 * GIB
        self.loop = StepLoop()
        memory = Memory(lambda: 3 * GIB + self.cache, lambda: None)
        self.loop.guard = MemoryGuard(
            8 * GIB, memory, clock=lambda: 0.0, report=lambda _: None, most=16 * GIB
        )
        self.loop.guard.add("the memory tier", self.free)

    def free(self, n_bytes: int) -> bool:
        freed = min(n_bytes, self.cache)
        self.cache -= freed
        return bool(freed)


@contextmanager
def server(settings: ServerSettings | None = None) -> Iterator[RunningServer]:
    fake, context = RunnableFake(), ServerContext()
    fake.memory = Process().loop

    async def load() -> RunnableFake:
        return fake

    lifecycle = Lifecycle(context, load)
    with running(app=create_app(settings=settings, lifecycle=lifecycle, context=context)) as found:
        while context.serving is None:
            pass
        yield found


def test_the_limit_is_shown_lowered_and_reset() -> None:
    with server() as found:
        at = ("--url", found.url)
        assert semantic("memory", *at).out == "5.0 GiB of 8.0 GiB\n"
        lowered = semantic("memory", "--limit", "4", *at)
        assert lowered.out.splitlines() == ["3.5 GiB of 4.0 GiB", "pressure: the memory tier"]
        shown = json.loads(semantic("memory", "--json", *at).out)
        assert shown["counts"] == {"the memory tier": 1}
        assert semantic("memory", "--reset", *at).out.startswith("3.5 GiB of 8.0 GiB\n")
        text = found.ask("GET", "/metrics").body.decode()
        assert "semantic_memory_max_bytes 8.589934592e+09" in text
        assert 'semantic_memory_steps_total{step="the memory tier"} 1.0' in text
        changes: Any = found.ask("GET", "/v1/overview").json["changes"]
        sample = changes["samples"][-1]
        assert sample["tiers"]["process"] == [int(3.5 * GIB), 8 * GIB]
        assert sample["pressure"] == ["the memory tier"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--limit", "99"), "the limit must be at most all memory, 16 GiB, got 99 GiB"),
        (("--limit", "-1"), "--limit must be above 0"),
        (("--limit", "4", "--reset"), "expected either --limit or --reset"),
    ],
)
def test_a_limit_that_cannot_be_kept_is_one_line(arguments: tuple[str, ...], expected: str) -> None:
    with server() as found:
        ran = semantic("memory", "--url", found.url, *arguments)
        assert (ran.code, len(ran.error_lines), expected in ran.err) == (2, 1, True)
        assert semantic("memory", "--url", found.url).out == "5.0 GiB of 8.0 GiB\n"


@pytest.mark.parametrize("body", [{}, {"limit_gb": "4"}, {"limit_gb": 0}, {"limit_gb": 4, "x": 1}])
def test_a_body_that_is_wrong_changes_nothing(body: dict[str, object]) -> None:
    with server() as found:
        refused = found.ask("POST", "/v1/memory", body)
        assert refused.status == 400
        assert found.ask("GET", "/v1/memory").json["max_bytes"] == 8 * GIB


def test_memory_is_for_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, operators = (SecretStr(KEY),), (SecretStr(OPERATOR),)
    with server(ServerSettings(api_keys=keys, operator_keys=operators)) as found:
        for arguments in ((), ("--limit", "4")):
            monkeypatch.setenv("SEMANTIC_API_KEY", KEY)
            refused = semantic("memory", "--url", found.url, *arguments)
            assert (refused.code != 0, "operator" in refused.err) == (True, True)
            monkeypatch.setenv("SEMANTIC_API_KEY", OPERATOR)
            assert semantic("memory", "--url", found.url, *arguments).code == 0
