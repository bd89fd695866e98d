"""Runs a row of the zoo through `build_engine`: its answers beside mlx-lm's, and what was reused.

The reference is mlx-lm alone, on weights that it loads itself from the same folder. Chunks have a
fixed size and every stored prefix is read, so that the numbers do not depend on the machine's pace.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast
from unittest import mock

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load

from semantic import BlockPool, BlockPoolBatchEngine, CompletedGeneration
from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.kv_cache.forms import choosing_pages
from semantic.adapters.mlx.kv_cache.paged.attention import PortableAttention
from semantic.adapters.mlx.kv_cache.probe import LogitsProbe
from semantic.adapters.mlx.kv_cache.spec_reader import read_shapes
from semantic.adapters.stores.memory import MemoryStore
from semantic.application.engine import batch_engine
from semantic.bootstrap import App, build_engine
from semantic.composition.engine_settings import Settings
from semantic.domain.errors import SemanticError
from semantic.domain.value_objects import BLOCK_TOKENS
from semantic.ports.generation import at_once
from tests.support.always_read import always_read
from tests.support.reference import generate, is_greedy, logit_gap
from tests.support.rig import FixedBudget
from tests.zoo.configurations import VOCAB
from tests.zoo.folder import write_folder
from tests.zoo.records import Result

MIB: Final = 1 << 20
ANSWER, LONG = 8, 16
"""Tokens of an answer, and of the first ones."""
PROMPT, SHARED, MESSAGE = 700, 600, 40
"""Tokens of a prompt, of the prefix that agents share, and of a further message."""
BEGIN, AGENTS, ROUNDS = 1024, 8, 3
"""Agents that begin alike at once: tokens of their prefix, how many, and how often."""
TOGETHER: Final = (
    *("deepseek_v3", "gemma4", "glm_moe_dsa", "gpt_oss", "kimi_linear", "lfm2", "llama"),
    *("nemotron_h", "qwen3_5"),
)
"""The rows for which that is recorded."""
_BATCH = (703, 41, 7, 300)
_CHUNK = 512
_NEAR: Final = 1e-3
"""Of the largest logit: two tokens that are closer are equally good."""

Prompt = tuple[int, ...]


@contextlib.contextmanager
def steady() -> Iterator[None]:
    """Engines that are built here compute in chunks of one size and read what is stored."""
    with (
        mock.patch.object(batch_engine, "PrefillBudget", return_value=FixedBudget(_CHUNK)),
        always_read(),
    ):
        yield


def text(n_tokens: int, seed: str) -> Prompt:
    """Random tokens; the beginnings of texts of one seed are alike. Without the special ones."""
    draw = random.Random(seed)
    return tuple(draw.randrange(4, VOCAB) for _ in range(n_tokens))


def edited(tokens: Prompt, at: int) -> Prompt:
    """`tokens` with another one at position `at`."""
    return (*tokens[:at], 4 + (tokens[at] + 1) % (VOCAB - 4), *tokens[at + 1 :])


class Reference:
    """mlx-lm alone on its own copy of the weights."""

    def __init__(self, folder: Path, *, in_one_pass: bool = False) -> None:
        """With `in_one_pass` an answer is right also if each of its tokens is the likeliest after
        those before, all computed at once: far cheaper than mlx-lm's own loop."""
        self._in_one_pass = in_one_pass
        loaded = load(str(folder))
        self.model = cast(Module, loaded[0])
        self._eos = frozenset(cast("set[int]", loaded[1].eos_token_ids))
        self.tokens: set[int] = set()

    @property
    def caches(self) -> str:
        """The kinds of caches that it keeps, like "2 Arrays + 2 KV"."""
        counts = Counter(_kind(cache) for cache in make_prompt_cache(self.model))
        return " + ".join(f"{n} {kind}" for kind, n in counts.items())

    def answer(self, prompt: Sequence[int], n: int = ANSWER) -> tuple[int, ...]:
        """Its greedy tokens, the end token included."""
        tokens = tuple(generate(self.model, prompt, n, self._eos))
        self.tokens.update(tokens)
        return tokens

    def verdict(self, prompt: Prompt, found: Sequence[int], n: int = ANSWER) -> str:
        """ "=", "~" or where the answer is wrong."""
        whole = len(found) == n or bool(self._eos.intersection(found[-1:]))
        if self._in_one_pass and whole and is_greedy(self.model, prompt, found):
            self.tokens.update(found)
            return "="
        expected = self.answer(prompt, n)
        if tuple(found) == expected:
            return "="
        pairs = enumerate(zip(found, expected, strict=False))
        at = next((i for i, (one, other) in pairs if one != other), None)
        if at is None:
            return f"X {len(found)} of {len(expected)} tokens"
        gap = logit_gap(self.model, [*prompt, *expected[:at]], (found[at], expected[at]))
        if not gap < _NEAR:
            return f"X {gap:.0e}@{at}"
        rest = found[at + 1 :]
        if not rest:
            return "~"
        later = self.verdict((*prompt, *found[: at + 1]), rest, n - at - 1)
        return "~" if later == "=" else later


def _kind(cache: object) -> str:
    inner = getattr(cache, "caches", None)
    if inner is not None:
        return f"({', '.join(_kind(one) for one in inner)})"
    return type(cache).__name__.removesuffix("Cache").removesuffix("KV") or "KV"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and how many of its prompt's tokens could be reused."""

    agent: str
    prompt: Prompt
    possible: int = 0


class Life:
    """One engine over the store in a folder, from `build_engine` to its end."""

    def __init__(self, folder: Path, store: Path, result: Result, reference: Reference) -> None:
        with steady():
            self.app: App = build_engine(
                Settings(
                    model=str(folder),
                    pool_bytes=128 * MIB,
                    use_disk=True,
                    store=store,
                    disk_bytes=512 * MIB,
                    memory_bytes=64 * MIB,
                )
            )
        self.result, self._reference = result, reference

    def ask(self, column: str, *asked: Asked, n: int = ANSWER, reuse: str = "") -> list[Prompt]:
        """Requests at once; returns what each agent holds then.

        Their verdict is the column's in `answers`; with a `reuse` their reuse is that column's.
        """
        return self.ask_engine(self.app.engine, column, asked, n, reuse)

    def ask_engine(
        self,
        engine: BlockPoolBatchEngine,
        column: str,
        asked: Sequence[Asked],
        n: int = ANSWER,
        reuse: str = "",
    ) -> list[Prompt]:
        """`ask` another engine over the same model."""
        uids = [engine.submit(one.agent, one.prompt, max_tokens=n) for one in asked]
        ended: dict[str, CompletedGeneration] = {done.uid: done for done in engine.step()}
        engine.check_integrity()
        answers, held = [self.result.answers.get(column, "=")], []
        for uid, one in zip(uids, asked, strict=True):
            done = ended[uid]
            if done.error is not None:
                answers.append(f"X {done.error}")
            else:
                answers.append(self._reference.verdict(one.prompt, done.tokens, n))
            held.append((*one.prompt, *done.tokens))
        self.result.answers[column] = worst(answers)
        if reuse:
            possible = sum(one.possible for one in asked)
            pairs = zip(uids, asked, strict=True)
            cached = sum(min(ended[uid].cached_tokens, one.possible) for uid, one in pairs)
            self.result.reuse[reuse] = 100 * cached // possible
        return held

    def close(self) -> None:
        """End in order."""
        self.app.engine.close()


def worst(answers: Sequence[str]) -> str:
    """The first that is wrong, else "~" if one is near, else "="."""
    return next((one for one in answers if one[0] == "X"), "~" if "~" in answers else "=")


def run(row: str, scratch: Path, *, in_one_pass: bool = False) -> Result:
    """Everything about a row; its folders are below `scratch`, which must not exist yet.

    `in_one_pass`: see `Reference`. Raises what mlx-lm raises if it cannot load or compute the
    model.
    """
    folder = write_folder(row, scratch / "model")
    result = Result(row)
    reference = Reference(folder, in_one_pass=in_one_pass)
    result.caches = reference.caches
    reference.answer(text(PROMPT, "ann"), LONG)
    try:
        life = Life(folder, scratch / "store", result, reference)
    except SemanticError as error:
        result.refused = f"{type(error).__name__}: {error}"
        return result
    describe(life.app, result)
    with steady():
        held, first = turns(life)
        killed = shutil.copytree(scratch / "store", scratch / "killed")
        preempted(life)
    life.close()
    life = Life(folder, scratch / "store", result, reference)
    restarted(life, held, first)
    life.close()
    life = Life(folder, killed, result, reference)
    life.ask("killed", Asked("ann", (*held, *text(MESSAGE, "killed"))))
    life.close()
    result.distinct = len(reference.tokens)
    return result


def turns(life: Life) -> tuple[Prompt, Prompt]:
    """The columns of one engine's life; what "ann" holds after two turns, and her first prompt."""
    first = text(PROMPT, "ann")
    life.ask("solo", Asked("ann", first), n=LONG)
    life.ask("batch", *(Asked(f"b{n}", text(n, f"b{n}")) for n in _BATCH), n=LONG)
    (held,) = life.ask("again", Asked("ann", first, PROMPT - 1), reuse="again")
    second = (*held, *text(MESSAGE, "second"))
    (later,) = life.ask("append", Asked("ann", second, len(held)), reuse="append")
    third = (*held, *text(MESSAGE, "instead"))
    life.ask("last edited", Asked("ann", third, len(held)), reuse="last edited")
    half = PROMPT // 2
    life.ask("edited", Asked("ann", edited(first, half), half), reuse="edited")
    begin = text(SHARED, "shared")
    life.ask("shared", Asked("s1", (*begin, *text(100, "s1"))))
    for agent, column in (("s2", "shared 2nd"), ("s3", "shared 3rd")):
        prompt = (*begin, *text(100, agent))
        life.ask("shared", Asked(agent, prompt, SHARED), reuse=column)
    return later, first


def preempted(life: Life) -> None:
    """Two requests in a pool that holds only one of them at its end; no column if none yields."""
    app = life.app
    lengths = BLOCK_TOKENS - 6, BLOCK_TOKENS - 5
    most = sum(app.spec.blocks_for(lengths[1] + ANSWER)) + sum(app.spec.blocks_for(lengths[0]))
    pool: BlockPool = BlockPool(app.spec, most)
    store = MemoryStore(64 * MIB)
    engine = BlockPoolBatchEngine(app.model, app.tokenizer, pool, app.spec, store=store)
    asked = [Asked(f"p{n}", text(n, f"p{n}")) for n in lengths]
    life.ask_engine(engine, "preempted", asked)
    if not engine.preemptions:
        del life.result.answers["preempted"]
    engine.close()


def restarted(life: Life, held: Prompt, first: Prompt) -> None:
    """The columns of a new engine on the store of one that ended in order."""
    third = Asked("ann", (*held, *text(MESSAGE, "third")), len(held))
    life.ask("restart", third, reuse="restart turn")
    shared = Asked("s4", (*text(SHARED, "shared"), *text(100, "s4")), SHARED)
    life.ask("restart", shared, reuse="restart shared")
    life.ask("restart", Asked("ann", first, PROMPT - 1), reuse="restart again")


def together(row: str, scratch: Path) -> Result:
    """Rounds of new agents that begin alike, all of them at once."""
    folder = write_folder(row, scratch / "model")
    result = Result(f"{row} together")
    life = Life(folder, scratch / "store", result, Reference(folder))
    begin = text(BEGIN, "together")
    with steady():
        for round_ in range(1, ROUNDS + 1):
            asked = [
                Asked(f"t{round_}{i}", (*begin, *text(20 + i, f"t{round_}{i}")), BEGIN)
                for i in range(AGENTS)
            ]
            life.ask("together", *asked, n=4, reuse=f"together {round_}")
    life.close()
    return result


def describe(app: App, result: Result) -> None:
    """How batches decode here, and whether the layers fit into pages."""
    model = app.model
    assert isinstance(model, MLXBackend)
    result.form = _form(model)
    spec, shapes = app.spec, read_shapes(model.model)
    probe = LogitsProbe(model.model)
    form = at_once(choosing_pages(probe, spec, shapes, lambda _: PortableAttention()))
    result.pages = form is not None


def _form(model: MLXBackend) -> str:
    if not model.together:
        return "one after another"
    if model.in_pages:
        return "pages"
    ragged = model.ragged_layers
    if all(ragged):
        return "own"
    return f"mixed {sum(ragged)}/{len(ragged)}" if any(ragged) else "mlx-lm's batch"
