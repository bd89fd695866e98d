"""`semantic cache`, where the store is, and what happens when it cannot be used."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from semantic.adapters.stores.disk import DiskStore
from semantic.cli.cache import CACHE_COMMANDS
from semantic.composition import process_stores
from semantic.composition.engine_settings import Settings
from semantic.composition.memory_shares import default_memory_tier_bytes
from semantic.composition.process_stores import (
    default_disk_bytes,
    default_store_folder,
    open_disk,
    open_store,
    require_chosen_store,
)
from semantic.domain.block_hash import LOCAL_TENANT, Scope, tenant_tag
from semantic.domain.errors import StoreError
from semantic.domain.identity import turns_owner
from semantic.domain.stored import Tier
from semantic_fleet import fleet_store
from semantic_fleet.objects.remote_records import Records
from semantic_fleet.objects.remote_store import RemoteStore
from semantic_server.http.identity import tenant_name
from tests.cli.stocked import block_files, disk_store, everything, new_agent
from tests.cli.support import Ran, process, semantic
from tests.support.store_blocks import block, chain

GIB = 1 << 30
SUM = "What is 3 plus 4?"


def cache(*arguments: str) -> Ran:
    return semantic("cache", *arguments)


def asked(*arguments: str, code: int = 0) -> dict[str, object]:
    ran = cache(*arguments, "--json")
    assert (ran.code, ran.err) == (code, "")
    document = json.loads(ran.out)
    assert isinstance(document, dict)
    return document


def only(document: dict[str, object], name: str) -> dict[str, object]:
    """The one thing that a list in a document holds."""
    listed = document[name]
    assert isinstance(listed, list)
    (found,) = listed
    assert isinstance(found, dict)
    return found


@pytest.fixture
def stocked() -> None:
    with disk_store() as store:
        new_agent(store, "ada")
        new_agent(store, "ben", seed=1)


# The store as a whole


@pytest.mark.usefixtures("stocked")
def test_stats_say_what_there_is() -> None:
    tier = only(asked("stats"), "tiers")
    assert set(tier) == {
        "tier", "agents", "blocks", "bytes", "max_bytes", "pinned_bytes", "counts", "written"
    }  # fmt: skip
    assert (tier["tier"], tier["agents"], tier["blocks"]) == ("disk", 2, 6)
    assert 0 < int(str(tier["bytes"])) < int(str(tier["max_bytes"]))
    assert cache("stats").out.startswith("store, disk: agents 2, blocks 6, ")


@pytest.mark.usefixtures("stocked")
def test_stats_say_what_was_written_and_its_share_of_the_drives_life() -> None:
    written = only(asked("stats", "--disk-rated-tbw", "1e-6"), "tiers")["written"]
    assert isinstance(written, dict)
    total = written["total"]
    assert total == written["today"] > 6 * 4096
    assert written["share"] == pytest.approx(total / 1e6)
    assert "the drive's rated life: unknown" in cache("stats").out
    assert f"rated life: {total / 1e6:.2%}" in cache("stats", "--disk-rated-tbw", "1e-6").out
    path = default_store_folder() / "written.json"
    days = {f"2020-01-{day:02}": day << 10 for day in range(1, 9)}
    path.write_text(json.dumps({"since": "2020-01-01", "total": 36 << 10, "days": days}))
    lines = cache("stats").out.splitlines()
    assert "0 bytes today, 36.0 KiB since 2020-01-01" in lines[-2]
    assert lines[-1].startswith("  before: 3.0 KiB on 2020-01-03, ")
    assert lines[-1].endswith("8.0 KiB on 2020-01-08")


def test_a_drive_is_rated_for_something() -> None:
    ran = cache("stats", "--disk-rated-tbw", "0")
    assert (ran.code, ran.err.count("--disk-rated-tbw must be above 0, got 0.0")) == (2, 1)


@pytest.mark.usefixtures("stocked")
@pytest.mark.parametrize("arguments", [(), ("--read-data",), ("--read-data-subset", "1/1")])
def test_a_sound_store_passes(arguments: tuple[str, ...]) -> None:
    before = everything(default_store_folder() / "blocks")
    document = asked("check", *arguments)
    assert document["passed"] is True
    assert (document["n_blocks"], document["n_manifests"]) == (6, 2)
    assert document["damaged"] == document["foreign"] == document["newer"] == []
    assert cache("check", *arguments).out.startswith("sound: 6 blocks and 2 manifests, ")
    assert everything(default_store_folder() / "blocks") == before


@pytest.mark.usefixtures("stocked")
def test_a_flipped_bit_is_found_when_data_is_read() -> None:
    file = block_files()[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert asked("check")["passed"] is True
    document = asked("check", "--read-data", code=1)
    damaged = only(document, "damaged")
    assert file.name in str(damaged["path"])
    assert damaged["damage"]
    ran = cache("check", "--read-data")
    assert ran.code == 1
    assert "damaged: blocks/" in ran.out
    codes = [cache("check", "--read-data-subset", f"{part}/3").code for part in (1, 2, 3)]
    assert sorted(codes) == [0, 0, 1]


@pytest.mark.parametrize("subset", ["", "0/3", "4/3", "1", "1/0", "a/b", "-1/3", "1/3/5", "9" * 99])
def test_a_share_that_is_none_is_refused(subset: str) -> None:
    ran = cache("check", "--read-data-subset", subset)
    assert (ran.code, ran.out) == (2, "")
    assert "--read-data-subset must be N/M" in ran.err
    assert len(ran.error_lines) == 1


@pytest.mark.usefixtures("stocked")
def test_gc_deletes_blocks_of_no_agent_and_says_so() -> None:
    assert "0 bytes were freed" in cache("gc").out
    assert len(block_files()) == 6
    assert semantic("agents", "rm", "ben").code == 0
    planned = cache("gc", "--dry-run").out
    assert "would delete 3 blocks of no agent" in planned
    assert "would be freed" in planned
    assert len(block_files()) == 6
    document = asked("gc")
    assert (document["dry_run"], document["unneeded_blocks"]) == (False, 3)
    assert set(document) == {
        "dry_run", "unneeded_blocks", "unfinished_files", "damaged_files", "evicted_blocks",
        "freed_bytes",
    }  # fmt: skip
    assert len(block_files()) == 3
    assert asked("check", "--read-data")["passed"] is True


@pytest.mark.usefixtures("stocked")
def test_without_a_limit_gc_deletes_nothing_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_stores, "_MAX_DISK_BYTES", 1)
    assert asked("gc")["evicted_blocks"] == 0
    with disk_store() as store:
        used = store.stats()[0].n_bytes
    limit = f"{(used - 20_000) / GIB:.9f}"
    assert asked("gc", "--dry-run", "--disk-gb", limit)["evicted_blocks"] in {2, 3}
    assert len(block_files()) == 6
    assert asked("gc", "--disk-gb", limit)["evicted_blocks"] in {2, 3}
    assert len(block_files()) in {3, 4}


@pytest.mark.usefixtures("stocked")
def test_the_index_is_made_anew_from_the_files() -> None:
    (default_store_folder() / "index.sqlite").write_bytes(b"nonsense" * 1000)
    assert cache("rebuild-index").out == "the index has 6 blocks and 2 agents\n"
    assert only(asked("rebuild-index"), "tiers")["blocks"] == 6


@pytest.mark.parametrize("command", list(CACHE_COMMANDS))
def test_every_command_explains_itself(command: str) -> None:
    ran = cache(command, "--help")
    assert ran.code == 0
    for option in ("--store", "--json", "--disk-gb"):
        assert option in ran.out


# Where it is, and how large


def test_a_variable_names_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SEMANTIC_STORE", str(tmp_path / "there"))
    assert default_store_folder() == tmp_path / "there"


def test_without_a_variable_it_is_among_the_users_caches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SEMANTIC_STORE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_store_folder() == tmp_path / "xdg" / "semantic" / "store"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(sys, "platform", "linux")
    assert default_store_folder() == tmp_path / ".cache" / "semantic" / "store"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_store_folder() == tmp_path / "Library" / "Caches" / "semantic" / "store"


def test_without_a_home_it_asks_for_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("SEMANTIC_STORE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(StoreError, match="set SEMANTIC_STORE"):
        default_store_folder()


@pytest.mark.parametrize(
    ("free", "held", "expected"),
    [
        (100 * GIB, 0, 10 * GIB),
        (100 * GIB, 5 * GIB, 15 * GIB),
        (900 * GIB, 0, 32 * GIB),
        (0, 7, 7),
        (900 * GIB, 50 * GIB, 50 * GIB),
    ],
)
def test_the_disk_gets_a_tenth_of_what_is_free_and_keeps_what_it_has(
    free: int, held: int, expected: int
) -> None:
    assert default_disk_bytes(free, held) == expected


@pytest.mark.parametrize(
    ("given", "free", "expected"), [(GIB, 5 * GIB, GIB), (90 * GIB, 5 * GIB, 5 * GIB)]
)
def test_a_quota_is_no_larger_than_its_disk(
    given: int,
    free: int,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(process_stores, "_free_bytes", lambda _: free)
    with closing(open_disk(Settings(use_disk=True, store=tmp_path, disk_bytes=given))) as store:
        [tier] = store.stats()
    assert tier.max_bytes is not None
    assert expected <= tier.max_bytes < expected + GIB // 100
    warned = ["disk_gb: the disk has room for only 5.0 of 90.0 GiB, which is now the limit"]
    assert caplog.messages == (warned if given > free else [])
    # A program looks first whether it can use a store that the user chose.
    require_chosen_store(Settings(use_disk=True, store=tmp_path, disk_bytes=given))
    assert caplog.messages == (warned if given > free else [])


def test_the_memory_gets_a_sixteenth_and_never_nothing() -> None:
    assert [default_memory_tier_bytes(n) for n in (16 * GIB, GIB // 2)] == [GIB, 64 << 20]


@pytest.mark.usefixtures("stocked")
def test_the_budget_counts_what_the_store_has() -> None:
    with disk_store() as store:
        used = store.stats()[0].n_bytes
    given: list[int] = []

    def limit(n_bytes: int) -> int:
        given.append(n_bytes)
        return n_bytes + 7

    with closing(DiskStore.open(default_store_folder(), limit)) as store:
        [tier] = store.stats()
        assert given == [tier.n_bytes]
        assert used <= tier.n_bytes
        assert tier.max_bytes == tier.n_bytes + 7


def test_settings_alone_touch_no_disk() -> None:
    store = open_store(Settings(memory_bytes=1 << 20))
    assert [stats.tier for stats in store.stats()] == [Tier.MEMORY]
    store.close()
    assert not default_store_folder().exists()


def test_the_command_line_has_both_tiers() -> None:
    store = open_store(Settings(use_disk=True, memory_bytes=1 << 20, disk_bytes=1 << 20))
    assert {stats.tier for stats in store.stats()} == {Tier.MEMORY, Tier.QUEUE, Tier.DISK}
    assert len(store.secret) == 32
    store.close()


# A folder that cannot be used


def newer(folder: Path) -> None:
    open_disk(Settings(use_disk=True, store=folder, disk_bytes=1 << 20)).close()
    (folder / "FORMAT").write_text('{"format": 2}', encoding="ascii")


def world_writable(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def full_of_other_things(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.tex").write_text("", encoding="ascii")


def a_file(folder: Path) -> None:
    folder.write_text("", encoding="ascii")


def somebody_elses_link(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a link away")
    folder.with_name("real").mkdir(mode=0o700)
    folder.symlink_to(folder.with_name("real"))
    os.chown(folder, 12345, 12345, follow_symlinks=False)


def below_a_file(folder: Path) -> None:
    folder.parent.rmdir()
    folder.parent.write_text("", encoding="ascii")


def somebody_elses(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    folder.mkdir()
    os.chown(folder, 12345, 12345)


def without_its_secret(folder: Path) -> None:
    open_disk(Settings(use_disk=True, store=folder, disk_bytes=1 << 20)).close()
    (folder / "secret").write_bytes(b"")


BAD = [
    newer, world_writable, full_of_other_things, a_file, below_a_file, somebody_elses,
    somebody_elses_link, without_its_secret,
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "place"
    place.mkdir()
    return place / "store"


def test_a_link_to_itself_is_one_line(folder: Path) -> None:
    folder.symlink_to(folder)
    ran = semantic("run", SUM, "--store", str(folder))
    assert (ran.code, ran.out) == (2, "")
    (line,) = ran.error_lines
    assert line.startswith(f"error: {folder} is a symbolic link")


def test_a_link_of_its_user_leads_to_the_store(folder: Path) -> None:
    elsewhere = folder.with_name("elsewhere")
    folder.symlink_to(elsewhere)
    for _ in range(2):
        ran = semantic("run", SUM, "--store", str(folder))
        assert (ran.code, ran.out, ran.error_lines) == (0, "3 plus 4 is 7.\n", [])
    assert (elsewhere / "FORMAT").is_file()
    assert folder.is_symlink()


@pytest.mark.parametrize("spoil", BAD)
@pytest.mark.parametrize(
    ("command", "named"),
    [("run", True), ("run", False), ("chat", True), ("serve", True), ("serve", False)],
)
def test_a_store_that_the_user_chose_must_be_usable(
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path], None],
    folder: Path,
    command: str,
    named: bool,
) -> None:
    spoil(folder)
    before = everything(folder.parents[1])
    if not named:
        monkeypatch.setenv("SEMANTIC_STORE", str(folder))
    more = ("--store", str(folder)) if named else ()
    ran = semantic(command, *([SUM] * (command == "run")), "--model", "./nowhere", *more)
    assert (ran.code, ran.out) == (2, "")
    (line,) = ran.error_lines
    assert line.startswith("error: ")
    assert line.endswith("; choose another --store, or --no-store")
    assert str(folder) in line or str(folder.parent) in line
    assert everything(folder.parents[1]) == before


@pytest.mark.parametrize("spoil", BAD)
def test_generating_goes_on_in_memory_without_the_default_store(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None], folder: Path
) -> None:
    folder = folder.parent / "semantic" / "store"
    folder.parent.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parents[1]))
    monkeypatch.delenv("SEMANTIC_STORE")
    spoil(folder)
    before = everything(folder.parents[2])
    ran = semantic("run", SUM)
    assert (ran.code, ran.out) == (0, "3 plus 4 is 7.\n")
    (line,) = ran.error_lines
    assert line.startswith("the disk store is off: ")
    assert line.endswith("; caches stay in memory only")
    assert str(folder) in line or str(folder.parent) in line
    assert everything(folder.parents[2]) == before


@pytest.mark.parametrize("spoil", BAD)
@pytest.mark.parametrize("command", [("agents", "ls"), ("cache", "stats")])
def test_the_stores_own_commands_fail(
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path], None],
    folder: Path,
    command: tuple[str, str],
) -> None:
    spoil(folder)
    before = everything(folder.parents[1])
    monkeypatch.setenv("SEMANTIC_STORE", str(folder))
    ran = semantic(*command)
    assert (ran.code, ran.out) == (4, "")
    assert len(ran.error_lines) == 1
    assert ran.err.startswith("error: ")
    assert everything(folder.parents[1]) == before


def test_a_slip_of_the_pen_makes_no_store(tmp_path: Path) -> None:
    ran = cache("stats", "--store", str(tmp_path / "slip"))
    assert (ran.code, ran.err) == (2, f"error: there is no store {tmp_path / 'slip'}\n")
    assert not (tmp_path / "slip").exists()


def test_doctor_says_where_the_store_is_or_what_is_wrong_with_it(folder: Path) -> None:
    def finding(*arguments: str) -> dict[str, str]:
        document = json.loads(semantic("doctor", "--json", *arguments).out)
        return next(one for one in document["findings"] if one["name"] == "store")

    world_writable(folder)
    assert finding()["detail"].startswith(f"{default_store_folder()}, agents 0, ")
    assert finding("--no-store")["detail"] == "not on disk: caches end with the program"
    bad = finding("--store", str(folder))
    assert bad["verdict"] == "warning"
    assert "others can write to" in bad["detail"]


# Options of the commands that generate


@pytest.mark.exact
@pytest.mark.process
def test_a_program_reuses_what_another_one_computed() -> None:
    long = "Read this. " * 200 + SUM
    first, second = (json.loads(run("run", long, "--json").out) for run in (semantic, process))
    assert first["match"]["source"] == "none"
    assert second["match"]["source"] == "disk"
    assert second["usage"]["cached_tokens"] > 256
    assert second["tokens"] == first["tokens"]


def test_no_store_leaves_no_trace() -> None:
    assert semantic("run", SUM, "--no-store").code == 0
    assert not default_store_folder().exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--disk-gb", "0"), "--disk-gb must be above 0, got 0.0"),
        (("--ram-gb", "nan"), "--ram-gb must be above 0, got nan"),
        (("--disk-gb", "inf"), "--disk-gb must be above 0, got inf"),
        (("--no-store", "--store", "x"), "expected either --store or --no-store"),
    ],
)
def test_a_budget_without_room_is_refused(arguments: tuple[str, ...], complaint: str) -> None:
    ran = semantic("run", SUM, *arguments)
    assert (ran.code, ran.out, ran.err) == (2, "", f"error: {complaint}\n")


@pytest.mark.parametrize("command", ["run", "chat", "doctor", "demo"])
def test_every_command_with_an_engine_has_the_options(command: str) -> None:
    shown = semantic(command, "--help").out
    for option in ("--store", "--no-store", "--disk-gb", "--ram-gb"):
        assert option in shown


# The object store of a fleet

FleetFlags = tuple[str, ...]


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FleetFlags:
    """A bucket with blocks, a turn and a response of two tenants."""
    secret = tmp_path / "fleet-secret"
    secret.write_bytes(bytes(range(64)))
    secret.chmod(0o600)
    (tmp_path / "bucket").mkdir()
    url = (tmp_path / "bucket").as_uri()
    objects, key = fleet_store.require_objects(Settings(remote=url, fleet_secret=secret))
    store = RemoteStore(objects, key)
    for name in (tenant_name("the-key"), LOCAL_TENANT):
        tag = tenant_tag(key, name)
        for link in chain(1024, scope=Scope(b"n" * 32, tag)):
            assert store.put(block(link))
        turns = Records(objects, key, "turns")
        turns.put(turns.tag(turns_owner(name)), b"turn", b"tokens")
        Records(objects, key, "responses").put(tag, b"response", b"text")
    store.close()
    monkeypatch.setenv("TENANT_KEY", "the-key")
    return "--remote-store", url, "--fleet-secret-file", str(secret)


def n_objects(fleet: FleetFlags, kind: str) -> int:
    bucket = Path(fleet[1].removeprefix("file://"))
    return sum(path.is_file() for path in bucket.glob(f"{kind}/*/*"))


def test_a_pass_of_the_janitor_is_shown_by_stats(fleet: FleetFlags) -> None:
    assert asked("stats", *fleet)["remote"] is None
    assert "no janitor was here" in cache("stats", *fleet).out
    report = asked("janitor", *fleet, "--remote-gb", "0.00002")
    assert report == asked("stats", *fleet)["remote"]
    assert report["evicted"] == {"blocks": 4}  # of each tenant two
    assert int(str(report["n_bytes"])) <= int(str(report["max_bytes"]))
    assert "evicted nothing" in cache("janitor", *fleet, "--remote-gb", "1").out
    assert cache("stats", *fleet).out.splitlines()[-1].startswith("object store: evicted nothing")
    for wrong, expected in (
        ((), "remote_gb: expected the GiB"),
        (("--remote-gb", "0"), "--remote-gb must be above 0"),
    ):
        ran = cache("janitor", *fleet, *wrong)
        assert (ran.code, ran.out) == (2, "")
        assert expected in ran.err
    assert "remote_gb also requires remote_store" in cache("janitor", "--remote-gb", "1").err


def test_a_tenant_that_is_forgotten_has_no_object_left(fleet: FleetFlags) -> None:
    given = ("forget-tenant", *fleet, "--key-variable", "TENANT_KEY")
    unconfirmed = cache(*given)
    assert (unconfirmed.code, unconfirmed.out) == (2, "")
    assert "--yes" in unconfirmed.err
    assert n_objects(fleet, "6e" * 32) == 8
    gone = {"deleted": 6, "keys": True, "keeps_versions": False}
    assert asked(*given, "--yes") == gone
    again = cache(*given, "--yes")
    assert (again.code, again.err) == (0, "")
    assert "has no objects" in again.out
    for kind, n_left in (("6e" * 32, 4), ("turns", 1), ("responses", 1)):
        assert n_objects(fleet, kind) == n_left
    assert asked("forget-tenant", *fleet, "--local", "--yes") == gone
    assert n_objects(fleet, "*") == 0
    for wrong in ((), ("--local", "--key-variable", "TENANT_KEY"), ("--key-variable", "NONE")):
        assert "--key-variable" in cache("forget-tenant", *fleet, *wrong, "--yes").err
