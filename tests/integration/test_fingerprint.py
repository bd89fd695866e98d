"""A model's name changes with its content, and with nothing else."""

from __future__ import annotations

import os
import platform
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from semantic.adapters.mlx import blas_kernel
from semantic.adapters.mlx.device import Device
from semantic.adapters.mlx.model import fingerprint as fingerprints
from semantic.adapters.mlx.model.fingerprint import (
    DigestCache,
    FileState,
    cache_folder,
    fingerprint,
    is_fingerprint,
    numerics,
)
from semantic.domain.block_hash import ANY_CHIP

_WEIGHTS = "model.safetensors"
_BIG = 18 << 20


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of two chunks of weights, drawn once."""
    path = tmp_path_factory.mktemp("weights") / _WEIGHTS
    mx.save_safetensors(str(path), {"w": mx.random.normal((_BIG // 4,), key=mx.random.key(1))})
    return path


@pytest.fixture
def folder(tmp_path: Path, weights: Path) -> Path:
    """A model of two chunks of weights."""
    made = tmp_path / "model"
    made.mkdir()
    shutil.copyfile(weights, made / _WEIGHTS)
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "merges.txt", "README.md"):
        (made / name).write_text(f"content of {name}")
    return made


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where digests are kept, of files of any size and age."""
    monkeypatch.setattr(fingerprints, "_WORTH_CACHING", 1 << 20)
    monkeypatch.setattr(fingerprints, "_CLOCK_NS", -(10**12))
    monkeypatch.setenv("SEMANTIC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights.json"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The weight files that were really read."""
    seen: list[Path] = []
    real = fingerprints._hash

    def hash_and_note(path: Path, size: int) -> bytes:
        if path.name == _WEIGHTS:
            seen.append(path)
        return real(path, size)

    monkeypatch.setattr(fingerprints, "_hash", hash_and_note)
    return seen


def nudge_one_weight(folder: Path) -> None:
    """Add 1e-3 to one number in the middle, in place."""
    weights = mx.load(str(folder / _WEIGHTS))
    assert isinstance(weights, dict)
    array = weights["w"]
    array[array.size // 2] += 1e-3
    copy = folder / "copy.safetensors"
    mx.save_safetensors(str(copy), {"w": array})
    (folder / _WEIGHTS).write_bytes(copy.read_bytes())
    copy.unlink()


def append(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with (folder / name).open("a") as file:
            file.write(" ")

    return change


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    "change",
    [
        nudge_one_weight,
        append("config.json"),
        append("tokenizer.json"),
        append("chat_template.jinja"),
        append("merges.txt"),
        lambda folder: (folder / "merges.txt").rename(folder / "vocab.txt"),
        lambda folder: (folder / "extra.json").write_text(""),
        lambda folder: (folder / "merges.txt").unlink(),
    ],
    ids=["weight", "config", "tokenizer", "template", "merges", "name", "new file", "less"],
)
def test_other_content_is_another_model(folder: Path, change: Callable[[Path], None]) -> None:
    before = fingerprint(folder)
    size = (folder / _WEIGHTS).stat().st_size
    change(folder)
    assert (folder / _WEIGHTS).stat().st_size == size
    assert fingerprint(folder) != before


@pytest.mark.usefixtures("cache")
def test_place_dates_and_descriptions_do_not_matter(folder: Path, tmp_path: Path) -> None:
    before = fingerprint(folder)
    append("README.md")(folder)
    os.utime(folder / _WEIGHTS, (1, 1))
    assert fingerprint(folder) == before
    moved = folder.rename(tmp_path / "moved")
    assert fingerprint(moved) == before
    assert fingerprint(Path(shutil.copytree(moved, tmp_path / "copied"))) == before


def test_a_large_file_is_read_once(folder: Path, cache: Path, reads: list[Path]) -> None:
    before = fingerprint(folder)
    assert fingerprint(folder) == before
    assert len(reads) == 1
    assert stat.S_IMODE(cache.stat().st_mode) == 0o600
    assert [file.name for file in cache.parent.iterdir()] == [cache.name]


@pytest.mark.usefixtures("cache")
def test_dates_set_back_hide_no_change(folder: Path, reads: list[Path]) -> None:
    before = fingerprint(folder)
    old = (folder / _WEIGHTS).stat()
    nudge_one_weight(folder)
    os.utime(folder / _WEIGHTS, ns=(old.st_atime_ns, old.st_mtime_ns))
    new = (folder / _WEIGHTS).stat()
    assert (new.st_ino, new.st_size, new.st_mtime_ns) == (old.st_ino, old.st_size, old.st_mtime_ns)
    assert fingerprint(folder) != before
    assert len(reads) == 2


def test_a_file_that_just_changed_is_not_remembered(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprints, "_CLOCK_NS", 10**12)
    fingerprint(folder)
    assert not cache.exists()


def _as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _as_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff\x00{"),
        lambda path: path.write_text("[1]"),
        lambda path: path.write_text("[" * 200_000),
        lambda path: path.write_bytes(path.read_bytes()[:-5]),
        lambda path: path.write_bytes(b" " * (2 << 20) + path.read_bytes()),
        lambda path: path.write_text(path.read_text().replace('": "', '": "zz')),
        lambda path: path.chmod(0o666),
        _as_fifo,
        _as_link,
        _as_folder,
    ],
    ids=[
        *("empty", "binary", "list", "deep", "cut", "large", "no digest", "open"),
        *("fifo", "link", "folder"),
    ],
)
def test_a_broken_cache_is_no_cache(
    folder: Path, cache: Path, reads: list[Path], spoil: Callable[[Path], None]
) -> None:
    before = fingerprint(folder)
    spoil(cache)
    assert fingerprint(folder) == before
    assert len(reads) == 2


@pytest.mark.usefixtures("cache")
def test_a_cache_that_cannot_be_written_is_no_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fingerprint(folder)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SEMANTIC_CACHE", str(tmp_path / "file"))
    assert fingerprint(folder) == before


def test_the_cache_lies_where_users_expect_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SEMANTIC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("sys.platform", "darwin")
    assert cache_folder() == tmp_path / "Library" / "Caches" / "semantic"
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_folder() == tmp_path / ".cache" / "semantic"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "semantic"
    monkeypatch.setenv("SEMANTIC_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_digests_are_those_of_the_file_asked_for(tmp_path: Path) -> None:
    cache = DigestCache(tmp_path)
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"1")
    other.write_bytes(b"2")
    cache.put(FileState.of(one), bytes(32))
    cache.save()
    again = DigestCache(tmp_path)
    assert again.get(FileState.of(one)) == bytes(32)
    assert again.get(FileState.of(other)) is None


def test_other_numerics_are_another_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(folder)
    assert "mlx=" in numerics()
    assert "blas=" in numerics()
    monkeypatch.setattr("platform.machine", lambda: "another")
    assert fingerprint(folder) != before


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("read_device", Device("CPU", "AMD EPYC", 1, 1, 1, "zen 9")),
        ("blas_kernel", "OpenBLAS 9 Zen"),
    ],
)
def test_another_chip_or_kernel_is_another_model_unless_that_is_allowed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, other: object
) -> None:
    before, shared = fingerprint(folder), fingerprint(folder, any_chip=True)
    assert shared != before
    assert shared.startswith(ANY_CHIP)
    assert is_fingerprint(shared)
    monkeypatch.setattr(fingerprints, name, lambda: other)
    assert fingerprint(folder) != before
    assert fingerprint(folder, any_chip=True) == shared


@pytest.mark.process
def test_the_kernel_is_that_of_the_library_that_computes() -> None:
    """A process in which OpenBLAS takes another kernel names that one."""
    if blas_kernel() == "own":
        pytest.skip("needs OpenBLAS")
    program = "from semantic.adapters.mlx import blas_kernel; print(blas_kernel())"
    environment = {**os.environ, "OPENBLAS_CORETYPE": "Prescott"}
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, check=True, text=True
    )
    release, core = found.stdout.strip().rsplit(" ", 1)
    assert blas_kernel().startswith(f"{release} ")
    assert core == "Prescott" or platform.machine() != "x86_64"
