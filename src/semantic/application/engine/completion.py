"""What is told of a request at its end. A pure function of the request."""

from __future__ import annotations

from semantic.application.cache.match_report import match_report
from semantic.application.request import Request
from semantic.domain.entities import AgentBlocks
from semantic.domain.value_objects import CompletedGeneration, FinishReason


def completion(
    request: Request,
    reason: FinishReason,
    blocks: AgentBlocks | None = None,
    error: str | None = None,
) -> CompletedGeneration:
    """The end of `request`; `blocks` is its agent's cache from now on."""
    return CompletedGeneration(
        uid=request.uid,
        agent_id=request.agent_id,
        text=request.text,
        tokens=tuple(request.generated),
        finish_reason=reason,
        prompt_tokens=len(request.prompt),
        cached_tokens=request.cached_tokens,
        blocks=blocks,
        logprobs=tuple(request.logprobs),
        error=error or request.error,
        match=match_report(request),
        stop_string=request.stop_string,
        prompt_logprobs=() if request.scoring else tuple(request.scores),
    )
