"""Request fields of Ollama's wire: which are supported; see `request_fields.table`.

A test compares the tables with the fields of Ollama's own client. Knows names and neutral values;
not what a field means.
"""

from __future__ import annotations

from typing import Final

from semantic_server.http.request_fields.table import (
    FOREIGN,
    IGNORED,
    NO_TEMPLATE,
    ONE_SAMPLER,
    SUPPORTED,
    Field,
    refused,
)

_NO_IMAGES: Final = "this model reads and writes text only"

_SHARED: Final[dict[str, Field]] = {
    "agent_id": SUPPORTED,
    "format": SUPPORTED,
    "keep_alive": SUPPORTED,
    "logprobs": SUPPORTED,
    "model": SUPPORTED,
    "options": SUPPORTED,
    "semantic": SUPPORTED,
    "shift": IGNORED,  # an answer ends where the context does
    "stream": SUPPORTED,
    "think": SUPPORTED,
    "top_logprobs": SUPPORTED,
    "truncate": IGNORED,  # a prompt that does not fit is always refused
}

CHAT_FIELDS: Final[dict[str, Field]] = {
    **_SHARED,
    "messages": SUPPORTED,
    "tools": SUPPORTED,
}

GENERATE_FIELDS: Final[dict[str, Field]] = {
    **_SHARED,
    "context": SUPPORTED,
    "height": refused(_NO_IMAGES),
    "images": refused(_NO_IMAGES, []),
    "prompt": SUPPORTED,
    "raw": SUPPORTED,
    "steps": refused(_NO_IMAGES),
    "suffix": refused("this model completes at the end only", ""),
    "system": SUPPORTED,
    "template": refused(NO_TEMPLATE, ""),
    "width": refused(_NO_IMAGES),
}

MESSAGE_FIELDS: Final[dict[str, Field]] = {
    "content": SUPPORTED,
    "images": SUPPORTED,
    "role": SUPPORTED,
    "thinking": SUPPORTED,
    "tool_call_id": SUPPORTED,
    "tool_calls": SUPPORTED,
    "tool_name": SUPPORTED,
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
    "frequency_penalty": SUPPORTED,
    "min_p": SUPPORTED,
    "mirostat": refused(ONE_SAMPLER, 0),
    "mirostat_eta": IGNORED,  # without mirostat it has no effect
    "mirostat_tau": IGNORED,
    "num_ctx": SUPPORTED,
    "num_keep": IGNORED,  # nothing is dropped from a context
    "num_predict": SUPPORTED,
    "penalize_newline": refused("every token is penalized alike", True),
    "presence_penalty": SUPPORTED,
    "repeat_last_n": SUPPORTED,
    "repeat_penalty": SUPPORTED,
    "seed": SUPPORTED,
    "stop": SUPPORTED,
    "temperature": SUPPORTED,
    "tfs_z": refused(ONE_SAMPLER, 1, 1.0),
    "top_k": SUPPORTED,
    "top_p": SUPPORTED,
    "typical_p": refused(ONE_SAMPLER, 1, 1.0),
}  # fmt: skip
"""What places a model on a device is ignored: it changes no answer."""

MODEL_FIELDS: Final[dict[str, Field]] = {
    "model": SUPPORTED,
    "name": SUPPORTED,
    "system": IGNORED,
    "template": IGNORED,
    "options": IGNORED,
    "verbose": IGNORED,
}
"""Of /api/show."""

PULL_FIELDS: Final[dict[str, Field]] = {
    "insecure": IGNORED,
    "model": SUPPORTED,
    "name": SUPPORTED,
    "stream": SUPPORTED,
}

EMBED_FIELDS: Final[dict[str, Field]] = {
    "dimensions": SUPPORTED,
    "input": SUPPORTED,
    "keep_alive": SUPPORTED,
    "model": SUPPORTED,
    "options": SUPPORTED,
    "semantic": SUPPORTED,
    "truncate": SUPPORTED,
}

EMBEDDINGS_FIELDS: Final[dict[str, Field]] = {
    "keep_alive": SUPPORTED,
    "model": SUPPORTED,
    "options": SUPPORTED,
    "prompt": SUPPORTED,
    "semantic": SUPPORTED,
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
    "logit_bias": refused("not on this wire; use /v1/chat/completions", {}),
    "messages": refused("a field of /api/chat"),
    "n": refused("a reply has one answer", 1),
    "prompt": refused("a field of /api/generate", ""),
    "raw": refused("a field of /api/generate", False),
    "repetition_penalty": refused("use options.repeat_penalty", 1, 1.0),
    "stream_options": IGNORED,
    "suffix": refused("this model completes at the end only", ""),
    "system": refused("send a message with the role system", ""),
    "template": refused(NO_TEMPLATE, ""),
    "tool_choice": refused("not on this wire; use /v1/chat/completions", "auto"),
    "tools": refused("a field of /api/chat", []),
}  # fmt: skip
"""Fields of other wires and routes: what would change an answer is refused by name."""
