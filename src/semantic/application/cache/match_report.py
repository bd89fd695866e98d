"""Match report: how much of a request's prompt was reused, and why not more; also in words.

A pure function of the request; reads no store. Of an agent's note it knows only the parts of a
request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from semantic.application.cache.origin import parts_in
from semantic.application.request import Request
from semantic.domain.match import CacheMiss, MatchEnd, MatchReport
from semantic.domain.prefix import common_prefix, without_generation_prompt
from semantic.domain.request_parts import Change, Difference, PartKind, changed_part, rendered_part
from semantic.domain.value_objects import BLOCK_TOKENS

TokenReader = Callable[[int | None], str | None]
"""A token as text; None without a tokenizer or a token."""

_REASONS: Mapping[MatchEnd, str] = {
    MatchEnd.COMPLETE: "All that was cached of it was used.",
    MatchEnd.NEW: "Nothing was cached that begins like it.",
    MatchEnd.DIVERGED: "It is not what the agent had before.",
    MatchEnd.MISSING: "The next block is not there: evicted, dropped or never saved.",
    MatchEnd.DAMAGED: "The next block did not hold what it should and was put aside.",
    MatchEnd.NO_CHECKPOINT: (
        "The blocks are there, but this model's windows or states can be resumed only at an "
        "earlier position."
    ),
    MatchEnd.SLOWER: "Reading the rest would have taken longer than computing it.",
    MatchEnd.SCORED: "Log-probabilities of the prompt were asked for: all of it was computed.",
}
_SHARED = "The agent had nothing cached; what other agents had of it was used."

_OF_THE_REQUEST = (MatchEnd.DIVERGED, MatchEnd.COMPLETE)


def end_reason(match: MatchReport) -> str:
    """Why the reused prefix ended where it did, in a sentence."""
    if match.end is MatchEnd.NEW and match.reused_tokens:
        return _SHARED
    return _REASONS[match.end]


def cache_miss_reason(match: MatchReport) -> str:
    """Why cached tokens were computed again: the changed part, or what the cache lacks."""
    if match.lost is None or match.lost.part is None:
        return end_reason(match)
    words = part_words(match.lost.part)
    changed = f"{words[0].upper()}{words[1:]}."
    return changed if match.end in _OF_THE_REQUEST else f"{changed} {end_reason(match)}"


_CHANGES: Mapping[Change, str] = {
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
    """A clause with the part that changed, and how."""
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
    """tool 7 (Bash)."""
    return f"{noun} {part.number} ({part.name})" if part.name else f"{noun} {part.number}"


def explain(agent: str, match: MatchReport | None, read: TokenReader) -> Iterator[str]:
    """The match of an agent's last prompt, a sentence a line. Names of tools and agents are as the
    client chose them, with their control characters."""
    if match is None:
        yield f"{agent} has had no prompt since it was forked or imported"
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
            f"{match.lost.tokens} tokens that it had were computed again in "
            f"{_seconds(match.lost.seconds)}: {cache_miss_reason(match)}"
        )


def first_difference(position: int, expected: int, got: int, read: TokenReader) -> str:
    """The sentence about the first token that is not the agent's."""
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
        yield f"It differs from what the agent had at position {match.differs_at}, where one ends."


def _token(token: int, read: TokenReader) -> str:
    text = read(token)
    return f"token {token}" if text is None else f"token {token} ({text!r})"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def match_report(request: Request) -> MatchReport:
    """The report of a request that has ended."""
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
    """Tokens that the agent had cached and the request computed again; None if there are none.

    The last prompt token is always computed. Where the prompt is unchanged, less than a block does
    not count: a store may hold whole blocks only.
    """
    computed = min(request.computed, len(request.prompt) - 1)
    held = min(len(request.reuse.history or ()), computed)
    n_tokens = held - request.cached_tokens
    if n_tokens < (1 if differs else BLOCK_TOKENS):
        return None
    share = n_tokens / (computed - request.cached_tokens)
    part = _part(request, shared) if differs else None
    return CacheMiss(n_tokens, share * request.prefill_seconds, part)


def _part(request: Request, shared: int) -> Difference | None:
    """The part of the request that changed; None if the previous request is unknown."""
    saved = request.reuse.manifest
    if saved is None or saved.token_ids != request.reuse.history:
        return None  # the manifest is of another turn than the idle cache
    before, now = parts_in(saved.note), parts_in(request.note)
    if before is None or now is None:
        return None
    in_answer = shared >= without_generation_prompt(saved.prompt_tokens)
    return changed_part(before, now) or rendered_part(before, now, in_answer=in_answer)


def _end(request: Request, shared: int, *, differs: bool) -> MatchEnd:
    """Why the reused prefix ended; `shared` tokens equal the agent's previous ones."""
    end = request.reuse.end
    if request.params.prompt_logprobs is not None and not request.cached_tokens:
        return MatchEnd.SCORED
    if request.reuse.history is None:
        return MatchEnd.NEW if end is MatchEnd.MISSING else end
    if request.cached_tokens < min(shared, len(request.prompt) - 1):
        return end
    return MatchEnd.DIVERGED if differs else MatchEnd.COMPLETE
