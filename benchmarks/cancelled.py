"""A long prompt cancelled twice: how much of it the third attempt still computes."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import shapes, stored
from benchmarks.rig import Rig
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from semantic.adapters.stores.background import BackgroundStore
from semantic.adapters.stores.disk.store import DiskStore
from semantic.domain.value_objects import BLOCK_TOKENS, CompletedGeneration, PrefillEvent

QUESTION = "What does a prompt cost whose client leaves at a third and at two thirds of it?"
CRITERION = (
    "30,000 tokens, cancelled at 1/3 and 2/3, then answered: all attempts together compute no "
    "token twice but for one block an attempt, also when the process ends after the first"
)
PROMPT = 30_000
LEAVES_AT = (1 / 3, 2 / 3, 1.0)
Row = dict[str, Scalar]


def run() -> Result:
    """In one process, and with a new engine on the same store after the first attempt."""
    started = Run.start(
        "cancelled",
        QUESTION,
        model="2 layers of the small shape: 256 wide, fp32, random weights",
        parameters={"prompt_tokens": PROMPT},
        seed=0,
    )
    rows = [row for crash in (False, True) for row in attempts(crash=crash)]
    twice = max(
        sum(int(str(row["computed"])) for row in rows if row["crash"] == crash) - PROMPT
        for crash in (False, True)
    )
    allowed = BLOCK_TOKENS * len(LEAVES_AT)
    summary: dict[str, Json] = {"attempts": [{**row} for row in rows], "computed_twice": twice}
    return started.finish(
        rows, summary, Verdict(CRITERION, allowed, twice, passed=twice <= allowed)
    )


def attempts(*, crash: bool) -> Iterator[Row]:
    """All attempts at the same prompt; with `crash` only the store survives the first."""
    draw = random.Random(0)
    prompt = tuple(draw.randrange(90) for _ in range(PROMPT))
    with stored.folder() as folder:
        rig = open_rig(folder)
        for number, share in enumerate(LEAVES_AT, 1):
            begin = time.perf_counter()
            found, done = attempt(rig, prompt, share)
            yield {
                "crash": crash,
                "attempt": number,
                "found": found,
                "reached": done,
                "computed": done - found,
                "seconds": round(time.perf_counter() - begin, 2),
            }
            if crash and number == 1:
                rig.engine.flush()
                rig = open_rig(folder)
        rig.engine.close()


def open_rig(folder: Path) -> Rig:
    """An engine on the store in `folder`."""
    store = BackgroundStore(DiskStore.open(folder, stored.ROOM), 1 << 32)
    return Rig.build(shapes.small(layers=2), store=store, model_id=stored.MODEL_ID)


def attempt(rig: Rig, prompt: Sequence[int], share: float) -> tuple[int, int]:
    """Submit, and cancel after `share` of the prompt: tokens cached before, and after."""
    uid = rig.engine.submit("ann", prompt, max_tokens=1)
    done = 0
    while True:
        for event in rig.engine.step_once():
            if isinstance(event, PrefillEvent):
                done = event.done
                if share < 1 and done >= share * len(prompt):
                    rig.engine.cancel(uid)
            elif isinstance(event, CompletedGeneration):
                return event.cached_tokens, max(done, event.cached_tokens)
