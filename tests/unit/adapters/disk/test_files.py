"""Deleting whatever has a name: also deep folders, and nothing outside of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from semantic.adapters.stores.disk.entries import escape_name, unescape_name
from semantic.adapters.stores.disk.files import FOLDER_FLAGS, FileSystem, delete_any, opened

DEPTH = 1500


def delete(path: Path) -> None:
    files = FileSystem()
    with opened(files, path.parent, FOLDER_FLAGS) as folder:
        delete_any(files, path.name, folder)


def deep(root: Path) -> None:
    """Folders in folders, far longer than a path may be and deeper than Python may call."""
    root.mkdir()
    fd = os.open(root, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("inside", dir_fd=fd)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
        below = os.open("inside", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)


def test_a_folder_goes_however_deep_it_is(tmp_path: Path) -> None:
    deep(tmp_path / "folder")
    delete(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


def test_links_go_and_what_they_point_to_stays(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_bytes(b"x")
    folder = tmp_path / "folder"
    (folder / "inside").mkdir(parents=True)
    (folder / "link").symlink_to(kept)
    (folder / "inside" / "link").symlink_to(kept / "file")
    (tmp_path / "link").symlink_to(kept)
    delete(folder)
    delete(tmp_path / "link")
    assert [path.name for path in tmp_path.rglob("*")] == ["kept", "file"]


def test_nothing_to_delete_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        delete(tmp_path / "nothing")


@pytest.mark.parametrize("name", [b"a b", b"\xff\xfe", b"100%", b"%FF", "é".encode(), b"a\nb", b""])
def test_any_name_is_shown_as_text_and_found_again(name: bytes) -> None:
    text = escape_name(os.fsdecode(name))
    assert text.isascii()
    assert text == "" or text.isprintable()
    assert os.fsencode(unescape_name(text)) == name
