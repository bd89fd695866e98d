"""Small Hugging Face tokenizers built in memory, for tests whose tokens need texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken
from tokenizers import Tokenizer as Fast
from tokenizers.decoders import ByteFallback, Fuse
from tokenizers.decoders import Sequence as Decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from semantic.adapters.mlx.text.tokenizer import HuggingFaceTokenizer, MLXTokenizer

END = "<|end|>"


def text_tokenizer(
    extra: Sequence[str] = (), *, special: Sequence[str] = (), replacing: int = 0
) -> MLXTokenizer:
    """Each printable ASCII character is a token, then END: 96 tokens, as tiny models have.

    `extra` adds tokens of several characters; `<0x41>` and the like are byte tokens, a second
    spelling of a character. `special` adds special tokens. `replacing` leaves out that many rare
    characters.
    """
    letters = [chr(code) for code in range(32, 127)]
    rare = [letter for letter in "~`^@$%&*;|" if letter in letters][:replacing]
    texts = [*(letter for letter in letters if letter not in rare), *extra]
    vocabulary = {text: i for i, text in enumerate(texts)}
    fast = Fast(BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    fast.decoder = Decoders([ByteFallback(), Fuse()])
    fast.add_special_tokens([AddedToken(text, special=True) for text in (END, *special)])
    make = cast("Callable[..., PreTrainedTokenizerFast]", PreTrainedTokenizerFast)
    wrapped = TokenizerWrapper(make(tokenizer_object=fast, eos_token=END))
    return MLXTokenizer(cast(HuggingFaceTokenizer, wrapped))


def id_of(tokenizer: MLXTokenizer, text: str) -> int:
    """The id of the token `text`."""
    wrapper = cast(TokenizerWrapper, tokenizer.inner)
    return cast(int, wrapper.convert_tokens_to_ids(text))
