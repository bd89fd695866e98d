"""`python -m tests.support.divided_model ROW`: a model of the zoo on two ranks, and on one device.

"llama in pages" is the row "llama", with pages on the ranks that are copied beside MLX.

Prints what was found as a line of JSON; the same command with MLX_RANK is rank 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest
from mlx.nn.layers.base import Module

from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.device import on_cpu
from semantic.adapters.mlx.kv_cache import forms
from semantic.adapters.mlx.model.provider import wrapping
from semantic.adapters.mlx.ranks import following, shared_memory
from semantic.adapters.mlx.ranks.following import follow
from semantic.adapters.mlx.ranks.shard import Ranks, shard_model, shared_name
from semantic.adapters.mlx.ranks.shared_memory import LEAST_BYTES, GatheredBody
from semantic.adapters.mlx.transfers import Transfers
from semantic.domain.block_hash import Part
from semantic.domain.errors import CacheReconstructionError, SemanticError
from semantic.domain.value_objects import BLOCK_TOKENS, SamplingParams, SequenceId
from semantic.ports.generation import at_once
from tests.support.bodies import bytes_of_body
from tests.support.host_driver import HostDriver
from tests.support.in_pages import SUFFIX
from tests.support.reference import is_answer
from tests.support.two_ranks import PLACEMENT, launched, pages_here, shortened
from tests.zoo.folder import drawn

PROMPT: Final = [4 + (i * i * 7 + i * 3) % 500 for i in range(330)]
CAPACITY: Final = 2 * BLOCK_TOKENS
N: Final = 8
_END_SECONDS: Final = 60.0


def main(row: str) -> None:
    """Compare, and print; on rank 1 follow."""
    if "MLX_RANK" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            mine, theirs = launched(Path(folder))
            command = (sys.executable, "-m", "tests.support.divided_model", row)
            with subprocess.Popen(command, env={**os.environ, **theirs}) as other:
                os.environ.update(mine)
                try:
                    ranks = Ranks(PLACEMENT)
                    sys.stdout.write(json.dumps(_found(row, ranks)) + "\n")
                    sys.stdout.flush()
                    ranks.links.finish()
                    other.wait(_END_SECONDS)
                finally:
                    other.kill()  # else an error here would wait for it
        return
    ranks = Ranks(PLACEMENT)
    with suppress(SemanticError):  # rank 0 says it
        follow(_shard(row, ranks), ranks)


def _shard(row: str, ranks: Ranks) -> MLXBackend:
    model = _model(row)
    shard_model(model, ranks)
    name = shared_name("tiny:zoo", "", ranks)
    attention = None
    if row.endswith(SUFFIX):
        attention = pages_here()
        if on_cpu():
            _copy_by_hand()
    return at_once(wrapping(model, name, attention=attention, decoding=shortened, ranks=ranks))


def _copy_by_hand() -> None:
    """Copy bodies as a GPU does."""
    transfers = Transfers(HostDriver())
    patch = pytest.MonkeyPatch()
    patch.setattr(forms, "transfers_for", lambda _: transfers)
    for module in (forms, shared_memory, following):
        patch.setattr(module, "transfers_here", lambda: transfers)


def _model(row: str) -> Module:
    return drawn(row.removesuffix(SUFFIX), wide=row.endswith(SUFFIX))


def _found(row: str, ranks: Ranks) -> dict[str, object]:
    """Whether the answer is that of one device, and that after a restore the one without."""
    try:
        backend = _shard(row, ranks)
    except SemanticError as error:
        return {"refused": str(error)}
    whole = _prefilled(backend, PROMPT[:BLOCK_TOKENS])
    parts = [one for one in (Part.FULL, Part.WINDOW) if backend.layout().bytes_per_token(one)]
    exported = {one: backend.export_block(whole, one, 0, BLOCK_TOKENS) for one in parts}
    bodies = {one: bytes_of_body(body) for one, body in exported.items()}
    large = [one for one in exported.values() if len(one) >= LEAST_BYTES]
    shared = all(isinstance(one, GatheredBody) and one.room is not None for one in large)
    checkpoint = None
    if backend.layout().needs_checkpoint:
        checkpoint = backend.export_checkpoint(whole)
    tokens = _answer(backend, whole)
    restored = backend.open(CAPACITY)
    for part in parts or [Part.FULL]:
        (target,) = backend.loading(restored, part, 0, BLOCK_TOKENS)
        target.put(bodies.get(part, b""))
    one_device = _model(row)
    one_device.eval()
    right = is_answer(one_device, PROMPT, tokens, N)
    try:
        backend.loaded(restored, BLOCK_TOKENS, checkpoint)
    except CacheReconstructionError:
        return {"right": right, "restored": False}
    again = _answer(backend, restored) == tokens
    return {"right": right, "restored": again, "in pages": backend.in_pages, "shared": shared}


def _prefilled(backend: MLXBackend, tokens: Sequence[int]) -> SequenceId:
    sequence = backend.open(CAPACITY)
    backend.prefill(sequence, tokens)
    return sequence


def _answer(backend: MLXBackend, sequence: SequenceId) -> list[int]:
    """What follows the prompt, of which the sequence holds the first block."""
    backend.prefill(sequence, PROMPT[BLOCK_TOKENS:-1])
    backend.start(sequence, PROMPT[-1], PROMPT[:-1], SamplingParams(), 0)
    said: list[int] = []
    while len(said) < N:
        said += [one.token for one in backend.decode() if one.sequence == sequence]
    backend.close(sequence)
    return said


if __name__ == "__main__":
    main(sys.argv[1])
