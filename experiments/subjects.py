"""The models that experiments on correctness are run on; small enough for any machine.

- `semantic-tiny`: the trained model that ships with the package.
- `stories260K`: a third party's trained model (a 260,032-parameter Llama on TinyStories, MIT). Not
  part of the repository: looked for in the folder that SEMANTIC_TEST_MODELS names, else in
  `../shared/models`.
- `smollm2-135m-shape`: SmolLM2-135M's exact shape with random fp32 weights, hence no tokenizer.
- SmolLM2-135M-Instruct itself, with 4 bits and dequantised, where `smollm2.py` has fetched it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_map
from mlx_lm.models import llama

from experiments import smollm2
from experiments.harness.environment import ROOT
from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.model.provider import MLXModelProvider, find_folder, wrap_model
from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
from semantic.application.request import StreamingDetokenizer
from semantic.domain.errors import InvalidRequestError, ModelNotFoundError

FOLDER_VARIABLE = "SEMANTIC_TEST_MODELS"
NAMES = ("semantic-tiny", "stories260K", "smollm2-135m-shape")
REAL = (smollm2.QUANTISED, smollm2.WHOLE)
CONTEXTS = {"stories260K": 512, **dict.fromkeys(REAL, 8192)}
"""Tokens that a model was made for, where these are not 4,096."""
SEED = 7


@dataclass(frozen=True, slots=True)
class Subject:
    """A model under test. `tokenizer` is None where there is no text, only token ids.

    `context` is how many tokens it was made for.
    """

    name: str
    backend: MLXBackend
    tokenizer: MLXTokenizer | None
    context: int

    @property
    def model(self) -> Module:
        """mlx-lm's own model object."""
        return self.backend.model

    def prompt(self, text: str, n_tokens: int) -> tuple[int, ...]:
        """Token ids of `text`, as a question if the model has a chat template.

        Without a tokenizer they are `n_tokens` random ones, fixed by the text.
        """
        if self.tokenizer is not None:
            if self.tokenizer.inner.chat_template is None:
                return tuple(self.tokenizer.encode(text))
            return tuple(self.tokenizer.render_chat([{"role": "user", "content": text}]))
        draw = random.Random(f"{SEED}:{text}")
        return tuple(draw.randrange(self.backend.vocab_size) for _ in range(n_tokens))


class TokenIds:
    """A tokenizer for experiments that only compare tokens: no text, and no end token."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """None: answers end at their length."""
        return frozenset()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Refuses: there is no text."""
        raise InvalidRequestError(f"token ids only, got {text!r} ({add_special_tokens=})")

    def decode(self, tokens: Sequence[int]) -> str:
        """Each token as its number."""
        return "".join(f"<{token}>" for token in tokens)

    def text_of(self, token: int) -> str:
        """Its number."""
        return self.decode([token])

    def detokenizer(self, after: Sequence[int] = ()) -> StreamingDetokenizer:
        return StreamingDetokenizer(self.decode, after)

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Refuses: there is no text."""
        raise InvalidRequestError(f"token ids only, got {messages} ({add_generation_prompt=})")


def why_missing(name: str) -> str | None:
    """Why a subject cannot be used on this machine, or None when it can."""
    if name not in (*NAMES, *REAL):
        return f"{name} is not one of {', '.join((*NAMES, *REAL))}"
    folder = _folder(name)
    if folder is None or all((folder / file).is_file() for file in _FILES):
        return None
    if name in REAL:
        return f"{name} is not here; python -m experiments.smollm2 fetches it"
    hint = "" if name == NAMES[0] else f"; set {FOLDER_VARIABLE} to the folder that holds it"
    return f"{name} is not here{hint}"


def load(name: str) -> Subject:
    """The subject of that name; ModelNotFoundError says why there is none."""
    reason = why_missing(name)
    if reason is not None:
        raise ModelNotFoundError(reason)
    folder = _folder(name)
    if folder is None:
        return Subject(name, wrap_model(_random_smollm2(), f"{name}:{SEED}"), None, 2048)
    backend, tokenizer = MLXModelProvider().load_model(str(folder))
    return Subject(name, backend, tokenizer, CONTEXTS.get(name, 4096))


_FILES = ("config.json", "model.safetensors", "tokenizer.json")


def _folder(name: str) -> Path | None:
    """The folder of a subject; None if it has none."""
    if name == "smollm2-135m-shape":
        return None
    if name in REAL:
        return smollm2.FOLDER / name
    if name == "stories260K":
        given = os.environ.get(FOLDER_VARIABLE)
        return (Path(given) if given else ROOT.parent / "shared" / "models") / name
    return find_folder(name)


def _random_smollm2() -> Module:
    """Weights spread so wide that the likeliest token is clear and differs from step to step."""
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            vocab_size=49152,
            rms_norm_eps=1e-5,
            rope_theta=1e5,
            tie_word_embeddings=True,
        )
    )
    mx.random.seed(SEED)

    def draw(weight: mx.array) -> mx.array:
        if weight.ndim < 2:
            return weight
        spread = 2.0 / weight.shape[-1] ** 0.5
        return mx.random.normal(weight.shape, scale=spread)

    model.update(tree_map(draw, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model
