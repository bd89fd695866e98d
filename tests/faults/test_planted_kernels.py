"""Code that MLX compiles is loaded from a folder of ours: none that others put there runs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import platformdirs
import pytest

from semantic.adapters.mlx import kernel_files
from semantic.adapters.mlx.kernel_files import KernelFolder
from semantic.domain.errors import BackendError

pytestmark = pytest.mark.process

_BELOW = ("mlx", version("mlx"), "cpu")
_ASK = ("-m", "semantic", "run", "Hello", "--max-tokens", "2")
_LIBRARY = """
import sys
import tempfile
import semantic
try:
    semantic.load()
except semantic.SemanticError as error:
    sys.exit(str(error))
"""
_UNGUARDED = f"""
from pathlib import Path
from semantic.adapters.mlx import kernel_files
kernel_files.require_own = Path
{_LIBRARY}
"""
_PLANT = """
#include <cstdio>
__attribute__((constructor)) static void run() { std::fclose(std::fopen("%s", "w")); }
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (sys.executable, *arguments),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def own(folder: Path) -> dict[str, str]:
    """The environment of a user whose folders are below `folder`."""
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    return {"XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder / "tmp")}


def kept(folder: Path) -> dict[str, int]:
    """The files that processes of this user keep, and their inodes."""
    files = (folder / "cache" / "semantic" / "kernels").glob("*/*.so")
    return {file.name: file.stat().st_ino for file in files}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder after one answer."""
    folder = tmp_path_factory.mktemp("user")
    done = run(*_ASK, **own(folder))
    assert not done.returncode, done.stderr
    return folder


def test_what_is_compiled_is_kept_and_used_again(compiled: Path) -> None:
    before = kept(compiled)
    assert before
    assert [path.name for path in (compiled / "tmp").iterdir()] == []
    assert not run(*_ASK, **own(compiled)).returncode
    assert kept(compiled) == before
    runs = (compiled / "cache" / "semantic" / "kernels").glob("run-*")
    assert list(runs) == []


def test_planted_code_does_not_run(compiled: Path, tmp_path: Path) -> None:
    ran, source = tmp_path / "ran", tmp_path / "plant.cpp"
    source.write_text(_PLANT % ran)
    shared = (tmp_path / "user" / "tmp").joinpath(*_BELOW)
    shared.mkdir(parents=True)
    for name in kept(compiled):
        build = ("c++", "-shared", "-fPIC", str(source), "-o", str(shared / name))
        subprocess.run(build, check=True)
    for folder in (shared, shared.parent, shared.parent.parent):
        folder.chmod(0o777)
    assert not run(*_ASK, **own(tmp_path / "user")).returncode
    assert not ran.exists()
    refused = run("-c", _LIBRARY, **own(tmp_path / "user"))
    assert "cannot compile kernels: " in refused.stderr
    assert "others may write to it; set TMPDIR to a folder of yours" in refused.stderr
    assert not ran.exists()
    run("-c", _UNGUARDED, **own(tmp_path / "user"))
    assert ran.exists() == bool(kept(compiled))  # else the test would prove nothing


def test_what_a_killed_process_left_is_not_used_and_removed(compiled: Path) -> None:
    root = compiled / "cache" / "semantic" / "kernels"
    left = root / "run-left"
    files = left.joinpath(*_BELOW)
    files.mkdir(parents=True)
    for name in kept(compiled):
        (files / name).write_bytes(b"\x7fELF")
    assert not run(*_ASK, **own(compiled)).returncode
    assert not left.exists()


def test_a_folder_that_is_in_use_is_not_removed(tmp_path: Path) -> None:
    first, second = KernelFolder(tmp_path), KernelFolder(tmp_path)
    assert first.path.exists()
    for folder in (first, second):
        folder.end()
        assert not folder.path.exists()


def test_processes_that_begin_together_leave_each_other_their_folders(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        folders = [*threads.map(KernelFolder, [tmp_path] * 64)]
    assert all(folder.path.joinpath(*_BELOW).is_dir() for folder in folders)
    for folder in folders:
        folder.end()


def test_an_incomplete_file_is_not_kept(tmp_path: Path) -> None:
    folder = KernelFolder(tmp_path)
    folder.path.joinpath(*_BELOW, "half.so").write_bytes(b"\x7fELF")
    folder.end()
    assert [path.name for path in tmp_path.rglob("*.so")] == []


@pytest.mark.parametrize("fault", ["link", "file", "mode", "programs", "room"])
def test_a_folder_that_is_not_fit_is_refused(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    if fault == "link":
        (tmp_path / "other").mkdir()
        root.symlink_to(tmp_path / "other")
    elif fault == "file":
        root.touch()
    else:
        root.mkdir()
    if fault == "mode":
        root.chmod(0o777)
    found = os.statvfs(tmp_path)
    if fault in ("programs", "room"):
        flag = found.f_flag | (os.ST_NOEXEC if fault == "programs" else 0)
        room = 1 if fault == "room" else found.f_bavail
        given = (*found[:4], room, *found[5:8], flag, *found[9:])
        monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(given))
    with pytest.raises(OSError, match=r"link|folder|exists|write|programs|space"):
        KernelFolder(root)


def test_without_a_fit_folder_the_mend_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setattr(kernel_files, "_own", [])
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda _: tmp_path)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/proc")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)
    with pytest.raises(BackendError, match=r"^cannot compile kernels: .*write to it; .*; set TMPD"):
        kernel_files.own()
