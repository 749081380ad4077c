# SPDX-License-Identifier: Apache-2.0
"""What directions have in common: momentum in the parameter's own layout, a stage on matrices, Newton-Schulz."""

from collections.abc import Sequence
from typing import Unpack

import jax
import optax

from normpre_optax.options import NewtonSchulzOptions, OrthogonalOptions, pick, with_options
from normpre_optax.transforms.oriented import chain
from normpre_optax.transforms.precondition import precondition_globally
from normpre_optax.transforms.sharding import divided
from normpre_optax.transforms.wrappers import as_matrices, at_least_float32, in_dtype


def matrix_momentum(
    stage: optax.GradientTransformation,
    *,
    momentum: jax.typing.ArrayLike = 0.95,
    nesterov: bool = False,
    mu_dtype: jax.typing.DTypeLike | None = None,
    compute_dtype: jax.typing.DTypeLike | None = None,
    matrix_dims=None,
) -> optax.GradientTransformationExtraArgs:
    """A stage on the matrices of the momentum: ``M = mu M + G``, ``U = G + mu M`` (Nesterov) or M, ``stage(U)``.

    Args:
        stage: a transformation that reads the last two axes as (rows, columns), rows being output neurons.
        momentum: ``mu``.
        nesterov: whether the update looks one gradient ahead.
        mu_dtype: dtype in which M is stored; None means at least float32.
        compute_dtype: dtype in which ``stage`` is handed U; None means at least float32.
        matrix_dims: which axes are inputs and outputs: see ``as_matrices``.

    Returns:
        A direction: its updates point uphill. M lies as the parameter does.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import matrix_momentum, normalize_rows
        >>> tx = matrix_momentum(normalize_rows())
        >>> kernel = jnp.array([[3.0], [4.0]])  # (in, out)
        >>> print(tx.update(kernel, tx.init(kernel))[0].T)
        [[0.6 0.8]]
    """
    matrices = as_matrices(matrix_dims, in_dtype(compute_dtype, stage))
    return at_least_float32(optax.chain(optax.trace(momentum, nesterov, mu_dtype), matrices))


@with_options
def orthogonalize(**options: Unpack[NewtonSchulzOptions]) -> optax.GradientTransformationExtraArgs:
    """``precondition_globally`` as a finished optimizer runs it: on a mesh, every matrix whole on one device.

    Returns:
        A stateless transformation on matrices in the last two axes.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import orthogonalize
        >>> tx = orthogonalize(ns_steps=None)
        >>> print(tx.update(jnp.diag(jnp.array([3.0, 0.5])), ())[0])
        [[1. 0.]
         [0. 1.]]
    """
    stage = precondition_globally(options["ns_steps"], options["ns_coefficients"], options["compute_dtype"])
    return divided(stage) if options["divide"] else stage


@with_options
def orthogonalized_momentum(
    before: Sequence[optax.GradientTransformation] = (),
    after: Sequence[optax.GradientTransformation] = (),
    **options: Unpack[OrthogonalOptions],
) -> optax.GradientTransformationExtraArgs:
    """What Muon and its relatives share: the momentum's matrices, orthogonalised between other stages.

    Args:
        before: stages on matrices, such as ``[normalize_rows()]``.
        after: stages on matrices, such as ``[scale_to_rms(0.2)]``.

    Returns:
        A direction: its updates point uphill.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import orthogonalized_momentum, scale_to_rms
        >>> tx = orthogonalized_momentum(after=[scale_to_rms(0.2)], momentum=0.9)
        >>> jnp.shape(tx.init({"kernel": jnp.ones((4, 8))})[0].trace["kernel"])
        (4, 8)
    """
    stage = chain(*before, orthogonalize(**pick(NewtonSchulzOptions, options)), *after)
    return matrix_momentum(
        stage,
        momentum=options["momentum"],
        nesterov=options["nesterov"],
        mu_dtype=options["mu_dtype"],
        matrix_dims=options["matrix_dims"],
    )
