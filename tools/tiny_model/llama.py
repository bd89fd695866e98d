"""The Llama architecture in torch, as small as semantic-tiny needs it, and its published folder.

Knows nothing of the data. Parameter names are those of the published format, so the state
dictionary is the file.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the network, under the names of the published configuration."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 576
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rms_norm_eps: float = 1e-5
    rope_theta: float = 100_000.0
    max_position_embeddings: int = 8192


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions in the half-split convention: pair i is (i, i + head_dim / 2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        queries = shape.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, heads, T, head_dim)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        q = rotated(self.heads(self.q_proj(x)), cosine, sine)
        k = rotated(self.heads(self.k_proj(x)), cosine, sine)
        v = self.heads(self.v_proj(x))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        projected: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return projected


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gated = functional.silu(self.gate_proj(x)) * self.up_proj(x)
        projected: Tensor = self.down_proj(gated)
        return projected


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cosine, sine)
        widened: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return widened


class Trunk(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)


class Llama(nn.Module):
    cosine: Tensor
    sine: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        powers = torch.arange(0, shape.head_dim, 2) / shape.head_dim
        angles = torch.arange(shape.max_position_embeddings)[:, None] / shape.rope_theta**powers
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.model.embed_tokens(tokens)  # (B, T, hidden)
        for layer in self.model.layers:
            x = layer(x, self.cosine[:length], self.sine[:length])
        logits: Tensor = self.model.norm(x) @ self.model.embed_tokens.weight.T  # tied embeddings
        return logits

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def round_to_half(model: Llama) -> None:
    """Leaves in the model exactly what the published half-precision file will hold."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half().float())


def load(model: Llama, folder: Path) -> None:
    """Puts the published weights of a folder into the model."""
    model.load_state_dict(load_file(str(folder / "model.safetensors")))


def save(model: Llama, folder: Path, end_token: int) -> None:
    """Writes the weights in half precision and the two configuration files beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().half().contiguous().cpu()
        for name, tensor in model.state_dict().items()
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **asdict(model.shape),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": end_token,
        "pad_token_id": end_token,
        "torch_dtype": "float16",
    }
    generation = {"do_sample": False, "eos_token_id": end_token, "pad_token_id": end_token}
    for name, content in (("config", config), ("generation_config", generation)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
