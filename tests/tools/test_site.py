"""Links of the site stay inside it. Needs nothing that builds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.site import assets, for_site, write


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository of five pages at its root and one below `docs`."""
    for name in ("README", "ARCHITECTURE", "CHANGELOG", "CONTRIBUTING", "SECURITY"):
        (tmp_path / f"{name}.md").write_text(f"# {name}\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text(
        "[b](../README.md) ![c](../plot.svg) [d](../src/e.py)\n"
    )
    (tmp_path / "plot.svg").write_text("<svg/>")
    return tmp_path


def test_links_to_pages_and_drawings_stay_and_others_keep_their_words(root: Path) -> None:
    write(root / "site", root)
    assert (root / "site/docs/a.md").read_text() == "[b](../README.md) ![c](../plot.svg) d\n"
    assert (root / "site/plot.svg").read_text() == "<svg/>"
    assert not (root / "site/src").exists()


def test_the_search_of_the_site_finds_tasks_and_no_decisions(root: Path) -> None:
    (root / "docs" / "adr").mkdir()
    for name in ("001-a", "README"):
        (root / "docs" / "adr" / f"{name}.md").write_text("# Decide\n")
    write(root / "site", root)
    unsearched = "---\nsearch:\n  exclude: true\n---\n# Decide\n"
    assert (root / "site/docs/adr/001-a.md").read_text() == unsearched
    assert (root / "site/docs/adr/README.md").read_text() == "# Decide\n"


def test_what_was_written_before_is_gone(root: Path) -> None:
    (root / "site").mkdir()
    (root / "site" / "old.md").touch()
    write(root / "site", root)
    assert not (root / "site/old.md").exists()


def test_a_link_in_a_code_block_is_text(root: Path) -> None:
    text = "```\n[a](no_such.py)\n```\n[b](no_such.py) [c](https://example.org)\n"
    assert for_site(text, Path(), root) == "```\n[a](no_such.py)\n```\nb [c](https://example.org)\n"
    assert assets("```\n[a](plot.svg)\n```\n", Path(), root) == set()


def test_a_picture_that_is_not_there_is_an_error(root: Path) -> None:
    (root / "README.md").write_text("![a](no_such.svg)\n")
    with pytest.raises(FileNotFoundError):
        write(root / "site", root)
