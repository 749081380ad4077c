# SPDX-License-Identifier: Apache-2.0
"""Normalize, then precondition: matrix optimizers for pretraining language models in JAX.

``normpre_g`` and ``normpre_l`` are drop-in optax optimizers; ``muon``, ``mano`` and what else ``families`` lists are
relatives made of the same parts, and the parts are here to make your own. ``algorithm`` is the page to read first.
"""

from normpre_optax import diagnostics, options
from normpre_optax.algorithm import (
    normpre,
    normpre_g,
    normpre_l,
    scale_by_normpre,
    scale_by_normpre_g,
    scale_by_normpre_l,
)
from normpre_optax.directions import matrix_momentum, orthogonalize, orthogonalized_momentum
from normpre_optax.family import STATIC_ARGS, families
from normpre_optax.finish import hybrid
from normpre_optax.meshes.exchange import divided
from normpre_optax.norm_control import brake_radially, hold_norm, hyperball, row_gains
from normpre_optax.options import static_args
from normpre_optax.parameters.dims import MatrixDims
from normpre_optax.parameters.explain import explain
from normpre_optax.parameters.nnx import dims_from_nnx
from normpre_optax.parameters.rules import default_matrix_dims, no_gains_or_biases
from normpre_optax.recipes.adamuon import adamuon, scale_by_adamuon
from normpre_optax.recipes.dion import dion, scale_by_dion
from normpre_optax.recipes.mano import mano, scale_by_mano
from normpre_optax.recipes.moga import moga, scale_by_moga
from normpre_optax.recipes.muon import muon, scale_by_muon
from normpre_optax.recipes.muon_plus import muon_plus, scale_by_muon_plus
from normpre_optax.recipes.muoneq import muoneq, scale_by_muoneq
from normpre_optax.recipes.normuon import normuon, scale_by_normuon
from normpre_optax.recipes.rmnp import rmnp, scale_by_rmnp
from normpre_optax.recipes.swan import scale_by_swan, swan
from normpre_optax.transfer import learning_rate_from_muon, rates_by_width
from normpre_optax.transforms.low_rank import error_feedback, orthogonalize_low_rank
from normpre_optax.transforms.monitor import monitor, monitored
from normpre_optax.transforms.normalize import equalize_rows_and_columns, normalize_rows, standardize_rows
from normpre_optax.transforms.oriented import chain
from normpre_optax.transforms.precondition import precondition_globally, precondition_locally, whiten
from normpre_optax.transforms.quantized import quantize_momentum
from normpre_optax.transforms.scale import add_cautious_decay, scale_by_shape, scale_to_rms
from normpre_optax.transforms.second_moment import scale_by_row_moment
from normpre_optax.transforms.tangent import normalize_tangent_rows, project_to_tangent
from normpre_optax.transforms.wrappers import (
    alternate_orientation,
    as_matrices,
    at_least_float32,
    both_orientations,
    fixed_orientation,
    in_dtype,
)

__version__ = "0.2.0"

__all__ = [
    "STATIC_ARGS",
    "MatrixDims",
    "adamuon",
    "add_cautious_decay",
    "alternate_orientation",
    "as_matrices",
    "at_least_float32",
    "both_orientations",
    "brake_radially",
    "chain",
    "default_matrix_dims",
    "diagnostics",
    "dims_from_nnx",
    "dion",
    "divided",
    "equalize_rows_and_columns",
    "error_feedback",
    "explain",
    "families",
    "fixed_orientation",
    "hold_norm",
    "hybrid",
    "hyperball",
    "in_dtype",
    "learning_rate_from_muon",
    "mano",
    "matrix_momentum",
    "moga",
    "monitor",
    "monitored",
    "muon",
    "muon_plus",
    "muoneq",
    "no_gains_or_biases",
    "normalize_rows",
    "normalize_tangent_rows",
    "normpre",
    "normpre_g",
    "normpre_l",
    "normuon",
    "options",
    "orthogonalize",
    "orthogonalize_low_rank",
    "orthogonalized_momentum",
    "precondition_globally",
    "precondition_locally",
    "project_to_tangent",
    "quantize_momentum",
    "rates_by_width",
    "rmnp",
    "row_gains",
    "scale_by_adamuon",
    "scale_by_dion",
    "scale_by_mano",
    "scale_by_moga",
    "scale_by_muon",
    "scale_by_muon_plus",
    "scale_by_muoneq",
    "scale_by_normpre",
    "scale_by_normpre_g",
    "scale_by_normpre_l",
    "scale_by_normuon",
    "scale_by_rmnp",
    "scale_by_row_moment",
    "scale_by_shape",
    "scale_by_swan",
    "scale_to_rms",
    "standardize_rows",
    "static_args",
    "swan",
    "whiten",
]
