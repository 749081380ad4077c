# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz: an odd matrix polynomial, iterated, that brings every singular value near one.

One step maps ``X`` to ``a X + (b A + c A^2) X`` with ``A = X X^T``, hence every singular value ``s`` to
``a s + b s^3 + c s^5``, and leaves the singular vectors alone. It starts from ``X / ||X||_F``.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp

from normpre_optax.linalg.precision import exact_product, product, working_dtype
from normpre_optax.platforms import by_platform

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
        if not isinstance(coefficients, Iterable):
            raise refusal
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
    bounded: bool = False,
    unit: bool = False,
) -> jax.Array:
    """Approximate ``msign(x) = U V^T`` by Newton-Schulz iterations on the shorter side.

    Args:
        x: matrices ``(..., m, n)``.
        steps: number of iterations.
        coefficients: a name in ``COEFFICIENTS``, one triple, or one triple a step.
        compute_dtype: dtype of the products' operands (sums and everything between are kept in float32); None: the
            device's usual product, see ``precision.product``.
        form: ``"plain"`` iterates on the matrix, ``"gram"`` on its Gram matrix: fewer operations from an aspect of
            about 1.5 on; ``"auto"`` chooses.
        bounded: whether rows or columns are known to be of length one or zero, so that no square can overflow or
            vanish: that saves two passes over the matrix.
        unit: whether the result is divided by its Frobenius norm.

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
    y = x.astype(working_dtype(x.dtype))
    y = y if bounded else unit_frobenius(y)
    plain, gram = (
        functools.partial(f, headroom=headroom, table=table, operand_dtype=compute_dtype, unit=unit)
        for f in (_iterate, _iterate_gram)
    )
    if form == "auto":
        form = "gram" if table and max(x.shape[-2:]) >= 1.5 * min(x.shape[-2:]) else "plain"
        if form == "gram" and table[0][0] > _STEEP and (compute_dtype is None or jnp.dtype(compute_dtype).itemsize < 4):
            # Rounded operands and a steep first step: the Gram matrix loses what the step is to bring up.
            half = compute_dtype is not None
            return (plain(y) if half else by_platform(y, cpu=gram, default=plain)).astype(x.dtype)
    return (gram if form == "gram" else plain)(y).astype(x.dtype)


# With products in bfloat16 and a first coefficient of 3.4 the two forms end equally far from msign, with 4.1 the Gram
# form up to 0.02 further on steep spectra, with 8.2 up to 0.2 (docs/results/accuracy_cpu.md).
_STEEP = 4.5


def _iterate(
    y: jax.Array,
    headroom: float,
    table: Sequence[Triple],
    operand_dtype: jax.typing.DTypeLike | None,
    unit: bool,
) -> jax.Array:
    """``Y <- a Y + (b A + c A^2) Y`` with ``A = Y Y^T``: ``20 s^2 t + 10 s^3`` operations at five steps, s <= t."""
    symmetric = functools.partial(symmetric_product, operand_dtype=operand_dtype)
    for i, (a, b, c) in enumerate(table):
        gram = symmetric(*_beside(y))
        start = 1.0 if i else _inverse_norm(gram) / headroom
        gram = gram * jnp.square(start)
        y = (a * start) * y + _times(start * (b * gram + c * symmetric(gram, gram)), y, operand_dtype)
    return _unit(y) if unit else y


def _iterate_gram(
    y: jax.Array,
    headroom: float,
    table: Sequence[Triple],
    operand_dtype: jax.typing.DTypeLike | None,
    unit: bool,
) -> jax.Array:
    """The same on ``R = Y Y^T``: with ``Z = b R + c R^2`` a step is ``Y <- a Y + Z Y``, ``R <- (a + Z) R (a + Z)``.

    The factors are gathered in Q and applied at the end: ``8 s^2 t + 28 s^3`` operations at five steps, the small
    products all with symmetric results. Rounding in R grows from step to step, so R is taken anew from Y after the
    second one. On an accelerator the size of the result is taken from ``Q R Q``, without a pass over it; with rounded
    operands that is off by a fifth for a matrix of rank one, by a thousandth where the others have a thousandth of it.
    """
    symmetric = functools.partial(symmetric_product, operand_dtype=operand_dtype)
    identity = jnp.eye(min(y.shape[-2:]), dtype=y.dtype)
    parts = [part for part in (table[:2], table[2:]) if part]
    for part in parts:
        r = symmetric(*_beside(y))
        start = _inverse_norm(r) / headroom if part is parts[0] else 1.0
        r = whole = r * jnp.square(start)
        q = identity
        for i, (a, b, c) in enumerate(part):
            z = b * r + c * symmetric(r, r)
            q = a * q + (symmetric(q, z) if i else z)
            if i < len(part) - 1:
                turned = a * r + symmetric(r, z)
                r = a * turned + symmetric(z, turned)
        if not unit or part is not parts[-1]:
            y = _times(q * start, y, operand_dtype)
            continue

        def measured(q: jax.Array, whole: jax.Array, y: jax.Array) -> jax.Array:
            del whole
            return _unit(_times(q, y, operand_dtype))

        def known(q: jax.Array, whole: jax.Array, y: jax.Array) -> jax.Array:
            squares = jnp.sum(symmetric(q, whole) * q, axis=(-2, -1), keepdims=True)
            return _times(q * inverse_root(squares), y, operand_dtype)

        y = by_platform(q * start, whole, y, cpu=measured, default=known)
    return y


def _unit(y: jax.Array) -> jax.Array:
    return y * inverse_root(jnp.sum(y**2, axis=(-2, -1), keepdims=True))


def _inverse_norm(gram: jax.Array) -> jax.Array:
    """One over the Frobenius norm of a matrix, from its Gram matrix; 0 for a zero matrix."""
    return inverse_root(jnp.trace(gram, axis1=-2, axis2=-1)[..., None, None])


def inverse_root(squares: jax.Array) -> jax.Array:
    """``squares^(-1/2)``, and 0 where there is nothing.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.newton_schulz import inverse_root
        >>> print(inverse_root(jnp.array([4.0, 0.0])))
        [0.5 0. ]
    """
    return jnp.where(squares <= 0, 0, 1 / jnp.sqrt(jnp.where(squares <= 0, 1, squares)))


def _is_tall(y: jax.Array) -> bool:
    return y.shape[-2] > y.shape[-1]


def _beside(y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The factors of the Gram matrix of the shorter side."""
    return (y.mT, y) if _is_tall(y) else (y, y.mT)


def _times(small: jax.Array, y: jax.Array, operand_dtype: jax.typing.DTypeLike | None) -> jax.Array:
    """``small`` times ``y``, along its shorter side."""
    return product(y, small, operand_dtype) if _is_tall(y) else product(small, y, operand_dtype)


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
    return by_platform(a, b, cpu=lambda a, b: _lower_blocks(a, b, whole), default=whole)


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


# Polar Express from 1e-3 or so upwards, then the classical step, which settles at one.
_SETTLING = (*COEFFICIENTS["polar_express"], *[(1.875, -1.25, 0.375)] * 3)


def clipping_factor(gram: jax.Array) -> jax.Array:
    """``min(gram^-1/2, 1) - 1`` of symmetric positive semidefinite matrices, by products alone.

    Eigenvalues above one are told by the sign of ``I - gram``; their inverse root is what Newton-Schulz multiplies a
    matrix of that Gram matrix by. Where an eigenvalue is so near to one that its sign is not settled, both agree.

    Args:
        gram: ``X X^T``, ``(..., l, l)``.

    Returns:
        C, ``(..., l, l)``: ``X + C X`` has the singular values of X, those above one clipped to one.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.newton_schulz import clipping_factor
        >>> factor = clipping_factor(jnp.diag(jnp.array([16.0, 4.0, 0.25])))
        >>> print((1 + jnp.diag(factor)).round(3))
        [0.25 0.5  1.  ]

    References:
        Singular values clipped without a decomposition: MuCon, arXiv 2605.26459.
    """
    whole = jnp.broadcast_to(jnp.eye(gram.shape[-1], dtype=gram.dtype), gram.shape)
    sign = _unit(whole - gram)
    start = _inverse_norm(gram)
    factor, rest = whole * start, gram * start**2
    for a, b, c in _SETTLING:
        square = exact_product(sign, sign)
        sign = a * sign + exact_product(b * square + c * exact_product(square, square), sign)
        step = a * whole + b * rest + c * exact_product(rest, rest)
        factor, rest = exact_product(step, factor), exact_product(step, exact_product(step, rest))
    return exact_product((whole - sign) / 2, factor - whole)
