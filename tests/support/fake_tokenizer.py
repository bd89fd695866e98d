"""Fake of the `Tokenizer` port: tokens are bytes, so characters span tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from semantic.application.request import StreamingDetokenizer
from semantic.domain.errors import InvalidRequestError

BOS = 256
EOS = 257


class ByteTokenizer:
    """Token i is byte i of UTF-8; 256 begins a prompt and 257 ends an answer, both without text.

    `merged` adds tokens of several bytes, numbered from 258 on: they may end inside a character.
    """

    def __init__(self, merged: Sequence[bytes] = ()) -> None:
        self._merged = tuple(merged)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return EOS + 1 + len(self._merged)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset({EOS})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self._bytes, tokens)).decode(errors="replace")

    def text_of(self, token: int) -> str:
        return self.decode([token])

    def detokenizer(self, after: Sequence[int] = ()) -> StreamingDetokenizer:
        return StreamingDetokenizer(self.decode, after)

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        for message in messages:
            if not {"role", "content"} <= message.keys():
                raise InvalidRequestError(f"a message needs role and content, got {dict(message)}")
        text = "".join(f"<{message['role']}>{message['content']}\n" for message in messages)
        return self.encode(text + "<assistant>" * add_generation_prompt)

    def _bytes(self, token: int) -> bytes:
        if token in (BOS, EOS):
            return b""
        return bytes([token]) if token < BOS else self._merged[token - EOS - 1]
