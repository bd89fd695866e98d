"""Where a user's files are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from semantic.domain.errors import OperatorError


def home_of(environment: Mapping[str, str]) -> Path:
    """The folder that HOME names. Raises OperatorError when it names none."""
    home = environment.get("HOME", "")
    if not Path(home).is_absolute():
        raise OperatorError("expected HOME to name the user's folder")
    return Path(home)
