# SPDX-License-Identifier: Apache-2.0
"""Rates that were tuned on a small model, for a wider one: what the spectral condition makes of every parameter's."""

import math
from typing import Any, Literal

import jax

from normpre_optax.parameters.dims import matrix_shape
from normpre_optax.parameters.rules import Choice, pieces, resolve
from normpre_optax.transforms.checks import choice

UPDATES = ("orthogonal", "relative", "elementwise")


def rates_by_width(
    params: Any, base: Any, *, update: Literal["orthogonal", "relative", "elementwise"], matrix_dims: Any = None
) -> Any:
    """How many times its learning rate a parameter should have where the rate was tuned on a narrower model.

    A matrix (out, in) = m x n changes what it makes of its inputs alike at all widths if the largest singular value of
    its step goes with ``sqrt(m / n)``. With m0 x n0 in the tuned model and t the longer side, its rate is multiplied by

    - ``"orthogonal"``: ``sqrt(m / (n t)) / sqrt(m0 / (n0 t0))``, for steps of one RMS at all widths whose singular
      values are equal: ``normpre_g``, ``normpre_l``, ``muon`` (as it comes), ``muoneq``, ``adamuon``. One over the
      square root of the width;
    - ``"relative"``: 1, for steps as long as the weights (``norm_control="hyperball"``), and for those that already are
      ``sqrt(max(1, m / n))`` long (``muon(convention="keller")``, ``normuon``);
    - ``"elementwise"``: ``n0 / n``, for steps of one RMS at all widths of which few singular values are large: AdamW.

    AdamW's part: ``n0 / n`` for an output head of its own, 1 for tables, gains and biases. Weight decay is left as it
    is, ``lr wd``: that much of the weights goes at every width. For the first weights the same condition says standard
    deviations of ``c / sqrt(n)``.

    Args:
        params: the model's, arrays or shapes.
        base: those of the model that the rates were tuned on: the same tree.
        update: what the steps of matrices are like.
        matrix_dims: which parameters are matrices; see ``hybrid``. Of blocks of given sizes the largest decides.

    Returns:
        A tree of numbers, for ``rate_multipliers`` of every optimizer.

    Raises:
        ValueError: if ``update`` is unknown, or the trees differ.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import rates_by_width
        >>> wide, tuned = ({"up": {"kernel": jnp.zeros((d, 4 * d)), "bias": jnp.zeros(4 * d)}} for d in (256, 64))
        >>> rates_by_width(wide, tuned, update="orthogonal")
        {'up': {'bias': 1.0, 'kernel': 0.5}}

    References:
        Yang, Simon and Bernstein, A Spectral Condition for Feature Learning, arXiv 2310.17813.
    """
    choice("update", update, UPDATES)
    here, there = resolve(params, matrix_dims), resolve(base, matrix_dims)
    if list(here) != list(there):
        raise ValueError(
            f"params and base are different trees: only one of them has {sorted(set(here) ^ set(there))[:1]}"
        )

    for path, one in here.items():
        if len(one.shape) != len(there[path].shape):
            raise ValueError(f"parameter {path!r} has shape {one.shape}, in base {there[path].shape}")

    def slowness(one: Choice) -> float:
        one = max(pieces(one), key=lambda block: math.prod(block.shape))  # a parameter has one rate
        if one.dims is None:  # of an output head, what grows with the width is the inputs
            return math.prod(one.shape) if one.reason == "output head" else 1.0
        _, m, n = matrix_shape(one.shape, one.dims)
        return {"orthogonal": math.sqrt(n * max(m, n) / m), "relative": 1.0, "elementwise": float(n)}[update]

    rates = [slowness(there[path]) / slowness(one) for path, one in here.items()]
    return jax.tree.structure(params).unflatten(rates)
