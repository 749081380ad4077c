# SPDX-License-Identifier: Apache-2.0
"""GPT-2, LLaMA and Qwen3: a token table, pre-norm blocks of attention and MLP, a final
norm, an output head.

- GPT-2: LayerNorm, learned positions, one matrix for query, key and value, an MLP with
  GELU. As in nanoGPT, linear layers and LayerNorm have biases only with ``bias``, and
  GELU is exact (OpenAI's weights were trained with its tanh approximation, ``gelu_new``
  in transformers).
- LLaMA: RMSNorm, rotary positions, a gated MLP, no biases.
- Qwen3: LLaMA with fewer heads of keys and values, heads of any width, and RMSNorm over
  every query and key.

Shape letters: B batch, T time, D width, H heads, G heads of keys and values, K head
width, F MLP width, V vocabulary, L layers. Parameters are float32; ``dtype`` is the
type of the arithmetic. A residual projection, the last matrix of a branch that is added
to the stream, is initialized smaller by sqrt(2 L) with ``scaled_residuals``, so that
the stream's variance does not grow with depth. On a mesh (``..mesh``) a layer gathers
its weight over ``fsdp`` before it uses it.
"""

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from ..config import ModelConfig
from ..mesh import BATCH, gather_again, on_mesh, whole

INIT_STD = 0.02
CUDNN_HEAD_WIDTH = 128
Implementation = Literal["xla", "cudnn"]


def rows(x: jax.Array) -> jax.Array:
    """``x`` (..., D) as (N, D) on one device: on CPU, XLA computes a 2-D weight
    gradient in half the time.
    """
    return x if on_mesh() else x.reshape(-1, x.shape[-1])


class Linear(nnx.Linear):
    """``nnx.Linear`` on ``rows``; on a mesh it gathers its kernel."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., inputs) to (..., outputs), in ``dtype``."""
        bias = None if self.bias is None else self.bias[...]
        x, kernel, bias = self.promote_dtype(
            (x, self.kernel[...], bias), dtype=self.dtype
        )
        y = jnp.dot(rows(x), whole(kernel))
        return (y if bias is None else y + bias.reshape(1, -1)).reshape(
            *x.shape[:-1], -1
        )


class Embedding(nnx.Embed):
    """A table (V, D); with a tied head it is also the output matrix."""

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """(B, T) to (B, T, D)."""
        if not on_mesh():
            return super().__call__(tokens)
        out = jax.sharding.PartitionSpec(BATCH, None, None)
        return self.table().at[tokens].get(out_sharding=out)

    def table(self) -> jax.Array:
        """The table in ``dtype``, gathered over ``fsdp``."""
        return whole(self.embedding[...].astype(self.dtype))

    def attend(self, x: jax.Array) -> jax.Array:
        """(..., D) to logits (..., V)."""
        return jnp.dot(rows(x.astype(self.dtype)), self.table().T).reshape(
            *x.shape[:-1], -1
        )


def linear(
    inputs: int,
    outputs: int,
    *,
    std: float = INIT_STD,
    bias: bool = False,
    dtype: jnp.dtype,
    rngs: nnx.Rngs,
) -> Linear:
    """A linear layer; kernel (inputs, outputs), normal with standard deviation ``std``,
    and a bias of zeros or none.
    """
    init = nnx.initializers.normal(std)
    return Linear(
        inputs,
        outputs,
        use_bias=bias,
        dtype=dtype,
        param_dtype=jnp.float32,
        kernel_init=init,
        rngs=rngs,
    )


def embedding(
    entries: int, width: int, *, dtype: jnp.dtype, rngs: nnx.Rngs
) -> Embedding:
    """A table (entries, width), normal as the linear layers."""
    init = nnx.initializers.normal(INIT_STD)
    return Embedding(
        entries,
        width,
        dtype=dtype,
        param_dtype=jnp.float32,
        embedding_init=init,
        rngs=rngs,
    )


def norm(
    config: ModelConfig, width: int, *, dtype: jnp.dtype, rngs: nnx.Rngs
) -> nnx.Module:
    """RMSNorm with a scale, or GPT-2's LayerNorm; Flax computes the moments in float32
    for every ``dtype``.
    """
    common: dict[str, Any] = {
        "epsilon": config.norm_epsilon,
        "dtype": dtype,
        "param_dtype": jnp.float32,
        "rngs": rngs,
    }
    if config.family != "gpt2":
        return nnx.RMSNorm(width, **common)
    # The fast variance is a difference of squares, which cancels.
    return nnx.LayerNorm(width, use_bias=config.bias, use_fast_variance=False, **common)


def residual_std(config: ModelConfig) -> float:
    """Initial standard deviation of a residual projection; every block has two."""
    return (
        config.hidden_std / math.sqrt(2 * config.layers)
        if config.scaled_residuals
        else config.hidden_std
    )


def rotate(x_BxTxHxK: jax.Array, base: float) -> jax.Array:
    """Rotary positions: dimensions i and i + K/2 are rotated by the angle t
    base^(-2i/K); computed in float32.
    """
    time, half = x_BxTxHxK.shape[1], x_BxTxHxK.shape[3] // 2
    frequencies_K = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles_Tx1xK = jnp.arange(time, dtype=jnp.float32)[:, None, None] * frequencies_K
    cosine, sine = jnp.cos(angles_Tx1xK), jnp.sin(angles_Tx1xK)
    first, second = jnp.split(x_BxTxHxK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )
    return rotated.astype(x_BxTxHxK.dtype)


def head_width(config: ModelConfig) -> int:
    """Size K of a head."""
    return config.head_width or config.width // config.heads


def attention_implementation(config: ModelConfig, dtype: jnp.dtype) -> Implementation:
    """What computes attention: cuDNN where it runs, unless the model is configured to
    use XLA.
    """
    return (
        "cudnn"
        if config.attention == "auto" and cudnn_runs(head_width(config), dtype)
        else "xla"
    )


def cudnn_runs(width: int, dtype: jnp.dtype) -> bool:
    """Whether cuDNN's attention runs here on heads of ``width``; JAX allows wider ones
    on some GPUs.
    """
    device = jax.local_devices()[0]
    # compute_capability is no number on AMD's GPUs, whose platform is "gpu", too.
    cuda = (
        "cuda" in device.client.platform_version
        and float(device.compute_capability) >= 8
    )
    return (
        cuda
        and dtype in (jnp.bfloat16, jnp.float16)
        and width <= CUDNN_HEAD_WIDTH
        and width % 8 == 0
    )


def attend(
    query_BxTxHxK: jax.Array,
    key_BxTxGxK: jax.Array,
    value_BxTxGxK: jax.Array,
    implementation: Implementation,
) -> jax.Array:
    """Causal attention, (B, T, H, K); on a mesh every device computes its own
    sequences.
    """
    function = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation=implementation
    )
    if on_mesh():
        axes = jax.sharding.PartitionSpec(BATCH)
        function = jax.shard_map(function, in_specs=(axes, axes, axes), out_specs=axes)
    return function(query_BxTxHxK, key_BxTxGxK, value_BxTxGxK)


class Attention(nnx.Module):
    """Causal self-attention; H / G heads of queries share a head of keys and values.

    The matrices are query (D, HK), key and value (D, GK), and out (HK, D). GPT-2 has
    one matrix qkv (D, 3D) for the first three, whose columns are the queries', then the
    keys', then the values'.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        self.implementation: Implementation = attention_implementation(config, dtype)
        queries, keys = (
            heads * head_width(config)
            for heads in (config.heads, config.kv_heads or config.heads)
        )
        matrix = functools.partial(linear, bias=config.bias, dtype=dtype, rngs=rngs)
        if config.family == "gpt2":
            self.qkv = matrix(config.width, 3 * config.width, std=config.hidden_std)
        else:
            parts = (
                matrix(config.width, size, std=config.hidden_std)
                for size in (queries, keys, keys)
            )
            self.query, self.key, self.value = parts
        self.out = matrix(queries, config.width, std=residual_std(config))
        if config.family == "qwen3":
            self.query_norm = norm(config, head_width(config), dtype=dtype, rngs=rngs)
            self.key_norm = norm(config, head_width(config), dtype=dtype, rngs=rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        """(B, T, D) to the same."""
        family, base, shape = (
            self.config.family,
            self.config.rotary_base,
            x_BxTxD.shape[:2],
        )
        if family == "gpt2":
            parts = jnp.split(self.qkv(x_BxTxD), 3, axis=-1)
        else:
            parts = [layer(x_BxTxD) for layer in (self.query, self.key, self.value)]
        query_BxTxHxK, key_BxTxGxK, value_BxTxGxK = (
            x.reshape(*shape, -1, head_width(self.config)) for x in parts
        )
        if family == "qwen3":
            query_BxTxHxK, key_BxTxGxK = (
                self.query_norm(query_BxTxHxK),
                self.key_norm(key_BxTxGxK),
            )
        if family != "gpt2":
            query_BxTxHxK, key_BxTxGxK = (
                rotate(query_BxTxHxK, base),
                rotate(key_BxTxGxK, base),
            )
        mixed_BxTxHxK = attend(
            query_BxTxHxK, key_BxTxGxK, value_BxTxGxK, self.implementation
        )
        return self.out(mixed_BxTxHxK.reshape(*shape, -1))


class MLP(nnx.Module):
    """GPT-2's down(gelu(up(x))), else SwiGLU, down(silu(gate(x)) * up(x)); matrices (D,
    F), and down (F, D).
    """

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


def make_blocks(config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.Module:
    """The blocks of a model: a list, or with ``scan_layers`` one block whose every
    parameter has an axis L in front.

    The stack is made of the list's blocks, so both forms have the same initial
    parameters.
    """
    blocks = [Block(config, dtype=dtype, rngs=rngs) for _ in range(config.layers)]
    if not config.scan_layers:
        return nnx.List(blocks)
    states = [nnx.state(block) for block in blocks]
    return nnx.merge(
        nnx.graphdef(blocks[0]),
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *states),
    )


def apply_blocks(
    blocks: nnx.Module, x_BxTxD: jax.Array, config: ModelConfig
) -> jax.Array:
    """One block after the other, as ``make_blocks`` made them, on (B, T, D)."""

    def apply(
        graphdef: nnx.GraphDef, state: nnx.State, x_BxTxD: jax.Array
    ) -> jax.Array:
        return nnx.merge(graphdef, state)(x_BxTxD)

    if (
        config.remat or on_mesh()
    ):  # on a mesh, gathered weights are not kept until the backward pass
        policy = None if config.remat else gather_again
        # A scan's body is compiled alone, so nothing outside could undo the
        # recomputation.
        apply = jax.checkpoint(
            apply, static_argnums=0, prevent_cse=not config.scan_layers, policy=policy
        )
    if not config.scan_layers:
        for block in blocks:  # pyright: ignore[reportGeneralTypeIssues]
            x_BxTxD = apply(*nnx.split(block), x_BxTxD)
        return x_BxTxD
    graphdef, stack = nnx.split(blocks)
    return jax.lax.scan(
        lambda x_BxTxD, state: (apply(graphdef, state, x_BxTxD), None), x_BxTxD, stack
    )[0]


class Transformer(nnx.Module):
    """Tokens (B, T) to logits (B, T, V); GPT-2's T is at most ``context``."""

    def __init__(
        self, config: ModelConfig, vocabulary: int, *, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        self.config = config
        self.tokens = embedding(vocabulary, config.width, dtype=dtype, rngs=rngs)
        if config.family == "gpt2":
            self.positions = embedding(
                config.context, config.width, dtype=dtype, rngs=rngs
            )
        self.blocks = make_blocks(config, dtype=dtype, rngs=rngs)
        self.final_norm = norm(config, config.width, dtype=dtype, rngs=rngs)
        if not config.tied_head:
            self.head = linear(config.width, vocabulary, dtype=dtype, rngs=rngs)

    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        """Logits of every next token."""
        x_BxTxD = self.tokens(tokens_BxT)
        if self.config.family == "gpt2":
            x_BxTxD = x_BxTxD + self.positions.table()[: tokens_BxT.shape[1]]
        x_BxTxD = self.final_norm(apply_blocks(self.blocks, x_BxTxD, self.config))
        return (
            self.tokens.attend(x_BxTxD) if self.config.tied_head else self.head(x_BxTxD)
        )
