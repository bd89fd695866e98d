"""Bytes written to disk by a conversation of 40 turns, beside saving its history every time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from benchmarks import footprint, stored
from experiments.harness.document import Json, Scalar
from experiments.harness.plots import Plot
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from experiments.subjects import TokenIds
from semantic import BlockPool, BlockPoolBatchEngine, load
from semantic.adapters.stores.background import BackgroundStore
from semantic.adapters.stores.disk.store import DiskStore
from semantic.domain.value_objects import BLOCK_TOKENS

QUESTION = "How many bytes does a turn write, when a conversation gets longer and longer?"
CRITERION = (
    "40 turns of 60 tokens: no turn writes more than the keys and values of its new tokens and of "
    "one block, and 64 KiB, however long the history is"
)
TURNS, PROMPT, ANSWER = 40, 40, 20
FRAME = 64 << 10
"""Bytes a turn may write beside keys and values: headers, the manifest."""
PLOTS = (
    Plot(
        "turns.svg",
        "One agent, 40 turns of 60 tokens: written to disk",
        x="turn",
        y="kb",
        series="way",
        x_label="turn",
        y_label="kB in this turn",
    ),
)
OURS, WHOLE = "blocks and manifest", "the whole history"
Row = dict[str, Scalar]


def run() -> Result:
    """One agent, turn after turn, each written before the next begins."""
    started = Run.start(
        "turns",
        QUESTION,
        model="semantic-tiny",
        parameters={"turns": TURNS, "prompt_tokens": PROMPT, "answer_tokens": ANSWER},
        seed=0,
    )
    with stored.folder() as folder:
        turns = list(conversation(folder))
    written = sum(int(str(turn["bytes"])) for turn in turns)
    whole = sum(int(str(turn["whole_bytes"])) for turn in turns)
    most = max(int(str(turn["bytes"])) for turn in turns)
    allowed = max(int(str(turn["allowed_bytes"])) for turn in turns)
    passed = all(int(str(turn["bytes"])) <= int(str(turn["allowed_bytes"])) for turn in turns)
    samples: list[Row] = [
        {"turn": turn["turn"], "way": way, "kb": int(str(turn[key])) / 1e3}
        for way, key in ((OURS, "bytes"), (WHOLE, "whole_bytes"))
        for turn in turns
    ]
    summary: dict[str, Json] = {
        "turns": [{**turn} for turn in turns if int(str(turn["turn"])) in (1, 2, 10, 20, 40)],
        "written_mb": round(written / 1e6, 2),
        "whole_history_mb": round(whole / 1e6, 2),
        "ratio": round(whole / written, 1),
        "most_kb": round(most / 1e3, 1),
    }
    verdict = Verdict(CRITERION, allowed, most, passed=passed)
    return started.finish([*turns, *samples], summary, verdict)


def conversation(folder: Path) -> Iterator[Row]:
    """Files that each turn left new in the store, and what saving everything would have written."""
    backend, _ = load()
    spec = backend.cache_spec()
    store = BackgroundStore(DiskStore.open(folder, stored.ROOM), 1 << 30)
    engine = BlockPoolBatchEngine(
        backend, TokenIds(), BlockPool(spec, max_bytes=1 << 32), spec, store=store
    )
    per_token = sum(layer.bytes_per_block for layer in spec.layers) // BLOCK_TOKENS
    draw = random.Random(0)
    history: tuple[int, ...] = ()
    before = footprint.files(folder)
    for turn in range(1, TURNS + 1):
        prompt = [*history, *(draw.randrange(backend.vocab_size) for _ in range(PROMPT))]
        engine.submit("ann", prompt, max_tokens=ANSWER)
        (done,) = engine.step()
        engine.flush()
        after = footprint.files(folder)
        new = {path: size for path, size in after.items() if path not in before}
        before, held = after, len(history)
        history = (*prompt, *done.tokens)
        yield {
            "turn": turn,
            "tokens": len(history) - 1,  # the last one was not computed
            "block_bytes": in_folder("blocks", new),
            "manifest_bytes": in_folder("agents", new),
            "bytes": in_folder("blocks", new) + in_folder("agents", new),
            "whole_bytes": (len(history) - 1) * per_token,
            "allowed_bytes": (len(history) - held + BLOCK_TOKENS) * per_token + FRAME,
        }
    engine.close()


def in_folder(name: str, files: dict[tuple[str, int], int]) -> int:
    """Bytes of the files that lie below a folder of that name."""
    return sum(size for (path, _), size in files.items() if path.startswith(f"{name}/"))
