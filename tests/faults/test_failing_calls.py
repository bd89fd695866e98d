"""The system fails single calls, once or for ever: also those that SQLite makes, which no test
double sees. Whatever is reported as saved is there afterwards, and nothing is ever raised.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults import victim
from tests.faults.folder import disk_usage, fast_folder, is_read, opened, works
from tests.faults.traced import Outcome, Stage, why_not
from tests.support import store_blocks as make
from tests.support.lanes import THOROUGH

pytestmark = [pytest.mark.skipif(why_not() is not None, reason=str(why_not())), pytest.mark.process]

FAULTS = {
    "write": ("ENOSPC", "EDQUOT", "EIO"),
    "pwrite64": ("ENOSPC", "EIO"),
    "pread64": ("EIO",),
    "preadv2": ("EIO",),
    "fsync": ("EIO", "ENOSPC"),
    "fdatasync": ("EIO",),
    "ftruncate": ("EIO", "ENOSPC"),
    "renameat": ("ENOSPC", "EIO", "EACCES"),
    "mkdir": ("ENOSPC", "EDQUOT"),
    "unlink": ("EIO",),
    "unlinkat": ("EIO",),
    "close": ("EIO",),
    "openat": ("EMFILE", "EROFS"),
    "flock": ("EIO",),
    "fcntl": ("EIO",),
    "newfstatat": ("EIO",),
    "getdents64": ("EIO",),
}
"""What each call is made to fail with."""
STEPS = {"pwrite64": 12, "pread64": 6, "fcntl": 20, "newfstatat": 12, "close": 7, "openat": 5}
"""Of calls that are made often, each so many-th fails."""

BLOCK_COST = 8448
"""Bytes that one of the blocks in the folder counts for."""

_STRIDE = 1 if THOROUGH else 16
"""Every so many-th call is failed."""

Fault = tuple[str, str, str]


@pytest.fixture(scope="module")
def stages() -> Iterator[Sequence[Stage]]:
    """One for each of two cores."""
    with Stage() as one, Stage() as other:
        yield one, other


@pytest.mark.parametrize("forever", ["", "+"], ids=["once", "forever"])
def test_a_call_fails_during_a_save(stages: Sequence[Stage], forever: str) -> None:
    """Rows 7 and 8, full disk and I/O errors: at the n-th write, flush, rename, close."""
    with fast_folder() as folder:
        prepared = folder / "prepared"
        victim.prepare(prepared)
        faults = faults_of(stages[0], folder / "counted", prepared, forever)
        assert len(faults) > (50 if THOROUGH else 20)

        def run(i: int) -> list[str]:
            mine = faults[i :: len(stages)]
            found = (failed(stages[i], folder / f"run {i}", prepared, fault) for fault in mine)
            return [problem for problem in found if problem]

        with ThreadPoolExecutor(len(stages)) as pool:
            runs = [pool.submit(run, i) for i in range(len(stages))]
            problems = [problem for one in runs for problem in one.result()]
        assert not problems, "\n".join(problems)


@pytest.mark.parametrize("error", ["ENOSPC", "EDQUOT", "EIO"])
def test_no_block_can_be_written_at_all(stages: Sequence[Stage], error: str) -> None:
    """Row 7, full disk from the first write on: nothing is kept, and the reason is counted."""
    with fast_folder() as folder:
        victim.prepare(folder / "store")
        outcome = stages[0].play(
            "save", folder / "store", "-e", f"inject=write:error={error}:when=4+"
        )
        assert outcome.raised is None, outcome.raised
        assert "new" not in outcome.said
        assert outcome.counts.get(f"write_errors: {error}", 0) > 0, outcome
        judge(folder / "store", outcome)


def test_a_flush_that_fails_is_never_believed(stages: Sequence[Stage]) -> None:
    """Row 8: after a failed flush the system may forget what it could not write, and say that the
    next flush went well. No block that failed may be found afterwards.
    """
    with fast_folder() as folder:
        root = folder / "store"
        victim.prepare(folder / "prepared")
        for first in range(1, 20):  # the index is flushed while the store is opened
            place(root, folder / "prepared")
            fault = f"inject=fdatasync:error=EIO:when={first}+"
            outcome = stages[0].play("save", root, "-e", fault)
            if not outcome.was_refused:
                break
        assert outcome.raised is None, outcome.raised
        assert outcome.counts["write_errors: EIO"] > 0
        assert outcome.counts["dropped"] == 4, "all that were new"
        with opened(root, victim.BUDGET) as store:
            assert not store.find(make.keys(make.chain(victim.OTHER_TOKENS, 2)))


def faults_of(stage: Stage, root: Path, prepared: Path, forever: str) -> list[Fault]:
    """Call, error and when, for all that is to fail."""
    place(root, prepared)
    counts = stage.count("save", root, ",".join(FAULTS))
    stride = 6 if forever and THOROUGH else _STRIDE
    return [
        (call, error, f"{number}{forever}")
        for call, n_calls in sorted(counts.items())
        for error in FAULTS[call]
        if not (forever and call == "fcntl")  # a lock that cannot be let go of: slow, not wrong
        for number in range(1, n_calls + 1, STEPS.get(call, 1) * stride)
    ]


def place(root: Path, prepared: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(prepared, root, copy_function=shutil.copy)


def failed(stage: Stage, root: Path, prepared: Path, fault: Fault) -> str | None:
    """What is wrong after a save with the fault; None when nothing is."""
    place(root, prepared)
    call, error, when = fault
    outcome = stage.play("save", root, "-e", f"inject={call}:error={error}:when={when}")
    try:
        assert outcome.raised is None
        assert outcome.code == 0
        judge(root, outcome)
    except AssertionError as problem:
        return f"{fault}: {problem}; {outcome}"
    return None


def judge(root: Path, outcome: Outcome) -> None:
    """What was said to be saved is there; whatever else is there is right; all goes on."""
    with opened(root, victim.BUDGET) as store:
        report = store.check(read_data=True)
        assert report.is_clean, report.damaged
        for name, seed, n_new in (("old", 1, victim.NEW_TOKENS), ("new", 2, victim.OTHER_TOKENS)):
            manifest = store.manifest(make.SCOPE, name)
            n_tokens = None if manifest is None else len(manifest.token_ids)
            before = victim.OLD_TOKENS if name == "old" else None
            assert n_tokens in ({n_new} if name in outcome.said else {before, n_new})
            if manifest is not None:
                assert manifest.token_ids == make.text(len(manifest.token_ids), seed)
                for link in make.chain(len(manifest.token_ids), seed):
                    is_read(store, link)
        if not outcome.was_refused:
            assert [len(list(one.iterdir())) for one in (root / "tmp").iterdir()] == [1]
        # A block that could not be read left the index; its file is found again by the opening,
        # which deletes nothing.
        found_again = outcome.counts.get("read_errors", 0) * BLOCK_COST
        assert disk_usage(root) <= store.stats()[0].n_bytes <= victim.BUDGET + found_again
        assert works(store)
        assert store.stats()[0].n_bytes <= victim.BUDGET
