"""Encoders of the extra [embeddings], in an environment that has it: vectors are those of the
package's own models, pooled as a model's files declare."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))
import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx.utils import tree_flatten, tree_map  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from tokenizers.processors import TemplateProcessing  # noqa: E402

from semantic.adapters.mlx.model.load_embedder import load_embedder  # noqa: E402
from semantic.ports.embedding import Embedder, Vector  # noqa: E402

TEXTS = ("Oslo", "The sea is calm today.", "A ship " * 12, "x")
WIDTH = 32
FIRST, END = "<|user|>", "<|end|>"
NEAR = 1e-5


def write_encoder(folder: Path, kind: str, pooling: str | None) -> Path:
    """A small random encoder with the package's tokenizer."""
    folder.mkdir()
    vocabulary = _word_pieces(folder) if kind == "bert" else _package_tokenizer(folder)
    config = {
        "model_type": kind,
        "architectures": ["Encoder"],
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 66,
        "vocab_size": vocabulary,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-5,
        "pad_token_id": 1,
    }
    module = import_module(f"mlx_embeddings.models.{kind.replace('-', '_')}")
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.random.seed(7)
    drawn = tree_map(lambda one: mx.random.normal(one.shape) * 0.2 + 0.1, model.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(drawn)))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        declared = json.dumps({pooling: True})
        (folder / "1_Pooling" / "config.json").write_text(declared, encoding="utf-8")
    return folder


def _word_pieces(folder: Path) -> int:
    """BERT's own kind of tokenizer, with a piece for each letter; the size of its vocabulary."""
    letters = [*map(chr, range(ord("a"), ord("z") + 1)), "."]
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*marks, *letters, *(f"##{letter}" for letter in letters)]
    (folder / "vocab.txt").write_text("\n".join(pieces), encoding="utf-8")
    fast = import_module("transformers").BertTokenizerFast
    fast(str(folder / "vocab.txt")).save_pretrained(folder)
    return len(pieces)


def _package_tokenizer(folder: Path) -> int:
    """The package's tokenizer with marks around each text; the size of its vocabulary."""
    package = ROOT / "src" / "semantic" / "models" / "semantic-tiny"
    tokenizer = Tokenizer.from_file(str(package / "tokenizer.json"))
    marks = [(mark, tokenizer.token_to_id(mark)) for mark in (FIRST, END)]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{FIRST} $A {END}", pair=f"{FIRST} $A {END} $B {END}", special_tokens=marks
    )
    fast = import_module("transformers").PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer).save_pretrained(folder)
    return int(tokenizer.get_vocab_size())


def computed(embedder: Embedder, *texts: str) -> list[Vector]:
    run = embedder.start([embedder.encode(text) for text in texts])
    found = None
    while found is None:
        found = run.step()
    return list(found)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
@pytest.mark.parametrize(
    ("declared", "pooling"),
    [
        (None, "mean"),
        ("pooling_mode_mean_tokens", "mean"),
        ("pooling_mode_cls_token", "first"),
        ("pooling_mode_lasttoken", "last"),
    ],
)
def test_vectors_are_those_of_the_packages_model(
    tmp_path: Path, kind: str, declared: str | None, pooling: str
) -> None:
    folder = write_encoder(tmp_path / "encoder", kind, declared)
    embedder, details = load_embedder(folder)
    assert embedder.max_tokens == (66 if kind == "bert" else 64)
    assert (details.architecture, embedder.dimensions) == (kind, WIDTH)
    utils = import_module("mlx_embeddings.utils")
    model = utils.load_model(folder, path_to_repo="")
    for text, vector in zip(TEXTS, computed(embedder, *TEXTS), strict=True):
        output = model(mx.array([embedder.encode(text)]))
        states = np.array(output.last_hidden_state)[0]
        taken = {"mean": states.mean(axis=0), "first": states[0], "last": states[-1]}[pooling]
        assert vector.tolist() == pytest.approx(list(taken / np.linalg.norm(taken)), abs=NEAR)
        if pooling == "mean":
            assert vector.tolist() == pytest.approx(output.text_embeds[0].tolist(), abs=NEAR)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_a_batch_changes_no_vector(tmp_path: Path, kind: str) -> None:
    embedder, _ = load_embedder(write_encoder(tmp_path / "encoder", kind, None))
    for text, vector in zip(TEXTS * 40, computed(embedder, *TEXTS * 40), strict=True):
        assert vector.tolist() == pytest.approx(computed(embedder, text)[0].tolist(), abs=NEAR)


def test_a_text_that_is_too_long_keeps_its_end(tmp_path: Path) -> None:
    embedder, _ = load_embedder(write_encoder(tmp_path / "encoder", "bert", None))
    long = embedder.encode("word " * 200)
    short = embedder.shortened(long)
    assert (len(short), short[-1], short[:-1]) == (66, long[-1], long[:65])
    assert len(computed(embedder, "word " * 10)[0]) == WIDTH
