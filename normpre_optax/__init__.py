# SPDX-License-Identifier: Apache-2.0
"""Normalize, then precondition: matrix optimizers for pretraining language models in
JAX.

``normpre_h`` is the recommended optimizer. ``normpre_g`` and ``normpre_l`` are those of
the NormPre paper; ``muon`` and the others of ``families()`` are related optimizers. All
are optax transformations. ``algorithm.py`` is the file to read first.
"""

from normpre_optax.algorithm import (
    normpre,
    normpre_g,
    normpre_l,
    scale_by_normpre,
    scale_by_normpre_g,
    scale_by_normpre_l,
)
from normpre_optax.hyperball import hyperball
from normpre_optax.learning_rates import (
    learning_rate_by_length,
    learning_rate_from_muon,
    multipliers_by_width,
)
from normpre_optax.optimizer import with_adamw
from normpre_optax.options import static_args
from normpre_optax.parameters import presets
from normpre_optax.parameters.dims import MatrixDims
from normpre_optax.parameters.explain import explain
from normpre_optax.parameters.rules import decay_matrices_only, default_matrix_dims
from normpre_optax.recommended import normpre_h, scale_by_normpre_h
from normpre_optax.relatives import families
from normpre_optax.relatives.mano import mano, scale_by_mano
from normpre_optax.relatives.muon import muon, scale_by_muon
from normpre_optax.relatives.muoneq import muoneq, scale_by_muoneq
from normpre_optax.relatives.normuon import normuon, scale_by_normuon
from normpre_optax.relatives.rmnp import rmnp, scale_by_rmnp
from normpre_optax.stages.base import direction, per_parameter
from normpre_optax.stages.metric import with_metric
from normpre_optax.stages.momentum import two_momenta
from normpre_optax.stages.rows import (
    normalize_rows,
    normalize_tangent,
    project_to_tangent,
)
from normpre_optax.stages.scale import scale_by_shape, scale_to_rms
from normpre_optax.stages.spectral import precondition_globally, precondition_locally

__version__ = "0.3.0"

# What is imported above; the stub lists it.
_public = [name for name, x in vars().items() if callable(x) or name == "presets"]
__all__ = sorted(_public)  # pyright: ignore[reportUnsupportedDunderAll]
