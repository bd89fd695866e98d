"""`python -m benchmarks.forced_server --answers FILE serve ...`: `semantic` with known answers.

FILE is a JSON list of answers, each a list of token ids. The answer of a request is the one whose
number is the request's `seed`. The model computes every step, and the step selects the likeliest
tokens; only then they become the answer's. So a step takes its usual time, and a draft is right if
it is the answer's next token.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import cast
from unittest.mock import patch

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler

from benchmarks import stall_watch
from semantic.__main__ import main as run_semantic
from semantic.adapters.mlx import backend
from semantic.adapters.mlx.batch import decode_batch
from semantic.adapters.mlx.batch.draft_costs import StepSeconds, Waiting
from semantic.adapters.mlx.kv_cache.paged.attention import PortableAttention
from semantic.adapters.mlx.model import provider
from semantic.adapters.mlx.sampling.sampler import Sampler, SeededSampler, draw, make_sampler
from semantic.domain.value_objects import SamplingParams
from semantic.ports.generation import Draft

Allot = Callable[[Sequence[Draft], int, int, StepSeconds], Sequence[int]]
"""Takes drafts, the number of rows, and the most tokens to check. Returns how many of each."""


class ForcedSampler(SeededSampler):
    """Takes token number `drawn` of an answer, then each later one, and then the last one again."""

    def __init__(self, answer: Sequence[int], drawn: int) -> None:
        super().__init__(SamplingParams(seed=0), drawn)
        self._answer = answer

    def take_token(self) -> int:
        """Return the next token. `give_back` returns to it."""
        return self._answer[min(self.take_seed(), len(self._answer) - 1)]


def forced(answers: Sequence[Sequence[int]], params: SamplingParams, drawn: int) -> Sampler:
    """Return the sampler of the answer that `params` names by its seed. Without a seed it is the
    usual one: a server at its start has requests of its own."""
    if params.seed is None:
        return make_sampler(params, drawn)
    return ForcedSampler(answers[params.seed], drawn)


def draw_forced(samplers: Sequence[Sampler], logprobs: mx.array) -> mx.array:
    """Like `draw`, but rows with a forced sampler get its tokens after a greedy draw."""
    known = [one for one in samplers if isinstance(one, ForcedSampler)]
    if len(known) < len(samplers):
        return draw(samplers, logprobs)
    tokens = mx.array([one.take_token() for one in known], mx.uint32)
    return tokens + 0 * greedy_sampler(logprobs)


def all_up_to(n_each: int) -> Allot:
    """Return a choice of `n_each` tokens of each draft, or as many as it has."""

    def allotted(
        drafts: Sequence[Draft], _n_rows: int, most: int, _seconds: StepSeconds
    ) -> Sequence[int]:
        counts: list[int] = []
        for draft in drafts:
            counts.append(min(n_each, len(draft.tokens), most - sum(counts)))
        return counts

    return allotted


def main(given: Sequence[str] | None = None) -> None:
    """Run `semantic` with the arguments that are not known here."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--checked", type=int, help="each step checks so many tokens of a draft")
    parser.add_argument("--portable", action="store_true", help="pages on any device")
    parser.add_argument("--stalls", type=float, help="tell where threads stand still so long")
    arguments, rest = parser.parse_known_args(given)
    if arguments.stalls is not None:
        stall_watch.begin(cast(float, arguments.stalls))
    answers = cast("list[list[int]]", json.loads(cast(Path, arguments.answers).read_bytes()))
    checked = cast("int | None", arguments.checked)
    with ExitStack() as patches:
        patches.enter_context(patch.object(backend, "make_sampler", partial(forced, answers)))
        patches.enter_context(patch.object(decode_batch, "draw", draw_forced))
        if checked is not None:
            patches.enter_context(patch.object(decode_batch, "allotted", all_up_to(checked)))
            patches.enter_context(patch.object(Waiting, "pays", lambda *_: True))
        if arguments.portable:
            in_pages = partial(provider.wrapping, attention=lambda _: PortableAttention())
            patches.enter_context(patch.object(provider, "wrapping", in_pages))
        sys.argv = ["semantic", *rest]
        run_semantic()


if __name__ == "__main__":
    main()
