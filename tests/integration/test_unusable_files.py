"""Models that cannot load: the message names the file at fault, and the mend."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from semantic.adapters.mlx.model.provider import MLXModelProvider, find_local, load_tokenizer
from semantic.domain.errors import ModelNotFoundError
from tests.support.model_folder import small_model


def text(said: str) -> bytes:
    return struct.pack("<Q", len(said.encode())) + said.encode()


def gguf(**fields: str) -> bytes:
    """The beginning of a file with these texts, numbers between them, and an array at the end."""
    said = b"".join(
        text(f"general.{name}") + struct.pack("<I", 8) + text(value)
        + text(f"{name}.count") + struct.pack("<IQ", 10, 7)
        for name, value in fields.items()
    )  # fmt: skip
    count = 2 * len(fields) + 1
    return b"GGUF" + struct.pack("<IQQ", 3, 10, count) + said + text("tokens") + b"\x09\0\0\0"


def error_of(path: Path) -> str:
    with pytest.raises(ModelNotFoundError) as error:
        find_local(str(path))
    (line,) = str(error.value).splitlines()
    return line


def test_a_gguf_file_is_named_and_a_conversion_is_offered(tmp_path: Path) -> None:
    path = tmp_path / "Coder-7B-Instruct-Q4_K_M.gguf"
    path.write_bytes(gguf(architecture="qwen3", name="Coder 7B"))
    assert error_of(path) == (
        f"{path} is a GGUF file (qwen3, Coder 7B): MLX does not load llama.cpp's format; "
        "`semantic models search Coder-7B-Instruct` finds conversions for MLX, and "
        "`mlx_lm.convert --hf-path ORG/NAME -q` converts the original weights"
    )
    assert error_of(tmp_path) == error_of(path)  # a folder that holds it


@pytest.mark.parametrize(
    "data",
    [b"", b"GGUF", b"GG", gguf(name="x" * 9000), gguf(name="a\x1b[2J\nb"),
     b"GGUF" + b"\xff" * 40, gguf(name="y")[:40], b"GGUF" + struct.pack("<IQQ", 3, 0, 2**64 - 1)],
)  # fmt: skip
def test_a_hostile_gguf_file_is_a_gguf_file(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    assert f"{path} is a GGUF file" in error_of(path)
    assert error_of(path).isprintable()


def cut(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(2000)


def cut_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 5000) + b"{")


def lose_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "config.json").write_text('{"a":'), "config.json is not valid"),
        (lambda folder: (folder / "tokenizer.json").write_text("["), "tokenizer.json is not valid"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json; copy it"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no model*.safetensors"),
        (cut, "model.safetensors has 2000 of "),
        (cut_header, "model.safetensors has 9 of 5008 bytes"),
        (lose_shard, "model-00002-of-00002.safetensors is missing, which "),
    ],
)
def test_the_file_at_fault_is_named(
    damage: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    folder = small_model(tmp_path / "tiny")
    damage(folder)
    with pytest.raises(ModelNotFoundError) as error:
        MLXModelProvider().load_model(str(folder))
    assert words in str(error.value)
    assert "newer version" not in str(error.value)


def test_a_model_of_the_hub_is_completed_by_pull(tmp_path: Path) -> None:
    snapshots = tmp_path / "models--org--tiny" / "snapshots"
    snapshots.mkdir(parents=True)
    folder = small_model(snapshots / "abc")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFoundError, match="`semantic models pull org/tiny` completes it"):
        load_tokenizer(str(folder))
