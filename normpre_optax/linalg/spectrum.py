# SPDX-License-Identifier: Apache-2.0
"""What the spectral stage does to singular values: clip the leading ones to one, or set all of them to one."""

import jax
import jax.numpy as jnp

from normpre_optax.linalg.eigenspace import Clip, Modes
from normpre_optax.linalg.lapack import svd
from normpre_optax.linalg.precision import exact_product, product
from normpre_optax.platforms import by_platform


def clip_modes(
    psi: jax.Array,
    modes: Modes | Clip,
    compute_dtype: jax.typing.DTypeLike | None = None,
    columns: bool = False,
    level: jax.typing.ArrayLike = 1.0,
) -> jax.Array:
    """``(I + U (Lambda^-1/2 - I) U^T) Psi`` over the modes with ``lambda > 1``: their singular values become one.

    Args:
        psi: wide matrices ``(..., s, n)``; their transposes ``(..., n, s)`` if ``columns``.
        modes: leading modes of the wide matrices, or the clipping itself.
        compute_dtype: dtype of the product's operands; None: the device's usual product.
        columns: the modes belong to the transpose of ``psi``, which is clipped from the right.
        level: square of the threshold, ``(..., 1, 1)``, where it is not one.

    Returns:
        Matrices in the shape of ``psi``: ``T`` of NormPre-L.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.eigenspace import leading_modes_exact
        >>> from normpre_optax.linalg.spectrum import clip_modes
        >>> psi = jnp.diag(jnp.array([3.0, 2.0, 0.5]))
        >>> print(jnp.diag(clip_modes(psi, leading_modes_exact(psi, rank=1))).round(3))
        [1.  2.  0.5]
    """
    clip = _clip(modes, level)
    left, right = (clip.coordinates, clip.vectors) if columns else (clip.vectors, clip.coordinates)
    return psi.astype(left.dtype) + product(left.mT, right, compute_dtype)


def _clip(modes: Modes | Clip, level: jax.typing.ArrayLike) -> Clip:
    if isinstance(modes, Clip):
        return modes
    level = jnp.broadcast_to(level, (*modes.values.shape[:-1], 1, 1))
    over = jnp.maximum(modes.values / level[..., 0], 1)  # lambda <= 1 changes nothing: unselected modes need no mask.
    scaled = modes.vectors * (1 / jnp.sqrt(over) - 1)[..., None]
    return Clip(scaled, modes.coordinates, level * jnp.sum(over - 1, axis=-1)[..., None, None])


def clipped_squares(
    psi: jax.Array,
    squares: jax.Array,
    modes: Modes | Clip,
    compute_dtype: jax.typing.DTypeLike | None = None,
    columns: bool = False,
    level: jax.typing.ArrayLike = 1.0,
) -> jax.Array:
    """Sum of squares of ``clip_modes(psi, modes)``, from that of ``psi`` and the eigenvalues: no pass over the result.

    ``||T||^2 = ||Psi||^2 - level sum (lambda - 1)`` over the modes with ``lambda > 1``. Where little of it is left,
    that difference is not exact: there a CPU measures the result, and an accelerator takes no less than one clipped
    mode has.

    Args:
        psi: wide matrices ``(..., s, n)``; their transposes ``(..., n, s)`` if ``columns``.
        squares: sums of squares of ``psi``, ``(..., 1, 1)``.
        modes: see ``clip_modes``.
        compute_dtype: see ``clip_modes``.
        columns: see ``clip_modes``.
        level: see ``clip_modes``.

    Returns:
        ``(..., 1, 1)``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.eigenspace import leading_modes_exact
        >>> from normpre_optax.linalg.spectrum import clipped_squares
        >>> psi = jnp.diag(jnp.array([3.0, 2.0, 0.5]))
        >>> print(f"{clipped_squares(psi, jnp.array([[13.25]]), leading_modes_exact(psi, rank=1)).item():.3f}")
        5.250
    """
    clip = _clip(modes, level)
    left = squares - clip.removed

    def checked(psi: jax.Array, squares: jax.Array, clip: Clip, left: jax.Array) -> jax.Array:
        unsure = left < squares / 8

        @jax.named_scope("rare")
        def measured() -> jax.Array:
            clipped = clip_modes(psi, clip, compute_dtype, columns)
            return jnp.where(unsure, jnp.sum(clipped**2, axis=(-2, -1), keepdims=True), left)

        return jax.lax.cond(jnp.any(unsure), measured, lambda: left)

    def bounded(psi: jax.Array, squares: jax.Array, clip: Clip, left: jax.Array) -> jax.Array:
        del psi, clip
        return jnp.maximum(left, jnp.minimum(squares, level))

    return by_platform(psi, squares, clip, left, cpu=checked, default=bounded)


def exact_msign(x: jax.Array) -> jax.Array:
    """``msign(x) = U V^T`` over the nonzero singular values, by singular value decomposition.

    Args:
        x: matrices ``(..., m, n)``.

    Returns:
        Matrices ``(..., m, n)`` whose singular values are one, or zero where those of ``x`` are rounding noise.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.spectrum import exact_msign
        >>> print(exact_msign(jnp.array([[0.0, 5.0], [1e-3, 0.0]])))
        [[0. 1.]
         [1. 0.]]
    """
    u, s, vt = svd(x)
    noise = max(x.shape[-2:]) * jnp.finfo(x.dtype).eps * s[..., :1]
    kept = jnp.where(s <= noise, 0, 1).astype(x.dtype)
    return exact_product(u * kept[..., None, :], vt)
