"""What a model's own files say of how it wants to be used: its context, its sampling.

Knows mlx-lm's model arguments and the files beside the weights; loads nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from semantic.domain.errors import InvalidRequestError
from semantic.domain.value_objects import SamplingParams

_LIMIT = "max_position_embeddings"
_GENERATION = "generation_config.json"


def read_context(model: object) -> int | None:
    """The most tokens the model was made for; None when it does not say."""
    arguments = getattr(model, "args", None)
    nested = getattr(arguments, "text_config", None)
    own = getattr(arguments, _LIMIT, None)
    found = nested.get(_LIMIT) if own is None and isinstance(nested, Mapping) else own
    return found if isinstance(found, int) and found > 0 else None


def read_sampling(folder: Path) -> SamplingParams:
    """How the model's makers sample it, by `generation_config.json`; greedy when that is silent.

    A file that is broken or asks for what cannot be says nothing.
    """
    try:
        given = json.loads((folder / _GENERATION).read_text())
    except (OSError, ValueError, RecursionError):
        return SamplingParams()
    if not isinstance(given, dict) or given.get("do_sample") is False:
        return SamplingParams()
    temperature, top_p, top_k = (given.get(name) for name in ("temperature", "top_p", "top_k"))
    if not isinstance(temperature, int | float):
        return SamplingParams()
    try:
        return SamplingParams(
            temperature=temperature,
            top_p=top_p if isinstance(top_p, int | float) else 0.0,
            top_k=top_k if isinstance(top_k, int) else 0,
        )
    except InvalidRequestError:
        return SamplingParams()
