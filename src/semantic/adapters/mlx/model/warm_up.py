"""Warm-up: computes a prompt, then decodes batches that grow and shrink, before the first request.

A GPU loads and compiles kernels when they are first used, which takes up to seconds and would stop
every stream. Knows the backend; not which kernels it uses.
"""

from __future__ import annotations

from collections.abc import Iterator

from semantic.adapters.mlx.backend import MLXBackend
from semantic.domain.value_objects import BLOCK_TOKENS, SamplingParams, SequenceId

_ROWS = 9
"""One more than a power of two, so that batches are padded in between."""
_PROMPT = (1, 2, 3, 4)
_CHUNK = 640
"""Tokens of a prompt that is too long for rows of a batch."""


def warming_up(backend: MLXBackend, *, whole: bool = True) -> Iterator[None]:
    """Let some sequences join and leave a batch, one computation at a time; none is open
    afterwards. Unless `whole` one sequence alone, which shows whether the model can be computed."""
    *history, last = _PROMPT
    sequences: list[SequenceId] = []
    if whole:
        long = backend.open(_CHUNK)
        backend.prefill(long, [_PROMPT[0]] * _CHUNK)
        backend.close(long)
        yield
    try:
        for _ in range(_ROWS if whole else 1):
            sequences.append(sequence := backend.open(BLOCK_TOKENS))
            backend.prefill(sequence, history)
            backend.start(sequence, last, history, SamplingParams(), 0)
            backend.decode()
            yield
    finally:
        for sequence in sequences:
            backend.close(sequence)
            backend.decode()
