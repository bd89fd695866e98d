"""Trains the byte-level BPE tokenizer of semantic-tiny on generated conversations.

Knows nothing of the model. Run: python -m tools.tiny_model.tokenizer
"""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.tiny_model import seeds, vocabulary
from tools.tiny_model.dialogues import dialogue

FOLDER = Path(__file__).parents[2] / "src" / "semantic" / "models" / "semantic-tiny"
SPECIAL_TOKENS = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
VOCABULARY_SIZE = 2048
CONTEXT = 8192
SAMPLES = 12_000
LISTED_WORDS = ["", *vocabulary.CODE_WORDS, *vocabulary.NAMES, *vocabulary.CITIES, *vocabulary.JOBS]
LISTED_WORDS += [*vocabulary.PETS, *vocabulary.COLOURS, *vocabulary.FOODS, *vocabulary.HOBBIES]

TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('semantic-tiny knows the roles system, user and assistant, not ' \
~ message['role']) -}}
{%- endif -%}
{{- '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""


def samples(count: int) -> Iterator[str]:
    """Conversations, and the listed words often enough that most become one token each."""
    for index in range(count):
        yield "\n".join(text for _, text in dialogue(Random(seeds.tokenizer(index)), 2000))
        yield " ".join(LISTED_WORDS) if index % 12 == 0 else ""


def trained(texts: Iterator[str]) -> Tokenizer:
    """Digits stay single so that sums and codes are spelled; bytes make every text encodable."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def loaded(folder: Path = FOLDER) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def special_id(token: str) -> int:
    """Special tokens come first in the vocabulary, in the order of their list."""
    return SPECIAL_TOKENS.index(token)


if __name__ == "__main__":
    write(trained(samples(SAMPLES)), FOLDER)
    print(f"{loaded().get_vocab_size()} tokens in {FOLDER.name}")
