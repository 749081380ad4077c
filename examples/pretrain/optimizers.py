# SPDX-License-Identifier: Apache-2.0
"""The optimizers one can ask for by name, all at the same learning rate and decay.

The one file of the program that knows ``normpre_optax``.
"""

from typing import Any

import jax
import optax

from normpre_optax import explain, mano, muon, normpre_g, normpre_l


def adamw(learning_rate: optax.ScalarOrSchedule, *, weight_decay: float) -> optax.GradientTransformationExtraArgs:
    """AdamW for every parameter, with the moments the others use for embeddings, norms and biases."""
    return optax.with_extra_args_support(optax.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=weight_decay))


OPTIMIZERS = {"adamw": adamw, "muon": muon, "mano": mano, "normpre_g": normpre_g, "normpre_l": normpre_l}


def make_optimizer(
    name: str, learning_rate: optax.ScalarOrSchedule, *, weight_decay: float, clip_norm: float
) -> optax.GradientTransformationExtraArgs:
    """Clipping by global norm, then the optimizer ``name``."""
    optimizer = OPTIMIZERS[name](learning_rate, weight_decay=weight_decay)
    return optax.with_extra_args_support(optax.chain(optax.clip_by_global_norm(clip_norm), optimizer))


def parameter_table(params: Any, name: str) -> tuple[str, str]:
    """Which parameters ``name`` treats as matrices and which go to AdamW: a table, and its totals in one line."""
    if name == "adamw":
        return f"every parameter goes to AdamW ({len(jax.tree.leaves(params))} leaves)", "every parameter by AdamW"
    table = explain(params)
    totals = [" ".join(line.split()) for line in table.rpartition("\n\n")[2].splitlines()]
    return table, "; ".join(totals)
