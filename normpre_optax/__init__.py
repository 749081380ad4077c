# SPDX-License-Identifier: Apache-2.0
"""Normalize, then precondition: matrix optimizers for pretraining language models in
JAX.

``normpre_h`` is the recommended optimizer. ``normpre_g`` and ``normpre_l`` are those of
the NormPre paper; ``muon`` and the others of ``optimizers()`` are related optimizers.
All are optax transformations. ``algorithm.py`` is the file to read first.
"""

from normpre_optax.algorithm import normpre, scale_by_normpre
from normpre_optax.hyperball import hyperball
from normpre_optax.learning_rates import (
    learning_rate_by_length,
    learning_rate_from_muon,
    model_width,
    multipliers_by_width,
)
from normpre_optax.optimizer import with_adamw
from normpre_optax.options import static_args
from normpre_optax.parameters import presets
from normpre_optax.parameters.dims import MatrixDims
from normpre_optax.parameters.explain import explain
from normpre_optax.parameters.rules import decay_matrices_only, default_matrix_dims
from normpre_optax.relatives import REGISTRY, families, optimizers
from normpre_optax.stages.metric import with_metric
from normpre_optax.stages.momentum import two_momenta
from normpre_optax.stages.rows import (
    normalize_rows,
    normalize_tangent,
    project_to_tangent,
)
from normpre_optax.stages.scale import scale_by_shape, scale_to_rms
from normpre_optax.stages.spectral import precondition_globally, precondition_locally
from normpre_optax.stages.stage import direction, per_parameter

__version__ = "0.3.0"

# Every optimizer of the registry, and its direction; the stub has their signatures.
for _optimizer in REGISTRY:
    globals()[_optimizer.name] = _optimizer.factory
    globals()[f"scale_by_{_optimizer.name}"] = _optimizer.direction

# What the package offers: functions, MatrixDims and the module of presets.
_public = [
    name
    for name, found in vars().items()
    if (callable(found) or name == "presets") and not name.startswith("_")
]
__all__ = sorted(_public)  # pyright: ignore[reportUnsupportedDunderAll]
