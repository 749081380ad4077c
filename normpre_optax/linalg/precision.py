# SPDX-License-Identifier: Apache-2.0
"""Working precision: at least float32, whatever dtype the caller stores."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from normpre_optax.platforms import by_platform


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
    """Matrix product with sums in at least float32, at the speed that ``operand_dtype`` says.

    Args:
        a: matrices ``(..., m, k)``.
        b: matrices ``(..., k, n)``.
        operand_dtype: dtype to which the operands are rounded. float32 is true float32 on every device. None leaves
            them to the device's usual product: of float32 operands one pass in bfloat16 on a TPU, TF32 on a GPU, true
            float32 on a CPU (``jax.default_matmul_precision`` decides otherwise where it is set).

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
        if a.dtype == working_dtype(a.dtype):
            return exact_product(a, b)
    sums = working_dtype(a.dtype)
    usual = functools.partial(jnp.matmul, preferred_element_type=sums)
    if a.dtype == sums:
        return usual(a, b)
    # XLA's CPU backend has no half-precision products with float32 sums in every place where one may stand.
    return by_platform(a, b, cpu=lambda a, b: exact_product(a.astype(sums), b.astype(sums)), default=usual)


def exact_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Matrix product in the operands' own precision on every device: for small problems and yardsticks.

    Args:
        a: matrices ``(..., m, k)`` in at least float32.
        b: matrices ``(..., k, n)`` likewise.

    Returns:
        Matrices ``(..., m, n)``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.precision import exact_product
        >>> print(exact_product(jnp.array([[1.0, 1e-6]]), jnp.ones((2, 1))))
        [[1.000001]]
    """
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
