"""How many tokens of an agent's cache a new prompt can reuse.

Reused tokens equal the prompt's tokens at the same positions, so reuse never changes an answer.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from semantic.domain.block_hash import TOKEN_BYTES, BlockLink, pack_tokens
from semantic.domain.entities import AgentBlocks
from semantic.domain.stored import Manifest, TurnEnd
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


def turns_before(tokens: Sequence[int], before: Manifest) -> tuple[TurnEnd, ...]:
    """Return the turns of `before` that the history `tokens` of a later turn contains."""
    common = min(common_prefix(before.token_ids, tokens), len(tokens) - 1)
    return tuple(one for one in before.turn_ends if one.tokens <= common)


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


_EACH = 16
"""Every prefix of a prompt up to this number of tokens has a digest. Longer prefixes have eight
digests for each doubling of the length."""
_PER_DOUBLING = 8
_DIGEST_BYTES = 8
"""The size of a digest in bytes. A collision only gives a request another agent's name."""


@dataclass(frozen=True, slots=True)
class PromptDigests:
    """Digests of a prompt's prefixes, and of the whole prompt."""

    n_tokens: int
    prefixes: bytes
    whole: bytes

    def common(self, other: PromptDigests) -> int:
        """Return the length, in tokens, of the longest digested prefix that both prompts share."""
        n = min(len(self.prefixes), len(other.prefixes)) // _DIGEST_BYTES
        same = bisect_left(range(n), True, key=lambda at: self._digest(at) != other._digest(at))
        return _length(same - 1) if same else 0

    def items(self) -> Iterator[tuple[int, bytes]]:
        """Yield the length and the digest of each digested prefix, shortest first."""
        for at in range(len(self.prefixes) // _DIGEST_BYTES):
            yield _length(at), self._digest(at)

    def _digest(self, at: int) -> bytes:
        return self.prefixes[at * _DIGEST_BYTES : (at + 1) * _DIGEST_BYTES]


def digests_of(tokens: Sequence[int]) -> PromptDigests:
    """Return the digests of a prompt."""
    return digests_and_prefixes(tokens, ())[0]


def digests_and_prefixes(
    tokens: Sequence[int], lengths: Collection[int]
) -> tuple[PromptDigests, Mapping[int, bytes]]:
    """Return a prompt's digests, and the digests of its prefixes of the given `lengths`."""
    packed = memoryview(pack_tokens(tokens))
    n_tokens = len(tokens)
    grid = list(_lengths(n_tokens))
    digests: dict[int, bytes] = {}
    running = hashlib.sha256()
    done = 0
    wanted = {length for length in lengths if 0 < length <= n_tokens}
    for length in sorted({*grid, *wanted, n_tokens}):
        running.update(packed[done * TOKEN_BYTES : length * TOKEN_BYTES])
        digests[length] = running.copy().digest()[:_DIGEST_BYTES]
        done = length
    result = PromptDigests(
        n_tokens, b"".join(digests[length] for length in grid), digests[n_tokens]
    )
    return result, digests


def _lengths(n_tokens: int) -> Iterator[int]:
    at = 0
    while (length := _length(at)) <= n_tokens:
        yield length
        at += 1


def _length(at: int) -> int:
    if at < _EACH:
        return at + 1
    doubling, step = divmod(at - _EACH, _PER_DOUBLING)
    return (_EACH << doubling) + (step + 1) * ((_EACH << doubling) // _PER_DOUBLING)
