# SPDX-License-Identifier: Apache-2.0
"""The pretraining program with the optimizers of ablations: ``python -m
examples.research.train [COMMAND] ...``.

It has the commands and options of ``python -m examples.pretrain``, and these further
optimizers:

- ``normpre_g_from_x``, ``normpre_l_from_x``: the preconditioner is built before
  normalization, from X instead of Psi;
- ``normpre_h_variant``, ``muon_falling_hyperball``, ``soap_hyperball``: see
  ``variants``;
- ``optax_muon``: optax's Muon for the matrices that other optimizers use.
"""

import functools
import inspect
import sys
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from examples.pretrain import optimizers
from examples.pretrain.compare import results, study
from examples.pretrain.main import main
from examples.research.ablations import normpre_from_x
from examples.research.variants import (
    muon_falling_hyperball,
    normpre_h_variant,
    soap_hyperball,
)
from normpre_optax import with_adamw
from normpre_optax.parameters.rules import assign


def optax_muon(
    learning_rate: Any, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """Optax's Muon for hidden matrices, and AdamW for everything else."""

    def direction(matrix_dims: Any) -> optax.GradientTransformation:
        def numbers(params: Any) -> Any:
            dims = [spec.dims for spec in assign(params, matrix_dims).values()]
            axes = [
                MuonDimensionNumbers(d.inputs, d.outputs) if d else None for d in dims
            ]
            return jax.tree.structure(params).unflatten(axes)

        return optax.contrib.scale_by_muon(weight_dimension_numbers=numbers)

    return with_adamw(direction, learning_rate, **options)


optax_muon.__signature__ = inspect.signature(with_adamw)  # pyright: ignore

FURTHER = {
    "normpre_g_from_x": (
        functools.partial(normpre_from_x, variant="normpre_g"),
        "NormPre-G from X",
        "#F0E442",
    ),
    "normpre_l_from_x": (
        functools.partial(normpre_from_x, variant="normpre_l"),
        "NormPre-L from X",
        "#117733",
    ),
    "normpre_h_variant": (normpre_h_variant, "NormPre-H variant", "#DDCC77"),
    "muon_falling_hyperball": (
        muon_falling_hyperball,
        "Muon, falling momentum, Hyperball",
        "#44AA99",
    ),
    "optax_muon": (optax_muon, "optax Muon", "#999933"),
    "soap_hyperball": (soap_hyperball, "SOAP, Hyperball", "#6699CC"),
}
for name, (factory, label, color) in FURTHER.items():
    optimizers.OPTIMIZERS[name] = factory
    results.NAMES[name] = (label, color)
study.PROGRAM = "examples.research.train"

if __name__ == "__main__":
    sys.exit(main())
