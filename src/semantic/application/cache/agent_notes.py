"""Notes: text about an agent's last request, saved with the agent's manifest.

The first line of a note is the Origin, and the second line has the parts of the request's prompt.
Both are JSON with labels and digests, never text of the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard, TypeVar, get_args

from semantic.domain.chat import Chat, Role
from semantic.domain.identity import Identity, digest, is_tag
from semantic.domain.match import CacheMiss, MatchEnd, MatchReport
from semantic.domain.prefix import common_prefix, without_generation_prompt
from semantic.domain.request_parts import (
    MAX_MESSAGES,
    SHORT,
    Answered,
    Change,
    Difference,
    MessageDigest,
    Named,
    PartKind,
    Parts,
    changed_part,
    label,
    rendered_part,
)
from semantic.domain.stored import Manifest
from semantic.domain.value_objects import BLOCK_TOKENS

if TYPE_CHECKING:
    from semantic.application.request import Request

T = TypeVar("T")

_AGENT_NOTE_START = '{"parts"'
_AGENT_NOTE_VERSION = 1
_CONTINUED = "continued"
_ROLES: dict[str, Role] = {role[0]: role for role in get_args(Role)}


def note_of(origin: str, parts: Parts | None, last: str = "", continued: str | None = None) -> str:
    """Return a note with one line each for `origin`, `parts`, the agent that a new agent seems to
    continue, and `last`. Leaves out empty lines."""
    lines = [origin] if origin else []
    if parts is not None:
        text = json.dumps(_written(parts), ensure_ascii=False, separators=(",", ":"))
        lines.append(text)
    if continued is not None:
        lines.append(json.dumps({_CONTINUED: continued}))
    if last:
        lines.append(last)
    return "\n".join(lines)


def continued_in(note: str) -> str | None:
    """Return the agent that a new agent seems to continue; None without one."""
    lines = note.split("\n", 3)[:3]  # other texts may be long
    line = next((one for one in lines if one.startswith(f'{{"{_CONTINUED}"')), "{}")
    try:
        name: object = json.loads(line).get(_CONTINUED)
    except (ValueError, RecursionError):
        return None
    return name if _is_parent(name) else None


def parts_in(note: str, max_messages: int = MAX_MESSAGES) -> Parts | None:
    """Return the parts of a prompt in a note; None if the text is not a note of this version."""
    lines = note.split("\n", 2)[:2]  # other texts may be long
    line = next((one for one in lines if one.startswith(_AGENT_NOTE_START)), None)
    if line is None:
        return None
    try:
        return _read(json.loads(line), max_messages)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _written(parts: Parts) -> dict[str, object]:
    return {
        "parts": _AGENT_NOTE_VERSION,
        "options": [[one.name, one.digest] for one in parts.options],
        "tools": [[one.name, one.digest] for one in parts.tools],
        "messages": [
            f"{one.role[0]}{one.answered}{one.digest}{one.thought}" for one in parts.messages
        ],
        "n_messages": parts.n_messages,
        "kept": parts.n_replayed,
    }


def _read(fields: object, max_messages: int) -> Parts | None:
    """Return the parts of a prompt in `fields`. Raises KeyError, TypeError or ValueError if
    `fields` are malformed."""
    if not isinstance(fields, dict) or fields["parts"] != _AGENT_NOTE_VERSION:
        return None
    read = _is(list, fields["messages"])[:max_messages]
    messages = tuple(_message(_is(str, one)) for one in read)
    n_messages = _is(int, fields["n_messages"])
    n_replayed = _is(int, fields["kept"])
    if not 0 <= n_replayed <= n_messages or n_messages < len(messages):
        raise ValueError("counts")
    tools, options = (_named(_is(list, fields[name])) for name in ("tools", "options"))
    return Parts(options, tools, messages, n_messages, n_replayed)


def _named(pairs: Sequence[object]) -> tuple[Named, ...]:
    found = [_is(list, pair) for pair in pairs]
    # Another program may have written the file.
    return tuple(Named(label(_is(str, name)), _is(str, digest)) for name, digest in found)


def _message(text: str) -> MessageDigest:
    role, answered, digests = _ROLES[text[:1]], Answered(text[1:2]), text[2:]
    return MessageDigest(role, digests[:SHORT], digests[SHORT:], answered)


def _is(kind: type[T], value: object) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


_VERSION = 1
_START = '{"origin"'
_LONGEST_NAME = 256
_DIGEST_BYTES = 8
_TOOLS, _NO_TOOLS = "tools", "plain"


@dataclass(frozen=True, slots=True)
class Origin:
    """A client identity and a `kind` of conversation."""

    identity: Identity
    kind: str

    @property
    def has_tools(self) -> bool:
        """True if the requests offer tools."""
        return self.kind.startswith(_TOOLS)

    def note(self) -> str:
        """Return a line of JSON, which `origin_in` reads."""
        one = self.identity
        fields = {
            "session": one.session,
            "client": one.client,
            "agent": one.agent,
            "parent": one.parent,
            "shared": one.shared,
            "kind": self.kind,
        }
        return json.dumps({"origin": _VERSION, **fields}, ensure_ascii=False)


def origin_of(identity: Identity, chat: Chat | None) -> Origin:
    """Return the origin of a request for `chat`; None means a plain prompt."""
    kind = _TOOLS if chat is not None and chat.tools else _NO_TOOLS
    if identity.shared and chat is not None:
        kind = f"{kind}-{_first_messages(chat).hex()}"
    return Origin(identity, kind)


def origin_in(note: str) -> Origin | None:
    """Return the origin in a note; None if it has none."""
    if not note.startswith(_START):  # other texts may be long
        return None
    try:
        fields: object = json.loads(note.partition("\n")[0])
    except (ValueError, RecursionError):
        return None
    return _origin(fields) if isinstance(fields, dict) else None


def session_and_client_in(note: str) -> tuple[str | None, str | None]:
    """Return the session and the client in a note. Each of them is None if unknown."""
    origin = origin_in(note)
    if origin is None:
        return None, None
    return origin.identity.session, origin.identity.client or None


def parent_of(manifest: Manifest) -> str | None:
    """Return the name of the agent's parent: a fork's original, or the parent that the client
    named."""
    return manifest.parent if manifest.parent is not None else parent_in(manifest.note)


def parent_after(before: Manifest | None, note: str) -> str | None:
    """Return the parent of an agent after a request with `note`. `before` is the agent's manifest
    before it, None for a new agent."""
    named = parent_in(note)
    if before is None:
        return continued_in(note) if named is None else named
    return named if before.parent is None else before.parent


def parent_in(note: str) -> str | None:
    """Return the name of the parent agent in a note, as the client gave it."""
    origin = origin_in(note)
    return None if origin is None else origin.identity.parent


def _origin(fields: Mapping[str, object]) -> Origin | None:
    if fields.get("origin") != _VERSION:
        return None
    session, kind = fields.get("session"), fields.get("kind")
    client, agent, parent = (fields.get(name) for name in ("client", "agent", "parent"))
    if not (is_tag(session) and is_tag(kind) and (client == "" or is_tag(client))):
        return None
    if not ((agent is None or is_tag(agent)) and _is_parent(parent)):
        return None
    identity = Identity(session, client, agent, parent, shared=fields.get("shared") is True)
    return Origin(identity, kind)


def _is_parent(text: object) -> TypeGuard[str | None]:
    if text is None:
        return True
    return isinstance(text, str) and 1 <= len(text) <= _LONGEST_NAME and text.isprintable()


def _first_messages(chat: Chat) -> bytes:
    texts: list[bytes] = []
    for message in chat.messages:
        texts += [message.role.encode(), message.content.encode("utf-8", "surrogatepass")]
        if message.role == "user":
            break
    return digest("opening-v1", *texts)[:_DIGEST_BYTES]


TokenReader = Callable[[int | None], str | None]
"""Returns a token as text; None without a tokenizer or a token."""

_REASONS: Mapping[MatchEnd, str] = {
    MatchEnd.COMPLETE: "The prompt reused every matching cached token.",
    MatchEnd.NEW: "No cached prefix matches it.",
    MatchEnd.DIVERGED: "The prompt differs from the agent's history.",
    MatchEnd.MISSING: "The next block is missing: evicted, dropped or never saved.",
    MatchEnd.DAMAGED: "The next block failed verification, and the store put it aside.",
    MatchEnd.NO_CHECKPOINT: (
        "The blocks are there, but this model's windows or states can resume only at an "
        "earlier position."
    ),
    MatchEnd.SLOWER: "Reading the rest would have taken longer than computing it.",
    MatchEnd.OTHER_BITS: "The agent's cache has other bits; see --kv-bits.",
    MatchEnd.SCORED: "The request asked for log-probabilities, which need the whole prompt.",
}
_SHARED = "The agent had nothing cached; it reused other agents' blocks."

_OF_THE_REQUEST = (MatchEnd.DIVERGED, MatchEnd.COMPLETE)


def end_reason(match: MatchReport) -> str:
    """Return a sentence that says why the reused prefix ended."""
    if match.end is MatchEnd.NEW and match.reused_tokens:
        return _SHARED
    return _REASONS[match.end]


def cache_miss_reason(match: MatchReport) -> str:
    """Return a sentence that says why the request computed cached tokens again."""
    if match.lost is None or match.lost.part is None:
        return end_reason(match)
    words = part_words(match.lost.part)
    changed = f"{words[0].upper()}{words[1:]}."
    return changed if match.end in _OF_THE_REQUEST else f"{changed} {end_reason(match)}"


_CHANGES: Mapping[Change, str] = {
    Change.CHANGED: "{} changed",
    Change.ADDED: "{} was added",
    Change.REMOVED: "{} was removed",
    Change.MOVED: "{} moved to another place in the order",
    Change.NOT_ANSWERED: "{} differs from the model's answer",
    Change.CUT: "{} ended at a stop string, before the end of the model's text",
    Change.RENDERED: "the template writes {} differently",
}
_THINKING: Mapping[Change, str] = {
    Change.REMOVED: "the thinking of {} was left out",
    Change.ADDED: "thinking was added to {}",
    Change.CHANGED: "the thinking of {} changed",
    Change.RENDERED: "the template writes the thinking of {} differently or leaves it out",
}
_TEMPLATE = "nothing in the request changed, but the template writes it differently"


def part_words(part: Difference) -> str:
    """Return a clause that names the changed part of the prompt and the change."""
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
    return _CHANGES[part.change].format(thing)


def _numbered(noun: str, part: Difference) -> str:
    return f"{noun} {part.number} ({part.name})" if part.name else f"{noun} {part.number}"


def explain(agent: str, match: MatchReport | None, read: TokenReader) -> Iterator[str]:
    """Yield the match report of an agent's last prompt as lines of one sentence."""
    if match is None:
        yield f"{agent} has had no prompt since its fork or import"
        return
    source = f" from {match.source}" if match.reused_tokens else ""
    cost = f", which took {_seconds(match.seconds)}" if match.computed_tokens else ""
    yield (
        f"{agent}'s last prompt: {match.prompt_tokens} tokens, {match.reused_tokens} "
        f"reused{source}, {match.computed_tokens} computed{cost}"
    )
    yield end_reason(match)
    yield from _difference(match, read)
    if match.lost is not None:
        yield (
            f"The model computed {match.lost.tokens} cached tokens again in "
            f"{_seconds(match.lost.seconds)}: {cache_miss_reason(match)}"
        )


def first_difference(position: int, expected: int, got: int, read: TokenReader) -> str:
    """Return a sentence about the first token that differs from the cached tokens."""
    return (
        f"At position {position} the agent had {_token(expected, read)}, "
        f"the prompt has {_token(got, read)}."
    )


def _difference(match: MatchReport, read: TokenReader) -> Iterator[str]:
    if match.differs_at is None:
        return
    if match.expected is not None and match.got is not None:
        yield first_difference(match.differs_at, match.expected, match.got, read)
    else:
        yield f"It differs from the agent's tokens at position {match.differs_at}, where one ends."


def _token(token: int, read: TokenReader) -> str:
    text = read(token)
    return f"token {token}" if text is None else f"token {token} ({text!r})"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def match_report(request: Request) -> MatchReport:
    """Return the match report of a finished request."""
    prompt, reuse = request.prompt, request.reuse
    history = reuse.history or ()
    shared = common_prefix(history, prompt)
    differs = shared < min(len(history), len(prompt))
    return MatchReport(
        prompt_tokens=len(prompt),
        reused_tokens=request.cached_tokens,
        end=_end(request, shared, differs=differs),
        source=reuse.source if request.cached_tokens else "none",
        differs_at=shared if differs else None,
        expected=history[shared] if differs else None,
        got=prompt[shared] if differs else None,
        seconds=request.prefill_seconds,
        lost=_cache_miss(request, shared, differs=differs),
        any_chip=reuse.any_chip and request.cached_tokens > 0,
    )


def _cache_miss(request: Request, shared: int, *, differs: bool) -> CacheMiss | None:
    # Without the last prompt token. In an unchanged prompt, less than a block does not count
    # either, as stores may lack partial blocks.
    computed = min(request.computed, len(request.prompt) - 1)
    held = min(len(request.reuse.history or ()), computed)
    n_tokens = held - request.cached_tokens
    if n_tokens < (1 if differs else BLOCK_TOKENS):
        return None
    share = n_tokens / (computed - request.cached_tokens)
    part = _part(request, shared) if differs else None
    return CacheMiss(n_tokens, share * request.prefill_seconds, part)


def _part(request: Request, shared: int) -> Difference | None:
    saved = request.reuse.manifest
    if saved is None or saved.token_ids != request.reuse.history:
        return None  # the manifest belongs to another turn than the idle cache
    before, now = parts_in(saved.note), parts_in(request.note)
    if before is None or now is None:
        return None
    in_answer = shared >= without_generation_prompt(saved.prompt_tokens)
    return changed_part(before, now) or rendered_part(before, now, in_answer=in_answer)


def _end(request: Request, shared: int, *, differs: bool) -> MatchEnd:
    end = request.reuse.end
    if request.params.prompt_logprobs is not None and not request.cached_tokens:
        return MatchEnd.SCORED
    if request.reuse.history is None:
        return MatchEnd.NEW if end is MatchEnd.MISSING else end
    if request.cached_tokens < min(shared, len(request.prompt) - 1):
        return end
    return MatchEnd.DIVERGED if differs else MatchEnd.COMPLETE
