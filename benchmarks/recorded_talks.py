"""Recorded sessions with text as chats whose answers are known, and a tokenizer that keeps them.

Knows files and chats; no server.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from benchmarks.draft_acceptance import text_of
from benchmarks.server_client import Message

END = "<|im_end|>"
CHATML = (
    "{%- for message in messages -%}{{- '<|im_start|>' ~ message['role'] ~ '\\n' ~ "
    "message['content'] ~ '<|im_end|>\\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}"
    "{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
_ROLES = {"system": "system", "assistant": "assistant"}
"""The roles that are sent. All others are users."""


class Exchange(NamedTuple):
    """A recorded answer, its number among all of them, and the messages before it."""

    number: int
    messages: list[Message]
    answer: str
    tokens: list[int]


class Talk(NamedTuple):
    """A recorded session."""

    task: str
    exchanges: list[Exchange]


class Limits(NamedTuple):
    """How much of a recording is used; None for all. The last sessions come first: eight of them
    solve the same task."""

    sessions: int | None = None
    turns: int | None = None
    tokens: int | None = None


def talks_in(path: Path, tokenizer: Tokenizer, limits: Limits) -> list[Talk]:
    """Return the last sessions of a recording, in order."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        recorded = [json.loads(line) for line in lines]
    if limits.sessions is not None:
        recorded = recorded[-limits.sessions :]
    tokenizer.encode_special_tokens = True  # text that spells a special token is text
    numbers = itertools.count()
    return [
        Talk(
            one["session"].rpartition("/")[2],
            _exchanges(one["messages"], tokenizer, limits, numbers),
        )
        for one in recorded
    ]


def _exchanges(
    recorded: Sequence[Mapping[str, object]],
    tokenizer: Tokenizer,
    limits: Limits,
    numbers: Iterator[int],
) -> list[Exchange]:
    said: list[Message] = []
    found: list[Exchange] = []
    for message in recorded:
        role, text = _ROLES.get(str(message["role"]), "user"), text_of(message)
        if role == "assistant" and text:
            text, tokens = _cut(text, tokenizer, limits.tokens)
            found.append(Exchange(next(numbers), list(said), text, tokens))
            if len(found) == limits.turns:
                break
        said.append({"role": role, "content": text})
    return found


def _cut(text: str, tokenizer: Tokenizer, most: int | None) -> tuple[str, list[int]]:
    """Return an answer of at most `most` tokens. Raises ValueError if the tokenizer loses text."""
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    kept = tokenizer.decode(tokens, skip_special_tokens=False)
    if kept != text:
        raise ValueError(f"the tokenizer does not keep the text of {text[:80]!r}")
    if most is not None and most < len(tokens):
        del tokens[most:]
        kept = tokenizer.decode(tokens, skip_special_tokens=False)
        while not text.startswith(kept):  # it ends with a part of a character
            del tokens[-1]
            kept = tokenizer.decode(tokens, skip_special_tokens=False)
    return kept, tokens


def use_tokenizer(model: Path, file: Path) -> int:
    """Give the model in a folder another tokenizer, and ChatML's template. Return the number of the
    token that ends an answer. Raises ValueError if the tokenizer has no such token."""
    tokenizer = Tokenizer.from_file(str(file))
    end = tokenizer.token_to_id(END)
    if end is None:
        raise ValueError(f"{file.name} has no token {END}")
    (model / "tokenizer.json").write_bytes(file.read_bytes())
    (model / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    _change(model / "tokenizer_config.json", {"eos_token": END, "pad_token": END})
    ends = {"eos_token_id": end, "pad_token_id": end}
    _change(model / "config.json", ends)
    _change(model / "generation_config.json", ends)
    return int(end)


def _change(file: Path, members: Mapping[str, object]) -> None:
    known = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**known, **members}), encoding="utf-8")
