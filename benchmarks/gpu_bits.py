"""Bitwise reproducibility: how an answer depends on its batch and on preemptions.

MLX multiplies matrices of different shapes with different kernels, which add in a different order,
so with any cache a sequence may get other last bits in a batch of another size. In a batch of the
same shape nothing may depend on anything else. Random weights are the worst case: many
log-probabilities of the vocabulary nearly tie.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlx.nn.layers.base import Module

from benchmarks.gpu_sides import prompt
from experiments.harness.document import Json
from semantic.adapters.mlx.model.provider import wrap_model
from semantic.domain.prefix import common_prefix
from semantic.domain.value_objects import BLOCK_TOKENS, ExactBatch, SampledToken
from tests.support.one_batch import said_by, same_bits

LENGTHS = [1024, *(256 + 16 * number for number in range(15))]
BATCHES = (2, 4, 8, 16)
STEPS, SUSPENDED_AFTER = 48, (5, 16, 30)
SUSPENDED = 8
"""Size of the batch that is preempted: one of BATCHES."""
TOP = 4


def bits(model: Module, vocab: int, exact_batch: ExactBatch = "off") -> dict[str, Json]:
    """One sequence in several batch sizes; batches preempted three times and never."""
    backend = wrap_model(model, "benchmark", exact_batch=exact_batch)
    prompts = [prompt(length, number, vocab) for number, length in enumerate(LENGTHS)]
    backend.set_aside(len(LENGTHS) * backend.cache_spec().bytes_for(LENGTHS[0] + 2 * BLOCK_TOKENS))
    said = {size: said_by(backend, prompts[:size], STEPS, top=TOP) for size in (1, *BATCHES)}
    alone = said[1][0]
    divergence: list[Json] = []
    for size in BATCHES:
        mine = said[size][0]
        n_same = common_prefix([one.token for one in mine], [one.token for one in alone])
        divergence.append(
            {
                "batch": size,
                "same_tokens": n_same,
                "of": STEPS,
                "largest_logprob_difference": largest_difference(mine[:n_same], alone[:n_same]),
            }
        )
    thrice = said_by(backend, prompts[:SUSPENDED], STEPS, top=TOP, preempted_after=SUSPENDED_AFTER)
    found = [same for a, b in zip(said[SUSPENDED], thrice, strict=True) for same in same_bits(a, b)]
    n_other = found.count(False)
    return {
        "divergence": divergence,
        "suspended": {"sequences": SUSPENDED, "tokens": len(found), "other_bits": n_other},
    }


def largest_difference(mine: Sequence[SampledToken], others: Sequence[SampledToken]) -> float:
    """Of the log-probabilities of the same tokens after the same tokens."""
    gaps = [
        abs(a.logprob.logprob - b.logprob.logprob)
        for a, b in zip(mine, others, strict=True)
        if a.logprob and b.logprob
    ]
    return round(max(gaps, default=0.0), 6)
