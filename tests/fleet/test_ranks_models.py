"""Every architecture of the zoo that mlx-lm divides, on two ranks: the answers of one device."""

from __future__ import annotations

import json
import subprocess
import sys

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
    command = (sys.executable, "-m", "tests.support.divided_model", row)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"right": True, "restored": True, "in pages": row in IN_PAGES}
