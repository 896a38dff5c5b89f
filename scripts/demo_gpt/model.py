"""A compact GPT.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.3: pre-norm
transformer blocks (Vaswani et al., 2017) with causal attention, learned positions, a last layer norm,
output weights tied to the embedding, and residual projections initialised smaller by sqrt(2 * layers).

Shapes: B sequences, T characters each, V vocabulary, D width, H heads.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    vocabulary_size: int
    context: int = 64
    width: int = 208
    heads: int = 4
    layers: int = 2


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.projection = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x_btd: Tensor) -> Tensor:
        b, t, d = x_btd.shape
        split = self.query_key_value(x_btd).view(b, t, 3, self.heads, d // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.projection(mixed.transpose(1, 2).reshape(b, t, d))
        return projected


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.widen = nn.Linear(config.width, 4 * config.width)
        self.projection = nn.Linear(4 * config.width, config.width)

    def forward(self, x_btd: Tensor) -> Tensor:
        x_btd = x_btd + self.attention(self.attention_norm(x_btd))
        hidden = functional.gelu(self.widen(self.mlp_norm(x_btd)), approximate="tanh")
        out: Tensor = x_btd + self.projection(hidden)
        return out


class GPT(nn.Module):
    """Predicts the next character; `seed` alone decides the initial weights."""

    def __init__(self, config: ModelConfig, *, seed: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(config.vocabulary_size, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self._initialise(config.layers, torch.Generator().manual_seed(seed))

    def _initialise(self, layers: int, generator: torch.Generator) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith("projection.weight")
                std = INIT_STD / math.sqrt(2 * layers) if residual else INIT_STD
                nn.init.normal_(parameter, std=std, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, inputs_bt: Tensor) -> Tensor:
        """Return logits, float32 (B, T, V), of int64 characters (B, T)."""
        x_btd = self.characters(inputs_bt) + self.positions.weight[: inputs_bt.shape[1]]
        for block in self.blocks:
            x_btd = block(x_btd)
        return functional.linear(self.norm(x_btd), self.characters.weight)

    def loss(self, windows: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats per character, over windows, int64 (B, T + 1)."""
        logits_btv = self(windows[:, :-1])
        return functional.cross_entropy(logits_btv.flatten(0, 1), windows[:, 1:].flatten())
