"""How the states of a text's tokens become its vector, as the files beside a model declare it.

These are the files of sentence-transformers: most embedding models have them. Knows declarations
and arrays; no model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, Literal

from semantic.domain.errors import UnsupportedModelError

Pooling = Literal["last", "mean", "first"]

_DECLARED: Final[dict[str, Pooling]] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
}
_FILE: Final = Path("1_Pooling", "config.json")
_MODULES: Final = "modules.json"
_KNOWN_MODULES: Final = frozenset({"Transformer", "Pooling", "Normalize"})
_MAX_BYTES: Final = 1 << 20


def read_pooling(folder: Path, default: Pooling) -> Pooling:
    """The pooling that `folder` declares, `default` if it declares none.

    Raises UnsupportedModelError for one that is not supported, and for a layer after it.
    """
    modules = _read(folder / _MODULES)
    kinds = (
        [str(one.get("type", "")) for one in modules if isinstance(one, dict)]
        if isinstance(modules, list)
        else []
    )
    for kind in kinds:
        if kind.rpartition(".")[2] not in _KNOWN_MODULES:
            raise UnsupportedModelError(f"{folder / _MODULES}: {kind!r:.80} is not supported")
    declared = _read(folder / _FILE)
    if not isinstance(declared, dict):
        return default
    modes = [
        name for name, value in declared.items() if name.startswith("pooling_") and value is True
    ]
    if len(modes) != 1 or modes[0] not in _DECLARED:
        known = ", ".join(_DECLARED)
        raise UnsupportedModelError(f"{folder / _FILE}: expected one of {known}, got {modes}")
    return _DECLARED[modes[0]]


def read_length(folder: Path) -> int | None:
    """The longest text in tokens that `folder` declares; None if it declares none."""
    found = _read(folder / "sentence_bert_config.json")
    most = found.get("max_seq_length") if isinstance(found, dict) else None
    return most if type(most) is int and most > 0 else None


def _read(path: Path) -> object:
    """The JSON in a file; None if there is none. Raises UnsupportedModelError for another file."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UnsupportedModelError(f"{path} is longer than {_MAX_BYTES} bytes")
        found: object = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"cannot read {path}: {error}") from error
    return found
