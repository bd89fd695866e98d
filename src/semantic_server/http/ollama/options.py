"""Fields that the routes of Ollama's API share, such as `options` and `think`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Final

from annotated_types import Ge, Le
from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from semantic.domain.chat import AnswerFormat
from semantic.domain.value_objects import SamplingParams
from semantic.ports.serving import ServedModel
from semantic_server.http.errors import FieldError
from semantic_server.http.openai.fields import warnings
from semantic_server.http.openai.requests import sampling_of
from semantic_server.http.openai.validators import CompletionBody
from semantic_server.http.request_body import LazyAdapter, validated
from semantic_server.http.request_fields.table import (
    FOREIGN,
    IGNORED,
    NO_TEMPLATE,
    ONE_SAMPLER,
    SUPPORTED,
    Field,
    fields_of,
    ignored,
    object_at,
    refused,
    supported,
)

_NO_IMAGES: Final = "this model reads and writes text only"

_SHARED: Final[dict[str, Field]] = {
    **supported(
        "agent_id format keep_alive logprobs model options semantic stream think top_logprobs"
    ),
    "shift": IGNORED,  # an answer ends where the context ends
    "truncate": IGNORED,  # the server refuses a prompt that does not fit
}

CHAT_FIELDS: Final[dict[str, Field]] = {**_SHARED, "messages": SUPPORTED, "tools": SUPPORTED}

GENERATE_FIELDS: Final[dict[str, Field]] = {
    **_SHARED,
    **supported("context prompt raw system"),
    "height": refused(_NO_IMAGES),
    "images": refused(_NO_IMAGES, []),
    "steps": refused(_NO_IMAGES),
    "suffix": refused("this model can only append to text", ""),
    "template": refused(NO_TEMPLATE, ""),
    "width": refused(_NO_IMAGES),
}

MESSAGE_FIELDS: Final[dict[str, Field]] = {
    **supported("content images role thinking tool_call_id tool_calls tool_name")
}

OPTION_FIELDS: Final[dict[str, Field]] = {
    **dict.fromkeys(
        (
            "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_gpu", "num_gqa",
            "num_thread", "numa", "use_mlock", "use_mmap", "vocab_only",
        ),
        IGNORED,
    ),
    "embedding_only": IGNORED,
    **supported(
        "frequency_penalty min_p num_ctx num_predict presence_penalty repeat_last_n "
        "repeat_penalty seed stop temperature top_k top_p"
    ),
    "mirostat": refused(ONE_SAMPLER, 0),
    "mirostat_eta": IGNORED,  # no effect without mirostat
    "mirostat_tau": IGNORED,
    "num_keep": IGNORED,  # the server drops nothing from a context
    "penalize_newline": refused("this server penalizes every token alike", True),
    "tfs_z": refused(ONE_SAMPLER, 1, 1.0),
    "typical_p": refused(ONE_SAMPLER, 1, 1.0),
}  # fmt: skip
"""Members of the field `options`."""

MODEL_FIELDS: Final[dict[str, Field]] = {
    "model": SUPPORTED,
    "name": SUPPORTED,
    **ignored("system template options verbose"),
}
"""Fields of /api/show."""

PULL_FIELDS: Final[dict[str, Field]] = {"insecure": IGNORED, **supported("model name stream")}

EMBED_FIELDS: Final[dict[str, Field]] = {
    **supported("dimensions input keep_alive model options semantic truncate")
}

EMBEDDINGS_FIELDS: Final[dict[str, Field]] = {
    **supported("keep_alive model options prompt semantic")
}

_OPTION: Final = "send it in options"

OTHER_WIRES: Final[dict[str, Field]] = {
    **FOREIGN,
    **{name: refused(_OPTION) for name, one in OPTION_FIELDS.items() if one is SUPPORTED},
    **dict.fromkeys(
        ("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"),
        IGNORED,
    ),
    **dict.fromkeys(
        (
            "guided_choice", "guided_grammar", "guided_json", "guided_regex", "json_schema",
            "response_format", "structured_outputs",
        ),
        refused("use format", {}, {"type": "text"}),
    ),
    **dict.fromkeys(
        ("enable_thinking", "reasoning", "reasoning_effort", "thinking"), refused("use think", {})
    ),
    **dict.fromkeys(
        ("max_completion_tokens", "max_output_tokens", "max_tokens"),
        refused("use options.num_predict"),
    ),
    "context": refused("a field of /api/generate", []),
    "input": refused("a field of /api/embed"),
    "logit_bias": refused("not in this API; use /v1/chat/completions", {}),
    "messages": refused("a field of /api/chat"),
    "n": refused("a reply has one answer", 1),
    "prompt": refused("a field of /api/generate", ""),
    "raw": refused("a field of /api/generate", False),
    "repetition_penalty": refused("use options.repeat_penalty", 1, 1.0),
    "stream_options": IGNORED,
    "suffix": refused("this model can only append to text", ""),
    "system": refused("send a message with the role system", ""),
    "template": refused(NO_TEMPLATE, ""),
    "tool_choice": refused("not in this API; use /v1/chat/completions", "auto"),
    "tools": refused("a field of /api/chat", []),
}  # fmt: skip
"""Fields of other APIs and of Ollama's other routes."""


_OPTIONS: Final = "options"
_MAX_TOP_LOGPROBS: Final = 20

_SECONDS: Final = {
    "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0,
}  # fmt: skip
_STEP: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)", re.ASCII)
_LONGEST_DURATION: Final = 64
"""The maximum number of characters in a duration."""
_LONGEST_STAY: Final = 1e9
"""The maximum number of seconds to keep a model loaded."""

_EFFORTS: Final = ("low", "medium", "high", "max")


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of an answer. If `max_tokens` is None, the server's default applies. If
    `context_tokens` is None, the model's limit applies."""

    sampling: SamplingParams
    max_tokens: int | None
    context_tokens: int | None


@with_config(ConfigDict(strict=True))
class _Numbers(TypedDict, total=False):
    """The members of `options` that have an effect, apart from `stop`."""

    frequency_penalty: float
    min_p: float
    num_ctx: Annotated[int, Ge(0)]
    num_predict: int
    presence_penalty: float
    repeat_last_n: int
    repeat_penalty: float
    seed: int
    temperature: float
    top_k: int
    top_p: float


_numbers: Final = LazyAdapter(_Numbers)


@with_config(ConfigDict(strict=True))
class _Logprobs(TypedDict, total=False):
    logprobs: bool
    top_logprobs: Annotated[int, Ge(0), Le(_MAX_TOP_LOGPROBS)]


_logprobs: Final = LazyAdapter(_Logprobs)


def read_options(value: object, model: ServedModel) -> Options:
    """Read `options`. Raises FieldError for an unsupported option."""
    given = object_at(_OPTIONS, {} if value is None else value)
    given = {name: _whole(one) for name, one in given.items()}
    known = fields_of(given, OPTION_FIELDS, {}, warnings, f"{_OPTIONS}.")
    stop = known.pop("stop", None)
    try:
        numbers = validated(_numbers(), known)
        sampling = sampling_of(_renamed(numbers), stop, model)
    except FieldError as error:
        path = f"{_OPTIONS}.{_own(error.param or '')}"
        raise FieldError(f"{_OPTIONS}.{_own(str(error))}", param=path) from error
    return Options(
        _with_window(sampling, numbers, model),
        _max_tokens(numbers, model),
        numbers.get("num_ctx") or None,  # 0 means the model's own limit
    )


def _whole(value: object) -> object:
    """Convert a float like 4096.0 to an integer, as Ollama does."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _own(text: str) -> str:
    """Replace OpenAI's name of a field at the start of an error by Ollama's name."""
    return text.replace("repetition_penalty", "repeat_penalty", 1)


def _renamed(numbers: _Numbers) -> CompletionBody:
    """Return the numeric options that OpenAI's APIs have too, under OpenAI's names."""
    found: CompletionBody = {"model": "", "prompt": ""}
    if "repeat_penalty" in numbers:
        found["repetition_penalty"] = numbers["repeat_penalty"]
    if numbers.get("seed", -1) >= 0:  # a negative one means a random seed
        found["seed"] = numbers["seed"]
    if "top_k" in numbers:
        found["top_k"] = numbers["top_k"]
    for name in ("frequency_penalty", "min_p", "presence_penalty", "temperature", "top_p"):
        if name in numbers:
            found[name] = numbers[name]
    return found


def _with_window(sampling: SamplingParams, numbers: _Numbers, model: ServedModel) -> SamplingParams:
    """Return `sampling` with `repeat_penalty` restricted to the last tokens."""
    window = numbers.get("repeat_last_n")
    if window is None:
        return sampling
    if window == 0:
        return replace(sampling, repetition_penalty=None)
    most = model.context_tokens
    return replace(sampling, repetition_context=most if window < 0 else min(window, most))


def _max_tokens(numbers: _Numbers, model: ServedModel) -> int | None:
    """Return the limit on answer tokens. A number of 0 or less means the size of the context."""
    wanted = numbers.get("num_predict")
    return model.context_tokens if wanted is not None and wanted <= 0 else wanted


def read_keep_alive(value: object) -> float | None:
    """Read `keep_alive` in seconds. Returns None if the field is missing, and infinity if its
    number is negative. Raises FieldError."""
    if value is None:
        return None
    seconds = _duration(value) if isinstance(value, str) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise FieldError(
            f"keep_alive: expected seconds or a duration like 5m or 1h30m, got {value!r:.80}",
            param="keep_alive",
        )
    return float(seconds) if 0 <= seconds <= _LONGEST_STAY else math.inf


def _duration(text: str) -> float | None:
    """Return the seconds that a number or Go's duration means, or None."""
    if len(text) > _LONGEST_DURATION:
        return None
    sign, rest = (-1 if text[:1] == "-" else 1), text[text[:1] in {"+", "-"} :]
    if rest.isascii() and rest.isdigit():
        return sign * float(rest)
    steps = _STEP.findall(rest)
    if not steps or "".join(number + unit for number, unit in steps) != rest:
        return None
    return sign * sum(float(number) * _SECONDS[unit] for number, unit in steps)


def read_think(value: object) -> tuple[dict[str, object], int | None]:
    """Return the template options and the thinking budget that `think` means. Raises FieldError."""
    if value is None:
        return {}, None
    if value is False:
        return {"enable_thinking": False}, 0
    if value is True:
        return {"enable_thinking": True}, None
    if isinstance(value, str) and value in _EFFORTS:
        return {"enable_thinking": True, "reasoning_effort": value}, None
    expected = ", ".join(_EFFORTS)
    raise FieldError(f"think: expected true, false or one of {expected}", param="think")


def read_format(value: object) -> AnswerFormat | None:
    """Read `format`, which is "json" or a schema. It is "" for free text. Raises FieldError."""
    if value in (None, ""):
        return None
    if value == "json":
        return AnswerFormat()
    if isinstance(value, dict):
        return AnswerFormat(value)
    raise FieldError('format: expected "json" or a JSON schema', param="format")


def read_logprobs(known: Mapping[str, object]) -> int | None:
    """Return the number of alternatives to report per token, or None. Raises FieldError."""
    given = validated(_logprobs(), known)
    top = given.get("top_logprobs", 0)
    return top if given.get("logprobs", top > 0) else None
