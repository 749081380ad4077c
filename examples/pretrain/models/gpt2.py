# SPDX-License-Identifier: Apache-2.0
"""GPT-2: pre-norm blocks, LayerNorm, learned positions, one matrix for query, key and value, an MLP with GELU.

As in nanoGPT, linear layers and LayerNorm have biases only if ``bias`` is set, and GELU is the exact one. (OpenAI's
weights were trained with its tanh approximation, ``gelu_new`` in transformers.)
"""

import jax
import jax.numpy as jnp
from flax import nnx

from ..config import ModelConfig
from .layers import (
    Implementation,
    apply_blocks,
    attend,
    attention_implementation,
    embedding,
    linear,
    make_blocks,
    residual_std,
)


def layer_norm(config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """LayerNorm over the width; moments in float32, the variance not as a difference of squares, which cancels."""
    return nnx.LayerNorm(
        config.width,
        epsilon=config.norm_epsilon,
        use_bias=config.bias,
        use_fast_variance=False,
        dtype=dtype,
        param_dtype=jnp.float32,
        rngs=rngs,
    )


class Attention(nnx.Module):
    """Causal self-attention; the columns of qkv (D, 3D) are the queries', then the keys', then the values'."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        width, std = config.width, residual_std(config)
        self.heads = config.heads
        self.implementation: Implementation = attention_implementation(config, dtype)
        self.qkv = linear(width, 3 * width, std=config.hidden_std, bias=config.bias, dtype=dtype, rngs=rngs)
        self.out = linear(width, width, std=std, bias=config.bias, dtype=dtype, rngs=rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        """Mix along time; (B, T, D) to the same."""
        query_BxTxHxK, key_BxTxHxK, value_BxTxHxK = (
            third_BxTxD.reshape(*x_BxTxD.shape[:2], self.heads, -1) for third_BxTxD in self.qkv.parts(x_BxTxD, 3)
        )
        mixed_BxTxHxK = attend(query_BxTxHxK, key_BxTxHxK, value_BxTxHxK, self.implementation)
        return self.out(mixed_BxTxHxK.reshape(x_BxTxD.shape))


class MLP(nnx.Module):
    """down(gelu(up(x))), with matrices (D, F) and (F, D)."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        width, hidden, std = config.width, config.mlp_width, residual_std(config)
        self.up = linear(width, hidden, std=config.hidden_std, bias=config.bias, dtype=dtype, rngs=rngs)
        self.down = linear(hidden, width, std=std, bias=config.bias, dtype=dtype, rngs=rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        """(B, T, D) to the same."""
        return self.down(jax.nn.gelu(self.up(x_BxTxD), approximate=False))


class Block(nnx.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.attention_norm = layer_norm(config, dtype=dtype, rngs=rngs)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = layer_norm(config, dtype=dtype, rngs=rngs)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        """(B, T, D) to the same."""
        x_BxTxD = x_BxTxD + self.attention(self.attention_norm(x_BxTxD))
        return x_BxTxD + self.mlp(self.mlp_norm(x_BxTxD))


class GPT2(nnx.Module):
    """Tokens (B, T) to logits (B, T, V); T is at most ``context``."""

    def __init__(self, config: ModelConfig, vocabulary: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config, self.dtype = config, dtype
        self.tokens = embedding(vocabulary, config.width, dtype=dtype, rngs=rngs)
        self.positions = embedding(config.context, config.width, dtype=dtype, rngs=rngs)
        self.blocks = make_blocks(lambda: Block(config, dtype=dtype, rngs=rngs), config)
        self.final_norm = layer_norm(config, dtype=dtype, rngs=rngs)
        if not config.tied_head:
            self.head = linear(config.width, vocabulary, dtype=dtype, rngs=rngs)

    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        """Logits of every next token."""
        positions_TxD = self.positions.table()[: tokens_BxT.shape[1]]
        x_BxTxD = self.tokens(tokens_BxT) + positions_TxD
        x_BxTxD = self.final_norm(apply_blocks(self.blocks, x_BxTxD, self.config))
        return self.tokens.attend(x_BxTxD) if self.config.tied_head else self.head(x_BxTxD)
