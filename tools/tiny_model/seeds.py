"""The seeds everything is drawn from: training data, text for the tokenizer, held-out trials.

The first word of a seed says what it is for, so no trial is drawn as training data are. It knows
nothing of what is drawn.
"""


def training(run: int, length: int, shard: int, row: int) -> str:
    return f"train/{run}/{length}/{shard}/{row}"


def tokenizer(sample: int) -> str:
    return f"tokenizer/{sample}"


def held_out(name: str) -> str:
    return f"held-out/{name}"
