# SPDX-License-Identifier: Apache-2.0
"""GPT-2, LLaMA and Qwen3.

A token table, pre-norm blocks of attention and MLP, a final norm, an output head.

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
    """``x`` (..., D) as (N, D) on one device.

    On CPU, XLA computes a 2-D weight gradient in half the time.
    """
    if on_mesh():
        return x
    return x.reshape(-1, x.shape[-1])


class Linear(nnx.Linear):
    """``nnx.Linear`` on ``rows``; on a mesh it gathers its kernel."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., inputs) to (..., outputs), in ``dtype``."""
        bias = None
        if self.bias is not None:
            bias = self.bias[...]
        arrays = (x, self.kernel[...], bias)
        x, kernel, bias = self.promote_dtype(arrays, dtype=self.dtype)
        y = jnp.dot(rows(x), whole(kernel))
        if bias is not None:
            y = y + bias.reshape(1, -1)
        return y.reshape(*x.shape[:-1], -1)


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
        logits = jnp.dot(rows(x.astype(self.dtype)), self.table().T)
        return logits.reshape(*x.shape[:-1], -1)


def layer_options(dtype: jnp.dtype, rngs: nnx.Rngs) -> dict[str, Any]:
    """Options of every layer: arithmetic in ``dtype``, parameters in float32."""
    return {"dtype": dtype, "param_dtype": jnp.float32, "rngs": rngs}


def linear(
    inputs: int,
    outputs: int,
    *,
    std: float = INIT_STD,
    bias: bool = False,
    dtype: jnp.dtype,
    rngs: nnx.Rngs,
) -> Linear:
    """A linear layer: kernel (inputs, outputs), and a bias of zeros or none.

    The kernel is normal with standard deviation ``std``.
    """
    return Linear(
        inputs,
        outputs,
        use_bias=bias,
        kernel_init=nnx.initializers.normal(std),
        **layer_options(dtype, rngs),
    )


def embedding(
    entries: int, width: int, *, dtype: jnp.dtype, rngs: nnx.Rngs
) -> Embedding:
    """A table (entries, width), normal as the linear layers."""
    return Embedding(
        entries,
        width,
        embedding_init=nnx.initializers.normal(INIT_STD),
        **layer_options(dtype, rngs),
    )


def norm(
    config: ModelConfig, width: int, *, dtype: jnp.dtype, rngs: nnx.Rngs
) -> nnx.Module:
    """RMSNorm with a scale, or GPT-2's LayerNorm.

    Flax computes the moments in float32 for every ``dtype``.
    """
    options = layer_options(dtype, rngs)
    options["epsilon"] = config.norm_epsilon
    if config.family != "gpt2":
        return nnx.RMSNorm(width, **options)
    # The fast variance is a difference of squares, which cancels.
    options |= {"use_bias": config.bias, "use_fast_variance": False}
    return nnx.LayerNorm(width, **options)


def residual_std(config: ModelConfig) -> float:
    """Initial standard deviation of a residual projection; every block has two."""
    if config.scaled_residuals:
        return config.hidden_std / math.sqrt(2 * config.layers)
    return config.hidden_std


def rotate(x_BxTxHxK: jax.Array, base: float) -> jax.Array:
    """Rotary positions, computed in float32.

    Dimensions i and i + K/2 are rotated by the angle t base^(-2i/K).
    """
    _, time, _, width = x_BxTxHxK.shape
    half = width // 2
    frequencies_K = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles_Tx1xK = jnp.arange(time, dtype=jnp.float32)[:, None, None] * frequencies_K
    cosine = jnp.cos(angles_Tx1xK)
    sine = jnp.sin(angles_Tx1xK)
    first, second = jnp.split(x_BxTxHxK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )
    return rotated.astype(x_BxTxHxK.dtype)


def head_width(config: ModelConfig) -> int:
    """Size K of a head."""
    return config.head_width or config.width // config.heads


def attention_implementation(config: ModelConfig, dtype: jnp.dtype) -> Implementation:
    """What computes attention: cuDNN where it runs, unless the model is to use XLA."""
    if config.attention == "auto" and cudnn_runs(head_width(config), dtype):
        return "cudnn"
    return "xla"


def cudnn_runs(width: int, dtype: jnp.dtype) -> bool:
    """Whether cuDNN's attention runs here on heads of ``width``.

    JAX allows wider ones on some GPUs.
    """
    device = jax.local_devices()[0]
    # The platform of AMD's GPUs is "gpu", too; their compute_capability is no number.
    if "cuda" not in device.client.platform_version:
        return False
    if float(device.compute_capability) < 8:
        return False
    fits = width <= CUDNN_HEAD_WIDTH and width % 8 == 0
    return fits and dtype in (jnp.bfloat16, jnp.float16)


def attend(
    query_BxTxHxK: jax.Array,
    key_BxTxGxK: jax.Array,
    value_BxTxGxK: jax.Array,
    implementation: Implementation,
) -> jax.Array:
    """Causal attention, (B, T, H, K).

    On a mesh every device computes its own sequences.
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
        width, std = config.width, config.hidden_std
        queries = config.heads * head_width(config)
        keys = (config.kv_heads or config.heads) * head_width(config)
        matrix = functools.partial(linear, bias=config.bias, dtype=dtype, rngs=rngs)
        # The order of the layers is that of their random draws.
        if config.family == "gpt2":
            self.qkv = matrix(width, 3 * width, std=std)
        else:
            self.query = matrix(width, queries, std=std)
            self.key = matrix(width, keys, std=std)
            self.value = matrix(width, keys, std=std)
        self.out = matrix(queries, width, std=residual_std(config))
        if config.family == "qwen3":
            self.query_norm = norm(config, head_width(config), dtype=dtype, rngs=rngs)
            self.key_norm = norm(config, head_width(config), dtype=dtype, rngs=rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        """(B, T, D) to the same."""
        family, base = self.config.family, self.config.rotary_base
        if family == "gpt2":
            query, key, value = jnp.split(self.qkv(x_BxTxD), 3, axis=-1)
        else:
            query = self.query(x_BxTxD)
            key = self.key(x_BxTxD)
            value = self.value(x_BxTxD)
        query_BxTxHxK = self._in_heads(query)
        key_BxTxGxK = self._in_heads(key)
        value_BxTxGxK = self._in_heads(value)
        if family == "qwen3":
            query_BxTxHxK = self.query_norm(query_BxTxHxK)
            key_BxTxGxK = self.key_norm(key_BxTxGxK)
        if family != "gpt2":
            query_BxTxHxK = rotate(query_BxTxHxK, base)
            key_BxTxGxK = rotate(key_BxTxGxK, base)
        mixed_BxTxHxK = attend(
            query_BxTxHxK, key_BxTxGxK, value_BxTxGxK, self.implementation
        )
        return self.out(mixed_BxTxHxK.reshape(*x_BxTxD.shape[:2], -1))

    def _in_heads(self, x: jax.Array) -> jax.Array:
        """(B, T, HK) to (B, T, H, K)."""
        return x.reshape(*x.shape[:2], -1, head_width(self.config))


class MLP(nnx.Module):
    """GPT-2's down(gelu(up(x))), else SwiGLU, down(silu(gate(x)) * up(x)).

    The matrices are (D, F), and down (F, D).
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
    """The blocks of a model: a list, or a stack of them with ``scan_layers``.

    A stack is one block whose every parameter has an axis L in front. The stack is made
    of the list's blocks, so both forms have the same initial parameters.
    """
    blocks = [Block(config, dtype=dtype, rngs=rngs) for _ in range(config.layers)]
    if not config.scan_layers:
        return nnx.List(blocks)
    states = [nnx.state(block) for block in blocks]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    return nnx.merge(nnx.graphdef(blocks[0]), stack)


def apply_blocks(
    blocks: nnx.Module, x_BxTxD: jax.Array, config: ModelConfig
) -> jax.Array:
    """One block after the other, as ``make_blocks`` made them, on (B, T, D)."""

    def apply(
        graphdef: nnx.GraphDef, state: nnx.State, x_BxTxD: jax.Array
    ) -> jax.Array:
        return nnx.merge(graphdef, state)(x_BxTxD)

    if config.remat or on_mesh():
        # On a mesh, gathered weights are not kept until the backward pass.
        policy = gather_again
        if config.remat:
            policy = None
        # A scan's body is compiled alone, so nothing outside could undo the
        # recomputation.
        prevent_cse = not config.scan_layers
        apply = jax.checkpoint(
            apply, static_argnums=0, prevent_cse=prevent_cse, policy=policy
        )
    if not config.scan_layers:
        for block in blocks:  # pyright: ignore[reportGeneralTypeIssues]
            x_BxTxD = apply(*nnx.split(block), x_BxTxD)
        return x_BxTxD
    graphdef, stack = nnx.split(blocks)

    def step(x_BxTxD: jax.Array, state: nnx.State) -> tuple[jax.Array, None]:
        return apply(graphdef, state, x_BxTxD), None

    x_BxTxD, _ = jax.lax.scan(step, x_BxTxD, stack)
    return x_BxTxD


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
        if self.config.tied_head:
            return self.tokens.attend(x_BxTxD)
        return self.head(x_BxTxD)
