# SPDX-License-Identifier: Apache-2.0
"""LLaMA: pre-norm blocks, RMSNorm, rotary positions, a gated MLP, no biases; the head is tied to the embedding."""

import jax
import jax.numpy as jnp
from flax import nnx

from ..config import ModelConfig
from .layers import Attention, GatedMLP, residual_std, rms_norm, tied_embedding


class Block(nnx.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        std = residual_std(config.layers)
        self.attention_norm = rms_norm(config.width, dtype=dtype, rngs=rngs)
        self.attention = Attention(config.width, config.heads, out_std=std, dtype=dtype, rngs=rngs)
        self.mlp_norm = rms_norm(config.width, dtype=dtype, rngs=rngs)
        self.mlp = GatedMLP(config.width, config.mlp_width, out_std=std, dtype=dtype, rngs=rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        """(B, T, D) to the same."""
        x_BxTxD = x_BxTxD + self.attention(self.attention_norm(x_BxTxD))
        return x_BxTxD + self.mlp(self.mlp_norm(x_BxTxD))


class LLaMA(nnx.Module):
    """Tokens (B, T) to logits (B, T, V)."""

    def __init__(self, config: ModelConfig, vocabulary: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.tokens = tied_embedding(vocabulary, config.width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, dtype=dtype, rngs=rngs) for _ in range(config.layers)])
        self.final_norm = rms_norm(config.width, dtype=dtype, rngs=rngs)

    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        """Logits of every next token."""
        x_BxTxD = self.tokens(tokens_BxT)
        for block in self.blocks:
            x_BxTxD = block(x_BxTxD)
        return self.tokens.attend(self.final_norm(x_BxTxD))
