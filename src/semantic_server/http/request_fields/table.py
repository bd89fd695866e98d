"""Field tables: which fields of a body a wire supports, ignores and refuses by name.

Of fields in no table those that look like a known one are refused, others logged once. Fields that
clients send to other servers are alike on all wires. Knows names, JSON types and neutral values;
not what a field means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from semantic_server.http.errors import FieldError
from semantic_server.http.logs import WarnOnce
from semantic_server.http.request_body import check_spelling

_LONGEST_NAME: Final = 80


@dataclass(frozen=True, slots=True)
class Field:
    """Support for one field. With a `refusal` only the values in `unless` are accepted."""

    refusal: str | None = None
    unless: tuple[object, ...] = ()

    def accepts(self, value: object) -> bool:
        """True if a request may contain this `value`."""
        return self.refusal is None or any(
            type(value) is type(one) and value == one for one in self.unless
        )


SUPPORTED: Final = Field()

IGNORED: Final = Field()
"""Accepted without effect: accounting tags and hints that change no answer."""


def refused(refusal: str, *unless: object) -> Field:
    """A field of which only the values in `unless` are accepted."""
    return Field(refusal, unless)


def fields_of(
    body: Mapping[str, object],
    table: Mapping[str, Field],
    others: Mapping[str, Field],
    warnings: WarnOnce,
    within: str = "",
) -> dict[str, object]:
    """The fields of `body` that are in the table and not null.

    `others` are fields of other servers and wires, where the table lacks them. `within` is the path
    prefix of a nested `body`. Raises FieldError for a refused field, and for one that is spelled
    like a known one.
    """
    given = {name: value for name, value in body.items() if value is not None}
    unknown = sorted(given.keys() - table.keys())
    for name in unknown:
        _check(within + name, given[name], others.get(name, IGNORED))
    unknown = [name for name in unknown if name not in others]
    check_spelling(unknown, table, within)
    for name in unknown:
        warnings.warn(f"field {within + name!a:.{_LONGEST_NAME}} is unknown and has no effect")
    known = {name: value for name, value in given.items() if name in table}
    for name, value in known.items():
        _check(within + name, value, table[name])
    return known


def _check(path: str, value: object, field: Field) -> None:
    if field.accepts(value):
        return
    allowed = " or ".join(repr(one) for one in field.unless)
    hint = f"; only {allowed} is accepted" if allowed else ""
    raise FieldError(f"{path}: {field.refusal}{hint}", param=path)


NO_TEMPLATE: Final = "the model's own template is used"
PENALTY_CONTEXT: Final = "the tokens that a penalty looks at cannot be set"
THINKING_LIMIT: Final = "use the limit of reasoning that the wire has"
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
    "custom_logit_processor": refused("logits processors cannot be sent", ""),
    "lora_path": refused("name a model with an adapter", ""),
    "max_thinking_tokens": refused(THINKING_LIMIT),
    "reasoning_budget": refused(THINKING_LIMIT, -1),
    "structural_tag": refused("not supported; use strict tools"),
    "thinking_budget": refused(THINKING_LIMIT),
    "thinking_token_budget": refused(THINKING_LIMIT),
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
    "adaptive_target": refused(ONE_SAMPLER, -1, -1.0),
    "lora": refused("name a model with an adapter", []),
    "repeat_last_n": refused(PENALTY_CONTEXT, 64),
    "top_n_sigma": refused(ONE_SAMPLER, -1, -1.0, 0, 0.0),
    # mlx_lm.server
    "adapters": refused("name a model with an adapter"),
    "repetition_context_size": refused(PENALTY_CONTEXT, 20),
    # transformers and text-generation-webui
    "banned_strings": refused("words cannot be excluded", []),
    "do_sample": refused("use temperature", True),
    "early_stopping": refused("there is no beam search", False),
    "epsilon_cutoff": refused(ONE_SAMPLER, 0, 0.0),
    "eta_cutoff": refused(ONE_SAMPLER, 0, 0.0),
    "grammar_string": refused("use a grammar of the wire", ""),
    "guidance_scale": refused(ONE_SAMPLER, 1, 1.0),
    "max_new_tokens": refused("use max_tokens"),
    "min_new_tokens": refused("a least number of tokens cannot be enforced", 0),
    "no_repeat_ngram_size": refused(ONE_SAMPLER, 0),
    "num_beams": refused("there is no beam search", 1),
    "penalty_alpha": refused(ONE_SAMPLER, 0, 0.0),
    "smoothing_factor": refused(ONE_SAMPLER, 0, 0.0),
    "stopping_strings": refused("use stop", []),
    "token_healing": refused("prompts are never changed", False),
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
