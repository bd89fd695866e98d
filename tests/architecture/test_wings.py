"""The engine imports neither the server nor the fleet, and the server does not import the fleet."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.budgets import ROOT, part_of

SOURCE = ROOT / "src" / "semantic"
BELOW = {"engine": ("server", "fleet"), "server": ("fleet",), "fleet": ()}
"""What a part must not import."""


def imports(path: Path) -> Iterator[str]:
    """Modules of the package that a file imports anywhere, as paths below the package."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("semantic"):
            for alias in node.names:
                yield from file_of(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from file_of(alias.name)


def file_of(name: str) -> Iterator[str]:
    """The file of a module, or of the module that a name is in."""
    first, *parts = name.split(".")
    while first == "semantic" and parts:
        for path in ("/".join(parts) + ".py", "/".join(parts) + "/__init__.py"):
            if (SOURCE / path).is_file():
                yield path
                return
        parts.pop()


@pytest.mark.parametrize("part", BELOW)
def test_a_part_imports_none_above_it(part: str) -> None:
    files = {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}
    above = [
        f"{name} imports {other}"
        for name, path in files.items()
        if part_of(name) == part
        for other in imports(path)
        if part_of(other) in BELOW[part]
    ]
    assert above == []


def test_a_file_that_imports_what_is_above_is_found(tmp_path: Path) -> None:
    file = tmp_path / "engine.py"
    file.write_text("def f():\n    from semantic.adapters.http.settings import ServerSettings\n")
    assert [part_of(one) for one in imports(file)] == ["server"]
