"""A Hugging Face tokenizer behind the `Tokenizer` port. Knows no model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from jinja2 import TemplateError

from semantic.domain.errors import InvalidRequestError


class HuggingFaceTokenizer(Protocol):
    """The part of a transformers tokenizer (or mlx-lm's wrapper of one) that is used here."""

    bos_token: str | None
    chat_template: object
    eos_token_ids: Iterable[int]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
    ) -> str | list[int]: ...


class MLXTokenizer:
    """Implements `Tokenizer`; text in, token ids out, as mlx-lm does it."""

    def __init__(self, inner: HuggingFaceTokenizer) -> None:
        self.inner = inner
        self._eos = frozenset(inner.eos_token_ids)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """See `Tokenizer.eos_token_ids`."""
        return self._eos

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer.encode`. A text that begins with the BOS token gets no second one."""
        bos = self.inner.bos_token
        if bos is not None and text.startswith(bos):
            add_special_tokens = False
        return list(self.inner.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        return self.inner.decode(list(tokens))

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """See `Tokenizer.render_chat`."""
        if self.inner.chat_template is None:
            raise InvalidRequestError("this model has no chat template; send a plain prompt")
        try:
            text = self.inner.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except TemplateError as error:
            raise InvalidRequestError(f"the chat template refused the messages: {error}") from error
        if not isinstance(text, str):
            raise TypeError(f"expected a rendered template, got {type(text).__name__}")
        # A template writes its own special tokens.
        return self.encode(text, add_special_tokens=False)
