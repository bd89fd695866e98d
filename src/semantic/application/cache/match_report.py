"""Match report: how much of a request's prompt was reused, and why not more.

A pure function of the request; reads no store. Of an agent's note it knows only the parts of a
request.
"""

from __future__ import annotations

from semantic.application.cache.agent_note import parts_in
from semantic.application.request import Request
from semantic.domain.match import CacheMiss, MatchEnd, MatchReport
from semantic.domain.prefix import common_prefix, without_generation_prompt
from semantic.domain.request_parts import Difference, changed_part, rendered_part
from semantic.domain.value_objects import BLOCK_TOKENS


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
