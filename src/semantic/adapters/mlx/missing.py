"""What to type where MLX cannot be loaded. Knows the installers by what they leave behind."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

DISTRIBUTION = "semantic-engine"
"""The package's name in an index; it is imported as `semantic`."""

_RECEIPTS = {
    "uv-receipt.toml": "uv tool install",
    "pipx_metadata.json": "pipx install --force",
}
"""Files in an environment that a tool's installer has made, and how it installs again."""


def what_to_install() -> str:
    """One sentence: the command that installs what MLX needs on this platform."""
    install = _installer(Path(sys.prefix), has_pip=find_spec("pip") is not None)
    if sys.platform == "linux":
        return (
            f"On Linux type: {install} '{DISTRIBUTION}[cpu]'; "
            f"with an NVIDIA GPU: {install} '{DISTRIBUTION}[cuda]'"
        )
    return f"Type: {install} {DISTRIBUTION}"


def extra_to_install(extra: str) -> str:
    """One sentence: the command that installs what the package's `extra` is for."""
    install = _installer(Path(sys.prefix), has_pip=find_spec("pip") is not None)
    return f"Type: {install} '{DISTRIBUTION}[{extra}]'"


def _installer(environment: Path, *, has_pip: bool) -> str:
    """The command that installs into the Python environment in the folder `environment`."""
    for receipt, command in _RECEIPTS.items():
        if (environment / receipt).exists():
            return command
    return "pip install" if has_pip else "uv pip install"
