# SPDX-License-Identifier: Apache-2.0
"""Normalize, then precondition: matrix optimizers for pretraining language models in JAX.

``normpre_g`` and ``normpre_l`` are drop-in optax optimizers; ``muon``, ``mano`` and what else ``families`` lists are
relatives made of the same parts, and the parts are here to make your own. ``algorithm`` is the page to read first.
"""

from normpre_optax import diagnostics
from normpre_optax.algorithm import normpre, normpre_g, normpre_l, scale_by_normpre
from normpre_optax.assemble import STATIC_ARGS
from normpre_optax.family import families
from normpre_optax.meshes.exchange import divided
from normpre_optax.parameters.dims import MatrixDims
from normpre_optax.parameters.nnx import dims_from_nnx
from normpre_optax.parameters.rules import default_matrix_dims, explain
from normpre_optax.recipes.adamuon import adamuon
from normpre_optax.recipes.dion import dion
from normpre_optax.recipes.mano import mano
from normpre_optax.recipes.moga import moga
from normpre_optax.recipes.muon import muon
from normpre_optax.recipes.muon_plus import muon_plus
from normpre_optax.recipes.muoneq import muoneq
from normpre_optax.recipes.normuon import normuon
from normpre_optax.recipes.rmnp import rmnp
from normpre_optax.recipes.swan import swan
from normpre_optax.transforms.monitor import monitor, monitored
from normpre_optax.transforms.normalize import equalize_rows_and_columns, normalize_rows, standardize_rows
from normpre_optax.transforms.precondition import precondition_globally, precondition_locally, whiten
from normpre_optax.transforms.scale import scale_to_rms
from normpre_optax.transforms.second_moment import scale_by_row_moment
from normpre_optax.transforms.tangent import project_to_tangent
from normpre_optax.transforms.wrappers import alternate_orientation, as_matrices

__version__ = "0.1.0"

__all__ = [
    "STATIC_ARGS",
    "MatrixDims",
    "adamuon",
    "alternate_orientation",
    "as_matrices",
    "default_matrix_dims",
    "diagnostics",
    "dims_from_nnx",
    "dion",
    "divided",
    "equalize_rows_and_columns",
    "explain",
    "families",
    "mano",
    "moga",
    "monitor",
    "monitored",
    "muon",
    "muon_plus",
    "muoneq",
    "normalize_rows",
    "normpre",
    "normpre_g",
    "normpre_l",
    "normuon",
    "precondition_globally",
    "precondition_locally",
    "project_to_tangent",
    "rmnp",
    "scale_by_normpre",
    "scale_by_row_moment",
    "scale_to_rms",
    "standardize_rows",
    "swan",
    "whiten",
]
