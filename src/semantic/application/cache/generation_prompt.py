"""The marks that open an answer: a rendered conversation ends with them.

A template may write them in another way when the answer is known. Knows only how many they are.
"""

from __future__ import annotations

_MOST_TOKENS = 16
"""No template needs more; in a short prompt they are a quarter at most, or short prompts would all
look alike."""
_PART = 4


def without_opening(n_tokens: int) -> int:
    """How many of a prompt's tokens its next one will surely begin with."""
    return n_tokens - min(_MOST_TOKENS, n_tokens // _PART)
