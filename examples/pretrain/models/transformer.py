# SPDX-License-Identifier: Apache-2.0
"""GPT-2, LLaMA and Qwen3: a token table, pre-norm blocks of attention and MLP, a final norm, an output head.

- GPT-2: LayerNorm, learned positions, one matrix for query, key and value, an MLP with GELU. As in nanoGPT, linear
  layers and LayerNorm have biases only with ``bias``, and GELU is exact (OpenAI's weights were trained with its tanh
  approximation, ``gelu_new`` in transformers).
- LLaMA: RMSNorm, rotary positions, a gated MLP, no biases.
- Qwen3: LLaMA with fewer heads of keys and values, heads of any width, and RMSNorm over every query and key.
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
    head_width,
    linear,
    make_blocks,
    norm,
    residual_std,
    rotate,
)


class FusedAttention(nnx.Module):
    """GPT-2's causal self-attention; the columns of qkv (D, 3D) are the queries', then the keys', then the values'."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        width, std = config.width, config.hidden_std
        self.heads = config.heads
        self.implementation: Implementation = attention_implementation(config, dtype)
        self.qkv = linear(width, 3 * width, std=std, bias=config.bias, dtype=dtype, rngs=rngs)
        self.out = linear(width, width, std=residual_std(config), bias=config.bias, dtype=dtype, rngs=rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        """(B, T, D) to the same."""
        query_BxTxHxK, key_BxTxHxK, value_BxTxHxK = (
            third_BxTxD.reshape(*x_BxTxD.shape[:2], self.heads, -1) for third_BxTxD in self.qkv.parts(x_BxTxD, 3)
        )
        mixed_BxTxHxK = attend(query_BxTxHxK, key_BxTxHxK, value_BxTxHxK, self.implementation)
        return self.out(mixed_BxTxHxK.reshape(x_BxTxD.shape))


class RotaryAttention(nnx.Module):
    """Causal self-attention with rotary positions; H / G heads of queries share a head of keys and values.

    The matrices are query (D, HK), key and value (D, GK), and out (HK, D).
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.head_width, self.rotary_base = head_width(config), config.rotary_base
        self.implementation: Implementation = attention_implementation(config, dtype)
        inside, shared = config.heads * self.head_width, (config.kv_heads or config.heads) * self.head_width
        self.query = linear(config.width, inside, std=config.hidden_std, dtype=dtype, rngs=rngs)
        self.key = linear(config.width, shared, std=config.hidden_std, dtype=dtype, rngs=rngs)
        self.value = linear(config.width, shared, std=config.hidden_std, dtype=dtype, rngs=rngs)
        self.out = linear(inside, config.width, std=residual_std(config), dtype=dtype, rngs=rngs)
        self.normalizes = config.family == "qwen3"
        if self.normalizes:
            self.query_norm = norm(config, self.head_width, dtype=dtype, rngs=rngs)
            self.key_norm = norm(config, self.head_width, dtype=dtype, rngs=rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        """(B, T, D) to the same."""
        query_BxTxHxK, key_BxTxGxK, value_BxTxGxK = (
            projection(x_BxTxD).reshape(*x_BxTxD.shape[:2], -1, self.head_width)
            for projection in (self.query, self.key, self.value)
        )
        if self.normalizes:
            query_BxTxHxK, key_BxTxGxK = self.query_norm(query_BxTxHxK), self.key_norm(key_BxTxGxK)
        query_BxTxHxK, key_BxTxGxK = rotate(query_BxTxHxK, self.rotary_base), rotate(key_BxTxGxK, self.rotary_base)
        mixed_BxTxHxK = attend(query_BxTxHxK, key_BxTxGxK, value_BxTxGxK, self.implementation)
        return self.out(mixed_BxTxHxK.reshape(*x_BxTxD.shape[:2], -1))


class MLP(nnx.Module):
    """GPT-2's down(gelu(up(x))), with matrices (D, F) and (F, D)."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        width, hidden, bias = config.width, config.mlp_width, config.bias
        self.up = linear(width, hidden, std=config.hidden_std, bias=bias, dtype=dtype, rngs=rngs)
        self.down = linear(hidden, width, std=residual_std(config), bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        """(B, T, D) to the same."""
        return self.down(jax.nn.gelu(self.up(x_BxTxD), approximate=False))


class GatedMLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), with matrices (D, F), (D, F) and (F, D)."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.gate = linear(config.width, config.mlp_width, std=config.hidden_std, dtype=dtype, rngs=rngs)
        self.up = linear(config.width, config.mlp_width, std=config.hidden_std, dtype=dtype, rngs=rngs)
        self.down = linear(config.mlp_width, config.width, std=residual_std(config), dtype=dtype, rngs=rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        """(B, T, D) to the same."""
        return self.down(jax.nn.silu(self.gate(x_BxTxD)) * self.up(x_BxTxD))


class Block(nnx.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        attention, mlp = (FusedAttention, MLP) if config.family == "gpt2" else (RotaryAttention, GatedMLP)
        self.attention_norm = norm(config, config.width, dtype=dtype, rngs=rngs)
        self.attention = attention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = norm(config, config.width, dtype=dtype, rngs=rngs)
        self.mlp = mlp(config, dtype=dtype, rngs=rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        """(B, T, D) to the same."""
        x_BxTxD = x_BxTxD + self.attention(self.attention_norm(x_BxTxD))
        return x_BxTxD + self.mlp(self.mlp_norm(x_BxTxD))


class Transformer(nnx.Module):
    """Tokens (B, T) to logits (B, T, V); GPT-2's T is at most ``context``."""

    def __init__(self, config: ModelConfig, vocabulary: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        self.tokens = embedding(vocabulary, config.width, dtype=dtype, rngs=rngs)
        if config.family == "gpt2":
            self.positions = embedding(config.context, config.width, dtype=dtype, rngs=rngs)
        self.blocks = make_blocks(lambda: Block(config, dtype=dtype, rngs=rngs), config)
        self.final_norm = norm(config, config.width, dtype=dtype, rngs=rngs)
        if not config.tied_head:
            self.head = linear(config.width, vocabulary, dtype=dtype, rngs=rngs)

    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        """Logits of every next token."""
        x_BxTxD = self.tokens(tokens_BxT)
        if self.config.family == "gpt2":
            x_BxTxD = x_BxTxD + self.positions.table()[: tokens_BxT.shape[1]]
        x_BxTxD = self.final_norm(apply_blocks(self.blocks, x_BxTxD, self.config))
        return self.tokens.attend(x_BxTxD) if self.config.tied_head else self.head(x_BxTxD)
