"""Compares the engine's answers, alone, in a batch and from the cache, with mlx_lm.generate's.

Tokens are compared with mlx-lm's own loop, texts with `mlx_lm.generate` and with the tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

from mlx_lm.generate import generate
from mlx_lm.tokenizer_utils import TokenizerWrapper

from experiments import subjects
from experiments.exp_005_correctness.detokenizers import Texts, difference, sequences, sweep
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from experiments.reference import greedy
from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
from semantic.application.engine.batch_engine import BlockPoolBatchEngine
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import CompletedGeneration

ID = "EXP-005"
QUESTION = (
    "Does the engine answer byte for byte what mlx_lm.generate answers, alone, in a batch and "
    "from a cache?"
)
CRITERION = (
    "for every model, prompt and way the tokens equal those of mlx-lm's own loop, the text equals "
    "the tokenizer's decode of them, and it is byte-identical to the text of mlx_lm.generate "
    "unless that is the same text without the space with which the answer begins"
)
PARAMETERS: dict[str, Scalar] = {
    "models": ",".join(subjects.NAMES),
    "new_tokens": 32,
    "random_answers": 500,
}
Row: TypeAlias = dict[str, Scalar]
Done: TypeAlias = CompletedGeneration

SENTENCES = (
    "Lily had a small red ball and a big brown dog.",
    "One day the dog ran into the park with the ball.",
    "My name is Ada and I live in Ljubljana.",
    "A bird sat in the tree and looked at the two friends.",
    "They were happy because the sun was shining.",
    "Then it began to rain, and they went home to their mother.",
)
TEXTS = {
    "short": ("The quick brown fox", 5),
    "medium": (" ".join(SENTENCES), 60),
    "long": (" ".join(SENTENCES * 3) + " One day Lily and the dog", 270),
}
LONGEST = " ".join(SENTENCES * 24)
"""Text of each prompt, and its length in tokens for a model without a tokenizer."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as it is given to both sides: text, or token ids."""

    name: str
    given: str | tuple[int, ...]
    tokens: tuple[int, ...]


def run(parameters: Mapping[str, Scalar]) -> Result:
    """Every prompt in every way on every model that is here, and the detokenizers by themselves."""
    names = str(parameters["models"]).split(",")
    missing = {name: why for name in names if (why := subjects.why_missing(name))}
    for why in missing.values():
        print(f"skipped: {why}")
    present = [name for name in names if name not in missing]
    started = Run.start(
        ID, QUESTION, model=", ".join(present), parameters=parameters, seed=subjects.SEED
    )
    samples: list[Row] = []
    detokenizers: list[Row] = []
    for name in present:
        subject = subjects.load(name)
        samples += answers(subject, int(str(parameters["new_tokens"])))
        detokenizers += swept(subject, int(str(parameters["random_answers"])))
    failed = sum(not row["passed"] for row in samples)
    with_text = [row for row in samples if row["against_generate"] != NO_TEXT]
    identical = sum(row["against_generate"] == "none" for row in with_text)
    summary: dict[str, Json] = {
        "answers": [{**row} for row in samples],
        "compared": len(samples),
        "failed": failed,
        "tokens_compared": sum(int(str(row["tokens"])) for row in samples),
        "token_differences": sum(not row["tokens_equal"] for row in samples),
        "with_text": len(with_text),
        "identical_to_generate": identical,
        "without_the_space": len(with_text) - identical,
        "detokenizers": [{**row} for row in detokenizers],
        "skipped": "; ".join(missing.values()) or "none",
    }
    return started.finish(samples, summary, Verdict(CRITERION, 0, failed, passed=not failed))


NO_TEXT = "no text"


def prompts(subject: subjects.Subject) -> list[Prompt]:
    """Plain texts; the same and a longer one as questions where there is a chat template."""
    tokenizer = subject.tokenizer
    if tokenizer is None:
        ids = {name: subject.prompt(*text) for name, text in TEXTS.items()}
        return [Prompt(name, tokens, tokens) for name, tokens in ids.items()]
    found = [Prompt(name, text, tuple(tokenizer.encode(text))) for name, (text, _) in TEXTS.items()]
    if tokenizer.inner.chat_template is not None:
        for name, text in TEXTS.items():
            tokens = subject.prompt(*text)
            found.append(Prompt(f"{name} question", tokens, tokens))
        tokens = subject.prompt(LONGEST, 0)
        found.append(Prompt("longest question", tokens, tokens))
    return found


def answers(subject: subjects.Subject, new: int) -> Iterator[Row]:
    """One row per prompt and way of asking."""
    asked = prompts(subject)
    tokenizer = subject.tokenizer or subjects.TokenIds()
    spec = subject.backend.cache_spec()
    pool = BlockPool(spec, total_blocks=20_000)
    engine = BlockPoolBatchEngine(subject.backend, tokenizer, pool, spec)
    found: dict[str, list[Done]] = {}
    for way in ("alone", "in a batch", "in a batch, warm"):
        agents = [f"alone {p.name}" if way == "alone" else f"together {p.name}" for p in asked]
        done: dict[str, Done] = {}
        for agent, prompt in zip(agents, asked, strict=True):
            engine.submit(agent, prompt.given, max_tokens=new)
            if way == "alone":
                done |= {end.agent_id: end for end in engine.step()}
        done |= {end.agent_id: end for end in engine.step()}
        found[way] = [done[agent] for agent in agents]
    for place, prompt in enumerate(asked):
        expected = greedy(subject.model, prompt.tokens, new, tokenizer.eos_token_ids)
        text = reference_text(subject, prompt, new)
        for way, ends in found.items():
            row: Row = {
                "model": subject.name,
                "prompt": prompt.name,
                "prompt_tokens": len(prompt.tokens),
                "way": way,
                **compare(ends[place], expected.tokens, text, subject.tokenizer),
            }
            yield row | {"smallest_gap": round(expected.smallest_gap, 6)}


def reference_text(subject: subjects.Subject, prompt: Prompt, new: int) -> str | None:
    """What mlx_lm.generate writes; None for a model without text."""
    if subject.tokenizer is None:
        return None
    given = prompt.given if isinstance(prompt.given, str) else list(prompt.given)
    tokenizer = cast(TokenizerWrapper, subject.tokenizer.inner)
    return generate(subject.model, tokenizer, given, max_tokens=new)


def compare(
    done: Done, tokens: tuple[int, ...], text: str | None, tokenizer: MLXTokenizer | None
) -> Row:
    """How an answer differs from the reference."""
    row: Row = {
        "tokens": len(done.tokens),
        "cached_tokens": done.cached_tokens,
        "tokens_equal": done.tokens == tokens,
    }
    if text is None or tokenizer is None:
        return row | {
            "decode_equal": None,
            "against_generate": NO_TEXT,
            "passed": done.tokens == tokens,
        }
    spoken = [token for token in done.tokens if token not in tokenizer.eos_token_ids]
    decoded = done.text == tokenizer.decode(spoken)
    against = difference(text, done.text)
    passed = done.tokens == tokens and decoded and against != "other"
    return row | {"decode_equal": decoded, "against_generate": against, "passed": passed}


def swept(subject: subjects.Subject, count: int) -> list[Row]:
    """The three detokenizers on every token and on random answers."""
    if subject.tokenizer is None:
        return []
    inner = subject.tokenizer.inner
    special = {*subject.tokenizer.eos_token_ids}
    special |= {t for t in range(subject.backend.vocab_size) if not inner.decode([t])}
    vocab = [token for token in range(subject.backend.vocab_size) if token not in special]
    return sweep(subject.name, cast(Texts, inner), sequences(vocab, 12, count, subjects.SEED))
