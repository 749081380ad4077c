# SPDX-License-Identifier: Apache-2.0
"""Working precision: at least float32, whatever dtype the caller stores."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp


def working_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype to compute in: float32, or wider where the data is wider.

    Args:
        dtype: dtype of the data.

    Returns:
        float32 for anything narrower, else ``dtype``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.precision import working_dtype
        >>> working_dtype(jnp.bfloat16)
        dtype('float32')
    """
    dtype = jnp.dtype(dtype)
    return dtype if jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 4 else jnp.dtype(jnp.float32)


def in_working_dtype(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Run ``f`` on arrays lifted to at least float32, and give the result back in the first array's dtype.

    Args:
        f: function of one or more arrays.

    Returns:
        The same function, safe for bfloat16 and float16 arrays.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.precision import in_working_dtype
        >>> in_working_dtype(jnp.cumsum)(jnp.ones(3, jnp.bfloat16)).dtype
        dtype(bfloat16)
    """

    @functools.wraps(f)
    def lifted(first: jax.Array, *rest: jax.Array) -> jax.Array:
        arrays = [x.astype(working_dtype(x.dtype)) for x in (first, *rest)]
        return f(*arrays).astype(first.dtype)

    return lifted


def product(a: jax.Array, b: jax.Array, operand_dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """Matrix product with sums in at least float32, and no silent rounding of float32 operands.

    GPUs and TPUs round the operands of a float32 product to TF32 or bfloat16 unless told otherwise; this one is told.

    Args:
        a: matrices ``(..., m, k)``.
        b: matrices ``(..., k, n)``.
        operand_dtype: dtype to which the operands are rounded; None leaves them.

    Returns:
        Matrices ``(..., m, n)`` in at least float32.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.precision import product
        >>> print(product(jnp.ones((1, 300)), jnp.ones((300, 1)), jnp.bfloat16))
        [[300.]]
    """
    if operand_dtype is not None:
        a, b = a.astype(operand_dtype), b.astype(operand_dtype)
    sums = working_dtype(a.dtype)
    exact = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST, preferred_element_type=sums)
    if a.dtype == sums:
        return exact(a, b)

    def widened(a: jax.Array, b: jax.Array) -> jax.Array:
        return exact(a.astype(sums), b.astype(sums))

    # XLA's CPU backend has no half-precision products with float32 sums in every place where one may stand.
    return jax.lax.platform_dependent(
        a, b, cpu=widened, default=functools.partial(jnp.matmul, preferred_element_type=sums)
    )
