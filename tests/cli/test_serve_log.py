"""A server in this process: what it says, and what it looks at when its model is there."""

from __future__ import annotations

import resource
import signal

import pytest

from semantic.application.models.model_manager import RunnableServing
from semantic.domain.errors import ModelNotFoundError, StoreError
from semantic_server.cli import serve
from semantic_server.http.settings import ServerSettings
from tests.support.runnable_serving import RunnableFake


@pytest.fixture(autouse=True)
def _log_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a server does to the process's log would stay for other tests."""
    monkeypatch.setattr("semantic_server.http.logs.configure_logs", lambda *_: None)


def _broken(_: object) -> None:
    raise BrokenPipeError


@pytest.mark.process
def test_notices_that_nobody_can_read_end_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semantic_server.cli.serve.print_notice", _broken)

    async def load() -> RunnableServing:
        raise ModelNotFoundError("the last thing that happens")

    with pytest.raises(ModelNotFoundError, match="the last thing"):
        serve.run_server(ServerSettings(port=0), load)


def test_a_store_that_is_off_can_be_told_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semantic.cli.progress.print_notice", _broken)
    serve.notify_store_unavailable(StoreError("full"))


@pytest.mark.process
def test_a_limit_of_open_files_that_loading_lowered_is_seen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = [(20_000, 20_000)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    said: list[object] = []

    def say(message: object) -> None:
        said.append(message)
        if str(message).startswith("ready"):
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("semantic_server.cli.serve.print_notice", say)

    async def load() -> RunnableServing:
        limits.append((200, 200))
        return RunnableFake()

    serve.run_server(ServerSettings(port=0), load)
    assert said[-1] == "stopped"
    assert "the limit on open files allows only 50 connections" in caplog.text
