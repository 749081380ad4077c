# SPDX-License-Identifier: Apache-2.0
"""The recommended optimizer, ``normpre_h``.

Momenta of two ages are orthogonalized in a metric of rows and columns. The step is one
of Hyperball.
"""

from collections.abc import Callable

import optax

from normpre_optax.optimizer import complete
from normpre_optax.options import (
    Coefficients,
    DimsTree,
    Dtype,
    Norm,
    Number,
    Operands,
    checked,
)
from normpre_optax.stages import (
    direction,
    precondition_globally,
    two_momenta,
    with_metric,
)


@checked
def scale_by_normpre_h(
    *,
    momentum: Number = 0.85,
    slow_momentum: Number = 0.98,
    slow_weight: Number | Callable = 0.56,
    metric_strength: Number = 0.5,
    ns_steps: int | None = 5,
    ns_coefficients: Coefficients = "muon",
    ns_norm: Norm = "schatten",
    compute_dtype: Operands = "narrow",
    mu_dtype: Dtype | None = None,
    matrix_dims: DimsTree = None,
) -> optax.GradientTransformationExtraArgs:
    """NormPre-H, the recommended optimizer: two momenta, orthogonalized in a metric.

    ``U`` mixes the gradient, a fast and a slow average of gradients (``two_momenta``),
    and ``D = diag(a) msign(diag(a) U diag(b)) diag(b)``, where a and b shrink rows and
    columns with large gradients (``with_metric``). The direction D has no particular
    scale.

    Args:
        momentum: decay of the fast average.
        slow_momentum: decay of the slow average.
        slow_weight: share of the slow average, number or schedule.
        metric_strength: exponent of the metric; 0 is none.

    References:
        Gong, Gan, Teng and Liu, Normalize-Then-Precondition; Wen et al., Hyperball,
        arXiv 2606.16899; Pagliardini et al., AdEMAMix, arXiv 2409.03137.
    """
    spectral = precondition_globally(
        ns_steps, ns_coefficients, compute_dtype, ns_norm=ns_norm
    )
    momenta = two_momenta(
        momentum, slow_momentum, slow_weight, accumulator_dtype=mu_dtype
    )
    return direction(
        momenta,  # U
        with_metric(spectral, metric_strength),  # D
        matrix_dims=matrix_dims,
    )


normpre_h = complete(
    scale_by_normpre_h, example="1.6e-2, adam_learning_rate=3e-3", hyperball=True
)
