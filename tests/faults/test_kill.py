"""A process is killed at every system call of a save or an opening; the next opening finds the old
state or the new one, and all that was saved.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults import victim
from tests.faults.folder import (
    all_read,
    delete_index,
    disk_usage,
    fast_folder,
    full_path,
    manifest_files,
    opened,
    works,
)
from tests.faults.traced import Outcome, Stage, why_not
from tests.support import store_blocks as make
from tests.support.lanes import THOROUGH

pytestmark = [pytest.mark.skipif(why_not() is not None, reason=str(why_not())), pytest.mark.process]

CALLS = (
    "write,pwrite64,writev,rename,renameat,renameat2,link,linkat,unlink,unlinkat,mkdir,mkdirat,"
    "rmdir,fsync,fdatasync,ftruncate,fallocate,fchmod,sync_file_range,openat,close,flock"
)
"""All that change something, and some between which a process only looks."""
STEPS = {"pwrite64": 2, "openat": 4, "close": 5, "flock": 3}
"""Of calls that are made often, each so many-th is killed at. The index is written in pairs: a
frame's head and its page.
"""

_STRIDE = 1 if THOROUGH else 11
"""Every so many-th call is killed at."""

Kill = tuple[str, int]


@pytest.fixture(scope="module")
def stages() -> Iterator[Sequence[Stage]]:
    """One for each of two cores."""
    with Stage() as one, Stage() as other:
        yield one, other


def test_kill_at_any_point_of_a_save(stages: Sequence[Stage]) -> None:
    """Row 1, kill -9 at any point of a save: into a full store, evicting on the way."""
    with fast_folder() as folder:
        victim.prepare(folder / "prepared")
        killed_everywhere(stages, "save", folder, folder / "prepared")


def test_kill_at_any_point_of_the_first_save(stages: Sequence[Stage]) -> None:
    """Row 1, kill -9 at any point of a save: while the folder itself is being made."""
    with fast_folder() as folder:
        killed_everywhere(stages, "save", folder, None)


def test_kill_at_any_point_of_an_opening(stages: Sequence[Stage]) -> None:
    """Row 21, a crash during recovery: the index is lost, unfinished and damaged files lie there,
    and they are cleaned away.
    """
    with fast_folder() as folder:
        prepared = folder / "prepared"
        victim.prepare(prepared)
        delete_index(prepared)
        for number in range(2):
            dead = prepared / "tmp" / f"{number:016x}"
            dead.mkdir(mode=0o700)
            (dead / "lock").touch(0o600)
            (dead / "7").write_bytes(bytes(5000))
        full_path(prepared, make.chain(256, seed=55)[0]).write_bytes(b"!")
        (newest,) = manifest_files(prepared)
        newest.with_suffix(f".{2:020}").write_bytes(b"!")
        killed_everywhere(stages, "recover", folder, prepared)


def killed_everywhere(
    stages: Sequence[Stage], scene: str, folder: Path, prepared: Path | None
) -> None:
    """Play `scene` with a kill at each call in turn; judge what each leaves."""

    def run(stage: Stage, kills: Sequence[Kill], name: str) -> int:
        return sum(killed(stage, scene, folder / name, prepared, kill) for kill in kills)

    kills = points_of(stages[0], scene, folder / "counted", prepared)
    assert len(kills) > (50 if THOROUGH else 20)
    with ThreadPoolExecutor(len(stages)) as pool:
        runs = [
            pool.submit(run, stage, kills[i :: len(stages)], f"run {i}")
            for i, stage in enumerate(stages)
        ]
        n_killed = sum(one.result() for one in runs)
    assert n_killed > 0.9 * len(kills), "nearly all points are met; a few move with the timing"


def points_of(stage: Stage, scene: str, root: Path, prepared: Path | None) -> list[Kill]:
    """The calls of `scene` to be killed at: the name, and which of that name."""
    place(root, prepared)
    counts = stage.count(scene, root, CALLS)
    return [
        (call, number)
        for call, n_calls in sorted(counts.items())
        for number in range(1, n_calls + 1, STEPS.get(call, 1) * _STRIDE)
    ]


def place(root: Path, prepared: Path | None) -> None:
    shutil.rmtree(root, ignore_errors=True)
    if prepared is not None:
        shutil.copytree(prepared, root, copy_function=shutil.copy)


def killed(stage: Stage, scene: str, root: Path, prepared: Path | None, kill: Kill) -> bool:
    """Whether the kill came; whenever it did, the store is sound."""
    place(root, prepared)
    call, number = kill
    outcome = stage.play(scene, root, "-e", f"inject={call}:signal=KILL:when={number}")
    assert outcome.raised is None, outcome.raised
    assert outcome.code in {0, -9}, outcome
    try:
        judge(root, outcome, was_prepared=prepared is not None)
    except AssertionError as error:
        raise AssertionError(f"{scene} killed at {call} number {number}: {outcome}") from error
    return outcome.code == -9


def judge(root: Path, outcome: Outcome, *, was_prepared: bool) -> None:
    """Old or new, never torn; what was saved is there; nothing is left over; all goes on."""
    with opened(root, victim.BUDGET) as store:
        report = store.check(read_data=True)
        assert report.is_clean, report.damaged
        assert not report.foreign
        old, new = (store.manifest(make.SCOPE, name) for name in ("old", "new"))
        before = {victim.OLD_TOKENS} if was_prepared else {None}
        after = {victim.NEW_TOKENS}
        n_old = None if old is None else len(old.token_ids)
        n_new = None if new is None else len(new.token_ids)
        assert n_old in (after if "old" in outcome.said else before | after)
        assert n_new in ({victim.OTHER_TOKENS} if "new" in outcome.said
                         else {None, victim.OTHER_TOKENS})  # fmt: skip
        for manifest, seed in ((old, 1), (new, 2)):
            if manifest is not None:
                assert manifest.token_ids == make.text(len(manifest.token_ids), seed)
                assert all_read(store, make.chain(len(manifest.token_ids), seed))
        assert [len(list(one.iterdir())) for one in (root / "tmp").iterdir()] == [1]
        assert not list(root.glob("*.new"))
        assert disk_usage(root) <= store.stats()[0].n_bytes <= victim.BUDGET
        assert works(store)
        assert store.stats()[0].n_bytes <= victim.BUDGET
    assert not list((root / "tmp").iterdir())
