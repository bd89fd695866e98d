"""Where a server keeps responses: beside its store, or in memory where there is none."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from semantic.composition.engine_settings import STORE_VARIABLE, Settings
from semantic.composition.process_stores import RESPONSES_FILE, open_responses
from tests.support.stored_responses import response


def test_responses_lie_beside_the_store(tmp_path: Path) -> None:
    settings = Settings(use_disk=True, store=tmp_path)
    for _ in range(2):
        with closing(open_responses(settings, pytest.fail)) as kept:
            kept.put("t", response(1))
    with closing(open_responses(settings, pytest.fail)) as kept:
        assert kept.get("t", "resp_1") == response(1)
    assert (tmp_path / RESPONSES_FILE).is_file()


def test_nothing_is_opened_before_it_is_needed(tmp_path: Path) -> None:
    settings = Settings(use_disk=True, store=tmp_path / "not yet")
    with closing(open_responses(settings, pytest.fail)):
        assert list(tmp_path.iterdir()) == []


def test_without_a_disk_they_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(open_responses(Settings(store=tmp_path), pytest.fail)) as kept:
        kept.put("t", response(1))
        assert kept.get("t", "resp_1") == response(1)
    assert list(tmp_path.iterdir()) == []


def test_where_nobody_has_a_home_they_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(STORE_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with closing(open_responses(Settings(use_disk=True), pytest.fail)) as kept:
        kept.put("t", response(1))
        assert kept.get("t", "resp_1") == response(1)
    assert list(tmp_path.iterdir()) == []
