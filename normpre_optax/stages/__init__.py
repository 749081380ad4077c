# SPDX-License-Identifier: Apache-2.0
"""Stages: optax transformations on parameter trees, in the parameters' own layout."""

from normpre_optax.stages.metric import with_metric
from normpre_optax.stages.momentum import two_momenta
from normpre_optax.stages.rows import (
    normalize_rows,
    normalize_tangent,
    project_to_tangent,
)
from normpre_optax.stages.scale import (
    CONVENTIONS,
    keller_scale,
    moonlight_scale,
    scale_by_row_moment,
    scale_by_shape,
    scale_to_rms,
)
from normpre_optax.stages.spectral import precondition_globally, precondition_locally
from normpre_optax.stages.stage import direction, per_parameter
from normpre_optax.stages.successive import normalize_successively
from normpre_optax.stages.whitening import standardize_rows, whiten
