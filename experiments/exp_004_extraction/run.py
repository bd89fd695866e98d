"""Three agents answer in one batch, are saved, and continue in another process.

Saved once as files of this experiment's own, and once by the engine through the block store. Their
answers are compared with those of plain mlx-lm in one uninterrupted run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from experiments import subjects
from experiments.exp_004_extraction import files
from experiments.exp_004_extraction.continuing import BLOCKS, Continued
from experiments.harness.document import Json, Scalar
from experiments.harness.environment import ROOT
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from experiments.reference import greedy
from semantic.application.engine.batch_engine import BlockPoolBatchEngine
from semantic.composition.engine_settings import Settings
from semantic.composition.process_stores import open_store
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import CompletedGeneration
from semantic.ports.store import StorePort

ID = "EXP-004"
QUESTION = (
    "Does an agent's cache, taken out of a running batch and saved, go on in a new process as if "
    "nothing had happened?"
)
CRITERION = (
    "for three agents of every model all caches are extracted, the bytes loaded in a new process "
    "equal the bytes saved, all but one token of the conversation is reused there, and the tokens "
    "before and after equal those of one uninterrupted greedy generation by mlx-lm"
)
PARAMETERS: dict[str, Scalar] = {"models": ",".join(subjects.NAMES), "before": 16, "after": 16}
Row: TypeAlias = dict[str, Scalar]

AGENTS = {
    "a": ("Hello world", 3),
    "b": ("The quick brown fox", 30),
    "c": ("Once upon a time there was a little dog who liked to run. " * 18, 270),
}


def run(parameters: Mapping[str, Scalar]) -> Result:
    """The whole journey with every model that is here."""
    names = str(parameters["models"]).split(",")
    missing = {name: why for name in names if (why := subjects.why_missing(name))}
    for why in missing.values():
        print(f"skipped: {why}")
    present = [name for name in names if name not in missing]
    started = Run.start(
        ID, QUESTION, model=", ".join(present), parameters=parameters, seed=subjects.SEED
    )
    by_file: list[Row] = []
    by_store: list[Row] = []
    for subject in map(subjects.load, present):
        by_file += journey(subject, parameters)
        by_store += stored_journey(subject, parameters)
    samples = [
        *({"saved_as": "files", **row} for row in by_file),
        *({"saved_as": "blocks", **row} for row in by_store),
    ]
    failed = sum(not all(row[test] for test in TESTS) for row in samples)
    summary: dict[str, Json] = {
        "agents": [{**row} for row in by_file],
        "stored": [{**row} for row in by_store],
        "journeys": len(samples),
        "failed": failed,
        "bytes": sum(int(str(row["bytes"])) for row in by_file),
        "skipped": "; ".join(missing.values()) or "none",
    }
    return started.finish(samples, summary, Verdict(CRITERION, 0, failed, passed=not failed))


TESTS = ("before_equal", "bytes_equal", "reused", "after_equal")


def journey(subject: subjects.Subject, parameters: Mapping[str, Scalar]) -> list[Row]:
    """Answer, save, load elsewhere, go on; one row per agent."""
    before, after = int(str(parameters["before"])), int(str(parameters["after"]))
    answered = answer(subject, before)
    with tempfile.TemporaryDirectory() as folder:
        saved = {done.agent_id: kept(Path(folder), done) for done in answered}
        went_on = continued("files", subject.name, folder, after)
    rows: list[Row] = []
    for done in sorted(answered, key=lambda done: done.agent_id):
        here, there = saved[done.agent_id], went_on[done.agent_id]
        rows.append(
            {
                **compared(subject, done, there, str(here["digest"]), after),
                "bytes": here["bytes"],
                "save_ms": here["save_ms"],
                "load_ms": round(there.load_ms, 3),
            }
        )
    return rows


def stored_journey(subject: subjects.Subject, parameters: Mapping[str, Scalar]) -> list[Row]:
    """The same with nothing but the engine's store between the two processes."""
    before, after = int(str(parameters["before"])), int(str(parameters["after"]))
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "store"
        store = open_store(Settings(use_disk=True, store=folder))
        answered = answer(subject, before, store)
        digests = {done.agent_id: reusable_digest(subject, done) for done in answered}
        store.close()
        went_on = continued("store", subject.name, str(folder), after)
    return [
        {
            **compared(subject, done, went_on[done.agent_id], digests[done.agent_id], after),
            "first_token_ms": round(went_on[done.agent_id].load_ms, 3),
        }
        for done in sorted(answered, key=lambda done: done.agent_id)
    ]


def compared(
    subject: subjects.Subject, here: CompletedGeneration, there: Continued, digest: str, after: int
) -> Row:
    """One agent's answers in both processes beside the uninterrupted one."""
    prompt, before = subject.prompt(*AGENTS[here.agent_id]), len(here.tokens)
    expected = greedy(subject.model, prompt, before + after)
    return {
        "model": subject.name,
        "agent": here.agent_id,
        "prompt_tokens": len(prompt),
        "before_equal": here.tokens == expected.tokens[:before],
        "bytes_equal": digest == there.digest,
        "reused": there.cached_tokens == len(prompt) + before - 1,
        "after_equal": tuple(there.tokens) == expected.tokens[before:],
        "smallest_gap": round(expected.smallest_gap, 6),
    }


def answer(
    subject: subjects.Subject, before: int, store: StorePort | None = None
) -> list[CompletedGeneration]:
    """All agents in one batch of the engine."""
    backend = subject.backend
    pool = BlockPool(backend.cache_spec(), total_blocks=BLOCKS)
    engine = BlockPoolBatchEngine(
        backend, subjects.TokenIds(), pool, backend.cache_spec(), store=store
    )
    for agent, prompt in AGENTS.items():
        engine.submit(agent, subject.prompt(*prompt), max_tokens=before)
    return list(engine.step())


def reusable_digest(subject: subjects.Subject, done: CompletedGeneration) -> str:
    """What the cache holds of the tokens that another process can reuse: all but the last."""
    if done.blocks is None:
        raise TypeError(f"agent {done.agent_id} ended without a cache: {done.error}")
    n_tokens = len(subject.prompt(*AGENTS[done.agent_id])) + len(done.tokens) - 1
    return files.digest_of_first(done.blocks, n_tokens)


def kept(folder: Path, done: CompletedGeneration) -> dict[str, Scalar]:
    """Save an agent's cache and say what was saved."""
    if done.blocks is None:
        raise TypeError(f"agent {done.agent_id} ended without a cache: {done.error}")
    path = folder / f"{done.agent_id}.safetensors"
    begun = time.perf_counter()
    files.save(path, done.blocks)
    save_ms = round(1000 * (time.perf_counter() - begun), 3)
    digest = files.digest(done.blocks)
    return {"save_ms": save_ms, "bytes": path.stat().st_size, "digest": digest}


def continued(way: str, subject_name: str, folder: str, after: int) -> dict[str, Continued]:
    """What the agents write in a process that knows only their files, or their store."""
    module = "experiments.exp_004_extraction.continuing"
    done = subprocess.run(  # noqa: S603 - our own module
        [sys.executable, "-m", module, way, subject_name, folder, str(after)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = [Continued(**json.loads(line)) for line in done.stdout.splitlines()]
    return {continued.agent: continued for continued in found}
