"""Replicas over an S3 server: agents move, and whatever the server does costs no answer."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from semantic.adapters.mlx.backend import MLXBackend
from semantic.composition.engine_settings import Settings
from semantic.composition.process_stores import require_shared
from semantic.domain.errors import StoreError
from semantic.domain.stored import Tier
from semantic_fleet.objects.objects import DEADLINE, Objects
from tests.fleet.seaweed import BUCKET, Seaweed, paths_of, until_uploaded
from tests.support.durable import Durable, history, text
from tests.support.serve_process import OURS, ServeProcess, served

pytestmark = pytest.mark.process

Json = dict[str, object]

KINDS = ("llama", "gemma3", "lfm2", "recurrent_gemma", "deepseek_v3", "falcon_h1")


class Fleet:
    """A prefix of the bucket and a secret."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"s3://{BUCKET}/{folder.name}"
        self.secret = folder / "secret"
        self.secret.write_bytes(os.urandom(40))
        self.secret.chmod(0o600)

    def replica(
        self,
        stack: ExitStack,
        name: str,
        architecture: str = "llama",
        backend: MLXBackend | None = None,
    ) -> Durable:
        fleet = self.url, self.secret
        life = Durable(architecture, self.folder / name, fleet=fleet, backend=backend)
        stack.callback(life.close)
        return life

    @property
    def flags(self) -> tuple[str, ...]:
        return "--remote-store", self.url, "--fleet-secret-file", str(self.secret)


@pytest.fixture
def fleet(weed: Seaweed, tmp_path: Path) -> Fleet:
    del weed
    return Fleet(tmp_path)


@pytest.mark.parametrize("architecture", KINDS)
def test_agents_of_every_kind_of_cache_move(architecture: str, fleet: Fleet) -> None:
    prompt = text(1200, seed=1)
    with ExitStack() as stack:
        one = fleet.replica(stack, "a", architecture)
        past = history(prompt, one.ask("ann", prompt, 9))
        one.store.flush()
        other = fleet.replica(stack, "b", architecture)
        moved = other.ask("ann", (*past, *text(30, seed=2)), 9)
        assert moved.match is not None
        assert moved.match.source == "remote"
        assert moved.cached_tokens >= 0.95 * moved.prompt_tokens
        stranger = other.ask("ann", prompt, 5, tenant="another")
        assert stranger.cached_tokens == 0


@pytest.mark.parametrize("damage", ["flipped", "truncated", "emptied"])
def test_damaged_objects_are_computed_again(damage: str, fleet: Fleet) -> None:
    prompt = text(900, seed=1)
    with ExitStack() as stack:
        one = fleet.replica(stack, "a")
        past = history(prompt, one.ask("ann", prompt, 5))
        one.store.flush()
        objects = Objects.open(fleet.url)
        for path in [one for one in paths_of(objects) if one.endswith(".full")]:
            data = bytearray(objects.get(path))
            data[len(data) // 2] ^= 4
            kept = {"flipped": len(data), "truncated": len(data) - 9, "emptied": 0}[damage]
            objects.replace(path, data[:kept])
            assert not bytes(objects.read(path, len(data), len(data) + 9))  # no failure
        cached = []
        for name in "bcd":
            life = fleet.replica(stack, name)
            cached.append(life.ask(name, (*past, 1), 5).cached_tokens)
            life.store.flush()
        assert cached[0] == 0
        assert cached[-1] >= 0.8 * len(past)


@pytest.mark.parametrize("fault", ["stopped", "frozen"])
def test_a_server_that_is_gone_or_hangs_costs_one_deadline(
    fault: str, fleet: Fleet, weed: Seaweed
) -> None:
    prompt = text(700, seed=3)
    with ExitStack() as stack:
        one = fleet.replica(stack, "a")
        past = history(prompt, one.ask("ann", prompt, 5))
        one.store.flush()
        other = fleet.replica(stack, "b")
        if fault == "frozen":
            weed.freeze()
            stack.callback(weed.thaw)
        else:
            weed.stop()
        assert other.discovery is not None
        for agent, most in (("ann", 2 * DEADLINE), ("bob", DEADLINE / 2)):
            started = time.monotonic()
            other.discovery.look_up(agent, "", past)
            assert time.monotonic() - started < most  # the second finds the breaker open
        assert other.ask("ann", (*past, 1), 5).cached_tokens == 0
        assert other.counts(Tier.REMOTE)["breaks"] > 0
        (weed.thaw if fault == "frozen" else weed.start)()
        time.sleep(5)
        third = fleet.replica(stack, "c")
        assert third.ask("ann", (*past, 3), 5).cached_tokens >= 0.95 * len(past)


def test_wrong_keys_cost_no_answer(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-key")
    settings = Settings(remote=fleet.url, fleet_secret=fleet.secret)
    with pytest.raises(StoreError) as failed:
        require_shared(settings).try_out()
    assert "not-the-key" not in str(failed.value)
    with ExitStack() as stack:
        life = fleet.replica(stack, "a")
        assert life.ask("ann", text(600, seed=1), 5).cached_tokens == 0
        life.store.flush()
        assert life.counts(Tier.REMOTE)["write_errors"] > 0


def test_a_full_server_costs_no_answer(tmp_path: Path) -> None:
    """Its volumes take nothing more; what was stored before is still read."""
    server = Seaweed(tmp_path / "full")
    kept = dict(os.environ)
    os.environ.update(server.environment)
    try:
        server.start()
        fleet, prompt = Fleet(tmp_path), text(600, seed=1)
        with ExitStack() as stack:
            one = fleet.replica(stack, "a")
            past = history(prompt, one.ask("ann", prompt, 5))
            one.store.flush()
            server.stop()
            server.start("-volume.minFreeSpace=100")
            other = fleet.replica(stack, "b")
            moved = other.ask("ann", (*past, *text(300, seed=2)), 5)
            assert moved.cached_tokens == len(past)
            other.store.flush()
            assert other.counts(Tier.REMOTE)["write_errors"] > 0
    finally:
        server.stop()
        os.environ.clear()
        os.environ.update(kept)


# Processes


def asked(server: ServeProcess, path: str, body: Json, key: str = "one") -> Json:
    request = urllib.request.Request(
        f"{server.url}/v1/{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {key}", "X-Agent-ID": "ann"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        found: Json = json.load(reply)
    return found


RULES = " ".join(f"Rule {i} is that {i} plus {i} is {2 * i}." for i in range(1, 90))


def chat(*messages: tuple[str, str]) -> Json:
    listed = [{"role": role, "content": content} for role, content in messages]
    return {"model": "default", "messages": listed, "max_tokens": 24, "temperature": 0}


def answer(reply: Mapping[str, object]) -> tuple[str, int, int]:
    """Text, tokens of the prompt, and those that were cached."""
    reply_json = json.loads(json.dumps(reply))
    usage = reply_json["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return reply_json["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


def test_an_agent_survives_kill_9_of_its_server_in_the_middle_of_a_turn(fleet: Fleet) -> None:
    """The same text as from one server alone; responses and tenants move as well."""
    environment = {**os.environ, **OURS}
    flags = (*fleet.flags, "--api-key", "one", "--api-key", "two")
    first = [("system", RULES), ("user", "My name is Ada. What is 3 plus 4?")]
    with ExitStack() as stack:
        one = stack.enter_context(_killed(fleet.folder / "a", flags, environment))
        other = stack.enter_context(served(fleet.folder / "b", *flags, environment=environment))
        said, n_prompt, _ = answer(asked(one, "chat/completions", chat(*first)))
        response = asked(one, "responses", {"model": "default", "input": RULES})
        until_uploaded(Objects.open(fleet.url))
        onward = [*first, ("assistant", said), ("user", "What is my name?")]
        long = {**chat(*onward), "max_tokens": 200}
        turn = threading.Thread(target=_ignore_loss, args=(one, long))
        turn.start()
        time.sleep(0.3)
        one.kill()
        turn.join()
        text_there, n_prompt, cached = answer(asked(other, "chat/completions", chat(*onward)))
        assert cached >= 0.95 * (n_prompt - 20)
        follow = {
            "model": "default",
            "input": "And then?",
            "previous_response_id": response["id"],
            "max_output_tokens": 8,
        }
        assert asked(other, "responses", follow)["previous_response_id"] == response["id"]
        with pytest.raises(urllib.error.HTTPError):
            asked(other, "responses", follow, key="two")
        assert answer(asked(other, "chat/completions", chat(*first), key="two"))[2] == 0
    with served(fleet.folder / "alone", environment=environment) as alone:
        assert answer(asked(alone, "chat/completions", chat(*first)))[0] == said
        assert answer(asked(alone, "chat/completions", chat(*onward)))[0] == text_there


@contextmanager
def _killed(
    store: Path, flags: tuple[str, ...], environment: Mapping[str, str]
) -> Iterator[ServeProcess]:
    """A server that is not asked to end."""
    command = (sys.executable, "-m", "semantic", "serve", "--port", "0", "--store", str(store))
    process = ServeProcess((*command, *flags), environment)
    try:
        process.wait_ready()
        yield process
    finally:
        process.kill()


def _ignore_loss(server: ServeProcess, body: Json) -> None:
    try:
        asked(server, "chat/completions", body)
    except OSError:
        return
