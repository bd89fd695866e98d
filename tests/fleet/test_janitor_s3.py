"""The janitor over an S3 server: two at once, beside readers, and when one or the server goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import pytest

from semantic.composition.engine_settings import Settings
from semantic.composition.process_stores import fleet_secret, require_shared
from semantic.domain.block_hash import LOCAL_TENANT
from semantic_fleet.fleet_store import evict_remote, forget_tenant
from semantic_fleet.objects.janitor import BackgroundJanitor, Janitor
from semantic_fleet.objects.lease import PERIOD, Lease, LostLeaseError
from semantic_fleet.objects.objects import Listed, Objects, UnavailableError
from semantic_fleet.objects.remote_store import RemoteStore
from tests.fleet.seaweed import Seaweed
from tests.fleet.test_s3 import Fleet, fleet
from tests.support.durable import history, text
from tests.support.fake_clock import FakeClock
from tests.support.store_blocks import block, chain, manifest

pytestmark = pytest.mark.process

__all__ = ["fleet"]

BODY = 3664


def secret_of(fleet: Fleet) -> bytes:
    found = fleet_secret(Settings(fleet_secret=fleet.secret))
    assert found is not None
    return found


def filled(fleet: Fleet, seed: int, n_blocks: int) -> RemoteStore:
    """A process that has stored an agent."""
    store = RemoteStore(Objects.open(fleet.url), secret_of(fleet))
    for link in chain(n_blocks * 256, seed):
        assert store.put(block(link))
    assert store.agents.save(manifest(f"agent{seed}", n_blocks * 256, seed))
    store.flush()
    return store


def n_bytes(fleet: Fleet) -> int:
    return sum(one.n_bytes for page in Objects.open(fleet.url).pages() for one in page)


@pytest.mark.parametrize("skew", [-5 * 3600.0, 5 * 3600.0])
def test_of_two_janitors_whose_clocks_are_hours_apart_one_acts(
    skew: float, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of day is hours wrong too, for all but the signatures of requests."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + skew)
    clocks = FakeClock(), FakeClock()
    clocks[1].now = abs(skew)
    leases = [Lease(Objects.open(fleet.url), clock=clock) for clock in clocks]
    assert leases[0].acquire()
    assert not leases[1].acquire()
    with ExitStack() as stack:
        stack.callback(filled(fleet, 1, 8).close)
        time.sleep(1.1)  # S3 has whole seconds
        newer = filled(fleet, 2, 8)
        stack.callback(newer.close)
    janitors = [
        Janitor(Objects.open(fleet.url), secret_of(fleet), one, 12 * BODY) for one in leases
    ]
    with pytest.raises(LostLeaseError):
        janitors[1].run()
    report = janitors[0].run()
    assert report.evicted["blocks"] >= 4
    assert n_bytes(fleet) <= 14 * BODY  # with its own tables
    assert not leases[1].acquire()  # it was renewed meanwhile
    clocks[1].advance(PERIOD)
    assert leases[1].acquire()
    with pytest.raises(LostLeaseError):
        janitors[0].run()


class Asleep(Objects):
    """A connection whose process sleeps once it has listed the store."""

    def __init__(self, url: str, meanwhile: Callable[[], None]) -> None:
        super().__init__(Objects.open(url)._small)
        self._meanwhile = meanwhile
        self.deleted: list[str] = []

    def pages(self, folder: str = "") -> Iterator[list[Listed]]:
        yield from super().pages(folder)
        if folder == "tenants":
            self._meanwhile()

    def delete_all(self, paths: Sequence[str]) -> None:
        self.deleted += paths
        super().delete_all(paths)


def test_a_janitor_that_sleeps_in_a_pass_deletes_nothing_when_it_wakes(fleet: Fleet) -> None:
    filled(fleet, 1, 8).close()
    clock = FakeClock()
    other = Lease(Objects.open(fleet.url), clock=clock)

    def sleep() -> None:
        other.acquire()
        clock.advance(PERIOD)
        assert other.acquire()

    objects = Asleep(fleet.url, sleep)
    lease = Lease(objects)
    assert lease.acquire()
    with pytest.raises(LostLeaseError):
        Janitor(objects, secret_of(fleet), lease, 1).run()
    assert not objects.deleted
    assert Janitor(Objects.open(fleet.url), secret_of(fleet), other, 1).run().evicted


def test_janitors_in_threads_keep_the_budget_beside_writers_and_readers(fleet: Fleet) -> None:
    """Whatever is read is right; the budget is met within a pass of the last upload."""
    heard: list[str] = []
    with ExitStack() as stack:
        for _ in range(3):
            one = BackgroundJanitor(
                Objects.open(fleet.url), secret_of(fleet), 60 * BODY, heard.append,
                lease_seconds=2, pass_seconds=(0.5, 0.5),
            )  # fmt: skip
            stack.callback(one.close)
        wrong: list[str] = []

        def work(seed: int) -> None:
            store = RemoteStore(Objects.open(fleet.url), secret_of(fleet))
            for turn in range(1, 9):
                links = chain(turn * 5 * 256, seed)
                for link in links:
                    store.put(block(link))
                    found = store.read(block(link).header)
                    if found not in (None, block(link).body):
                        wrong.append(link.hash.hex())
                store.agents.save(manifest(f"agent{seed}", turn * 5 * 256, seed))
            store.close()

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until = time.monotonic() + 30
        while _of_tenants(fleet) > 60 * BODY and time.monotonic() < until:
            time.sleep(0.2)
        assert _of_tenants(fleet) <= 60 * BODY
    assert not wrong
    assert any("evicted" in line for line in heard)
    assert not any("failed" in line for line in heard)


def _of_tenants(fleet: Fleet) -> int:
    pages = Objects.open(fleet.url).pages()
    return sum(one.n_bytes for page in pages for one in page if one.path[64:65] == "/")


def test_a_pass_in_which_the_server_goes_away_is_followed_by_another(
    fleet: Fleet, weed: Seaweed
) -> None:
    filled(fleet, 1, 12).close()
    objects, clock = Objects.open(fleet.url), FakeClock()
    lease = Lease(objects, clock=clock)
    assert lease.acquire()
    janitor = Janitor(objects, secret_of(fleet), lease, 4 * BODY)
    weed.stop()
    with pytest.raises(UnavailableError):
        janitor.run()
    weed.start()
    time.sleep(2)
    assert not lease.acquire()  # it cannot know whether it had renewed it
    clock.advance(PERIOD)
    assert lease.acquire()
    assert janitor.run().evicted
    assert _of_tenants(fleet) <= 4 * BODY


def test_agents_whose_blocks_were_evicted_give_the_same_tokens(fleet: Fleet) -> None:
    """The longest prefix that is left is used; `ask` compares the answer with mlx-lm's."""
    prompt = text(1200, seed=1)
    settings = Settings(remote=fleet.url, fleet_secret=fleet.secret, remote_bytes=1)
    with ExitStack() as stack:
        one = fleet.replica(stack, "a")
        past = history(prompt, one.ask("ann", prompt, 9))
        one.store.flush()
        report = evict_remote(replace(settings, remote_bytes=n_bytes(fleet) // 2))
        assert report is not None
        assert report.evicted["blocks"] > 0
        moved = fleet.replica(stack, "b").ask("ann", (*past, *text(30, seed=2)), 9)
        assert 0 < moved.cached_tokens < 0.95 * moved.prompt_tokens
        assert evict_remote(settings) is not None
        gone = fleet.replica(stack, "c").ask("ann", (*past, *text(30, seed=3)), 9)
        assert gone.cached_tokens == 0
        assert require_shared(settings).last_pass() is not None
        one.ask("ann", (*past, *text(300, seed=4)), 9)


def test_a_tenant_that_is_forgotten_has_nothing_left(fleet: Fleet) -> None:
    settings = Settings(remote=fleet.url, fleet_secret=fleet.secret)
    with ExitStack() as stack:
        one = fleet.replica(stack, "a")
        one.ask("ann", text(600, seed=1), 5)
        one.ask("bob", text(600, seed=2), 5, tenant="another")
        one.store.flush()
        before = _of_tenants(fleet)
        assert forget_tenant(settings, LOCAL_TENANT).n_objects > 3
        assert 0 < _of_tenants(fleet) < before
        assert not forget_tenant(settings, LOCAL_TENANT).n_objects


def test_a_janitor_that_is_killed_is_followed_by_another(fleet: Fleet) -> None:
    """Its lease is dead after a period of the other's monotonic clock, and not before."""
    assert Lease(Objects.open(fleet.url)).acquire()
    clock = FakeClock()
    other = Lease(Objects.open(fleet.url), clock=clock)
    waited = 0
    while not other.acquire():
        clock.advance(30)
        waited += 30
    assert waited == PERIOD
