"""What sequences say that decode in one batch from beginning to end, preempted on the way or not.

For comparisons to the bit: with `top`, log-probabilities are returned unrounded. Drives a backend
alone; knows no engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence

import mlx.core as mx

from semantic.adapters.mlx.backend import MLXBackend
from semantic.domain.value_objects import SampledToken, SamplingParams, SequenceId, whole_blocks
from tests.support.preempted import preempted, resumed


def said_by(
    backend: MLXBackend,
    prompts: Sequence[Sequence[int]],
    n_steps: int,
    *,
    top: int,
    preempted_after: Collection[int] = (),
    cuts: Sequence[int] = (),
) -> list[list[SampledToken]]:
    """Of each prompt `n_steps` tokens; all are preempted and resumed after so many steps. The first
    pass over prompt i ends at `cuts[i]`."""
    sampling = SamplingParams(logprobs=top)
    capacity = whole_blocks(max(map(len, prompts)) + n_steps)
    histories = [list(prompt) for prompt in prompts]
    sequences: list[SequenceId] = []
    for prompt, cut in zip(prompts, cuts or [0] * len(prompts), strict=True):
        sequence = backend.open(capacity)
        before = prompt[:-1]
        for part in (before[:cut], before[cut:]):
            for at in range(0, len(part), backend.best_chunk):
                backend.prefill(sequence, part[at : at + backend.best_chunk])
        backend.start(sequence, prompt[-1], before, sampling, 0)
        sequences.append(sequence)
    said: list[list[SampledToken]] = [[] for _ in prompts]
    for step in range(n_steps):
        if step in preempted_after:
            kept = [
                preempted(backend, sequence, history, capacity)
                for sequence, history in zip(sequences, histories, strict=True)
            ]
            sequences = [resumed(backend, blocks, capacity) for blocks in kept]
            for sequence, history in zip(sequences, histories, strict=True):
                backend.start(sequence, history[-1], history[:-1], sampling, step)
        tokens = {one.sequence: one for one in backend.decode()}
        for sequence, mine, history in zip(sequences, said, histories, strict=True):
            mine.append(tokens[sequence])
            history.append(tokens[sequence].token)
    for sequence in sequences:
        backend.close(sequence)
    return said


def same_bits(mine: Sequence[SampledToken], others: Sequence[SampledToken]) -> list[bool]:
    """Of each token whether it is the other and has the very same log-probabilities."""
    return [(a.token, a.logprob) == (b.token, b.logprob) for a, b in zip(mine, others, strict=True)]


def beside_others(
    n: int, draws: int, attended: Callable[[Sequence[int]], Sequence[mx.array]]
) -> Iterator[tuple[int, list[int], bool]]:
    """Of `n` rows, `draws` random batches: each row, its batch, and whether `attended` gives it the
    bits that it gives it alone."""
    alone = [attended([row])[0] for row in range(n)]
    draw = random.Random(0)
    for _ in range(draws):
        rows = draw.sample(range(n), draw.randint(2, n))
        for row, out in zip(rows, attended(rows), strict=True):
            yield row, rows, bool(mx.array_equal(out, alone[row]).item())
