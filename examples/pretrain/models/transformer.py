# SPDX-License-Identifier: Apache-2.0
"""GPT-2, LLaMA and Qwen3: a token table, pre-norm blocks of attention and MLP, a final norm, an output head.

- GPT-2: LayerNorm, learned positions, one matrix for query, key and value, an MLP with GELU. As in nanoGPT, linear
  layers and LayerNorm have biases only with ``bias``, and GELU is exact (OpenAI's weights were trained with its tanh
  approximation, ``gelu_new`` in transformers).
- LLaMA: RMSNorm, rotary positions, a gated MLP, no biases.
- Qwen3: LLaMA with fewer heads of keys and values, heads of any width, and RMSNorm over every query and key.
"""

import functools

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


class Attention(nnx.Module):
    """Causal self-attention; H / G heads of queries share a head of keys and values.

    The matrices are query (D, HK), key and value (D, GK), and out (HK, D). GPT-2 has one matrix qkv (D, 3D) for the
    first three, whose columns are the queries', then the keys', then the values'.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        self.implementation: Implementation = attention_implementation(config, dtype)
        queries, keys = (heads * head_width(config) for heads in (config.heads, config.kv_heads or config.heads))
        matrix = functools.partial(linear, bias=config.bias, dtype=dtype, rngs=rngs)
        if config.family == "gpt2":
            self.qkv = matrix(config.width, 3 * config.width, std=config.hidden_std)
        else:
            self.query = matrix(config.width, queries, std=config.hidden_std)
            self.key = matrix(config.width, keys, std=config.hidden_std)
            self.value = matrix(config.width, keys, std=config.hidden_std)
        self.out = matrix(queries, config.width, std=residual_std(config))
        if config.family == "qwen3":
            self.query_norm = norm(config, head_width(config), dtype=dtype, rngs=rngs)
            self.key_norm = norm(config, head_width(config), dtype=dtype, rngs=rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        """(B, T, D) to the same."""
        family, base, shape = self.config.family, self.config.rotary_base, x_BxTxD.shape[:2]
        gpt2 = family == "gpt2"
        parts = self.qkv.parts(x_BxTxD, 3) if gpt2 else [f(x_BxTxD) for f in (self.query, self.key, self.value)]
        query_BxTxHxK, key_BxTxGxK, value_BxTxGxK = (x.reshape(*shape, -1, head_width(self.config)) for x in parts)
        if family == "qwen3":
            query_BxTxHxK, key_BxTxGxK = self.query_norm(query_BxTxHxK), self.key_norm(key_BxTxGxK)
        if not gpt2:
            query_BxTxHxK, key_BxTxGxK = rotate(query_BxTxHxK, base), rotate(key_BxTxGxK, base)
        mixed_BxTxHxK = attend(query_BxTxHxK, key_BxTxGxK, value_BxTxGxK, self.implementation)
        return self.out(mixed_BxTxHxK.reshape(*shape, -1))


class MLP(nnx.Module):
    """GPT-2's down(gelu(up(x))), else SwiGLU, down(silu(gate(x)) * up(x)); matrices (D, F), and down (F, D)."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        matrix = functools.partial(linear, bias=config.bias, dtype=dtype, rngs=rngs)
        self.gated = config.family != "gpt2"
        if self.gated:
            self.gate = matrix(config.width, config.mlp_width, std=config.hidden_std)
        self.up = matrix(config.width, config.mlp_width, std=config.hidden_std)
        self.down = matrix(config.mlp_width, config.width, std=residual_std(config))

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        """(B, T, D) to the same."""
        if self.gated:
            return self.down(jax.nn.silu(self.gate(x_BxTxD)) * self.up(x_BxTxD))
        return self.down(jax.nn.gelu(self.up(x_BxTxD), approximate=False))


class Block(nnx.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.attention_norm = norm(config, config.width, dtype=dtype, rngs=rngs)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = norm(config, config.width, dtype=dtype, rngs=rngs)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

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
