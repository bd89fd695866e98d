"""Templates of real families as tokenizers, from the folder that SEMANTIC_TEMPLATES names."""

from __future__ import annotations

import functools
import os
import re
import tempfile
from pathlib import Path
from typing import Final

from semantic.adapters.mlx.text.chat_format import MLXChatFormat
from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
from tests.support.chat_templates import FORMATS, HEADED, Format, load_format

FOLDER: Final = os.environ.get("SEMANTIC_TEMPLATES", "")
LEFT_OUT: Final = ("fireworks-ai-llama-3-firefunction-v2",)
"""Templates that demand more than messages and tools: its tools as a text of its own."""
_SPECIAL: Final = re.compile(
    r"<\|[^|<>\s]+\|?>|<[^|<>\s]+\|>|<\uff5c[^\uff5c]+\uff5c>|\[/?[A-Z_]{3,}\]|</?s>"
)
_PLAIN: Final = re.compile(r"</?[a-zA-Z_]+(?::[a-zA-Z_]+)?>")


def real_formats() -> dict[str, Format]:
    """The formats of real templates by name; none without the folder."""
    paths = sorted(Path(FOLDER).glob("*.jinja")) if FOLDER else []
    return {path.stem: real_format(path) for path in paths if path.stem not in LEFT_OUT}


def real_format(path: Path) -> Format:
    """A template with the tokens that it names: a family's tokenizer has them."""
    text = path.read_text(encoding="utf-8")
    special = tuple(dict.fromkeys(_SPECIAL.findall(text)))
    plain = tuple(dict.fromkeys(one for one in _PLAIN.findall(text) if one not in special))
    return Format(path.stem, text, special=(*special, "<s>"), plain=plain, begin="<s>")


OURS: Final = FORMATS | HEADED
"""The project's own formats by name."""
REAL: Final = real_formats()


@functools.cache
def tokenizer_of(name: str) -> MLXTokenizer:
    """The tokenizer of one of these formats."""
    with tempfile.TemporaryDirectory() as folder:
        return load_format((OURS | REAL)[name], Path(folder))


@functools.cache
def format_of(name: str) -> MLXChatFormat:
    return MLXChatFormat(tokenizer_of(name))
