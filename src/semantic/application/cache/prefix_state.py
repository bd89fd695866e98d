"""What the archive knows of one request: its chain of hashes, what is stored, what it reused.

Plain data beside the request; decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from semantic.application.cache.loading import Load
from semantic.application.cache.prefix_lookup import StoredPrefix
from semantic.domain.block_hash import BlockHash, BlockLink, Scope
from semantic.domain.match import MatchEnd
from semantic.domain.stored import Manifest
from semantic.domain.value_objects import BLOCK_TOKENS


@dataclass(slots=True)
class PrefixState:
    """Between a request and the store. Without a store it stays as it is made."""

    links: list[BlockLink] = field(default_factory=list)
    """The full blocks of the request's tokens, as far as they were asked for."""
    kept_blocks: int = 0
    """Of those, how many leading ones are known to be in the store."""
    prefix: StoredPrefix | None = None
    """What the request is to begin with."""
    searched: bool = False
    """Whether `prefix` was looked for since the request began to wait."""
    load: Load | None = None
    """The prefix on its way into the request's sequence."""
    junction: int | None = None
    """Where a checkpoint is to be taken: others have the same tokens up to there."""
    computing: BlockHash | None = None
    """The block that is being computed now, which others may be waiting for."""
    history: tuple[int, ...] | None = None
    """The tokens that the agent had before, or None when it had nothing."""
    manifest: Manifest | None = None
    """The agent as it was saved last when the request came."""
    end: MatchEnd = MatchEnd.MISSING
    """Why what was found ended where it did."""
    source: str = "none"
    prefill_seconds: float = 0.0

    def full_links(self, scope: Scope, tokens: Sequence[int]) -> list[BlockLink]:
        """The full blocks of `tokens`, which begin as they did whenever this was asked before."""
        done = len(self.links)
        whole = len(tokens) // BLOCK_TOKENS
        if done < whole:
            parent = self.links[-1].hash if done else None
            rest = tokens[done * BLOCK_TOKENS : whole * BLOCK_TOKENS]
            self.links += scope.chain(rest, parent=parent, start=done * BLOCK_TOKENS)
        return self.links[:whole]

    def all_links(self, scope: Scope, tokens: Sequence[int]) -> list[BlockLink]:
        """The blocks of `tokens`, the last one perhaps not full."""
        links = self.full_links(scope, tokens)
        rest = tokens[len(links) * BLOCK_TOKENS :]
        parent = links[-1].hash if links else None
        return [*links, *scope.chain(rest, parent=parent, start=len(links) * BLOCK_TOKENS)]

    def wait_again(self) -> None:
        """The request was preempted: what was found may be gone when it comes back."""
        self.prefix, self.searched, self.load, self.computing = None, False, None, None
