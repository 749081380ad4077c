# SPDX-License-Identifier: Apache-2.0
"""LLaMA: pre-norm blocks, RMSNorm, rotary positions, a gated MLP, no biases."""

import jax
import jax.numpy as jnp
from flax import nnx

from ..config import ModelConfig
from .layers import GatedMLP, RotaryAttention, apply_blocks, embedding, linear, make_blocks, rms_norm


class Block(nnx.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    attention_class = RotaryAttention

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.attention_norm = rms_norm(config.width, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs)
        self.attention = self.attention_class(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = rms_norm(config.width, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs)
        self.mlp = GatedMLP(config, dtype=dtype, rngs=rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        """(B, T, D) to the same."""
        x_BxTxD = x_BxTxD + self.attention(self.attention_norm(x_BxTxD))
        return x_BxTxD + self.mlp(self.mlp_norm(x_BxTxD))


class LLaMA(nnx.Module):
    """Tokens (B, T) to logits (B, T, V)."""

    block_class = Block

    def __init__(self, config: ModelConfig, vocabulary: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        self.tokens = embedding(vocabulary, config.width, dtype=dtype, rngs=rngs)
        self.blocks = make_blocks(lambda: self.block_class(config, dtype=dtype, rngs=rngs), config)
        self.final_norm = rms_norm(config.width, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs)
        if not config.tied_head:
            self.head = linear(config.width, vocabulary, dtype=dtype, rngs=rngs)

    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        """Logits of every next token."""
        x_BxTxD = self.final_norm(apply_blocks(self.blocks, self.tokens(tokens_BxT), self.config))
        return self.tokens.attend(x_BxTxD) if self.config.tied_head else self.head(x_BxTxD)
