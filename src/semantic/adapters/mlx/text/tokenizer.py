"""A `Tokenizer` over a Hugging Face tokenizer, the bytes of its tokens, and its special tokens."""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import getattr_static
from typing import Final, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from semantic.adapters.mlx.text.bounded_template import bounded_rendering
from semantic.adapters.mlx.text.chat_template import TEMPLATE_ERRORS
from semantic.application.fair_threads import Failure, attempt
from semantic.application.request import ByteDetokenizer, StreamingDetokenizer
from semantic.domain.errors import BackendError, InvalidRequestError

_PRINTABLE: Final = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""Bytes that stand for themselves in a byte-level vocabulary."""
_BYTES: Final = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + number): byte
    for number, byte in enumerate(one for one in range(0x100) if one not in _PRINTABLE)
}


def plain_decode(decode: Callable[[list[int]], str]) -> Callable[[list[int]], str]:
    """Return a function with the same results as `decode`. If possible, it runs no Python code."""
    backend = _backend(decode)
    if backend is None:
        return decode
    quick = backend.decode
    return lambda tokens: quick(tokens, skip_special_tokens=False)


def bytes_of_tokens(decode: Callable[[list[int]], str]) -> Callable[[int], bytes] | None:
    """Return a function that maps a token to its bytes; None if that is impossible."""
    backend = _backend(decode)
    if backend is None or type(backend.decoder) is not ByteLevel:
        return None
    spelling = backend.id_to_token
    return functools.cache(lambda token: _bytes(spelling(token) or ""))


def _bytes(spelling: str) -> bytes:
    try:
        return bytes(_BYTES[character] for character in spelling)
    except KeyError:
        return spelling.encode()


def _backend(decode: Callable[[list[int]], str]) -> Tokenizer | None:
    """Return the decoder that `decode` calls; None if transformers changes the decoder's text."""
    owner = getattr(decode, "__self__", None)
    if not isinstance(owner, PreTrainedTokenizerFast):
        return None
    methods = ((getattr_static(of, "decode"), getattr_static(of, "_decode"))
               for of in (type(owner), PreTrainedTokenizerFast))  # fmt: skip
    if len(set(methods)) > 1:
        return None
    backend: Tokenizer = owner.backend_tokenizer
    return None if _cleans(owner, backend) else backend


def _cleans(tokenizer: PreTrainedTokenizerFast, backend: Tokenizer) -> bool:
    if not tokenizer.clean_up_tokenization_spaces:
        return False
    told = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    return not isinstance(backend.model, BPE) or bool(getattr(tokenizer, told, False))


_RUN: Final = re.compile(r"\s+|\S+")
_LONG_RUN: Final = 1 << 12
"""The maximum length of a run of similar characters that encodes in milliseconds."""
_OTHER: Final = " a "
"""Text that ends a run of similar characters."""
_SQUARE: Final = 8
"""A run is slow if four times its length takes over this many times as long."""
_MOST_SECONDS: Final = 1.0
_MEASUREMENTS: Final = 3
"""The shortest of this many measurements counts: a garbage collection lengthens some."""

NO_TEMPLATE = "this model has no chat template; send a plain prompt"


class AddedToken(Protocol):
    """A token for one fixed text. A `special` token controls the model."""

    content: str
    special: bool


class HuggingFaceTokenizer(Protocol):
    """The part of mlx-lm's `TokenizerWrapper` that this module uses."""

    bos_token: str | None
    chat_template: object
    eos_token_ids: Iterable[int]
    added_tokens_decoder: Mapping[int, AddedToken]
    has_chat_template: bool
    think_start: str | None
    think_end: str | None
    init_kwargs: Mapping[str, object]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...

    def get_vocab(self) -> Mapping[str, int]: ...

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, object]], **options: object
    ) -> str | list[int]: ...


class MLXTokenizer:
    """A `Tokenizer` with the same results as mlx-lm's. Thread-safe; decoding never waits."""

    def __init__(
        self, inner: HuggingFaceTokenizer, clock: Callable[[], float] = time.thread_time
    ) -> None:
        self.inner, self._clock = inner, clock
        self.eos_token_ids = frozenset(inner.eos_token_ids)
        self._encoding = threading.Lock()
        self._decode = plain_decode(inner.decode)
        self._bytes_of = bytes_of_tokens(inner.decode)
        added = inner.added_tokens_decoder.items()
        self._special = frozenset(number for number, token in added if token.special)
        self._some_text = self.encode("a", add_special_tokens=False)[-1:]

    @property
    def longest_token(self) -> int:
        """The length, in characters, of the longest token."""
        return max(map(len, self.inner.get_vocab()), default=1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer.encode`. A text that begins with the BOS token gets no second one."""
        bos = self.inner.bos_token
        if bos is not None and text.startswith(bos):
            add_special_tokens = False
        with self._encoding:
            outcome = attempt(lambda: self._encoded(text, add_special_tokens=add_special_tokens))
        if not isinstance(outcome, Failure):
            return outcome
        error = outcome.error
        cause = error.__cause__ if isinstance(error, BackendError) else error
        # A panic of the library, or an error of its own.
        if type(cause) is Exception or type(cause).__module__ == "pyo3_runtime":
            raise InvalidRequestError(f"cannot tokenize the text: {error}") from error
        raise cause or error

    def _encoded(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self._require_soon(text)
        return list(self.inner.encode(text, add_special_tokens=add_special_tokens))

    def _require_soon(self, text: str) -> None:
        """Raise InvalidRequestError if a run of similar characters takes too long to encode."""
        if len(text) <= _LONG_RUN:
            return
        run = max(_RUN.finditer(text), key=lambda one: one.end() - one.start())
        at, n = run.start(), run.end() - run.start()
        if n <= _LONG_RUN:
            return
        short, long = (text[at : at + size] + _OTHER for size in (_LONG_RUN // 4, _LONG_RUN))
        most = _MOST_SECONDS * (_LONG_RUN / n) ** 2
        if self._measured(long) <= most:  # further measurements could only be shorter
            return
        if self._seconds(long) > max(most, _SQUARE * self._seconds(short)):
            raise InvalidRequestError(
                f"cannot tokenize {n} characters of one kind in a row: this model's tokenizer "
                "takes time proportional to the square of their number; split them up"
            )

    def _seconds(self, text: str) -> float:
        return min(self._measured(text) for _ in range(_MEASUREMENTS))

    def _measured(self, text: str) -> float:
        began = self._clock()
        self.inner.encode(text)
        return self._clock() - began

    def encode_rendered(self, text: str) -> list[int]:
        """Return the tokens of a template's output, which already has its special tokens."""
        return self.encode(text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._decode(list(tokens))

    def text_of(self, token: int) -> str:
        if self._bytes_of is not None:
            return self.decode([token])
        return StreamingDetokenizer(self.decode, self._some_text).whole(token)

    def detokenizer(self, after: Sequence[int] = ()) -> ByteDetokenizer | StreamingDetokenizer:
        """See `Tokenizer.detokenizer`."""
        if self._bytes_of is None:
            begins = bool(after) and after[-1] in self._special
            return StreamingDetokenizer(self.decode, () if begins else after)
        return ByteDetokenizer(self._bytes_of)

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        if not self.inner.has_chat_template:
            raise InvalidRequestError(NO_TEMPLATE)
        given = [dict(message) for message in messages]
        try:
            text = self.apply_template(given, {"add_generation_prompt": add_generation_prompt})
        except TEMPLATE_ERRORS as error:
            raise refusal(error) from error
        return self.encode_rendered(text)

    def apply_template(
        self, messages: Sequence[Mapping[str, object]], options: Mapping[str, object]
    ) -> str:
        """Return the chat template's text for `messages`. Raises any of `TEMPLATE_ERRORS`."""
        with bounded_rendering():
            text = self.inner.apply_chat_template(messages, tokenize=False, **options)
        if not isinstance(text, str):
            raise TypeError(f"expected a rendered template, got {type(text).__name__}")
        return text


def refusal(error: Exception) -> InvalidRequestError:
    """Return the error to raise for a request if the template raised `error`."""
    reason = str(error) or type(error).__name__
    return InvalidRequestError(f"the chat template refused the messages: {reason}")


Encode = Callable[[str], list[int]]
"""Takes text and returns its tokens; recognizes special tokens but adds none."""

_NEVER = "(?!)"


class SpecialTokens:
    """Encodes with one tokenizer's special tokens, and keeps escaped ones as text."""

    def __init__(
        self, encode: Encode, special: Mapping[str, int], marks: Mapping[str, int]
    ) -> None:
        """`Escaper` escapes `special` tokens in every text, and `marks` only in some texts."""
        self._encode = encode
        self._tokens = frozenset(special.values()) | frozenset(marks.values())
        self.special = _any_of(special)
        self.all = _any_of([*special, *marks])
        self._newline = encode("\n")
        # SentencePiece puts a space before every text, which is wrong in the middle of a text.
        self._adds_space = encode("a") != self._encode_after_newline("a")

    def encode(self, text: str, escaper: Escaper) -> list[int]:
        """Return the tokens of a rendered chat in which `escaper` has escaped the texts."""
        pieces = escaper.placeholder.split(text)
        tokens = self._encode(pieces[0])
        for at, piece in enumerate(pieces[1:], start=1):
            if at % 2:
                tokens += self._encode_as_text(escaper.texts[int(piece)])
            elif piece:
                tokens += self.encode_following(piece)
        return tokens

    def _encode_as_text(self, text: str) -> list[int]:
        tokens = self.encode_following(text)
        if len(text) == 1 or not self._tokens.intersection(tokens):
            return tokens
        return self._encode_as_text(text[:1]) + self._encode_as_text(text[1:])

    def encode_following(self, text: str) -> list[int]:
        """Return the tokens of a continued text, without SentencePiece's leading space."""
        return self._encode_after_newline(text) if self._adds_space else self._encode(text)

    def _encode_after_newline(self, text: str) -> list[int]:
        tokens = self._encode("\n" + text)
        size = len(self._newline)
        return tokens[size:] if tokens[:size] == self._newline else self._encode(text)


class Escaper:
    """Replaces special tokens in the texts of one chat with placeholders."""

    def __init__(self, special_tokens: SpecialTokens, texts: Iterable[str]) -> None:
        """`texts` are all texts in the chat, in which placeholders must not occur."""
        self._special_tokens = special_tokens
        self._word = _word_not_in([text for text in texts if "hiddentext" in text])
        self.placeholder = re.compile(f"{self._word}([0-9]+)z")
        self.texts: list[str] = []

    def __call__(self, text: str, *, marks: bool = False) -> str:
        """Return `text` with placeholders for special tokens. If `marks`, replaces marks too."""
        pattern = self._special_tokens.all if marks else self._special_tokens.special
        return pattern.sub(self._replace, text)

    def _replace(self, found: re.Match[str]) -> str:
        self.texts.append(found[0])
        return f"{self._word}{len(self.texts) - 1}z"


def _word_not_in(texts: Iterable[str]) -> str:
    word = "hiddentext"
    while any(word in text for text in texts):
        word += "x"
    return word


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted((token for token in tokens if token), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or _NEVER)
