"""Which part of a request is not as it was, in words for people."""

from __future__ import annotations

from collections.abc import Mapping

from semantic.domain.request_parts import Change, Difference, PartKind

_WORDS: Mapping[Change, str] = {
    Change.CHANGED: "{} changed",
    Change.ADDED: "{} was added",
    Change.REMOVED: "{} was removed",
    Change.MOVED: "{} is at another place in the order",
    Change.NOT_ANSWERED: "{} is not the answer that was given",
    Change.CUT: "{} ended at a stop string, before what the model wrote did",
    Change.RENDERED: "{} is written differently by the template",
}
_THINKING: Mapping[Change, str] = {
    Change.REMOVED: "the thinking of {} was left out",
    Change.ADDED: "thinking was added to {}",
    Change.CHANGED: "the thinking of {} changed",
    Change.RENDERED: "the template writes the thinking of {} differently or leaves it out",
}
_TEMPLATE = "nothing in the request changed, but the template writes it differently"


def part_words(part: Difference) -> str:
    """A part of a sentence: what changed, and how."""
    match part.kind:
        case PartKind.TEMPLATE:
            return _TEMPLATE
        case PartKind.THINKING:
            where = "earlier messages" if part.number is None else _numbered("message", part)
            return _THINKING.get(part.change, _THINKING[Change.CHANGED]).format(where)
        case PartKind.OPTION:
            thing = f"the template option {part.name}" if part.name else "a template option"
        case PartKind.SYSTEM:
            first = part.number == 1
            thing = "the system message" if first else f"system message {part.number}"
        case _:
            thing = _numbered(part.kind.value, part)
    return _WORDS[part.change].format(thing)


def _numbered(noun: str, part: Difference) -> str:
    """tool 7 (Bash)."""
    return f"{noun} {part.number} ({part.name})" if part.name else f"{noun} {part.number}"
