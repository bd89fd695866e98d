"""`semantic fleet`: what no fleet can have is one line, and starts nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from semantic_fleet.cli.fleet_commands import ReplicaOptions, plan_of
from semantic_server.http.settings import ServerSettings
from tests.cli.support import semantic


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def shared(tmp_path: Path) -> list[str]:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(40)))
    secret.chmod(0o600)
    (tmp_path / "bucket").mkdir()
    return ["--remote-store", (tmp_path / "bucket").as_uri(), "--fleet-secret-file", str(secret)]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "expected --remote-store and --fleet-secret-file"),
        (["--remote-store", "file:///b"], "also requires fleet_secret_file"),
        (["--allow-pull", "org/*"], "--allow-pull: not available in a fleet"),
        (["--kv-events", "ipc://a"], "--kv-events: not available in a fleet"),
        (["--replicas", "3", "--max-replicas", "2"], "expected at least --replicas, 3"),
        (["--host", "0.0.0.0"], "expected --api-key"),
        (["--port", "70000"], "port (flag)"),
    ],
)
def test_what_no_fleet_can_have_is_refused(flags: list[str], expected: str) -> None:
    ran = semantic("fleet", "serve", *flags)
    assert (ran.code, len(ran.error_lines)) == (2, 1), ran.err
    assert expected in ran.err


@pytest.mark.process
def test_without_ray_it_says_what_to_install(
    shared: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    ran = semantic("fleet", "serve", "--port", "0", "--store", str(tmp_path / "s"), *shared)
    assert ran.code == 4
    assert "install semantic-engine[fleet]" in ran.err


def test_a_plan_has_what_was_given_and_the_servers_own_limits(tmp_path: Path) -> None:
    settings = ServerSettings(max_batch=8, max_waiting=5, store=tmp_path)
    plan = plan_of(settings, ReplicaOptions(replicas=3, max_replicas=5, drain_timeout=7))
    assert (plan.replicas, plan.most, plan.requests, plan.queued) == (3, 5, 8, 5)
    assert (plan.drain, plan.folder, plan.per_machine) == (7, str(tmp_path), 5)
    on_cluster = ReplicaOptions(replica_requests=4, ray_address="auto")
    assert plan_of(settings, on_cluster).requests == 4
    assert plan_of(settings, on_cluster).per_machine == 1
