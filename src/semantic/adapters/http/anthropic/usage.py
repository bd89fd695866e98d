"""How many tokens an answer took, in Anthropic's terms.

A prompt is three parts there: read from the cache, written to it, and the rest behind the last
place from which it can be read again. Here those places are the ends of whole blocks.
"""

from __future__ import annotations

from semantic.adapters.http.cache_miss_report import usage_extension
from semantic.domain.answer import Usage
from semantic.domain.value_objects import BLOCK_TOKENS


def usage_at_start(prompt_tokens: int) -> dict[str, object]:
    """Before anything is known of the cache: the event at the end says how the prompt divides."""
    return _usage(prompt_tokens, read=0, created=0, output=0, thinking=0)


def usage_of(usage: Usage, *, answered: bool = True) -> dict[str, object]:
    """The three parts add up to the prompt. `answered` is False when no answer was told.

    The last token is never among those written, so `input_tokens` is at least 1: there are
    clients that take 0 for a figure that is missing, and go on with the one from the start.
    """
    whole_blocks = (usage.prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    created = max(0, whole_blocks - usage.cached)
    told = _usage(
        usage.prompt - usage.cached - created,
        read=usage.cached,
        created=created,
        output=usage.completion if answered else 0,
        thinking=usage.reasoning if answered else 0,
    )
    return told | usage_extension(usage.match)


def _usage(rest: int, *, read: int, created: int, output: int, thinking: int) -> dict[str, object]:
    return {
        "input_tokens": rest,
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": created,
        "output_tokens": output,
        "output_tokens_details": {"thinking_tokens": thinking},
    }
