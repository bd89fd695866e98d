"""A model that calls one tool when it is spoken to, and says one sentence when it has the result.

Small enough to read an agent's prompt of tens of thousands of tokens in seconds. What it writes
next depends on its last token alone, and its template marks whether a result came; its attention
is real, and adds too little to matter. The call is one token of its own: written back as
text, it would be other tokens.
"""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
import mlx.core as mx

from semantic.adapters.mlx.model.provider import find_folder

CONTEXT: Final = 131_072
ANSWER: Final = " Done, and it works."

_WIDTH: Final = 64
_HEAD: Final = 32
_LAYERS: Final = 2
_NOISE: Final = 0.02
_ASKED: Final = "<|assistant|>"
_TOLD: Final = ";"
"""Follows what opens an answer when a result came."""
_END: Final = "<|end|>"
# An agent may add a message or two after a result.
_TEMPLATE: Final = """\
{%- macro opened(at) -%}
{%- set found = namespace(mark='') -%}
{%- for message in messages[[at - 3, 0] | max:at] -%}
{%- if '<tool_response>' in message['content'] -%}{%- set found.mark = ';' -%}{%- endif -%}
{%- endfor -%}
{{- '<|assistant|>' ~ found.mark -}}
{%- endmacro -%}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('expected system, user or assistant') -}}
{%- endif -%}
{%- if message['role'] == 'assistant' -%}
{{- opened(loop.index0) -}}
{%- else -%}
{{- '<|' ~ message['role'] ~ '|>' -}}
{%- endif -%}
{{- message['content'] ~ '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- opened(messages | length) -}}{%- endif -%}
"""


def write_model(folder: Path, tool: str, arguments: str) -> None:
    """Write the model that calls `tool` to a new `folder`; `arguments` are JSON."""
    source = find_folder("semantic-tiny")
    folder.mkdir(parents=True)
    shutil.copy(source / "generation_config.json", folder)
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    _copy_json(source, folder, "tokenizer_config.json", {"model_max_length": CONTEXT})
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    # Spaces that no template would write.
    call = f'<tool_call>\n{{ "name":  "{tool}", "arguments":  {arguments} }}\n</tool_call>'
    tokenizer.add_tokens([AddedToken(call, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    n_tokens = tokenizer.get_vocab_size()
    config = {
        "vocab_size": n_tokens,
        "hidden_size": _WIDTH,
        "intermediate_size": _WIDTH,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _WIDTH // _HEAD,
        "num_key_value_heads": 1,
        "head_dim": _HEAD,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    _copy_json(source, folder, "config.json", config)
    said = [tokenizer.encode(text).ids for text in (_ASKED + call + _END, _TOLD + ANSWER + _END)]
    weights = _weights(n_tokens, said)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


def _weights(n_tokens: int, said: list[list[int]]) -> dict[str, mx.array]:
    """Weights with which each token of `said` is followed by the next.

    Raises ValueError where a token stands twice: the model could not tell where it is.
    """
    before = [now for chain in said for now in chain[:-1]]
    if len(set(before)) < len(before):
        raise ValueError(f"expected no token twice, got {said}")
    mx.random.seed(1)
    tokens = mx.random.normal((n_tokens, _WIDTH))
    tokens = tokens / mx.sqrt((tokens * tokens).sum(axis=1, keepdims=True))
    scores = mx.zeros((n_tokens, _WIDTH))
    for chain in said:
        for now, following in pairwise(chain):
            scores[following] = scores[following] + tokens[now]
    weights = {
        "model.embed_tokens.weight": tokens,
        "lm_head.weight": scores,
        "model.norm.weight": mx.ones((_WIDTH,)),
    }
    shapes = {
        "self_attn.q_proj": (_WIDTH, _WIDTH),
        "self_attn.k_proj": (_HEAD, _WIDTH),
        "self_attn.v_proj": (_HEAD, _WIDTH),
        "self_attn.o_proj": (_WIDTH, _WIDTH),
        "mlp.gate_proj": (_WIDTH, _WIDTH),
        "mlp.up_proj": (_WIDTH, _WIDTH),
        "mlp.down_proj": (_WIDTH, _WIDTH),
    }
    for layer in range(_LAYERS):
        own = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{own}{norm}.weight"] = mx.ones((_WIDTH,))
        for name, shape in shapes.items():
            weights[f"{own}{name}.weight"] = mx.random.normal(shape) * _NOISE
    return weights


def _copy_json(source: Path, folder: Path, name: str, new: dict[str, object]) -> None:
    document = json.loads((source / name).read_text(encoding="utf-8"))
    (folder / name).write_text(json.dumps(document | new), encoding="utf-8")
