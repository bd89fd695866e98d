"""A model that plays a script: whatever it is asked, it writes the next answer that is given.

An answer's parts are tokens of the model's own. Attention finds the latest of them in a prompt, and
so which answer is next: a history in which an answer became other tokens would make it repeat
itself. Small enough to read an agent's prompt of tens of thousands of tokens in seconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
import mlx.core as mx

from semantic.adapters.mlx.model.provider import find_folder
from tests.support.chat_templates import Format

CONTEXT: Final = 131_072

_HEAD: Final = 64
_PARTS: Final = 3
_ASKS: Final = 0.4
"""In the first place of a token's embedding: it looks for the latest answer."""
_FIRST, _LAST = 0.3, 0.9
"""In the second place: the first token of an answer, the later the larger."""
_FILLER: Final = 32
"""Places of what nothing reads: ordinary tokens differ there."""
_SHARP: Final = 24.0
_STRONG: Final = 4.0
"""How much of what was found is in what a token says, whose own part is 1."""
_BEGIN: Final = 2.0


@dataclass(frozen=True, slots=True)
class Said:
    """An answer: its text and the token that ends it."""

    text: str
    end: str


def write_script(folder: Path, speaks: Format, answers: Sequence[Said]) -> None:
    """Write the model that gives these answers in turn to a new `folder`."""
    source = find_folder("semantic-tiny")
    folder.mkdir(parents=True)
    if speaks.template is not None:
        (folder / "chat_template.jinja").write_text(speaks.template, encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    ends = list(dict.fromkeys(answer.end for answer in answers))
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in dict.fromkeys((*speaks.special, *ends))]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in speaks.plain])
    parts = _parts([answer.text for answer in answers])
    own = [AddedToken(part, normalized=False) for one in parts for part in one]
    assert tokenizer.add_tokens(own) == len(own), "expected parts that are no tokens yet"
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"model_max_length": CONTEXT, "eos_token": ends[0]}
    settings |= {"bos_token": speaks.begin} if speaks.begin else {}
    _copy_json(source, folder, "tokenizer_config.json", settings)
    eos: dict[str, object] = {"eos_token_id": [tokenizer.token_to_id(end) for end in ends]}
    _copy_json(source, folder, "generation_config.json", eos)
    n_tokens = tokenizer.get_vocab_size()
    chains = [
        [tokenizer.token_to_id(text) or 0 for text in (*one, answer.end)]
        for one, answer in zip(parts, answers, strict=True)
    ]
    weights, width = _weights(n_tokens, chains)
    config = eos | {
        "vocab_size": n_tokens,
        "hidden_size": width,
        "intermediate_size": _HEAD,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": _HEAD,
        "max_position_embeddings": CONTEXT,
        "rope_theta": 1e12,  # what attention looks for turns by nothing over the whole context
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    _copy_json(source, folder, "config.json", config)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


def _parts(texts: Sequence[str]) -> list[list[str]]:
    """Each text in parts that are in no other one, or whole."""
    found = []
    for text in texts:
        size = max(-(-len(text) // _PARTS), 1)
        cut = [text[at : at + size] for at in range(0, len(text), size)]
        others = [other for other in texts if other != text]
        is_own = all(text.count(part) == 1 and not any(part in one for one in others)
                     for part in cut)  # fmt: skip
        found.append(cut if is_own else [text])
    return found


def _weights(n_tokens: int, chains: Sequence[Sequence[int]]) -> tuple[dict[str, mx.array], int]:
    """Weights with which each token of a chain is followed by the next, and anything else by the
    first token of the chain behind the latest in the prompt; and their width."""
    assert len(chains) < _HEAD, f"expected fewer than {_HEAD} answers, got {len(chains)}"
    places = {token: 2 + _FILLER + at for at, token in enumerate(t for c in chains for t in c[:-1])}
    found = 2 + _FILLER + len(places)  # the first of the places for what attention found
    width = -(-(found + len(chains)) // _HEAD) * _HEAD
    mx.random.seed(1)
    filler = mx.random.normal((n_tokens, _FILLER))
    filler = filler / mx.sqrt((filler * filler).sum(axis=1, keepdims=True))
    tokens, scores = mx.zeros((n_tokens, width)), mx.zeros((n_tokens, width))
    tokens[:, 0] = _ASKS
    tokens[:, 2 : 2 + _FILLER] = filler * (1 - _ASKS**2) ** 0.5
    for token, at in places.items():
        tokens[token] = mx.zeros((width,))
        tokens[token, at] = 1
    query, key, value = (mx.zeros((_HEAD, width)) for _ in range(3))
    query[-1, 0] = key[-1, 1] = _SHARP
    out = mx.zeros((width, _HEAD))
    scores[chains[0][0], 0] = _BEGIN
    for number, chain in enumerate(chains):
        first = chain[0]
        finds = _FIRST + (_LAST - _FIRST) * number / len(chains)
        tokens[first, 1] = finds
        tokens[first, places[first]] = own = (1 - finds**2) ** 0.5
        value[number, places[first]] = _STRONG / own / width**0.5
        out[found + number, number] = 1
        later = chains[number + 1][0] if number + 1 < len(chains) else chain[-1]
        scores[later, found + number] = 1
        for now, following in pairwise(chain):
            scores[following, places[now]] = 1
    nothing, layer = mx.zeros((_HEAD, width)), "model.layers.0."
    return {
        "model.embed_tokens.weight": tokens,
        "lm_head.weight": scores,
        "model.norm.weight": mx.ones((width,)),
        f"{layer}input_layernorm.weight": mx.ones((width,)),
        f"{layer}post_attention_layernorm.weight": mx.ones((width,)),
        f"{layer}self_attn.q_proj.weight": query,
        f"{layer}self_attn.k_proj.weight": key,
        f"{layer}self_attn.v_proj.weight": value,
        f"{layer}self_attn.o_proj.weight": out,
        f"{layer}mlp.gate_proj.weight": nothing,
        f"{layer}mlp.up_proj.weight": nothing,
        f"{layer}mlp.down_proj.weight": nothing.T,
    }, width


def _copy_json(source: Path, folder: Path, name: str, new: dict[str, object]) -> None:
    document = json.loads((source / name).read_text(encoding="utf-8"))
    (folder / name).write_text(json.dumps(document | new), encoding="utf-8")
