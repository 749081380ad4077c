# SPDX-License-Identifier: Apache-2.0
"""Momentum in eight bits: integers, and one scale for every block of them."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from normpre_optax.meshes.specs import gathered, shares_of
from normpre_optax.transforms.checks import static_int, transformation

LARGEST = 127


class Quantized(NamedTuple):
    """Stands for an array where a state keeps it: int8 of its shape, and float32 scales, one a block of the last axis.

    Entry by entry the array is ``values * scales``.
    """

    values: jax.Array
    scales: jax.Array


def quantize_momentum(
    tx: optax.GradientTransformation, *, block_size: int = 128
) -> optax.GradientTransformationExtraArgs:
    """``tx`` with its momentum kept in eight bits instead of 32: a fourth of the memory between steps.

    What ``optax.trace`` keeps of matrices and stacks (arrays of two or more axes) is rounded to the nearest of 255
    steps of its block's largest magnitude. AdamW's moments stay as they are: the second has entries too small for that.

    Args:
        tx: any optimizer or direction; it is wrapped as a whole. ``monitor``, ``optax.MultiSteps`` and the like may
            stand inside or around it.
        block_size: consecutive entries of the last axis that share a scale; a last axis that it does not divide is one
            block.

    Returns:
        The optimizer, whose state is that of ``tx`` with a ``Quantized`` for each such array.

    Raises:
        TypeError: if ``tx`` is no optax transformation.
        ValueError: if ``block_size`` is below 1; at ``init``, if ``tx`` keeps no such momentum, or keeps it so already.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from normpre_optax import muon, quantize_momentum
        >>> tx = quantize_momentum(muon(1e-3))
        >>> params = {"kernel": jnp.ones((64, 256))}
        >>> state = tx.init(params)
        >>> [(str(x.dtype), x.shape) for x in jax.tree.leaves(state) if x.ndim]
        [('int8', (64, 256)), ('float32', (64, 2))]

    References:
        Dettmers et al., arXiv 2110.02861 (blocks); Gupta et al., Effective Quantization of Muon Optimizer States, arXiv
        2509.23106 (for orthogonalised updates equal steps will do).
    """
    transformation("tx", tx)
    size = static_int("block_size", block_size, least=1)
    inner = optax.with_extra_args_support(tx)
    quantized = functools.partial(jax.tree.map, functools.partial(_quantized, size=size))
    restored = functools.partial(jax.tree.map, _restored, is_leaf=_is_quantized)

    def init(params):
        state = inner.init(params)
        if not any(map(_is_trace, jax.tree.leaves(state, is_leaf=_is_trace))):
            raise ValueError("quantize_momentum: tx keeps no momentum by optax.trace (AdamW, SWAN and Dion do not)")
        if any(map(_is_quantized, jax.tree.leaves(state, is_leaf=_is_quantized))):
            raise ValueError("quantize_momentum: tx keeps its momentum in eight bits already; wrap it once")
        return _traces(state, quantized)

    def update(updates, state, params=None, **extra_args):
        updates, state = inner.update(updates, _traces(state, restored), params, **extra_args)
        return updates, _traces(state, quantized)

    return optax.GradientTransformationExtraArgs(init, update)


def _traces(state: Any, change: Callable[[Any], Any]) -> Any:
    """The state with every momentum changed."""
    return jax.tree.map(lambda x: optax.TraceState(change(x.trace)) if _is_trace(x) else x, state, is_leaf=_is_trace)


def _is_trace(x: Any) -> bool:
    return isinstance(x, optax.TraceState)


def _is_quantized(x: Any) -> bool:
    return isinstance(x, Quantized)


def _quantized(x: jax.Array, size: int) -> jax.Array | Quantized:
    if x.ndim < 2 or not x.size:
        return x
    size = size if x.shape[-1] % size == 0 else x.shape[-1]
    pieces = _pieces(x.astype(jnp.float32), size)
    largest = jnp.max(jnp.abs(pieces), axis=-1)
    if pieces.shape[-1] < size:
        largest = jnp.max(_cut(gathered(largest, x.ndim - 1), size // pieces.shape[-1]), axis=-1)
    scales = largest / LARGEST
    steps = pieces / _spread(jnp.where(scales == 0, 1, scales), size, pieces)
    return Quantized(jnp.round(steps).astype(jnp.int8).reshape(x.shape), scales)


def _restored(x: jax.Array | Quantized) -> jax.Array:
    if not isinstance(x, Quantized):
        return x
    size = x.values.shape[-1] // x.scales.shape[-1]
    pieces = _pieces(x.values.astype(jnp.float32), size)
    return (pieces * _spread(x.scales, size, pieces)).reshape(x.values.shape)


def _pieces(x: jax.Array, size: int) -> jax.Array:
    """Blocks of the last axis as an axis more; where it is known to be spread, parts of them that no device shares."""
    *_, there = shares_of(x)
    return _cut(x, math.gcd(size, x.shape[-1] // there))


def _spread(scales: jax.Array, size: int, pieces: jax.Array) -> jax.Array:
    """The scale of the block that each piece is of."""
    times = size // pieces.shape[-1]
    return (scales if times == 1 else jnp.repeat(scales, times, axis=-1))[..., None]


def _cut(x: jax.Array, size: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
