# SPDX-License-Identifier: Apache-2.0
"""Products and inverse roots in at least float32.

``compute_dtype`` is the dtype of the operands of large products; None is the platform's
usual float32 product: one bfloat16 pass on a TPU, TF32 on a GPU, float32 on a CPU.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from normpre_optax.linalg.platforms import platform

# The dtype of the operands of products, see `product`; may be "narrow".
Operands = DTypeLike | None
Product = Callable[[jax.Array, jax.Array], jax.Array]


def at_least_float32(x: ArrayLike | jax.ShapeDtypeStruct) -> jax.Array:
    """Convert to float32 if the dtype is narrower, or an integer.

    Raises:
        TypeError: if ``x`` is a ``jax.ShapeDtypeStruct``, which has no values.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.products import at_least_float32
        >>> at_least_float32(jnp.ones(2, jnp.bfloat16)).dtype
        dtype('float32')
        >>> at_least_float32(jnp.ones(2, jnp.int32)).dtype
        dtype('float32')
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        raise TypeError(
            f"{x} has no values: for the shapes of a state, call"
            " jax.eval_shape(tx.init, params)"
        )
    x = jnp.asarray(x)
    if x.dtype.itemsize < 4 or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x.astype(jnp.float32)
    return x


def product(a: jax.Array, b: jax.Array, dtype: Operands = None) -> jax.Array:
    """Return ``a b`` with sums in at least float32 and operands rounded to ``dtype``.

    Args:
        a: matrices ``(..., m, k)``.
        b: matrices ``(..., k, n)``.
        dtype: of the operands; float32 is true float32 on every platform, None the
            platform's usual product, and "narrow" bfloat16 on a TPU or GPU, and None on
            a CPU.

    Returns:
        Matrices ``(..., m, n)``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.products import product
        >>> print(product(jnp.ones((1, 300)), jnp.ones((300, 1)), jnp.bfloat16))
        [[300.]]
    """
    if dtype == "narrow":
        dtype = None if platform() == "cpu" else jnp.bfloat16
    if dtype is not None:
        a = a.astype(dtype)
        b = b.astype(dtype)
    sums = a.dtype
    if sums.itemsize < 4:
        sums = jnp.dtype(jnp.float32)
    if a.dtype != sums and platform() == "cpu":
        # XLA's CPU backend lacks half-precision products with float32 sums.
        a = a.astype(sums)
        b = b.astype(sums)
    precision = None
    # By default, a TPU rounds float32 to bfloat16, and a GPU to TF32.
    if dtype is not None and a.dtype == sums:
        precision = jax.lax.Precision.HIGHEST
    return jnp.matmul(a, b, precision=precision, preferred_element_type=sums)


def rounds(dtype: Operands) -> bool:
    """Return whether ``product`` rounds float32 operands."""
    if dtype in (None, "narrow"):
        return platform() != "cpu"
    return jnp.dtype(dtype).itemsize < 4


def narrowed(xs: list[jax.Array], dtype: Operands) -> tuple[list[jax.Array], Operands]:
    """Return matrices for many thin products, and the ``dtype`` of these.

    On a GPU, reading the matrices is the cost of the products: they are rounded to
    bfloat16 once, unless a ``dtype`` is given.
    """
    if dtype is not None or platform() != "gpu" or xs[0].dtype != jnp.float32:
        return xs, dtype
    # The barrier keeps XLA from undoing the rounding.
    rounded = jax.lax.optimization_barrier([x.astype(jnp.bfloat16) for x in xs])
    return rounded, jnp.bfloat16


def smaller_gram(x: jax.Array, times: Product) -> jax.Array:
    """Return ``x x^T`` or ``x^T x``: the smaller one, by this product."""
    rows, columns = x.shape
    if rows <= columns:
        return times(x, x.T)
    return times(x.T, x)


def on_smaller_side(z: jax.Array, x: jax.Array, times: Product) -> jax.Array:
    """Return ``z x`` or ``x z``, for ``z`` of the size of ``smaller_gram(x)``."""
    if len(z) == len(x):
        return times(z, x)
    return times(x, z)


def exact_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return ``a b`` in the operands' own precision on every platform."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def inverse_root(squares: jax.Array, terms: int = 0) -> jax.Array:
    """Return ``squares^(-1/2)``, and 0 where ``squares`` is 0; NaN stays NaN.

    Of a sum of ``terms`` squares, float32 loses a part if their root mean square is
    below 1e-18: it counts as 0.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.products import inverse_root
        >>> print(inverse_root(jnp.array([4.0, 0.0])))
        [0.5 0. ]
    """
    # A hundred times the least normal number, which is the square of 1e-19: smaller
    # entries of the same row have squares that are flushed to zero.
    least = 100 * float(jnp.finfo(squares.dtype).tiny) * terms
    is_zero = squares <= least
    # NaN is not at most `least`, so it reaches the root and stays NaN.
    nonzero = jnp.where(is_zero, 1, squares)
    return jnp.where(is_zero, 0, jax.lax.rsqrt(nonzero))


def inverse_norm(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return 1 over the norm of ``x`` along axes, which it keeps; 0 for a norm of 0.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.products import inverse_norm
        >>> print(inverse_norm(jnp.array([[3.0, 4.0], [1e-19, 2e-19]]), (1,)))
        [[0.2]
         [0. ]]
    """
    squares = jnp.sum(x * x, axes, keepdims=True)
    # The number of entries along the axes; an array may be empty.
    return inverse_root(squares, x.size // max(1, squares.size))
