"""How much the tests try: `make quick`, `make test` or `make thorough`; and which are exact.

The lane is the Hypothesis profile, from the variable HYPOTHESIS_PROFILE: "quick" never imports
MLX, "thorough" tries more values and examples of what the default tries once.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Final

import pytest

PROFILE: Final = os.environ.get("HYPOTHESIS_PROFILE", "default")
QUICK: Final = PROFILE == "quick"
THOROUGH: Final = PROFILE == "thorough"

WITHOUT_OPENBLAS: Final = os.environ.get("SEMANTIC_TEST_BLAS") == "none"
"""Whether MLX computes with the BLAS it brings: `make test-blas` compares. For tests only."""

_EXACT: Final = ("contract", "faults", "fleet", "integration", "unit/adapters", "zoo")
"""Folders whose tests compare answers or stores; elsewhere the marker `exact` is set by hand."""

_APART: Final = re.compile(r"^pytestmark = .*\bpytest\.mark\.process\b", re.MULTILINE)

_MLX: Final = frozenset({"mlx", "mlx_lm"})


def examples(usual: int, *, thorough: int) -> int:
    """How many examples, or rounds, a test takes in this lane; a quarter of the usual in quick."""
    if THOROUGH:
        return thorough
    return max(5, usual // 4) if QUICK else usual


def more(*values: object) -> list[object]:
    """Further values of a parameter, for `make thorough` alone."""
    return [pytest.param(value, marks=pytest.mark.thorough) for value in values]


def more_rows(*rows: tuple[object, ...]) -> list[object]:
    """`more`, where each row has the values of several parameters."""
    return [pytest.param(*row, marks=pytest.mark.thorough) for row in rows]


class NoMLX:
    """A finder that refuses MLX, so that a test of the quick lane that needs it fails."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        """Raises for MLX's modules; knows no other."""
        del path, target
        if name.partition(".")[0] in _MLX:
            raise ImportError(f"{name} is not for the quick lane")
        return None


def forbid_mlx() -> None:
    """Every import of MLX fails from now on."""
    assert not loaded_mlx(), "MLX was imported before the tests began"
    sys.meta_path.insert(0, NoMLX())


def loaded_mlx() -> list[str]:
    """MLX's modules in this process."""
    return sorted(name for name in sys.modules if name.partition(".")[0] in _MLX)


def is_exact(item: pytest.Item) -> bool:
    """Whether a test compares answers or stores, by its folder."""
    folder = item.path.relative_to(Path(__file__).parents[1]).parent.as_posix()
    return folder.startswith(_EXACT)


def is_apart(path: Path) -> bool:
    """Whether all tests of a module are of the process lane, by its text."""
    return path.suffix == ".py" and bool(_APART.search(path.read_text(encoding="utf-8")))


def left_out(item: pytest.Item) -> bool:
    """Whether this lane leaves the test to another."""
    if QUICK and item.get_closest_marker("mlx"):
        return True
    return not THOROUGH and item.get_closest_marker("thorough") is not None
