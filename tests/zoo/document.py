"""Writes `docs/models.md` from what the zoo recorded and from the names of models.

Knows no model and computes nothing: the same records give the same text.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.zoo.names import NAMES, VARIANTS
from tests.zoo.patches import WITHOUT
from tests.zoo.records import Result, recorded_versions

DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "models.md"
_TOGETHER: Final = " together"
"""Behind a row's name where agents began alike at once."""

_COLUMNS: Final[Mapping[str, str]] = {
    "again": "the same prompt again",
    "append": "next turn",
    "last edited": "another last message",
    "edited": "edit in the middle",
    "shared 2nd": "second agent with the same beginning",
    "shared 3rd": "third agent",
    "restart turn": "after a restart: next turn",
    "restart shared": "new agent with the beginning",
    "restart again": "first prompt again",
}
"""Headings of what is reused, in this order."""

_FORMS: Final = {
    "own": "contiguous",
    "mlx-lm's batch": "padded",
    "one after another": "one after the other",
    "pages": "pages",
}

_CACHES: Final = {
    "KV": "full",
    "Rotating": "window",
    "Arrays": "state",
    "Chunked": "chunk",
    "Layer": "compressed",
}

_HEAD: Final = """# Models

What of each architecture is reused, and how its batches decode. Every number was measured with a
tiny random model of that architecture (two to four layers, windows of 128 tokens, prompts of 700
tokens) in fp32 on a CPU, beside mlx-lm alone on the same weights (mlx {mlx}, mlx-lm {mlx_lm}).
The tests compare with the same numbers; no change may lower them.

`python -m tests.zoo --document` writes this page, `--record` measures it anew. `model_type` in a
model's `config.json` names the module of mlx-lm; models were matched to it by hand. [Families of
models](families.md) says how they write calls.

## What is reused

Percent of the tokens that could be reused, rounded down. "Next turn" is a message behind an
answer; "another last message" replaces it; "edit in the middle" changes one token of 700, and what
is before it could be reused. Agents "with the same beginning" share 600 tokens of 700.

{profiles}

Full attention can be cut at every token. A window forgets what is before it, and a state cannot be
cut back: they go on from checkpoints, which are taken where a turn ends, where two prompts part, at
the end of a prompt and on a grid. The grid of these tiny models has a distance of 256 tokens, that
of large ones up to 4,096; an edit computes what is behind the last checkpoint before it. PLaMo 3
reuses what lies within its window alone: of a long prompt next to nothing.

## Architectures

"Caches": what the layers keep. *full*: keys and values of every token; *window*: of the last ones;
*state*: of fixed size (Mamba, gated delta, short convolutions); *(a, b)*: several in one layer.

"Decodes": *contiguous*: every sequence has buffers of its own in one batch, and nothing is padded.
*pages*: in shared pages of 256 tokens, which agents share and restores need not copy; where this
device has kernels for the heads of the model, else as on a CPU. *padded*: in mlx-lm's own batch,
padded to the longest sequence. *mixed*: attention contiguous, states in mlx-lm's batch. *one after
the other*: sequences share no step.

"Exact": whether greedy tokens are mlx-lm's, alone, in a batch of unequal lengths, with a prompt
again, appended, edited or begun alike, preempted, after a restart and after a kill; else where
they are not. Two tokens whose logits differ by less than a thousandth of the largest count as
equal. Where a sparse indexer chooses (GLM-5, DeepSeek V3.2) a prompt computed in two pieces may
flip a near tie, in mlx-lm alone too.

"Reuse" is a row of the table above.

{architectures}
"""


def document(results: Mapping[str, Result]) -> str:
    """The page."""
    rows = {name: one for name, one in results.items() if not name.endswith(_TOGETHER)}
    served = [one for one in rows.values() if not one.refused]
    letters = _letters(served)
    text = _HEAD.format(
        profiles=_profiles(served, letters),
        architectures=_architectures(served, letters),
        **recorded_versions(),
    )
    parts = [text, _variants(served, letters), _together(results)]
    return "\n".join([*(part for part in parts if part), _left_out(rows)])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


Profile = tuple[int, ...]


def _profile(result: Result) -> Profile:
    return tuple(result.reuse[column] for column in _COLUMNS)


def _letters(served: Sequence[Result]) -> dict[Profile, str]:
    """A letter for each way of reuse, the best first."""
    found = sorted({_profile(one) for one in served}, key=lambda one: (-sum(one), one))
    return dict(zip(found, string.ascii_uppercase, strict=False))


def _profiles(served: Sequence[Result], letters: Mapping[Profile, str]) -> str:
    counts = Counter(_profile(one) for one in served)
    rows = [
        [letter, *(str(percent) for percent in profile), str(counts[profile])]
        for profile, letter in letters.items()
    ]
    return _table(["reuse", *_COLUMNS.values(), "rows below"], rows)


def _architectures(served: Sequence[Result], letters: Mapping[Profile, str]) -> str:
    rows = [
        [NAMES[one.row], f"`{one.row}`", *_facts(one, letters)]
        for one in served
        if one.row not in VARIANTS
    ]
    return _table(
        ["models", "module", "caches", "decodes on a CPU", "on a GPU", "reuse", "exact"],
        sorted(rows, key=lambda row: row[0].lower()),
    )


def _variants(served: Sequence[Result], letters: Mapping[Profile, str]) -> str:
    rows = [
        [
            f"{NAMES[one.row.partition('+')[0]].partition(',')[0]}: {VARIANTS[one.row]}",
            *_facts(one, letters),
        ]
        for one in served
        if one.row in VARIANTS
    ]
    head = ["variant", "caches", "decodes on a CPU", "on a GPU", "reuse", "exact"]
    return "## Variants\n\n" + _table(head, sorted(rows)) + "\n" if rows else ""


def _facts(one: Result, letters: Mapping[Profile, str]) -> list[str]:
    form = _form(one.form)
    return [
        _caches(one.caches),
        form,
        "pages" if one.pages else form,
        letters[_profile(one)],
        _exactness(one),
    ]


def _form(form: str) -> str:
    return _FORMS.get(form, "mixed")


def _caches(caches: str) -> str:
    """The kinds of layers without their number: the tiny models have few."""
    kinds = re.sub(r"\w+", lambda word: _CACHES.get(word[0], word[0]), caches)
    return " + ".join(part.partition(" ")[2] for part in kinds.split(" + "))


def _exactness(one: Result) -> str:
    if not one.faults:
        return "yes"
    return "**no**: " + ", ".join(one.faults)


def _together(results: Mapping[str, Result]) -> str:
    rows = [
        [NAMES[name.removesuffix(_TOGETHER)], *(f"{percent}" for percent in one.reuse.values())]
        for name, one in sorted(results.items())
        if name.endswith(_TOGETHER)
    ]
    if not rows:
        return ""
    text = """## Agents that begin alike, at once

Eight new agents whose prompts begin with the same 1,024 tokens, submitted together, three times.
Percent of these tokens that were reused; 87 is all but the first agent's.
"""
    head = ["models", "first eight", "second eight", "third eight"]
    return f"{text}\n{_table(head, sorted(rows))}\n"


def _left_out(rows: Mapping[str, Result]) -> str:
    refused = [
        [_known(one.row), f"`{one.row}`", one.refused.partition(": ")[2]]
        for one in rows.values()
        if one.refused
    ]
    without = [[NAMES[name], f"`{name}`", reason] for name, reason in WITHOUT.items()]
    text = ""
    if refused:
        text += "## Refused\n\n" + _table(["models", "module", "what is said"], sorted(refused))
        text += "\n\n"
    text += "## Not measured\n\nmlx-lm itself cannot compute these here.\n\n"
    return text + _table(["models", "module", "reason"], sorted(without)) + "\n"


def _known(row: str) -> str:
    name = NAMES[row.partition("+")[0]]
    return f"{name}: {VARIANTS[row]}" if row in VARIANTS else name
