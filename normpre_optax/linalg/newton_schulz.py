# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz: an odd matrix polynomial, iterated, that brings every singular value near one.

One step maps ``X`` to ``a X + (b A + c A^2) X`` with ``A = X X^T``, hence every singular value ``s`` to
``a s + b s^3 + c s^5``, and leaves the singular vectors alone. It starts from ``X / ||X||_F``.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from normpre_optax.linalg.precision import product, working_dtype

Triple = tuple[float, float, float]
FORMS = ("auto", "plain", "gram")

COEFFICIENTS: dict[str, tuple[Triple, ...]] = {
    # Keller Jordan, Muon (github.com/KellerJordan/Muon): steepest at zero, does not settle at one. Any number of steps.
    "muon": ((3.4445, -4.7750, 2.0315),),
    # Jiacheng You's five-step set (in the run logs of github.com/KellerJordan/modded-nanogpt).
    "you": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Amsel et al., The Polar Express (arXiv 2505.16932), cushion 2e-2, safety factor 1.02 baked in.
    "polar_express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
}
# The start is divided by this too, so that rounding cannot push a singular value past the table's interval.
_HEADROOM = {"polar_express": 1.02}


def coefficient_table(coefficients: str | Sequence, steps: int) -> tuple[Triple, ...]:
    """One triple a step: the named or given table, cut to ``steps`` or continued with its last triple.

    Args:
        coefficients: a name in ``COEFFICIENTS``, one triple, or a sequence of triples.
        steps: number of iterations.

    Returns:
        ``steps`` triples ``(a, b, c)``.

    Raises:
        ValueError: if the name is unknown or the table is not made of triples.

    Example:
        >>> from normpre_optax.linalg.newton_schulz import coefficient_table
        >>> coefficient_table((2.0, -1.5, 0.5), 2)
        ((2.0, -1.5, 0.5), (2.0, -1.5, 0.5))
    """
    refusal = ValueError(
        f"ns_coefficients={coefficients!r} is not one of {sorted(COEFFICIENTS)}, a triple, or a list of triples"
    )
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENTS:
            raise refusal
        table = COEFFICIENTS[coefficients]
    else:
        given = tuple(coefficients)
        table = (given,) if given and not isinstance(given[0], Sequence) else tuple(tuple(row) for row in given)
        if not table or any(len(row) != 3 for row in table):
            raise refusal
    return tuple(table[min(i, len(table) - 1)] for i in range(steps))


def newton_schulz(
    x: jax.Array,
    steps: int = 5,
    coefficients: str | Sequence = "muon",
    compute_dtype: jax.typing.DTypeLike | None = None,
    form: str = "auto",
) -> jax.Array:
    """Approximate ``msign(x) = U V^T`` by Newton-Schulz iterations on the shorter side.

    Args:
        x: matrices ``(..., m, n)``.
        steps: number of iterations.
        coefficients: a name in ``COEFFICIENTS``, one triple, or one triple a step.
        compute_dtype: dtype of the products' operands (sums are kept in float32); None: the dtype of ``x``, at its
            full precision on every device.
        form: ``"plain"`` iterates on the matrix, ``"gram"`` on its Gram matrix: fewer operations from an aspect of
            about 1.5 on, in at least float32; ``"auto"`` chooses.

    Returns:
        Matrices ``(..., m, n)``; a zero matrix stays zero.

    Raises:
        ValueError: if ``coefficients`` is not a table or ``form`` is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.newton_schulz import newton_schulz
        >>> x = newton_schulz(jnp.diag(jnp.array([1e-3, 2e-3])), 12, (1.5, -0.5, 0.0))
        >>> print(x.round(3))
        [[1. 0.]
         [0. 1.]]

    References:
        Jordan et al., Muon, 2024; Bernstein and Newhouse, arXiv 2409.20325.
    """
    if form not in FORMS:
        raise ValueError(f"{form=} is not one of {FORMS}")
    table = coefficient_table(coefficients, steps)
    headroom = _HEADROOM.get(coefficients, 1.0) if isinstance(coefficients, str) else 1.0
    dtype = jnp.dtype(compute_dtype) if compute_dtype is not None else x.dtype
    if form == "auto":
        wide_enough = max(x.shape[-2:]) >= 1.5 * min(x.shape[-2:])
        form = "gram" if wide_enough and dtype == working_dtype(dtype) else "plain"
    iterate = _iterate_gram if form == "gram" else _iterate
    return iterate((unit_frobenius(x) / headroom).astype(dtype), table).astype(x.dtype)


def _iterate(y: jax.Array, table: Sequence[Triple]) -> jax.Array:
    """``Y <- a Y + (b A + c A^2) Y`` with ``A = Y Y^T``: ``20 s^2 t + 10 s^3`` operations at five steps, s <= t."""
    dtype, tall = y.dtype, y.shape[-2] > y.shape[-1]

    def step(y: jax.Array, abc: jax.Array) -> tuple[jax.Array, None]:
        a, b, c = abc
        gram = symmetric_product(y.mT, y, dtype) if tall else symmetric_product(y, y.mT, dtype)
        poly = b * gram + c * symmetric_product(gram, gram, dtype)
        turned = product(y, poly, dtype) if tall else product(poly, y, dtype)
        return (a * y + turned).astype(dtype), None

    triples = jnp.asarray(table, working_dtype(dtype)).reshape(len(table), 3)
    return jax.lax.scan(step, y, triples)[0]


def _iterate_gram(y: jax.Array, table: Sequence[Triple]) -> jax.Array:
    """The same on ``R = Y Y^T``: a step is ``Y <- P Y`` with ``P = a + b R + c R^2``, hence ``R <- P R P``.

    The factors are gathered in ``Q`` and applied at the end: ``8 s^2 t + 28 s^3`` operations at five steps, the small
    products all with symmetric results. Rounding in R grows from step to step, so R is taken anew from Y after the
    second one. Loops, not straight code: a step is compiled once.
    """
    if not table:
        return y
    y, tall = y.astype(working_dtype(y.dtype)), y.shape[-2] > y.shape[-1]
    identity = jnp.eye(min(y.shape[-2:]), dtype=y.dtype)
    triples = jnp.asarray(table, y.dtype).reshape(len(table), 3)

    def factor(i: jax.Array, r: jax.Array) -> jax.Array:
        a, b, c = triples[i]
        return a * identity + b * r + c * symmetric_product(r, r)

    def step(i: jax.Array, rpq: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        r, p, q = rpq
        r = symmetric_product(p, symmetric_product(r, p))
        p = factor(i, r)
        return r, p, symmetric_product(q, p)

    def steps(ends: jax.Array, y: jax.Array) -> jax.Array:
        first, last = ends
        r = product(y.mT, y) if tall else product(y, y.mT)
        p = factor(first, r)
        _, _, q = jax.lax.fori_loop(first + 1, last, step, (r, p, p))
        return product(y, q) if tall else product(q, y)

    split = min(2, len(table))
    parts = jnp.asarray([[0, split], [split, len(table)]])
    return jax.lax.fori_loop(0, 1 + (len(table) > 2), lambda k, y: steps(parts[k], y), y)


def symmetric_product(a: jax.Array, b: jax.Array, operand_dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """``a b`` where the result is known to be symmetric: on CPU, only its lower triangle is computed, in blocks.

    Args:
        a: matrices ``(..., s, k)``.
        b: matrices ``(..., k, s)``.
        operand_dtype: dtype to which the operands are rounded; None leaves them.

    Returns:
        Matrices ``(..., s, s)`` in at least float32.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.newton_schulz import symmetric_product
        >>> print(symmetric_product(jnp.array([[1.0, 2.0]]).T, jnp.array([[1.0, 2.0]])))
        [[1. 2.]
         [2. 4.]]
    """
    whole = functools.partial(product, operand_dtype=operand_dtype)
    if a.shape[-2] < _LOWER_FROM:
        return whole(a, b)
    return jax.lax.platform_dependent(a, b, cpu=lambda a, b: _lower_blocks(a, b, whole), default=whole)


# Below this side half a product is too small to fill two cores.
_LOWER_FROM = 384


def _lower_blocks(a: jax.Array, b: jax.Array, whole: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    half = (a.shape[-2] // 2 + 63) // 64 * 64
    top = whole(a[..., :half, :], b[..., :half])
    low = whole(a[..., half:, :], b[..., :half])
    bottom = whole(a[..., half:, :], b[..., half:])
    upper_rows = jnp.concatenate([top, low.mT], axis=-1)
    return jnp.concatenate([upper_rows, jnp.concatenate([low, bottom], axis=-1)], axis=-2)


def unit_frobenius(x: jax.Array) -> jax.Array:
    """Each matrix divided by its Frobenius norm; zero stays zero, and squares neither overflow nor vanish.

    Args:
        x: matrices ``(..., m, n)``.

    Returns:
        Matrices ``(..., m, n)`` of Frobenius norm 1 or 0.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.newton_schulz import unit_frobenius
        >>> print(unit_frobenius(jnp.array([[3e20, 4e20]])))
        [[0.6 0.8]]
    """
    peak = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True, initial=0)
    kept = jnp.finfo(x.dtype)
    x = x * jnp.clip(1 / jnp.where(peak == 0, 1, peak), kept.tiny, kept.max)  # cheap: fused, where a division is not
    norm = jnp.sqrt(jnp.sum(x**2, axis=(-2, -1), keepdims=True))
    return x * (1 / jnp.where(norm == 0, 1, norm))
