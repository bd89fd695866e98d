"""Says how much of a request's prompt was reused, and why not more.

A pure function of the request; reads no store. Of notes it knows only the parts of a request.
"""

from __future__ import annotations

from semantic.application.cache.agent_note import parts_in
from semantic.application.cache.generation_prompt import without_opening
from semantic.application.request import Request
from semantic.domain.match import Lost, MatchEnd, MatchReport
from semantic.domain.prefix import common_prefix
from semantic.domain.request_parts import Difference, changed_part, rendered_part
from semantic.domain.value_objects import BLOCK_TOKENS


def match_report(request: Request) -> MatchReport:
    """The report of a request, at its end."""
    state, prompt = request.archived, request.prompt
    history = state.history or ()
    shared = common_prefix(history, prompt)
    differs = shared < min(len(history), len(prompt))
    return MatchReport(
        prompt_tokens=len(prompt),
        reused_tokens=request.cached_tokens,
        end=_end(request, shared, differs=differs),
        source=state.source if request.cached_tokens else "none",
        differs_at=shared if differs else None,
        expected=history[shared] if differs else None,
        got=prompt[shared] if differs else None,
        seconds=state.prefill_seconds,
        lost=_lost(request, shared, differs=differs),
    )


def _lost(request: Request, shared: int, *, differs: bool) -> Lost | None:
    """What the agent had of the prompt's length and was computed again.

    The last token always is. Where all is as it was, less than a block is no loss: a store may
    hold whole ones only.
    """
    computed = min(request.computed, len(request.prompt) - 1)
    held = min(len(request.archived.history or ()), computed)
    n_tokens = held - request.cached_tokens
    if n_tokens < (1 if differs else BLOCK_TOKENS):
        return None
    share = n_tokens / (computed - request.cached_tokens)
    part = _part(request, shared) if differs else None
    return Lost(n_tokens, share * request.archived.prefill_seconds, part)


def _part(request: Request, shared: int) -> Difference | None:
    """What in the request is not as it was; None when the request before is not known."""
    saved = request.archived.manifest
    if saved is None or saved.token_ids != request.archived.history:
        return None  # what was saved is of another turn than what the pool had
    before, now = parts_in(saved.note), parts_in(request.note)
    if before is None or now is None:
        return None
    in_answer = shared >= without_opening(saved.prompt_tokens)
    return changed_part(before, now) or rendered_part(before, now, in_answer=in_answer)


def _end(request: Request, shared: int, *, differs: bool) -> MatchEnd:
    """Why the reused prefix ended; `shared` tokens are what the agent had before."""
    end = request.archived.end
    if request.params.prompt_logprobs is not None and not request.cached_tokens:
        return MatchEnd.SCORED
    if request.archived.history is None:
        return MatchEnd.NEW if end is MatchEnd.MISSING else end
    if request.cached_tokens < min(shared, len(request.prompt) - 1):
        return end
    return MatchEnd.DIVERGED if differs else MatchEnd.COMPLETE
