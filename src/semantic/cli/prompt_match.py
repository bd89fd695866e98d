"""How a prompt compares with what an agent has, and which of its blocks are there.

Tokens and blocks only; knows no tokenizer, nor how it is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from semantic.domain.block_hash import Part
from semantic.domain.prefix import common_prefix
from semantic.domain.stored import Manifest
from semantic.ports.store import CacheStorePort


@dataclass(frozen=True, slots=True)
class PromptMatch:
    """A prompt beside an agent's tokens.

    The first `common_tokens` are the same. Of the blocks that hold them `present` says which the
    store has; `stored_tokens` are those up to the first that is missing. `expected` and `got` are
    the tokens at which they part: None where one of them ends.
    """

    prompt_tokens: int
    agent_tokens: int
    common_tokens: int
    expected: int | None
    got: int | None
    present: tuple[bool, ...]
    stored_tokens: int

    @property
    def n_missing(self) -> int:
        """Blocks of the common tokens that are not there."""
        return len(self.present) - sum(self.present)


def match_prompt(store: CacheStorePort, manifest: Manifest, prompt: Sequence[int]) -> PromptMatch:
    """Compare `prompt` with the agent's tokens and with the blocks that are there."""
    tokens = manifest.token_ids
    common = common_prefix(tokens, prompt)
    # A block that the prompt leaves halfway serves up to there.
    chain = [link for link in manifest.scope.chain(tokens) if link.start < common]
    found = store.find([link.key(Part.FULL) for link in chain])
    present = tuple(link.key(Part.FULL) in found for link in chain)
    gap = present.index(False) if False in present else None
    return PromptMatch(
        prompt_tokens=len(prompt),
        agent_tokens=len(tokens),
        common_tokens=common,
        expected=tokens[common] if common < len(tokens) else None,
        got=prompt[common] if common < len(prompt) else None,
        present=present,
        stored_tokens=common if gap is None else chain[gap].start,
    )
