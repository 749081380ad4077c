# SPDX-License-Identifier: Apache-2.0
"""Layers that the model families share.

Shape letters: B batch, T time, D width, H heads, K head dimension, F MLP width, V vocabulary. Parameters are float32;
``dtype`` is the type of the arithmetic. A residual projection, the last matrix of a branch that is added to the stream,
starts smaller by sqrt(2 x layers), so that the stream's variance does not grow with depth.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

INIT_STD = 0.02
ROTARY_BASE = 10_000.0


class Linear(nnx.Linear):
    """``nnx.Linear`` with the leading axes flattened: on CPU, XLA takes a 2-D weight gradient in half the time."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., inputs) to (..., outputs)."""
        return super().__call__(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)


class TiedEmbedding(nnx.Embed):
    """A table (V, D) that is also the output head."""

    def attend(self, x: jax.Array) -> jax.Array:
        """(..., D) to logits (..., V); flattened as in ``Linear``."""
        return super().attend(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)


def linear(inputs: int, outputs: int, *, std: float = INIT_STD, dtype: jnp.dtype, rngs: nnx.Rngs) -> Linear:
    """A linear layer without bias; kernel (inputs, outputs), normal with standard deviation ``std``."""
    init = nnx.initializers.normal(std)
    return Linear(inputs, outputs, use_bias=False, dtype=dtype, param_dtype=jnp.float32, kernel_init=init, rngs=rngs)


def tied_embedding(entries: int, width: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> TiedEmbedding:
    """A table (entries, width), normal as the linear layers."""
    init = nnx.initializers.normal(INIT_STD)
    return TiedEmbedding(entries, width, dtype=dtype, param_dtype=jnp.float32, embedding_init=init, rngs=rngs)


def rms_norm(width: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """RMSNorm with a scale; Flax takes the mean square in float32 whatever ``dtype`` is."""
    return nnx.RMSNorm(width, epsilon=1e-6, dtype=dtype, param_dtype=jnp.float32, rngs=rngs)


def residual_std(layers: int) -> float:
    """Initial standard deviation of a residual projection in a model of ``layers`` blocks with two branches each."""
    return INIT_STD / math.sqrt(2 * layers)


def rotate(x_BxTxHxK: jax.Array) -> jax.Array:
    """Rotary positions: dimension i and i + K/2 turn together, by t ROTARY_BASE^(-2i/K); computed in float32."""
    time, half = x_BxTxHxK.shape[1], x_BxTxHxK.shape[3] // 2
    frequencies_K = ROTARY_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles_Tx1xK = jnp.arange(time, dtype=jnp.float32)[:, None, None] * frequencies_K
    cosine, sine = jnp.cos(angles_Tx1xK), jnp.sin(angles_Tx1xK)
    first, second = jnp.split(x_BxTxHxK.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(x_BxTxHxK.dtype)


class Attention(nnx.Module):
    """Causal self-attention with rotary positions; query, key, value and output are matrices (D, D)."""

    def __init__(self, width: int, heads: int, *, out_std: float, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.heads = heads
        self.query = linear(width, width, dtype=dtype, rngs=rngs)
        self.key = linear(width, width, dtype=dtype, rngs=rngs)
        self.value = linear(width, width, dtype=dtype, rngs=rngs)
        self.out = linear(width, width, std=out_std, dtype=dtype, rngs=rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        """Mix along time; (B, T, D) to the same."""
        batch, time, width = x_BxTxD.shape
        query_BxTxHxK, key_BxTxHxK, value_BxTxHxK = (
            projection(x_BxTxD).reshape(batch, time, self.heads, width // self.heads)
            for projection in (self.query, self.key, self.value)
        )
        mixed_BxTxHxK = jax.nn.dot_product_attention(
            rotate(query_BxTxHxK), rotate(key_BxTxHxK), value_BxTxHxK, is_causal=True
        )
        return self.out(mixed_BxTxHxK.reshape(batch, time, width))


class GatedMLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), with matrices (D, F), (D, F) and (F, D)."""

    def __init__(self, width: int, hidden: int, *, out_std: float, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.gate = linear(width, hidden, dtype=dtype, rngs=rngs)
        self.up = linear(width, hidden, dtype=dtype, rngs=rngs)
        self.down = linear(hidden, width, std=out_std, dtype=dtype, rngs=rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        """(B, T, D) to the same."""
        return self.down(jax.nn.silu(self.gate(x_BxTxD)) * self.up(x_BxTxD))
