"""Numbers as a user reads them, and answers as JSON. Knows no terminal and no engine."""

from __future__ import annotations

import json
from typing import TypeVar

from semantic.cli.driving import Timing
from semantic.domain.value_objects import CompletedGeneration, PoolView

KV = TypeVar("KV")

Json = dict[str, object]

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024


def show_bytes(n_bytes: float) -> str:
    """12.5 MiB."""
    for unit in _UNITS[:-1]:
        if n_bytes < _STEP:
            return f"{n_bytes:.0f} {unit}" if unit == "bytes" else f"{n_bytes:.1f} {unit}"
        n_bytes /= _STEP
    return f"{n_bytes:.1f} {_UNITS[-1]}"


def show_seconds(seconds: float | None) -> str:
    """12 ms or 1.23 s; a dash for what did not happen."""
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def answer_json(model: str, done: CompletedGeneration[KV], timing: Timing, view: PoolView) -> Json:
    """Everything about one answer."""
    return {
        "agent": done.agent_id,
        "model": model,
        "text": done.text,
        "tokens": list(done.tokens),
        "finish_reason": done.finish_reason,
        "error": done.error,
        "usage": {
            "prompt_tokens": done.prompt_tokens,
            "cached_tokens": done.cached_tokens,
            "generated_tokens": done.generated_tokens,
            "blocks": view.n_blocks,
            "bytes": view.n_bytes,
        },
        "timings": {
            "ttft_seconds": timing.ttft,
            "total_seconds": timing.total,
            "decode_tokens_per_second": timing.decode_rate,
        },
    }


def to_line(document: Json) -> str:
    """One JSON document on one line."""
    return json.dumps(document, ensure_ascii=False)
