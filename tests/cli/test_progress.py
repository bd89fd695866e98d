"""Bars: what advances them, that they fit their terminal, and that nothing is there without one."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from semantic.adapters.exchange.transfer import export_agent, import_agent
from semantic.cli import cache
from semantic.cli.progress import ServerProgress, _new_progress, _token_speed, work_bar
from semantic.composition.engine_settings import Settings
from semantic.composition.process_stores import open_disk
from semantic.domain.stored import OnProgress
from semantic_server.cli import running as archives
from tests.cli.stocked import BODY_BYTES, disk_store, new_agent
from tests.cli.support import semantic


class Seen:
    """An `OnProgress` that records, and stands in for a bar."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.steps: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        self.steps.append((done, total))

    @contextmanager
    def bar(self, words: str) -> Iterator[OnProgress]:
        self.words.append(words)
        yield self

    def to_the_end(self, total: int) -> bool:
        """Whether it only rose, to `total` of `total`."""
        done = [one for one, _ in self.steps]
        return done == sorted(set(done)) and self.steps[-1] == (total, total)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen()
    for module in (archives, cache):
        monkeypatch.setattr(module, "work_bar", found.bar)
    return found


def test_an_export_and_an_import_count_bytes(tmp_path: Path) -> None:
    out, back = Seen(), Seen()
    with disk_store() as store:
        export_agent(store, new_agent(store), tmp_path / "ada", out)
        import_agent(store, tmp_path / "ada", name="eve", on_progress=back)
    assert out.to_the_end(BODY_BYTES)
    assert back.to_the_end(2 * BODY_BYTES)


@pytest.mark.parametrize("read_data", [False, True])
def test_a_check_counts_files_and_a_collection_blocks(read_data: bool) -> None:
    with disk_store() as store:
        new_agent(store, "ada")
        gone = new_agent(store, "ben", seed=1)
        n_blocks = len(list(gone.scope.chain(gone.token_ids)))
        store.agents.remove(gone.scope, "ben")
    disk = open_disk(Settings(use_disk=True, disk_bytes=64 << 20))
    checked, collected, shared = Seen(), Seen(), Seen()
    try:
        n_files = sum(one.n_blocks + one.n_agents for one in disk.stats())
        disk.check(read_data=read_data, on_progress=checked)
        disk.check(read_data=read_data, subset=(1, 2), on_progress=shared)
        assert disk.gc(dry_run=True, on_progress=collected).unneeded_blocks == n_blocks
        assert collected.to_the_end(n_blocks)
    finally:
        disk.close()
    assert checked.to_the_end(n_files)
    assert all(done <= total for done, total in shared.steps)


def test_what_takes_long_has_a_bar(seen: Seen, tmp_path: Path) -> None:
    with disk_store() as store:
        new_agent(store)
    for words in (
        ("agents", "export", "ada", str(tmp_path / "ada")),
        ("agents", "import", str(tmp_path / "ada.json"), "--as", "eve"),
        ("cache", "check"),
        ("cache", "gc"),
        ("cache", "rebuild-index"),
    ):
        assert semantic(*words).code == 0
    assert seen.words == [
        "exporting ada", "importing ada.json", "checking files", "deleting blocks", "reading files"
    ]  # fmt: skip
    assert seen.steps


def test_without_a_terminal_there_is_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with work_bar("working") as on_progress:
        on_progress(1, 2)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("width", [20, 49, 50, 80, 99, 100, 200])
def test_a_line_of_the_server_fits_its_terminal(width: int) -> None:
    clock = [0.0]
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=width)
    progress = _new_progress(_token_speed, console=terminal)
    progress.get_time = lambda: clock[0]
    bars = ServerProgress(progress)
    bars.accepted("u", "agent-" + "x" * 300, 1)
    for done in range(10_000, 30_000, 4096):
        bars.prefilled("u", done, 99_999)
        clock[0] += 2
    progress.stop()
    lines = lines_of(progress.get_renderable, width)
    assert len(lines) == 1
    assert len(lines[0]) <= width
    assert "26%" in lines[0]
    # 2,048 tokens a second, those that were cached at the beginning not counted.
    assert ("2,048 tok/s" in lines[0] and "00:3" in lines[0]) == (width >= 50)


def lines_of(renderable: Callable[[], object], width: int) -> list[str]:
    """What is shown, without colours."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as captured:
        console.print(renderable())
    return Text.from_ansi(captured.get()).plain.splitlines()
