# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz iterations: the matrix sign and clipped singular values.

One step maps ``X`` to ``a X + (b A + c A^2) X`` with ``A = X X^T``. It maps every
singular value ``s`` to ``a s + b s^3 + c s^5`` and keeps the singular vectors. All
functions take one matrix; ``jax.vmap`` takes a stack.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from normpre_optax.linalg.batches import one_at_a_time
from normpre_optax.linalg.products import (
    Operands,
    Product,
    exact_product,
    inverse_root,
    on_smaller_side,
    product,
    rounds,
    smaller_gram,
)

Triple = tuple[float, float, float]

COEFFICIENTS: dict[str, tuple[Triple, ...]] = {
    # Keller Jordan, Muon (github.com/KellerJordan/Muon); for any number of steps.
    "muon": ((3.4445, -4.7750, 2.0315),),
    # Jiacheng You, five steps (run logs of github.com/KellerJordan/modded-nanogpt).
    "you": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Amsel et al., The Polar Express (arXiv 2505.16932), cushion 2e-2, safety factor
    # 1.02 included.
    "polar_express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
}
# Polar Express diverges above its interval: divide by a little more than the Frobenius
# norm.
HEADROOM = {"polar_express": 1.02}
# With rounded operands and a first coefficient above this, the Gram form loses accuracy
# (docs/results/accuracy_cpu.md).
_STEEP = 4.5


def coefficient_table(
    coefficients: str | Sequence[Any], steps: int
) -> tuple[Triple, ...]:
    """Return one triple per step, from a named or given table.

    The table is cut to ``steps`` or continued with its last triple.

    Raises:
        ValueError: if the name is unknown, or the table does not consist of triples of
            usable numbers.

    Example:
        >>> from normpre_optax.linalg.newton_schulz import coefficient_table
        >>> coefficient_table((2.0, -1.5, 0.5), 2)
        ((2.0, -1.5, 0.5), (2.0, -1.5, 0.5))
    """
    try:
        table = _triples(coefficients)
    except (KeyError, TypeError, ValueError, IndexError):
        raise ValueError(
            f"ns_coefficients={coefficients!r} is not one of {sorted(COEFFICIENTS)},"
            " a triple, or a list of triples, of numbers below 1000, the first one"
            " positive"
        ) from None
    return tuple(table[min(i, len(table) - 1)] for i in range(steps))


def _triples(coefficients: str | Sequence[Any]) -> tuple[Triple, ...]:
    """Return a table as triples of floats; fail in any way if it is not usable."""
    if isinstance(coefficients, str):
        return COEFFICIENTS[coefficients]
    given = tuple(coefficients)
    if not isinstance(given[0], Sequence):
        given = (given,)
    table = tuple((float(a), float(b), float(c)) for a, b, c in given)
    # NaN is not below 1000 either.
    usable = all(abs(number) < 1e3 for triple in table for number in triple)
    if not usable or table[0][0] <= 0:
        raise ValueError
    return table


# Jitted: traced and lowered once per shape.
@jax.jit(static_argnames=("table", "headroom", "compute_dtype", "norm"))
def newton_schulz(
    x: jax.Array,
    table: tuple[Triple, ...],
    headroom: float = 1.0,
    compute_dtype: Operands = None,
    norm: str = "frobenius",
    rms: ArrayLike | None = None,
) -> jax.Array:
    """Approximate ``msign(x) = U V^T``.

    The plain form iterates on the matrix. From an aspect ratio of 1.5 on, the Gram form
    needs fewer operations: it iterates on ``R = X X^T`` and collects the factors in
    ``Q``; ``R`` is recomputed after two steps, because rounding grows from step to
    step; of more than five, after every two.

    Args:
        x: a matrix ``(m, n)`` in at least float32.
        table: one triple ``(a, b, c)`` per step.
        headroom: ``x`` is divided by this times its norm.
        compute_dtype: dtype of the products' operands, see ``products.product``; may
            be "narrow".
        norm: which one: "frobenius", or "schatten", the fourth root of the sum of
            ``s^4``: a closer bound on the largest ``s``, so that small ones need fewer
            steps.
        rms: if given, scale the result to this root mean square.

    Returns:
        A matrix ``(m, n)``. One with a root mean square below 1e-18 becomes zero.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.newton_schulz import newton_schulz
        >>> x = jnp.diag(jnp.array([1e-3, 2e-3]))
        >>> print(newton_schulz(x, ((1.5, -0.5, 0.0),) * 12).round(3))
        [[1. 0.]
         [0. 1.]]

    References:
        Jordan et al., Muon, 2024; Bernstein and Newhouse, arXiv 2409.20325.
    """
    times = functools.partial(product, dtype=compute_dtype)
    result_norm = None  # Frobenius
    if rms is not None:
        result_norm = rms * math.sqrt(x.size)
    parts = _parts(x.shape, table, compute_dtype)
    last = len(parts) - 1
    for number, part in enumerate(parts):
        r = smaller_gram(x, times)
        start = 1.0
        if number == 0:
            start = _start(r, x.size, headroom, norm)
        r = r * jnp.square(start)
        own_norm = None
        if number == last:
            own_norm = result_norm
        if len(part) == 1:
            x = _plain_step(x, r, start, part[0], times, own_norm)
        else:
            x = _gram_steps(x, r, start, part, times, own_norm)
    return x


def _parts(
    shape: tuple[int, ...], table: tuple[Triple, ...], compute_dtype: Operands
) -> list[tuple[Triple, ...]]:
    """Return the steps between which the Gram matrix is recomputed.

    Those of the plain form are single steps.
    """
    is_oblong = max(shape) >= 1.5 * min(shape)
    is_inaccurate = table[0][0] > _STEEP and rounds(compute_dtype)
    if not is_oblong or is_inaccurate:
        return [(triple,) for triple in table]
    size = 3 if len(table) <= 5 else 2
    later = [table[i : i + size] for i in range(2, len(table), size)]
    return [table[:2], *later]


def _start(r: jax.Array, size: int, headroom: float, norm: str) -> jax.Array:
    """Return the factor of a matrix that brings its singular values below one.

    Args:
        r: its Gram matrix.
        size: its number of elements.
        headroom: it is divided by this times its norm.
        norm: which one, "frobenius" or "schatten".
    """
    start = inverse_root(jnp.trace(r), size) / headroom
    if norm == "schatten":
        # In two steps, or the squares overflow.
        unit = r * jnp.square(start * headroom)
        start = start * inverse_root(jnp.linalg.norm(unit))
    return start


def _plain_step(
    x: jax.Array,
    r: jax.Array,
    start: jax.Array | float,
    triple: Triple,
    times: Product,
    norm: ArrayLike | None,
) -> jax.Array:
    """Return one step from ``start x``, with ``r`` its Gram matrix, at a norm."""
    a, b, c = triple
    z = start * (b * r + c * times(r, r))
    x = (a * start) * x + on_smaller_side(z, x, times)
    if norm is None:
        return x
    return x * (norm * inverse_root(jnp.sum(x * x)))


def _gram_steps(
    x: jax.Array,
    r: jax.Array,
    start: jax.Array | float,
    part: tuple[Triple, ...],
    times: Product,
    norm: ArrayLike | None,
) -> jax.Array:
    """Return several steps from ``start x``, with ``r`` its Gram matrix.

    The factors ``z`` of the steps, polynomials of ``r``, are multiplied to ``q``; ``x``
    is multiplied once.
    """
    first = r
    q = jnp.eye(len(r), dtype=r.dtype)
    for i, (a, b, c) in enumerate(part):
        z = b * r + c * times(r, r)
        q = a * q + (z if i == 0 else times(q, z))
        # The Gram matrix after the last step is not needed.
        if i < len(part) - 1:
            rz = a * r + times(r, z)
            r = a * rz + times(z, rz)
    scale = start
    if norm is not None:
        # ||q x||^2 from small matrices.
        scale = start * norm * inverse_root(jnp.sum(times(q, first) * q))
    return on_smaller_side(q * scale, x, times)


def exact_msign(x: jax.Array, rms: ArrayLike | None = None) -> jax.Array:
    """Return ``U V^T`` over the nonzero singular values, by an SVD.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.newton_schulz import exact_msign
        >>> print(exact_msign(jnp.array([[0.0, 5.0], [1e-3, 0.0]])))
        [[0. 1.]
         [1. 0.]]
    """
    u, s, vt = one_at_a_time(_svd)(x)
    # Smaller singular values are rounding errors.
    is_nonzero = s > max(x.shape) * jnp.finfo(x.dtype).eps * s[0]
    kept = is_nonzero.astype(x.dtype)
    t = exact_product(u * kept[None], vt)
    if rms is None:
        return t
    return t * (rms * math.sqrt(x.size) * inverse_root(jnp.sum(t * t)))


def _svd(x: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(jnp.linalg.svd(x, full_matrices=False))


# Polar Express for eigenvalues above 1e-3, then the classical step, which converges to
# one.
_CONVERGING = (*COEFFICIENTS["polar_express"], *[(1.875, -1.25, 0.375)] * 3)


def clipping_factor(gram: jax.Array) -> jax.Array:
    """Return ``min(gram^(-1/2), 1) - 1`` of a Gram matrix, by products alone.

    ``gram`` is symmetric and positive semidefinite. The sign of ``I - gram`` selects
    the eigenvalues above one; their inverse root is the factor that Newton-Schulz
    multiplies a matrix with that Gram matrix by.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.newton_schulz import clipping_factor
        >>> gram = jnp.diag(jnp.array([16.0, 4.0, 0.25]))
        >>> print((1 + jnp.diag(clipping_factor(gram))).round(3))
        [0.25 0.5  1.  ]

    References:
        MuCon, arXiv 2605.26459, clips singular values in this way.
    """
    identity = jnp.eye(len(gram), dtype=gram.dtype)
    sign = identity - gram
    largest = jnp.max(jnp.abs(sign))
    # In two steps, or the squares of large values overflow.
    sign = sign / jnp.where(largest == 0, 1, largest)
    sign = sign * inverse_root(jnp.sum(sign * sign))
    start = inverse_root(jnp.trace(gram))
    factor = identity * start
    rest = gram * start**2
    for a, b, c in _CONVERGING:
        square = exact_product(sign, sign)
        polynomial = b * square + c * exact_product(square, square)
        sign = a * sign + exact_product(polynomial, sign)
        step = a * identity + b * rest + c * exact_product(rest, rest)
        factor = exact_product(step, factor)
        rest = exact_product(step, exact_product(step, rest))
    return exact_product((identity - sign) / 2, factor - identity)
