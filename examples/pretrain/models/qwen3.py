# SPDX-License-Identifier: Apache-2.0
"""Qwen3: LLaMA with fewer heads of keys and values, heads of any width, and a norm over every query and key."""

import jax
import jax.numpy as jnp
from flax import nnx

from ..config import ModelConfig
from . import llama
from .layers import RotaryAttention, rms_norm


class Attention(RotaryAttention):
    """Rotary attention; RMSNorm over each head (K) of queries and keys comes before they are turned."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        self.query_norm = rms_norm(self.head_width, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs)
        self.key_norm = rms_norm(self.head_width, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs)

    def turn(self, query_BxTxHxK: jax.Array, key_BxTxGxK: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Queries and keys, normalised, with their positions in them."""
        return super().turn(self.query_norm(query_BxTxHxK), self.key_norm(key_BxTxGxK))


class Block(llama.Block):
    """LLaMA's block around this attention."""

    attention_class = Attention


class Qwen3(llama.LLaMA):
    """Tokens (B, T) to logits (B, T, V)."""

    block_class = Block
