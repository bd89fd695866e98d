"""The site's sources: every page in one folder, as `zensical.toml` builds it.

    python -m tools.site       writes build/pages, which `make docs` gives to Zensical

The folder mirrors the repository, so that links of pages mean the same in both. A link to a file
that is no page keeps its words only, one to a drawing or a result brings that file. Standard
library alone: it runs in the environment of the site, without `semantic`.
"""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
CONFIGURATION: Final = ROOT / "zensical.toml"
PAGES: Final = ROOT / "build" / "pages"
ROOT_PAGES: Final = (
    *("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
)
"""Pages that are not below `docs`."""
_DECISION: Final = re.compile(r"docs/adr/\d")
_UNSEARCHED: Final = "---\nsearch:\n  exclude: true\n---\n"
"""Decisions have the words of every task; their index leads to them."""
ASSETS: Final = frozenset({".css", ".json", ".png", ".svg", ".txt"})

FENCE: Final = re.compile(r"^(```+|~~~+).*?^\1[^\S\n]*$", re.DOTALL | re.MULTILINE)
_LINK: Final = re.compile(r"(?P<image>!?)\[(?P<words>[^\]]*)\]\((?!\w+:)(?P<path>[^)#\s]+)[^)]*\)")


def pages(root: Path = ROOT) -> list[Path]:
    """Every page, relative to `root`."""
    below = sorted(path.relative_to(root) for path in (root / "docs").rglob("*.md"))
    return [*map(Path, ROOT_PAGES), *below]


def navigation(configuration: Path = CONFIGURATION) -> list[str]:
    """The pages that the navigation has, in its order."""
    entries = tomllib.loads(configuration.read_text(encoding="utf-8"))["project"]["nav"]
    return list(_leaves(entries))


def for_site(text: str, folder: Path, root: Path = ROOT) -> str:
    """The text of a page in `folder` (relative to `root`) without links that leave the site."""
    staged = set(pages(root))

    def kept(link: re.Match[str]) -> str:
        target = _within(root, folder, link["path"])
        is_page = target in staged or target.suffix in ASSETS
        return link[0] if is_page or link["image"] else link["words"]

    return _outside_fences(text, lambda part: _LINK.sub(kept, part))


def assets(text: str, folder: Path, root: Path = ROOT) -> set[Path]:
    """Files besides pages that the text of a page in `folder` needs, relative to `root`."""
    links = _LINK.finditer(FENCE.sub("", text))
    targets = {_within(root, folder, link["path"]) for link in links}
    return {path for path in targets if path.suffix in ASSETS}


def write(destination: Path = PAGES, root: Path = ROOT) -> None:
    """Write all pages and what they need to `destination`, which is emptied first."""
    shutil.rmtree(destination, ignore_errors=True)
    for page in pages(root):
        text = (root / page).read_text(encoding="utf-8")
        head = _UNSEARCHED if _DECISION.match(page.as_posix()) else ""
        _put(destination / page, f"{head}{for_site(text, page.parent, root)}".encode())
        for asset in assets(text, page.parent, root):
            _put(destination / asset, (root / asset).read_bytes())


def _leaves(entries: object) -> Iterator[str]:
    if isinstance(entries, str):
        yield entries
    elif isinstance(entries, dict):
        for entry in entries.values():
            yield from _leaves(entry)
    elif isinstance(entries, list):
        for entry in entries:
            yield from _leaves(entry)


def _outside_fences(text: str, change: Callable[[str], str]) -> str:
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join((*parts, change(text[end:])))


def _within(root: Path, folder: Path, target: str) -> Path:
    """Where a link leads, relative to `root`; a path above it stays as it is."""
    path = (root / folder / target).resolve()
    return path.relative_to(root.resolve()) if path.is_relative_to(root.resolve()) else path


def _put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


if __name__ == "__main__":
    write()
