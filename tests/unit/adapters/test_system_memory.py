"""What the system says of memory: limits and use of control groups of both versions, and of the
process."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from semantic.adapters.mlx import device

MIB = 1 << 20
_GROUPS = "4:memory:/outer/own\n3:cpu,cpuacct:/elsewhere\n0::/outer/own\n"
_STATUS = "Name:\tx\nRssAnon:\t   {anonymous} kB\nRssFile:\t 9999 kB\nRssShmem:\t 16 kB\n"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="of Linux")


class System:
    """Files as Linux has them, below a folder."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.proc = root / "proc"
        self.write(self.proc / "self" / "cgroup", _GROUPS)
        self.write(self.proc / "meminfo", f"MemTotal: 1 kB\nMemAvailable:  {1 << 20} kB\n")
        self.write(self.proc / "self" / "status", _STATUS.format(anonymous=1024))
        self.v1 = replace(device._V1, root=root / "v1")
        self.v2 = replace(device._V2, root=root / "v2")
        monkeypatch.setattr(device, "_PROC", self.proc)
        monkeypatch.setattr(device, "_V1", self.v1)
        monkeypatch.setattr(device, "_V2", self.v2)

    @staticmethod
    def write(path: Path, text: object) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="ascii")

    def limit(self, files: device._Files, group: str, limit: object, used: int = 0) -> None:
        """A control group with a limit, half of whose use can be dropped."""
        self.write(files.root / group / files.limit, limit)
        self.write(files.root / group / files.used, used)
        stat = f"anon 1\n{files.droppable[0]} {used // 4}\n{files.droppable[1]} {used // 4}"
        self.write(files.root / group / "memory.stat", stat)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    return System(tmp_path, monkeypatch)


def test_a_container_may_use_less_than_the_machine_has(system: System) -> None:
    everything = device.physical_memory()
    system.limit(system.v2, "", "max")
    assert device.physical_memory() == everything
    system.limit(system.v1, "", 1_000_000)
    assert device.physical_memory() == 1_000_000


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_what_is_left_is_the_least_of_every_group_and_files_count_as_free(
    system: System, version: str
) -> None:
    files: device._Files = getattr(system, version)
    assert device.spare_memory() == 1 << 30, "what is available"
    system.limit(files, "outer/own", 200 * MIB, used=100 * MIB)
    assert device.spare_memory() == 150 * MIB
    system.limit(files, "outer", 120 * MIB, used=100 * MIB)
    assert device.spare_memory() == 70 * MIB
    system.limit(files, "", "max", used=400 * MIB)
    assert device.spare_memory() == 70 * MIB
    system.limit(files, "outer", 40 * MIB, used=100 * MIB)
    assert device.spare_memory() == -10 * MIB, "a limit that was lowered"


def test_what_children_have_counts(system: System) -> None:
    assert device.own_memory() == (1024 + 16) << 10
    system.write(system.proc / "self" / "task" / "7" / "children", "8 9")
    system.write(system.proc / "8" / "status", _STATUS.format(anonymous=500))
    assert device.own_memory() == (1024 + 16 + 500 + 16) << 10
