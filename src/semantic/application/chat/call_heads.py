"""CallHeads: finds what precedes the arguments of a call, in a text that is still being written.

Knows how models write a call's name before arguments in JSON; other spellings are given. Knows
nothing of arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from semantic.ports.chat import CallHead

Read = Literal["all", "some", "none"]
"""Whether a text begins with all of what is expected, could still do so, or cannot."""

LONGEST_SPACE: Final = 256
"""White space at one place before the arguments, which are read again with each token until they
begin: with more, or a longer name, a call is parsed as a whole."""
_LONGEST_NAME: Final = 200
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_NAMES: Final = re.compile(r"[A-Za-z_][\w.:/-]{0,127}", re.ASCII)

OBJECT_HEAD: Final = CallHead(
    # {"name": "look", "arguments": {
    ("{", '"name"', ":"),
    re.compile(r'(?P<name>"(?:[^"\\\x00-\x1f]|\\.)*")'),
    re.compile(r'(?:"[^\x00-\x1f]*)?'),
    ((",",), ('"arguments"', '"parameters"'), (":",)),
    "{",
    quoted=True,
)
JSON_HEADS: Final = (
    OBJECT_HEAD,
    # look[ARGS]{
    CallHead(
        (),
        re.compile(r"(?P<name>[\w-]+)(?![\w-])", re.ASCII),
        re.compile(r"[\w-]*", re.ASCII),
        (("[ARGS]",),),
        "{",
    ),
    # <|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{
    CallHead(
        ("<|tool_call_begin|>",),
        re.compile(r"(?:functions\.)?(?P<name>[\w.-]+):[0-9]+(?![0-9])", re.ASCII),
        re.compile(r"[\w.-]*(?::[0-9]*)?", re.ASCII),
        (("<|tool_call_argument_begin|>",),),
        "{",
    ),
    # <|open|>call tool="look" index="1"<|sep|><|open|>json type="object"<|sep|>{
    CallHead(
        ("<|open|>call",),
        re.compile(r'tool="(?P<name>[\w.-]+)"(?: index="[0-9]*")?(?=<)', re.ASCII),
        re.compile(r"[^<]*"),
        (("<|sep|>",), ('<|open|>json type="object"<|sep|>',)),
        "{",
    ),
)


def is_name(name: str) -> bool:
    """Whether `name` may be that of a tool that was not offered. Some formats take all that
    precedes the arguments for the name."""
    return _NAMES.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class FoundHead:
    """A head at a position of a text: how much of it is there, and where the arguments begin."""

    read: Read
    head: CallHead = OBJECT_HEAD
    name: str | None = None
    end: int = 0


def find_head(heads: Iterable[CallHead], text: str, at: int) -> FoundHead:
    """The one of `heads` that is at position `at`, or goes furthest."""
    founds = [_find(head, text, at) for head in heads]
    whole = next((found for found in founds if found.read == "all"), None)
    some = [found for found in founds if found.read == "some"]
    named = next((found for found in some if found.name is not None), None)
    return whole or named or next(iter(some), None) or FoundHead("none")


def find_step(steps: tuple[str, ...], text: str, at: int) -> tuple[Read, int]:
    """One of `steps` behind white space, and where it ends."""
    begins, at = at, behind_space(text, at)
    if at - begins > LONGEST_SPACE:
        return "none", at
    for step in steps:
        if text.startswith(step, at):
            return "all", at + len(step)
    rest = text[at : at + max(map(len, steps))]
    return ("some" if any(step.startswith(rest) for step in steps) else "none"), at


def behind_space(text: str, at: int) -> int:
    """The position after white space at position `at`."""
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _find(head: CallHead, text: str, at: int) -> FoundHead:
    """`head` at position `at` of `text`."""
    for step in (*head.before, ""):
        read, at = find_step((step,), text, at)
        if read != "all":
            return FoundHead(read)
    found = head.name.match(text, at)
    if found is None or found.end() - at > _LONGEST_NAME:
        begins = len(text) - at <= _LONGEST_NAME and head.starts_name.fullmatch(text, at)
        return FoundHead("some" if begins else "none")
    if not head.quoted and found.end() == len(text):
        return FoundHead("some")  # more of the name may follow
    name = _name_in(found["name"], quoted=head.quoted)
    if not name:
        return FoundHead("none")
    at = found.end()
    for steps in (*head.after, *([(head.begin,)] if head.begin else [])):
        read, at = find_step(steps, text, at)
        if read != "all":
            return FoundHead(read, head, name)
    return FoundHead("all", head, name, at - len(head.begin))


def _name_in(text: str, *, quoted: bool) -> str | None:
    """The name that is written as `text`; None if it is no JSON string."""
    if not quoted:
        return text
    try:
        name = json.loads(text)
    except ValueError:
        return None
    return name if isinstance(name, str) else None
