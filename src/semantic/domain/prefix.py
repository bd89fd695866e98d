"""How many tokens of an agent's cache a new prompt can reuse.

Reused tokens equal the prompt's tokens at the same positions, so reuse never changes an answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from semantic.domain.block_hash import BlockLink
from semantic.domain.entities import AgentBlocks
from semantic.domain.stored import Manifest
from semantic.domain.value_objects import BLOCK_TOKENS, LayerKind, LayerSpec, ModelCacheSpec

_MAX_GENERATION_PROMPT = 16
"""The assumed maximum number of tokens in a generation prompt."""
_MAX_GENERATION_SHARE = 4
"""The generation prompt counts as at most a quarter of a short prompt."""


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    limit = min(len(left), len(right))
    if tuple(left[:limit]) == tuple(right[:limit]):
        return limit
    return next(i for i in range(limit) if left[i] != right[i])


def without_generation_prompt(n_tokens: int) -> int:
    """Return how many of a prompt's tokens the agent's next prompt probably repeats."""
    return n_tokens - min(_MAX_GENERATION_PROMPT, n_tokens // _MAX_GENERATION_SHARE)


def ends_of_turn(turn: Manifest) -> list[BlockLink]:
    """Return the last block of `turn`, and the block in which its repeated prompt part ends."""
    stop = _repeated(turn)
    links = list(turn.scope.chain(turn.token_ids))
    n_full = stop // BLOCK_TOKENS  # full blocks that the turn and the prompt share
    prompt = turn.scope.continued(links[:n_full], turn.token_ids[:stop])[n_full:]
    return [*links[-1:], *prompt]


def continues(newer: Manifest, older: Manifest) -> bool:
    """Return whether the turn `newer` of an agent repeats the prompt of the turn `older`."""
    stop = _repeated(older)
    return newer.token_ids[:stop] == older.token_ids[:stop]


def _repeated(turn: Manifest) -> int:
    return min(without_generation_prompt(turn.prompt_tokens), len(turn.token_ids))


def earliest_cut(layer: LayerSpec, held: range, total: int) -> int:
    """Return the shortest length to which a layer's cache can be cut.

    The cache holds the positions `held` of `total`. Returns `total + 1` if it cannot be cut.
    """
    if held.stop != total or (held.start > 0 and layer.kind is LayerKind.FULL):
        return total + 1
    if layer.kind is LayerKind.STATE:
        return total
    if held.start == 0 or layer.window is None:
        return 0
    return held.start + layer.window - 1


def reusable_prefix(spec: ModelCacheSpec, blocks: AgentBlocks | None, prompt: Sequence[int]) -> int:
    """Return how many tokens of `prompt` a request can reuse. The last token is never reused."""
    if blocks is None or blocks.retired:
        return 0
    length = spec.reusable(min(common_prefix(blocks.token_ids, prompt), len(prompt) - 1))
    if length < 1:
        return 0
    earliest = max(
        earliest_cut(layer, blocks.token_range(layer_id), blocks.total_tokens)
        for layer_id, layer in enumerate(spec.layers)
    )
    return length if length >= earliest else 0
