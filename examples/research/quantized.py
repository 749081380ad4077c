# SPDX-License-Identifier: Apache-2.0
"""Momentum in eight bits: integers, and one scale per block of them."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from normpre_optax.sharding.auto import in_auto_axes
from normpre_optax.sharding.placement import axes_of, is_explicit, spec_of

LARGEST = 127


class Quantized(NamedTuple):
    """An array as ``values * scales``: int8 of its shape, and float32 scales, one per block of the last axis."""

    values: jax.Array
    scales: jax.Array


def quantize_momentum(
    tx: optax.GradientTransformation, *, block_size: int = 128
) -> optax.GradientTransformationExtraArgs:
    """Keep the momentum of an optimizer in eight bits instead of 32 between steps.

    The state of ``optax.trace`` for arrays of two or more axes is rounded to the nearest of 255 steps of the largest
    magnitude of its block. The moments of AdamW stay as they are: the second has entries too small for that.

    Args:
        tx: an optimizer or direction, wrapped as a whole.
        block_size: consecutive entries of the last axis that share a scale; a last axis that it does not divide is one
            block.

    Returns:
        The optimizer; its state is that of ``tx`` with ``Quantized`` in place of such arrays.

    Raises:
        ValueError: at ``init``, if ``tx`` has no such momentum.

    Example:
        >>> from normpre_optax import muon
        >>> state = quantize_momentum(muon(1e-3)).init({"kernel": jnp.ones((64, 256))})
        >>> [(str(x.dtype), x.shape) for x in jax.tree.leaves(state) if x.ndim]
        [('int8', (64, 256)), ('float32', (64, 2))]

    References:
        Dettmers et al., arXiv 2110.02861 (blocks); Gupta et al., Effective Quantization of Muon Optimizer States, arXiv
        2509.23106 (equal steps suffice for orthogonalized updates).
    """
    inner = optax.with_extra_args_support(tx)
    quantized = functools.partial(jax.tree.map, functools.partial(_quantized, size=block_size))
    restored = functools.partial(jax.tree.map, _restored, is_leaf=lambda x: isinstance(x, Quantized))

    def init(params):
        state = inner.init(params)
        if not any(map(_is_trace, jax.tree.leaves(state, is_leaf=_is_trace))):
            raise ValueError("quantize_momentum: tx has no momentum from optax.trace (AdamW has none)")
        return _traces(state, quantized)

    def update(updates, state, params=None, **extra_args):
        updates, state = inner.update(updates, _traces(state, restored), params, **extra_args)
        return updates, _traces(state, quantized)

    return optax.GradientTransformationExtraArgs(init, update)


def _traces(state: Any, change: Callable[[Any], Any]) -> Any:
    """Return the state with every momentum changed."""
    return jax.tree.map(lambda x: optax.TraceState(change(x.trace)) if _is_trace(x) else x, state, is_leaf=_is_trace)


def _is_trace(x: Any) -> bool:
    return isinstance(x, optax.TraceState)


def _quantized(x: jax.Array, size: int) -> jax.Array | Quantized:
    if x.ndim < 2 or not x.size:
        return x
    size = size if x.shape[-1] % size == 0 else x.shape[-1]

    def rounded(x: jax.Array) -> Quantized:
        blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, size)
        scales = jnp.max(jnp.abs(blocks), axis=-1) / LARGEST
        steps = blocks / jnp.where(scales == 0, 1, scales)[..., None]
        return Quantized(jnp.round(steps).astype(jnp.int8).reshape(x.shape), scales)

    if not is_explicit(x):
        return rounded(x)
    mesh, (*before, last) = jax.typeof(x).sharding.mesh, spec_of(x)
    shards = math.prod(mesh.shape[axis] for axis in axes_of(last))
    scale_spec = PartitionSpec(*before, None if x.shape[-1] // size % shards else last)
    specs: Any = (spec_of(x), scale_spec)
    return in_auto_axes(rounded, mesh, Quantized(*specs))(x)


def _restored(x: jax.Array | Quantized) -> jax.Array:
    if not isinstance(x, Quantized):
        return x

    def multiplied(values: jax.Array, scales: jax.Array) -> jax.Array:
        blocks = values.astype(jnp.float32).reshape(*scales.shape, -1)
        return (blocks * scales[..., None]).reshape(values.shape)

    if is_explicit(x.values):
        multiplied = in_auto_axes(multiplied, jax.typeof(x.values).sharding.mesh, spec_of(x.values))
    return multiplied(*x)
