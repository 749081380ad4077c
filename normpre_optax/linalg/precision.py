# SPDX-License-Identifier: Apache-2.0
"""How matrices are computed: products by precision, the platform a program is traced
for, batches of one shape.

Everything is computed in at least float32. ``compute_dtype`` is the dtype of the
operands of large products; None is the platform's usual float32 product: one bfloat16
pass on a TPU, TF32 on a GPU, float32 on a CPU.
"""

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

# The platform inside of `on`. It is part of the key of jax's caches, so programs of two
# platforms are never mixed up.
_platform = jax.make_user_context("")


def platform() -> str:
    """Return "cpu", "tpu" or "gpu": what the surrounding ``by_platform`` traces for,
    else the default backend.
    """
    name = _platform.value or jax.default_backend()
    return name if name in ("cpu", "tpu") else "gpu"


def on(name: str, f: Callable, *args: Any) -> Any:
    """Return ``f(*args)``, traced for one platform.

    Example:
        >>> from normpre_optax.linalg.precision import on, platform
        >>> on("tpu", platform)
        'tpu'
    """
    with _platform(name):
        return f(*args)


def by_platform(f: Callable, *args: Any) -> Callable:
    """Return ``f`` for these arguments, traced once per platform; inside,
    ``platform()`` says which one.

    A jitted program is thus right for every platform it may be lowered for. Outside of
    jit the arrays decide. Inside of another ``by_platform``, this is ``f``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.precision import by_platform, platform
        >>> f, x = lambda x: x * (2 if platform() == "cpu" else 3), jnp.ones(2)
        >>> print(by_platform(f, x)(x))
        [2. 2.]
    """
    arrays = [x for x in jax.tree.leaves(args) if isinstance(x, jax.Array)]
    if _platform.value or not arrays:
        return f
    if any(isinstance(x, Tracer) for x in arrays):
        cpu, tpu, gpu = (
            functools.partial(on, name, f) for name in ("cpu", "tpu", "gpu")
        )
        return functools.partial(
            jax.lax.platform_dependent, cpu=cpu, tpu=tpu, default=gpu
        )
    return functools.partial(on, next(iter(arrays[0].devices())).platform, f)


def at_least_float32(x: Any) -> jax.Array:
    """Convert to float32 if the dtype is narrower, or an integer.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.precision import at_least_float32
        >>> [
        ...     str(at_least_float32(jnp.ones(2, dtype)).dtype)
        ...     for dtype in (jnp.bfloat16, jnp.int32)
        ... ]
        ['float32', 'float32']
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        raise TypeError(
            f"{x} has no values: for the shapes of a state, call"
            " jax.eval_shape(tx.init, params)"
        )
    x = jnp.asarray(x)
    return (
        x.astype(jnp.float32)
        if x.dtype.itemsize < 4 or not jnp.issubdtype(x.dtype, jnp.inexact)
        else x
    )


def product(a: jax.Array, b: jax.Array, dtype: Any = None) -> jax.Array:
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
        >>> from normpre_optax.linalg.precision import product
        >>> print(product(jnp.ones((1, 300)), jnp.ones((300, 1)), jnp.bfloat16))
        [[300.]]
    """
    if dtype == "narrow":
        dtype = None if platform() == "cpu" else jnp.bfloat16
    if dtype is not None:
        a, b = a.astype(dtype), b.astype(dtype)
    sums = jnp.dtype(jnp.float32) if a.dtype.itemsize < 4 else a.dtype
    if (
        a.dtype != sums and platform() == "cpu"
    ):  # XLA's CPU backend lacks half-precision products with float32 sums.
        a, b = a.astype(sums), b.astype(sums)
    precision = (
        jax.lax.Precision.HIGHEST if dtype is not None and a.dtype == sums else None
    )
    return jnp.matmul(a, b, precision=precision, preferred_element_type=sums)


def rounds(dtype: Any) -> bool:
    """Return whether ``product`` rounds float32 operands."""
    return (
        platform() != "cpu"
        if dtype in (None, "narrow")
        else jnp.dtype(dtype).itemsize < 4
    )


def narrowed(xs: list[jax.Array], dtype: Any) -> tuple[list[jax.Array], Any]:
    """Return matrices for many thin products, and the ``dtype`` of these. On a GPU,
    reading the matrices is their cost.

    The barrier keeps XLA from undoing the rounding.
    """
    if dtype is not None or platform() != "gpu" or xs[0].dtype != jnp.float32:
        return xs, dtype
    return (
        jax.lax.optimization_barrier([x.astype(jnp.bfloat16) for x in xs]),
        jnp.bfloat16,
    )


def one_at_a_time(f: Any) -> Any:
    """Return ``f`` of one matrix, which on a CPU stays one matrix under ``jax.vmap``.

    Batched LAPACK calls that run side by side can deadlock XLA's CPU thread pool
    (docs/cpu_hang.md).
    """
    return jax.custom_batching.sequential_vmap(f) if platform() == "cpu" else f


def exact_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return ``a b`` in the operands' own precision on every platform."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def inverse_root(squares: jax.Array, terms: int = 0) -> jax.Array:
    """Return ``squares^(-1/2)``, and 0 where ``squares`` is 0; NaN stays NaN.

    Of a sum of ``terms`` squares, float32 loses a part if their root mean square is
    below 1e-18: it counts as 0.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.precision import inverse_root
        >>> print(inverse_root(jnp.array([4.0, 0.0])))
        [0.5 0. ]
    """
    least = 100 * float(jnp.finfo(squares.dtype).tiny) * terms
    return jnp.where(
        squares <= least, 0, jax.lax.rsqrt(jnp.where(squares <= least, 1, squares))
    )


def inverse_norm(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return 1 over the norm of ``x`` along axes, which it keeps; 0 for a norm of 0.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.precision import inverse_norm
        >>> print(inverse_norm(jnp.array([[3.0, 4.0], [1e-19, 2e-19]]), (1,)))
        [[0.2]
         [0. ]]
    """
    squares = jnp.sum(x * x, axes, keepdims=True)
    return inverse_root(squares, x.size // max(1, squares.size))


def grouped(keys: Iterable[Hashable]) -> list[list[int]]:
    """Return the indices of equal keys, one list per key.

    Example:
        >>> from normpre_optax.linalg.precision import grouped
        >>> grouped("abca")
        [[0, 3], [1], [2]]
    """
    groups: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def join(
    items: Sequence[Any], keys: Iterable[Hashable]
) -> tuple[list[Any], list[tuple[int, int]]]:
    """Stack trees of arrays that have equal keys; also return the stack of each tree,
    and its index there.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.precision import join
        >>> stacks, places = join([jnp.ones(2), jnp.ones(3), jnp.ones(2)], "aba")
        >>> [x.shape for x in stacks], places
        ([(2, 2), (1, 3)], [(0, 0), (1, 0), (0, 1)])
    """
    groups = grouped(keys)
    stacks = [
        jax.tree.map(lambda *xs: jnp.stack(xs), *(items[i] for i in group))
        for group in groups
    ]
    places = {
        i: (number, k)
        for number, group in enumerate(groups)
        for k, i in enumerate(group)
    }
    return stacks, [places[i] for i in range(len(items))]


def solve_together(
    f: Callable, problems: Sequence[tuple[jax.Array, ...]], stacked: Callable = jax.vmap
) -> list[Any]:
    """Return ``f(*problem)`` for problems of arrays ``(..., a, b)``: one batched call
    for all of one size.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.precision import solve_together
        >>> print(
        ...     [
        ...         x.shape
        ...         for x in solve_together(
        ...             jnp.transpose, [(jnp.ones((2, 3)),), (jnp.ones((4, 2, 3)),)]
        ...         )
        ...     ]
        ... )
        [(3, 2), (4, 3, 2)]
    """
    results: list[Any] = [None] * len(problems)
    for members in grouped(
        tuple(x.shape[-2:] for x in problem) for problem in problems
    ):
        leads = [problems[i][0].shape[:-2] for i in members]
        parts = zip(
            *([x.reshape(-1, *x.shape[-2:]) for x in problems[i]] for i in members),
            strict=True,
        )
        solved = stacked(f)(*(jnp.concatenate(xs) for xs in parts))
        ends = itertools.accumulate(map(math.prod, leads), initial=0)
        for i, lead, (start, end) in zip(
            members, leads, itertools.pairwise(ends), strict=True
        ):
            results[i] = jax.tree.map(
                lambda x, a=start, b=end, lead=lead: x[a:b].reshape(
                    *lead, *x.shape[1:]
                ),
                solved,
            )
    return results


def batched(f: Callable, ndim: int) -> Callable:
    """Return a function of matrices as one of stacks with this number of axes."""
    for _ in range(ndim - 2):
        f = jax.vmap(f)
    return f
