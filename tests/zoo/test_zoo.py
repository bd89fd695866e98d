"""Every architecture of mlx-lm: answers are exact, and reuse is at least what was recorded.

`make test` runs the representatives, `make thorough` all rows. After a gain, record it:
`python -m tests.zoo --record [row ...]`, and write the table anew: `--document`.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.lanes import THOROUGH
from tests.zoo.configurations import configuration, modules, rows
from tests.zoo.document import DOCUMENT, document
from tests.zoo.folder import write_folder
from tests.zoo.names import NAMES, VARIANTS
from tests.zoo.patches import PARTS, WITHOUT
from tests.zoo.records import Result, read, worse
from tests.zoo.trial import TOGETHER, Reference, edited, run, text, together, worst

REPRESENTATIVES = frozenset(
    {
        *("deepseek_v3", "gemma3_text", "glm_moe_dsa", "gpt_oss", "kimi_linear"),
        *("lfm2", "llama", "qwen3_5"),
    }
)
"""One of each kind of cache, and of each way to compute with it."""


def lane(row: str) -> object:
    """The row, for `make thorough` alone if it represents nothing."""
    marks = [] if row in REPRESENTATIVES else [pytest.mark.thorough]
    return pytest.param(row, marks=marks)


@pytest.mark.parametrize("row", [lane(row) for row in rows()])
def test_answers_are_mlx_lms_and_reuse_is_not_less_than_recorded(row: str, tmp_path: Path) -> None:
    found = run(row, tmp_path / "zoo", in_one_pass=not THOROUGH)
    assert worse(found, read()[row]) == []


@pytest.mark.thorough
@pytest.mark.parametrize("row", TOGETHER)
def test_agents_that_begin_alike_at_once_reuse_what_was_recorded(row: str, tmp_path: Path) -> None:
    found = together(row, tmp_path / "zoo")
    assert worse(found, read()[found.row]) == []


# --- nothing is forgotten ---------------------------------------------------------------------


def test_every_module_of_mlx_lm_is_recorded_or_has_a_reason() -> None:
    known = read().keys() | PARTS | WITHOUT.keys()
    assert set(modules()) - known == set(), "add it: tests/zoo/patches.py, then --record"
    assert {*rows(), *(f"{row} together" for row in TOGETHER)} == read().keys()
    assert (PARTS | WITHOUT.keys()) - set(modules()) == set(), "mlx-lm has it no more"


def test_every_module_and_variant_has_the_name_that_users_know() -> None:
    assert set(modules()) - PARTS == NAMES.keys()
    assert {row for row in rows() if "+" in row} == VARIANTS.keys()


def test_the_document_is_what_was_recorded() -> None:
    written = DOCUMENT.read_text(encoding="utf-8")
    assert written == document(read()), "write it: python -m tests.zoo --document"


def test_every_row_has_a_configuration() -> None:
    assert [row for row in rows() if not configuration(row)] == []


@pytest.mark.parametrize("name", sorted(PARTS))
def test_a_part_of_other_modules_has_no_model(name: str) -> None:
    assert not hasattr(importlib.import_module(f"mlx_lm.models.{name}"), "Model")


@pytest.mark.process
@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(WITHOUT))
def test_a_model_that_is_left_out_cannot_be_computed_by_mlx_lm(name: str) -> None:
    code = f"import sys; from tests.zoo.folder import alone; sys.exit(not alone({name!r}))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, check=False, timeout=300)
    assert done.returncode != 0, "it can: record it"


# --- the comparison can fail ------------------------------------------------------------------

RECORDED = Result("a", form="mixed 1/2", pages=True, answers={"solo": "="}, reuse={"again": 85})


@pytest.mark.parametrize(
    ("found", "what"),
    [
        (Result("a", refused="no"), "refused"),
        (Result("a", form="own", pages=True, answers={"solo": "X 1e-1@3"}), "X 1e-1@3"),
        (Result("a", form="own", pages=True, reuse={"again": 85}), "was not asked"),
        (Result("a", form="own", pages=True, reuse={"again": 84}), "84 % reused, not 85 %"),
        (Result("a", form="own", reuse={"again": 85}), "pages"),
        (Result("a", form="mlx-lm's batch", pages=True), "decodes"),
        (Result("a", form="mixed 0/2", pages=True), "decodes"),
        (Result("a", form="own", pages=True, answers={"solo": "=", "batch": "X"}), "batch: X"),
    ],
)
def test_what_is_worse_than_recorded_is_found(found: Result, what: str) -> None:
    assert any(what in one for one in worse(found, RECORDED))


def test_what_is_better_than_recorded_passes() -> None:
    better = Result("a", form="own", pages=True, answers={"solo": "~"}, reuse={"again": 100})
    assert worse(better, RECORDED) == []
    assert worse(RECORDED, RECORDED) == []
    assert worse(RECORDED, Result("a", refused="no")) == []
    known = Result("a", form="own", answers={"batch": "X 1e-1@3"})
    assert worse(known, known) == []


def test_a_wrong_answer_is_found(tmp_path: Path) -> None:
    reference = Reference(write_folder("llama", tmp_path / "model"))
    prompt = text(20, "prompt")
    right = reference.answer(prompt)
    assert reference.verdict(prompt, right) == "="
    assert reference.verdict(prompt, edited(right, 3)).startswith("X")
    assert reference.verdict(prompt, right[:-1]).startswith("X")
    assert worst(["=", "~", "X 1e-1@3"]) == "X 1e-1@3"
    assert [worst(["=", "~"]), worst(["=", "="])] == ["~", "="]
