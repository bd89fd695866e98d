# What we and mlx-lm use of transformers, for mypy: its own sources take longer to check than ours.

from typing import Any

from tokenizers import Tokenizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

class PreTrainedTokenizer(PreTrainedTokenizerBase): ...

class PreTrainedTokenizerFast(PreTrainedTokenizerBase):
    clean_up_tokenization_spaces: bool
    @property
    def backend_tokenizer(self) -> Tokenizer: ...

class AutoTokenizer:
    @classmethod
    def from_pretrained(cls, *inputs: Any, **kwargs: Any) -> Any: ...
    @staticmethod
    def register(*classes: Any, **kwargs: Any) -> None: ...
