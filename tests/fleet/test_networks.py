"""Replicas and an S3 server with a network between them that is slow, late or cut; and many moves
through it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from semantic.domain.match import MatchEnd
from semantic.domain.stored import Tier
from semantic_fleet.objects.objects import DEADLINE
from tests.fleet.seaweed import Seaweed
from tests.fleet.slow_network import SlowNetwork
from tests.fleet.test_s3 import Fleet, fleet
from tests.support.durable import Asked, Durable, history, text
from tests.support.in_pages import tiny_backend

pytestmark = pytest.mark.process

__all__ = ["fleet"]

MOVED, AT_ONCE = 1000, 25


@contextmanager
def behind(network: SlowNetwork, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is opened inside reaches the server through `network`."""
    with network.opened() as port, monkeypatch.context() as own:
        own.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        yield


@contextmanager
def stack_of(fleet: Fleet, *names: str) -> Iterator[list[Durable]]:
    with ExitStack() as stack:
        yield [fleet.replica(stack, name) for name in names]


def test_an_agent_moves_over_a_network_that_is_late(
    fleet: Fleet, weed: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over another continent: 100 ms there and back."""
    prompt = text(1200, seed=1)
    with (
        behind(SlowNetwork(weed.port, delay=0.05), monkeypatch),
        stack_of(fleet, "a", "b") as (one, other),
    ):
        past = history(prompt, one.ask("ann", prompt, 9))
        one.store.flush()
        moved = other.ask("ann", (*past, *text(30, seed=2)), 9)
        assert moved.cached_tokens >= 0.95 * moved.prompt_tokens
        assert other.counts(Tier.REMOTE)["breaks"] == 0


@pytest.mark.measured_reads
def test_what_a_slow_network_brings_later_than_computing_is_computed(
    fleet: Fleet, weed: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is read to measure it; none is wrong, and the agent is not slower for it."""
    network = SlowNetwork(weed.port)
    with behind(network, monkeypatch), stack_of(fleet, "a", "b") as (one, other):
        pasts = []
        for seed in range(1, 4):
            prompt = text(900, seed=seed)
            pasts.append(history(prompt, one.ask(f"agent-{seed}", prompt, 5)))
        one.store.flush()
        other.ask("bob", text(900, seed=9), 5)  # what computing takes is measured
        network.bytes_per_second = 200e3
        first, *then = (
            other.ask(f"agent-{seed}", (*past, 1), 5) for seed, past in enumerate(pasts, 1)
        )
        assert first.cached_tokens > 0
        for one_of in then:
            assert one_of.cached_tokens == 0
            assert one_of.match is not None
            assert one_of.match.end == MatchEnd.SLOWER


def test_a_partition_costs_its_replica_one_deadline_and_the_others_nothing(
    fleet: Fleet, weed: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, network = text(700, seed=3), SlowNetwork(weed.port)
    with ExitStack() as stack:
        one = fleet.replica(stack, "a")
        with behind(network, monkeypatch):
            other = fleet.replica(stack, "b")
            stack.callback(lambda: setattr(network, "is_cut", False))
            past = history(prompt, one.ask("ann", prompt, 5))
            one.store.flush()
            network.is_cut = True
            assert other.discovery is not None
            for agent, most in (("ann", 2 * DEADLINE), ("bob", DEADLINE / 2)):
                started = time.monotonic()
                other.discovery.look_up(agent, "", past)
                assert time.monotonic() - started < most
            assert other.ask("ann", (*past, 1), 5).cached_tokens == 0
            onward = (*past, *text(600, seed=5))
            newer = history(onward, one.ask("eve", onward, 5))
            one.store.flush()
            assert one.counts(Tier.REMOTE)["breaks"] == 0
            network.is_cut = False
            until = time.monotonic() + 60
            while other.engine.manifest("eve") is None and time.monotonic() < until:
                time.sleep(0.5)
                other.discovery.look_up("eve", "", (*newer, 3))
            assert other.ask("eve", (*newer, 3), 5).cached_tokens >= 0.95 * len(newer)


def test_two_versions_of_a_model_share_nothing_and_disturb_nothing(fleet: Fleet) -> None:
    """As during a rolling update: each finds what its own version has stored."""
    prompt = text(700, seed=4)
    with ExitStack() as stack:
        old = fleet.replica(stack, "old")
        past = history(prompt, old.ask("ann", prompt, 5))
        old.store.flush()
        model = tiny_backend("llama", "tiny:llama of another version")
        new = fleet.replica(stack, "new", backend=model)
        assert new.ask("ann", (*past, 1), 5).cached_tokens == 0
        new.store.flush()
        for name, backend in (("old-2", None), ("new-2", model)):
            third = fleet.replica(stack, name, backend=backend)
            moved = third.ask("ann", (*past, 1), 5)
            assert moved.cached_tokens >= 0.95 * len(past)
            assert moved.match is not None
            assert moved.match.source == "remote"


def test_a_thousand_agents_move(fleet: Fleet) -> None:
    """Each with a beginning that all share and a block of its own; right to the token."""
    shared = text(256, seed=0)
    prompts = [(*shared, *text(290, seed=seed)) for seed in range(1, MOVED + 1)]
    with stack_of(fleet, "a", "b") as (one, other):
        pasts = []
        for first in range(0, MOVED, AT_ONCE):
            asked = [Asked(f"agent-{i}", prompts[i], 2) for i in range(first, first + AT_ONCE)]
            pasts += [history(a.prompt, d) for a, d in zip(asked, one.ask_all(asked), strict=True)]
        one.store.flush()
        uploads = one.counts(Tier.UPLOADS)
        assert not uploads["dropped"] + uploads.get("dropped manifests", 0)
        for first in range(0, MOVED, AT_ONCE):
            asked = [
                Asked(f"agent-{i}", (*pasts[i], 1, 2), 2) for i in range(first, first + AT_ONCE)
            ]
            for moved in other.ask_all(asked):
                assert moved.cached_tokens >= 0.95 * moved.prompt_tokens
        moves = other.counts(Tier.REMOTE)
        assert not moves["damaged"] + moves.get("unavailable", 0)
