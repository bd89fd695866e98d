"""The environment of a run: machine, versions, commit.

Identifies machines by their properties, never by name, and reports no paths. Imports none of the
packages whose versions it reads.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = {"mlx": "mlx", "mlx_lm": "mlx-lm", "semantic": "semantic"}

COMMIT_VARIABLE = "SEMANTIC_COMMIT"
"""Names the commit (`<hash>` or `<hash>-dirty`) where the code runs without its repository."""

WRITTEN_BY_RUNS = (
    ":(exclude)*.md",
    ":(exclude)experiments/*/result*.json",
    ":(exclude)experiments/*/*.svg",
    ":(exclude)benchmarks/results/*",
)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the numbers depend on. `accelerator` is None where the chip computes alone."""

    chip: str
    cores: int
    memory_bytes: int
    os: str
    accelerator: str | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """The code of a run; dirty when files other than a run's own output differed from it."""

    commit: str
    dirty: bool


def machine() -> Machine:
    """Describe this machine."""
    return Machine(
        chip=_chip(),
        cores=_cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        os=f"{platform.system()} {platform.machine()}",
        accelerator=_accelerator(),
    )


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a result; "absent" if not installed."""
    found = {"python": platform.python_version()}
    for name, distribution in DISTRIBUTIONS.items():
        try:
            found[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def commit(root: Path = ROOT) -> Commit:
    """The commit checked out at `root`; "unknown" (and dirty) outside a repository."""
    given = os.environ.get(COMMIT_VARIABLE)
    if given:
        return Commit(given.removesuffix("-dirty"), given.endswith("-dirty"))
    head = _output("git", "-C", str(root), "rev-parse", "HEAD")
    if head is None:
        return Commit("unknown", dirty=True)
    changes = _output("git", "-C", str(root), "status", "--porcelain", "--", ".", *WRITTEN_BY_RUNS)
    return Commit(head, dirty=changes != "")


def _chip() -> str:
    if platform.system() == "Darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _cores() -> int:
    """Cores this process may use, which a container may limit."""
    if platform.system() == "Linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _accelerator() -> str | None:
    listing = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    names = listing.splitlines() if listing else []
    if not names:
        return None
    return names[0] if len(names) == 1 else f"{len(names)} x {names[0]}"


def _output(*command: str) -> str | None:
    """What a program prints, or None if it is not here or fails."""
    program = shutil.which(command[0])
    if program is None:
        return None
    done = subprocess.run(  # noqa: S603 - fixed programs, no shell
        [program, *command[1:]], capture_output=True, text=True, check=False, timeout=30
    )
    return done.stdout.strip() if done.returncode == 0 else None
