"""A process that uses a store until the system turns on it, and one that starts such processes.

Run as a program it imports everything once and then forks a child for each line it reads: the
child waits until a tracer is attached, plays its scene and leaves what it has to say in shared
memory, so that saying it takes no system call.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from semantic.adapters.stores.disk import DiskStore
from semantic.domain.errors import StoreError
from tests.support import store_blocks as make

BUDGET = 1_600_000
OLD_TOKENS = 520
NEW_TOKENS = 700
OTHER_TOKENS = 530
_ROOM = 1 << 16

Say = Callable[[str], None]


def prepare(root: Path) -> None:
    """The store that `save` goes on with: a pinned agent, and others' blocks up to the budget."""
    store = DiskStore.open(root, BUDGET, durable=False)
    keep(store, OLD_TOKENS, seed=1)
    assert store.save(make.manifest("old", OLD_TOKENS, 1, pinned=True))
    for seed in range(50, 56):
        keep(store, 1024, seed)
    store.close()


def keep(store: DiskStore, n_tokens: int, seed: int) -> None:
    for block in make.blocks(make.chain(n_tokens, seed)):
        store.put(block)


def save(root: Path, say: Say) -> None:
    """Two agents, one of them new; what was there before has to make room."""
    store = DiskStore.open(root, BUDGET)
    say("opened")
    keep(store, NEW_TOKENS, seed=1)
    if store.save(make.manifest("old", NEW_TOKENS, 1, pinned=True)):
        say("old")
    keep(store, OTHER_TOKENS, seed=2)
    if store.save(make.manifest("new", OTHER_TOKENS, 2, pinned=True)):
        say("new")
    say("counts " + json.dumps(dict(store.stats()[0].counts)))
    store.close()


def recover(root: Path, say: Say) -> None:
    """Open a store that needs everything an opening does, and clean it."""
    store = DiskStore.open(root, BUDGET)
    say("opened")
    store.gc(dry_run=False)
    say("counts " + json.dumps(dict(store.stats()[0].counts)))
    store.close()


SCENES = {"save": save, "recover": recover}


def _play(scene: str, root: str, say: Say) -> int:
    try:
        SCENES[scene](Path(root), say)
    except StoreError as error:
        say(f"refused {error}")
    except BaseException:  # noqa: BLE001  # whatever it is, the test reads it
        say("raised " + json.dumps(traceback.format_exc()[-3000:]))
        return 1
    return 0


def _serve() -> None:
    shared = mmap.mmap(-1, _ROOM)

    def say(text: str) -> None:
        shared.write(text.encode() + b"\n")

    for line in sys.stdin:
        scene, root = json.loads(line)
        shared[:] = bytes(_ROOM)
        shared.seek(0)
        gate, opener = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(gate, 1)
            os._exit(_play(scene, root, say))
        print(child, flush=True)  # noqa: T201  # the test reads it
        sys.stdin.readline()
        os.write(opener, b".")
        _, status = os.waitpid(child, 0)
        os.close(gate)
        os.close(opener)
        said = shared[:].rstrip(b"\0").decode().splitlines()
        print(json.dumps([os.waitstatus_to_exitcode(status), said]), flush=True)  # noqa: T201


if __name__ == "__main__":
    _serve()
