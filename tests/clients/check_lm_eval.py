"""lm-eval: every sample is the same to the last bit, however the cache came to be.

A wrong log-probability after a restore or in a batch shows in no text; here it does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clients import talk
from tests.clients.conftest import SERVER_VARIABLE
from tests.support.serve_process import ROOT, ServeProcess, served

TASKS = ("mini_choice", "mini_answer")
TOKENIZER = ROOT / "src" / "semantic" / "models" / talk.MODEL

Samples = dict[str, list[str]]


@dataclass(frozen=True)
class Evaluated:
    """All samples of a task by its name, its score, and prompt tokens that came from the cache."""

    samples: Samples
    scores: dict[str, float]
    cached: int


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Evaluated]:
    """The same evaluation four times."""
    folder = tmp_path_factory.mktemp("lm-eval")
    found: dict[str, Evaluated] = {}
    with server(folder / "store") as one:
        found["cold"] = evaluated(one, folder / "cold")
        found["warm"] = evaluated(one, folder / "warm")
    with server(folder / "store") as one:
        found["restarted"] = evaluated(one, folder / "restarted")
    with server(folder / "another store") as one:
        found["together"] = evaluated(one, folder / "together", at_once=4)
    return found


@contextmanager
def server(store: Path) -> Iterator[ServeProcess]:
    python, environment = json.loads(os.environ[SERVER_VARIABLE])
    with served(store, python=python, environment=environment) as process:
        yield process


def evaluated(process: ServeProcess, out: Path, at_once: int = 1) -> Evaluated:
    """Run lm-eval as its users do."""
    before = cached_tokens(process.url)
    arguments = {
        "model": talk.MODEL,
        "base_url": f"{process.url}/v1/completions",
        "tokenizer": TOKENIZER,
        "tokenizer_backend": "huggingface",
        "num_concurrent": at_once,
        "max_retries": 1,
    }
    command = (
        *(sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"),
        *("--tasks", ",".join(TASKS), "--include_path", str(Path(__file__).with_name("tasks"))),
        *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
        *("--log_samples", "--output_path", str(out)),
    )
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return Evaluated(
        {task: samples(out, task) for task in TASKS},
        scores(out),
        cached_tokens(process.url) - before,
    )


def samples(out: Path, task: str) -> list[str]:
    """The lines that were logged, in the order of the data."""
    (path,) = out.glob(f"*/samples_{task}_*.jsonl")
    lines = path.read_text(encoding="utf-8").splitlines()
    return sorted(lines, key=lambda line: int(json.loads(line)["doc_id"]))


def scores(out: Path) -> dict[str, float]:
    (path,) = out.glob("*/results_*.json")
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    names = {"mini_choice": "acc,none", "mini_answer": "exact_match,none"}
    return {task: float(results[task][name]) for task, name in names.items()}


def cached_tokens(url: str) -> int:
    with urllib.request.urlopen(f"{url}/metrics") as response:
        text = response.read().decode()
    found = re.search(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", text, re.MULTILINE)
    return int(float(found[1])) if found else 0


def test_the_model_is_scored_and_not_chance(runs: dict[str, Evaluated]) -> None:
    assert runs["cold"].scores == {"mini_choice": 1.0, "mini_answer": 1.0}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("run", ["warm", "restarted", "together"])
def test_samples_are_equal_to_the_last_bit(runs: dict[str, Evaluated], run: str, task: str) -> None:
    assert runs["cold"].samples[task]
    assert runs[run].samples[task] == runs["cold"].samples[task]


@pytest.mark.parametrize("run", ["warm", "restarted"])
def test_little_was_computed_again(runs: dict[str, Evaluated], run: str) -> None:
    assert runs[run].cached > runs["cold"].cached
