"""Processes that use a store beside the test: one function each, run by name in a process."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from random import Random
from typing import IO, Self

from semantic.adapters.stores.disk import DiskStore
from semantic.domain.block_hash import Part
from semantic.domain.errors import StoreError
from tests.faults.folder import all_read, has_agent, is_read, open_descriptors, opened, works
from tests.support import store_blocks as make
from tests.support.store_blocks import saved_agents

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}


class process:  # noqa: N801  # reads as a noun in a with statement
    """A process that plays the function `name` of this module; it is killed at the end."""

    def __init__(self, name: str, *arguments: object, user: int | None = None) -> None:
        """`user` is who it becomes, when all that it needs is imported."""
        who = "-" if user is None else str(user)
        self._command = [sys.executable, "-m", __name__, who, name, *map(str, arguments)]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, cwd=ROOT, env=ENVIRONMENT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate(timeout=60)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def number(self) -> int:
        return self._process.pid

    def line(self) -> str:
        """The next line that it prints."""
        out: IO[str] | None = self._process.stdout
        assert out is not None
        return out.readline().strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(timeout=60)

    def result(self, seconds: float = 90) -> str:
        """All that it still prints, when it has ended well."""
        out, errors = self._process.communicate(timeout=seconds)
        assert self._process.returncode == 0, f"{self._process.returncode}: {errors[-3000:]}"
        return out.strip()


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201  # the test reads it


_LEAST_KEPT = 20
_LONGEST_BUSY = 60.0


def busy(root: str, seconds: str) -> None:
    """Threads use one store in every way, two of them only looking; prints what was kept.

    On a slow machine they go on for longer, until enough is kept to be looked at.
    """
    until = time.monotonic() + float(seconds)
    latest = until + _LONGEST_BUSY
    problems: list[BaseException] = []
    kept: list[int] = []

    def use(number: int) -> None:
        seed = 1000 * number
        try:
            while (now := time.monotonic()) < until or (len(kept) < _LEAST_KEPT and now < latest):
                seed += 1
                links = make.chain(300, seed)
                put = [store.put(block) for block in make.blocks(links)]
                if all(put):
                    kept.append(seed)
                store.save(make.manifest(f"thread {number}", 300, seed))
                all_read(store, links)
                store.find(make.keys(links))
                store.children(make.SCOPE.root, Part.FULL)
                saved_agents(store)
                store.stats()
        except BaseException as error:
            problems.append(error)
            raise

    def look() -> None:
        try:
            while time.monotonic() < until:
                store.find(make.keys(make.chain(600)))
        except BaseException as error:
            problems.append(error)
            raise

    store = DiskStore.open(Path(root), 64 << 20, durable=False)
    threads = [threading.Thread(target=use, args=(number,)) for number in range(1, 4)]
    threads += [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    say("busy")
    for thread in threads:
        thread.join()
    store.close()
    assert not problems
    say(json.dumps(kept))


def crowd(root: str, number: str, times: str, budget: str) -> None:
    """One of several processes that do everything to one store with a small budget, so often.

    Prints a line each time, and at the end how many blocks it read and the most bytes there were.
    """
    random = Random(int(number))
    store = DiskStore.open(Path(root), int(budget), durable=int(number) % 2 == 0)
    own = f"own {number}"
    n_read = most = 0
    for _ in range(int(times)):
        seed = random.randrange(6)
        n_tokens = random.choice([300, 700, 1024, 1100])
        links = make.chain(n_tokens, seed)
        rooms = [make.Room(make.header(link)) for link in links]
        match random.randrange(10):
            case 0 | 1 | 2:
                for block in make.blocks(links):
                    store.put(block)
                most = max(most, store.stats()[0].n_bytes)
            case 3 | 4 | 5:
                for room, link, filled in zip(
                    rooms, links, store.read_into([room.read for room in rooms]), strict=True
                ):
                    assert not filled or room.body == make.block(link).body, "wrong bytes"
                    n_read += filled
            case 6:
                saved = store.save(make.manifest(own, n_tokens, seed))
                found = store.manifest(make.SCOPE, own)
                same = found is None or found.token_ids == make.text(n_tokens, seed)
                assert same or not saved
            case 7:
                store.save(make.manifest("everybody's", n_tokens, seed))
                for found in saved_agents(store):
                    n_found = len(found.token_ids)
                    assert any(found.token_ids == make.text(n_found, one) for one in range(6))
            case 8:
                store.touch(make.keys(links))
                store.children(links[0].parent, Part.FULL)
                store.remove(make.SCOPE, own)
            case _:
                with_gc = random.random() < 0.5
                store.gc(dry_run=False) if with_gc else store.flush()
        say(".")
    counts = store.stats()[0].counts
    store.close()
    assert counts["damaged"] == 0, counts
    assert counts["write_errors"] == 0, counts
    assert counts.get("read_errors", 0) == counts.get("read_errors: ENOENT", 0), counts
    say(json.dumps([n_read, most]))


def holder(root: str) -> None:
    """Holds the store's lock, inside a transaction, until it is killed."""
    store = DiskStore.open(Path(root), 64 << 20)
    store.put(make.block(make.chain(256, seed=40)[0]))
    with store._store.index.writing() as db:
        db.execute("DELETE FROM blocks")
        store._store.folder.create(store._store.folder.root / "tmp" / "left", b"unfinished")
        say("holds")
        time.sleep(3600)


def few_descriptors(root: str, limit: str) -> None:
    """Reads hundreds of blocks when hardly a file can be opened."""
    links = make.chain(256 * 300, seed=60)
    with opened(Path(root)) as store:
        in_use = open_descriptors()
        resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + int(limit), in_use + 200))
        rooms = [make.Room(make.header(link)) for link in links]
        filled = list(store.read_into([room.read for room in rooms]))
        for room, link, done in zip(rooms, links, filled, strict=True):
            assert not done or room.body == make.block(link).body
        store.put(make.block(make.chain(256, seed=61)[0]))
        store.save(make.manifest("few", 256, 61))
        saved_agents(store)
        store.find(make.keys(links))
        counts = dict(store.stats()[0].counts)
        resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 200, in_use + 200))
        assert all_read(store, links[:20])
        assert works(store)
        say(json.dumps([sum(filled), counts]))


def small_files(root: str, limit: str) -> None:
    """Writes when no file may be longer than `limit`."""
    with opened(Path(root)) as store:
        soft = int(limit)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))
        kept = [store.put(make.block(link)) for link in make.chain(600, seed=70)]
        kept.append(store.save(make.manifest("b", 600, 70)))
        counts = dict(store.stats()[0].counts)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert works(store)
        assert has_agent(store)
        say(json.dumps([kept, counts]))


def open_and_use(root: str) -> None:
    """Opens the store, reads its agent and writes; prints what a caller would see."""
    try:
        with opened(Path(root)) as store:
            links = make.chain(600)
            read = [is_read(store, link) for link in links]
            kept = [store.put(block) for block in make.blocks(links)]
            again = [is_read(store, link) for link in links]
            counts = dict(store.stats()[0].counts)
            say(json.dumps([read, kept, again, has_agent(store), works(store), counts]))
    except StoreError as error:
        say(json.dumps(str(error)))


if __name__ == "__main__":
    _, who, name, *arguments = sys.argv
    if who != "-":
        os.setgroups([])
        os.setgid(int(who))
        os.setuid(int(who))
    globals()[name](*arguments)
