"""Fake of the `Tokenizer` port: one character per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from semantic.application.request import StreamingDetokenizer
from semantic.domain.errors import InvalidRequestError

_FIRST = 32


class CharTokenizer:
    """Token i is the character 32 + i; `eos` end an answer."""

    def __init__(self, eos: frozenset[int] = frozenset()) -> None:
        self._eos = eos

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        del add_special_tokens  # it has none
        return [ord(character) - _FIRST for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(_FIRST + token) for token in tokens)

    def text_of(self, token: int) -> str:
        return self.decode([token])

    def detokenizer(self, after: Sequence[int] = ()) -> StreamingDetokenizer:
        return StreamingDetokenizer(self.decode, after)

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        del messages, add_generation_prompt
        raise InvalidRequestError("this model has no chat template; send a plain prompt")
