"""What a request took, in tokens, summed over its choices and told in OpenAI's shape."""

from __future__ import annotations

from dataclasses import dataclass, field

from semantic.adapters.http.cache_miss_report import usage_extension
from semantic.domain.answer import Usage
from semantic.domain.match import MatchReport


@dataclass(slots=True)
class UsageSum:
    """Usage of a request whose prompts have `n` choices each, as its answers end.

    A prompt counts once, however many choices it has; of it counts as cached what none of them
    had to compute. `match` is that of the prompt that lost most.
    """

    n: int = 1
    _ended: dict[int, Usage] = field(default_factory=dict)

    def add(self, index: int, usage: Usage) -> None:
        """Choice number `index` ended, and took `usage`."""
        self._ended[index] = usage

    def total(self) -> Usage:
        """Of the choices that ended so far."""
        prompts: dict[int, Usage] = {}
        for index, usage in self._ended.items():
            prompt = index // self.n
            known = prompts.get(prompt)
            if known is None or usage.cached < known.cached:
                prompts[prompt] = usage
        return Usage(
            prompt=sum(usage.prompt for usage in prompts.values()),
            cached=sum(usage.cached for usage in prompts.values()),
            completion=sum(usage.completion for usage in self._ended.values()),
            reasoning=sum(usage.reasoning for usage in self._ended.values()),
            match=max((usage.match for usage in prompts.values()), key=_n_lost, default=None),
        )


def usage_body(usage: Usage) -> dict[str, object]:
    """`usage` as the JSON object that replies and last chunks have."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.total,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached,
            "cache_write_tokens": usage.written,
        },
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
        **usage_extension(usage.match),
    }


def _n_lost(match: MatchReport | None) -> int:
    return 0 if match is None or match.lost is None else match.lost.tokens
