"""What JSON may hold that others cannot take: values without end, and halves of characters.

Knows values and texts; not whose they are.
"""

from __future__ import annotations


def deeper_than(levels: int, value: object) -> bool:
    """Whether lists and objects in `value` stand within each other more than `levels` deep."""
    level = [value]
    for _ in range(levels + 1):
        level = [outer for outer in level if isinstance(outer, dict | list)]
        if not level:
            return False
        level = [child for outer in level for child in _children(outer)]
    return True


def unicode_text(text: str) -> str:
    """`text` with U+FFFD for each half of a surrogate pair: JSON can spell one, UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _children(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
