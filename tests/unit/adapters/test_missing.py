"""Where MLX is missing, the message is the command that the user's own installer understands."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from semantic.adapters import mlx
from semantic.adapters.mlx import DISTRIBUTION, what_to_install

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]


@pytest.mark.parametrize(
    ("receipt", "command"),
    [
        ("uv-receipt.toml", "uv tool install"),
        ("pipx_metadata.json", "pipx install --force"),
        ("pyvenv.cfg", "pip install"),
    ],
)
def test_the_command_is_that_of_the_installer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receipt: str, command: str
) -> None:
    (tmp_path / receipt).touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(mlx, "find_spec", lambda _: object())
    assert f" {command} '{DISTRIBUTION}[cpu]'; " in what_to_install()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert what_to_install() == f"Type: {command} {DISTRIBUTION}"


def test_an_environment_of_uv_without_pip_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx, "find_spec", lambda _: None)
    assert "uv pip install" in what_to_install()


def test_the_name_and_the_extras_are_those_of_the_package() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert {"cpu", "cuda"} <= set(PROJECT["optional-dependencies"])
