# SPDX-License-Identifier: Apache-2.0
"""What directions have in common: momentum in the parameter's own layout, a stage on matrices, Newton-Schulz."""

from collections.abc import Sequence
from typing import Annotated, Unpack

import optax

from normpre_optax.meshes.exchange import divided
from normpre_optax.options import (
    NesterovOptions,
    NewtonSchulzOptions,
    Option,
    OrthogonalOptions,
    pick,
    with_options,
)
from normpre_optax.transforms.checks import transformation
from normpre_optax.transforms.oriented import chain
from normpre_optax.transforms.precondition import precondition_globally
from normpre_optax.transforms.wrappers import as_matrices, at_least_float32, in_dtype


@with_options
def matrix_momentum(
    stage: optax.GradientTransformation, **options: Unpack[NesterovOptions]
) -> optax.GradientTransformationExtraArgs:
    """A stage on the matrices of the momentum: ``M = mu M + G``, ``U = G + mu M`` (Nesterov) or M, ``stage(U)``.

    Args:
        stage: a transformation that reads the last two axes as (rows, columns), rows being output neurons.
        compute_dtype: dtype in which ``stage`` is handed U; None means at least float32.

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
    momentum = optax.trace(options["momentum"], options["nesterov"], options["mu_dtype"])
    matrices = as_matrices(options["matrix_dims"], in_dtype(options["compute_dtype"], stage))
    return at_least_float32(optax.chain(momentum, matrices))


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
    rounded = options["compute_dtype"] is None and options["ns_steps"] is not None
    return divided(stage, rounded=rounded) if options["divide"] else stage


class AroundOptions(OrthogonalOptions, total=False):
    """Of ``orthogonalized_momentum``."""

    before: Annotated[Sequence, Option((), "stages on matrices, such as ``[normalize_rows()]``.")]
    after: Annotated[Sequence, Option((), "stages on matrices, such as ``[scale_to_rms(0.2)]``.")]


@with_options
def orthogonalized_momentum(**options: Unpack[AroundOptions]) -> optax.GradientTransformationExtraArgs:
    """What Muon and its relatives share: the momentum's matrices, orthogonalised between other stages.

    Returns:
        A direction: its updates point uphill.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import orthogonalized_momentum, scale_to_rms
        >>> tx = orthogonalized_momentum(after=[scale_to_rms(0.2)], momentum=0.9)
        >>> jnp.shape(tx.init({"kernel": jnp.ones((4, 8))})[0].trace["kernel"])
        (4, 8)
    """
    for name, stage in [("before", x) for x in options["before"]] + [("after", x) for x in options["after"]]:
        transformation(f"every stage of {name}", stage)
    stage = orthogonalize(**pick(NewtonSchulzOptions, options))
    stages = chain(*options["before"], stage, *options["after"])
    return matrix_momentum(stages, **pick(NesterovOptions, options) | {"compute_dtype": None})
