"""Seeds of everything random: training data, text for the tokenizer, held-out trials.

The first word of a seed is its purpose, so no trial is drawn like training data. Knows nothing of
what is drawn.
"""


def training(run: int, length: int, shard: int, row: int) -> str:
    return f"train/{run}/{length}/{shard}/{row}"


def tokenizer(sample: int) -> str:
    return f"tokenizer/{sample}"


def held_out(name: str) -> str:
    return f"held-out/{name}"
