"""The bytes of tokens, for tokenizers whose text is the concatenation of their tokens' bytes.

Those are the byte-level vocabularies of most models: each character of a token stands for one byte.
Knows how Hugging Face's tokenizers decode; not what a text is for.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import getattr_static
from typing import Final

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

_PRINTABLE: Final = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""Bytes that stand for themselves; the others are spelt by characters from U+0100 on."""
_BYTES: Final = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + number): byte
    for number, byte in enumerate(one for one in range(0x100) if one not in _PRINTABLE)
}


def plain_decode(decode: Callable[[list[int]], str]) -> Callable[[list[int]], str]:
    """`decode` of a tokenizer, without the Python around it where that only costs time."""
    backend = _backend(decode)
    if backend is None:
        return decode
    quick = backend.decode
    return lambda tokens: quick(tokens, skip_special_tokens=False)


def bytes_of_tokens(decode: Callable[[list[int]], str]) -> Callable[[int], bytes] | None:
    """The bytes of each token of the tokenizer with this `decode`; None if it has no such bytes.

    A token that the tokenizer does not have has none. Tokens are looked up once.
    """
    backend = _backend(decode)
    if backend is None or type(backend.decoder) is not ByteLevel:
        return None
    known = _KnownBytes(backend)
    return known.__getitem__


class _KnownBytes(dict[int, bytes]):
    """Bytes by token, as far as they were asked for."""

    def __init__(self, backend: Tokenizer) -> None:
        super().__init__()
        self._spelling = backend.id_to_token

    def __missing__(self, token: int) -> bytes:
        found = self[token] = _bytes(self._spelling(token) or "")
        return found


def _bytes(spelling: str) -> bytes:
    """The bytes that a token's characters stand for; an added token may have others, its own."""
    try:
        return bytes(_BYTES[character] for character in spelling)
    except KeyError:
        return spelling.encode()


def _backend(decode: Callable[[list[int]], str]) -> Tokenizer | None:
    """What decodes below `decode`, if that is transformers' own and gives its text unchanged."""
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
    """Whether spaces before punctuation are dropped; transformers does not for BPE, unless told."""
    if not tokenizer.clean_up_tokenization_spaces:
        return False
    told = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    return not isinstance(backend.model, BPE) or bool(getattr(tokenizer, told, False))
