"""Every architecture of the zoo that mlx-lm divides, on two ranks: the answers of one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from semantic.domain.errors import SemanticError
from tests.support.in_pages import SUFFIX
from tests.zoo.configurations import module_of, rows

pytestmark = pytest.mark.process

IN_PAGES = [row + SUFFIX for row in ("llama", "llama+window", "gpt_oss", "deepseek_v3", "qwen3_5")]
"""All kinds of layers: full attention alone, windows, sinks, latents, states."""


def divided() -> list[str]:
    """The rows whose model has a `shard`."""
    return [row for row in rows() if hasattr(_module(row), "shard")]


def _module(row: str) -> object:
    try:
        return module_of(row).Model
    except (ImportError, AttributeError, SemanticError):
        return None


@pytest.mark.parametrize("row", [*divided(), *IN_PAGES])
def test_two_ranks_answer_as_one_device_and_after_a_restore(row: str) -> None:
    expected = {"right": True, "restored": True, "in pages": row in IN_PAGES}
    assert _found(row) == expected | {"shared": hasattr(os, "memfd_create")}


def test_ranks_that_have_no_folder_in_common_send_sealed_frames(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)  # for a Unix socket's path
    folder.mkdir()
    found = _found("llama", TMPDIR=str(folder))
    assert found == {"right": True, "restored": True, "in pages": False, "shared": False}


def _found(row: str, **environment: str) -> dict[str, bool]:
    command = (sys.executable, "-m", "tests.support.divided_model", row)
    own = {**os.environ, **environment}
    done = subprocess.run(
        command, env=own, stdout=subprocess.PIPE, text=True, check=True, timeout=300
    )
    return cast(dict[str, bool], json.loads(done.stdout.splitlines()[-1]))
