"""Fields that clients send to other servers, alike on all wires here.

Knows names and neutral values; not what this server has instead, where that depends on the wire.
"""

from __future__ import annotations

from typing import Final

from semantic.adapters.http.request_fields.table import IGNORED, Field, refused

NO_TEMPLATE: Final = "the model's own template is used"
ONE_SAMPLER: Final = "this way to sample is not supported"

FOREIGN: Final[dict[str, Field]] = {
    # vLLM and SGLang
    "add_generation_prompt": refused(NO_TEMPLATE, True),
    "background": refused("answers are not computed in the background", False),
    "bad_words": refused("words cannot be excluded", []),
    "cache_salt": refused("caches are kept apart by API keys", ""),
    "chat_template": refused(NO_TEMPLATE),
    "continue_final_message": refused("an answer cannot be continued", False),
    "documents": refused("write documents into a message", []),
    "echo": refused("a conversation cannot be repeated", False),
    "guided_decoding_backend": IGNORED,
    "guided_whitespace_pattern": refused("white space in JSON cannot be set"),
    "include_reasoning": refused("reasoning is always returned", True),
    "include_stop_str_in_output": refused("stop strings are never part of an answer", False),
    "kv_transfer_params": refused("keys and values are not transferred", {}),
    "length_penalty": refused("there is no beam search", 1, 1.0),
    "logits_processors": refused("logits processors cannot be sent", []),
    "priority": IGNORED,
    "request_id": IGNORED,
    "return_token_ids": refused("token ids are not returned", False),
    "return_tokens_as_token_ids": refused("token ids are not returned", False),
    "separate_reasoning": refused("reasoning is always apart", True),
    "skip_special_tokens": refused("special tokens are never part of an answer", True),
    "spaces_between_special_tokens": IGNORED,
    "truncate_prompt_tokens": refused("prompts are never truncated"),
    "use_beam_search": refused("there is no beam search", False),
    "vllm_xargs": refused("there are no such arguments here", {}),
    # Ollama
    "context": refused("send the conversation itself"),
    "images": refused("images cannot be read by this model", []),
    "keep_alive": IGNORED,
    "num_ctx": refused("the context is a setting of the server"),
    "num_predict": refused("use max_tokens"),
    "options": refused("send its members as fields of the body", {}),
    "template": refused(NO_TEMPLATE, ""),
    # llama.cpp and LM Studio
    "cache_prompt": IGNORED,
    "draft_model": IGNORED,
    "dry_multiplier": refused(ONE_SAMPLER, 0, 0.0),
    "dynatemp_range": refused(ONE_SAMPLER, 0, 0.0),
    "id_slot": IGNORED,
    "mirostat": refused(ONE_SAMPLER, 0),
    "n_predict": refused("use max_tokens"),
    "reasoning_format": refused("reasoning is always apart", "auto", "deepseek"),
    "samplers": refused(ONE_SAMPLER, []),
    "tfs_z": refused(ONE_SAMPLER, 1, 1.0),
    "timings_per_token": IGNORED,
    "ttl": IGNORED,
    "typical_p": refused(ONE_SAMPLER, 1, 1.0),
    "xtc_probability": refused(ONE_SAMPLER, 0, 0.0),
    # Hosted models and routers
    "extra_body": refused("send its members as fields of the body", {}),
    "max_tokens_to_sample": refused("use max_tokens"),
    "models": IGNORED,
    "plugins": refused("there are no plugins here", []),
    "provider": IGNORED,
    "route": IGNORED,
    "top_a": refused(ONE_SAMPLER, 0, 0.0),
    "transforms": refused("prompts are never changed", []),
    "usage": IGNORED,
}
"""What would change an answer is refused by name, unless its value is neutral."""
