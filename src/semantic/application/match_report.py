"""Says how much of a request's prompt was reused, and why not more.

A pure function of the request; reads no store.
"""

from __future__ import annotations

from typing import TypeVar

from semantic.application.request import Request
from semantic.domain.match import MatchEnd, MatchReport
from semantic.domain.prefix import common_prefix

KV = TypeVar("KV")


def match_report(request: Request[KV]) -> MatchReport:
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
    )


def _end(request: Request[KV], shared: int, *, differs: bool) -> MatchEnd:
    """Why the reused prefix ended; `shared` tokens are what the agent had before."""
    end = request.archived.end
    if request.params.prompt_logprobs is not None and not request.cached_tokens:
        return MatchEnd.SCORED
    if request.archived.history is None:
        return MatchEnd.NEW if end is MatchEnd.MISSING else end
    if request.cached_tokens < min(shared, len(request.prompt) - 1):
        return end
    return MatchEnd.DIVERGED if differs else MatchEnd.COMPLETE
