"""The fields of requests that Ollama's Python client has, for tests without it.

`check_ollama.py` compares them with the client.
"""

from __future__ import annotations

from typing import Final

_SHARED: Final = {
    "format", "keep_alive", "logprobs", "model", "options", "stream", "think", "top_logprobs",
}  # fmt: skip
CHAT: Final = _SHARED | {"messages", "tools"}
GENERATE: Final = _SHARED | {
    "context", "height", "images", "prompt", "raw", "steps", "suffix", "system", "template",
    "width",
}  # fmt: skip
MESSAGE: Final = {"content", "images", "role", "thinking", "tool_calls", "tool_name"}
OPTIONS: Final = {
    "embedding_only", "f16_kv", "frequency_penalty", "logits_all", "low_vram", "main_gpu",
    "mirostat", "mirostat_eta", "mirostat_tau", "num_batch", "num_ctx", "num_gpu", "num_keep",
    "num_predict", "num_thread", "numa", "penalize_newline", "presence_penalty",
    "repeat_last_n", "repeat_penalty", "seed", "stop", "temperature", "tfs_z", "top_k", "top_p",
    "typical_p", "use_mlock", "use_mmap", "vocab_only",
}  # fmt: skip
EMBED: Final = {"dimensions", "input", "keep_alive", "model", "options", "truncate"}
