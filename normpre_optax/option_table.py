# SPDX-License-Identifier: Apache-2.0
"""What is known of an option, once for all optimizers and stages that have it.

A new option that several functions share, or whose value is a number in a range, is one
entry of ``OPTIONS``. Docstrings, checks and suggestions for misspelled names read it.
"""

import dataclasses
import math
from typing import NamedTuple

ANY = (0, math.inf)
SHARE = (0, 1)
POSITIVE = (1e-15, 1e15)  # far enough from the ends of float32 for a square
DTYPES = ("bfloat16", "float32", "float64")


class Former(NamedTuple):
    """A former name of an option, and the version that removes it."""

    name: str
    removed_in: str


@dataclasses.dataclass(frozen=True)
class Option:
    """What is known of an option, under its name in ``OPTIONS``.

    Attributes:
        description: for docstrings; None if every function describes its own.
        interval: [least, below) of a number; None if it is not a number.
        tree: whether it is a tree of such numbers.
        schedule: whether a function of the step is a value, too.
        none: whether None is a value, too.
        dtypes: names of the dtypes that it may be, besides None.
        elsewhere: its names in optax's, torch's and Keller Jordan's Muon, and in AdamW.
        formerly: names that it had in the version before; see ``deprecation``.
    """

    description: str | None = None
    interval: tuple[float, float] | None = None
    tree: bool = False
    schedule: bool = False
    none: bool = False
    dtypes: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    formerly: tuple[Former, ...] = ()


OPTIONS: dict[str, Option] = {
    # The momentum.
    "momentum": Option(
        "``mu`` in ``M = mu M + G``.",
        interval=SHARE,
        elsewhere=("beta", "mu"),
    ),
    "nesterov": Option("whether the update uses ``U = G + mu M`` instead of ``M``."),
    "mu_dtype": Option(
        "dtype of the first moments, including AdamW's. None means float32, even for"
        " bfloat16 parameters.",
        dtypes=DTYPES,
    ),
    "accumulator_dtype": Option(dtypes=DTYPES),
    "fast": Option(interval=SHARE),
    "slow": Option(interval=SHARE),
    "slow_momentum": Option(interval=SHARE),
    "slow_weight": Option(interval=SHARE, schedule=True),
    "gradient_share": Option(interval=SHARE),
    # The spectral stage.
    "ns_steps": Option("Newton-Schulz iterations; None orthogonalizes exactly."),
    "ns_coefficients": Option(
        '"muon", "you", "polar_express", a triple ``(a, b, c)``, or one triple per'
        " step.",
        elsewhere=("ns_coeffs",),
    ),
    "ns_norm": Option(
        'norm that matrices are divided by before the iterations. "schatten" is closer'
        ' to the largest singular value than "frobenius"; see'
        " ``precondition_globally``.",
        formerly=(Former("ns_scale", removed_in="0.5.0"),),
    ),
    "compute_dtype": Option(
        "dtype of the operands of large products; sums are in float32. None means the"
        " platform's default for float32: one bfloat16 pass on a TPU, TF32 on a GPU"
        " (sketches: bfloat16), float32 on a CPU. ``jnp.float32`` means true float32"
        ' everywhere, and "narrow" bfloat16 on a TPU or GPU and float32 on a CPU.',
        dtypes=(*DTYPES, "narrow"),
        elsewhere=("dtype",),
    ),
    "relative_threshold": Option(interval=POSITIVE, none=True),
    # Moments of rows, and the metric.
    "b2": Option(interval=SHARE),
    "eps": Option(interval=ANY),
    "decay": Option(interval=SHARE),
    "strength": Option(interval=(0, 10)),
    "metric_strength": Option(interval=(0, 10)),
    "clip": Option(interval=(1, math.inf)),
    # The size of a step.
    "rms": Option(
        "root mean square of every matrix update before the learning rate, or None for"
        " no scaling.",
        interval=POSITIVE,
        none=True,
    ),
    "convention": Option(elsewhere=("consistent_rms", "adjust_lr_fn")),
    "learning_rate": Option(
        interval=ANY, schedule=True, elsewhere=("lr", "eta", "step_size")
    ),
    "learning_rate_multipliers": Option(
        "tree of numbers, or a function ``(params) -> tree``: the learning rate of each"
        " parameter is multiplied by its number (``multipliers_by_width``); its weight"
        " decay is not. None means 1. Under Hyperball, 0 keeps the direction of a"
        " matrix, but its norm is still set.",
        interval=ANY,
        tree=True,
    ),
    # What keeps weights small.
    "weight_decay": Option(
        "decoupled weight decay, multiplied by the learning rate; number or schedule.",
        interval=ANY,
        schedule=True,
        elsewhere=("wd",),
    ),
    "weight_decay_mask": Option(
        "tree of bools, or a function ``(params) -> tree``; None decays all parameters;"
        " ``decay_matrices_only`` excludes norms and biases.",
        elsewhere=("mask",),
    ),
    "norm_control": Option(
        '"hyperball" sets the Frobenius norm of every matrix and makes the learning'
        " rate the size of a step relative to it; matrices then have no weight decay,"
        ' and ``adam_learning_rate`` must be given. "none" does nothing.'
    ),
    "row_norms": Option(
        "root mean square norm of the rows of matrices under Hyperball; None chooses it"
        ' by the role of the matrix, "keep" keeps the norm that every matrix has. See'
        " ``hyperball``.",
        interval=POSITIVE,
        tree=True,
    ),
    # The AdamW group.
    "adam_learning_rate": Option(
        "learning rate of the AdamW group; None means that of the matrix group.",
        interval=ANY,
        schedule=True,
        none=True,
        elsewhere=("adam_lr", "adamw_lr"),
    ),
    "adam_b1": Option(
        "decay rate of AdamW's first moment.",
        interval=SHARE,
        elsewhere=("b1", "betas"),
    ),
    "adam_b2": Option(
        "decay rate of AdamW's second moment.",
        interval=SHARE,
        elsewhere=("b2",),
    ),
    "adam_eps": Option(
        "AdamW's epsilon.",
        interval=POSITIVE,
        elsewhere=("eps",),
    ),
    "adam_weight_decay": Option(
        "weight decay of the AdamW group; None means that of the matrix group.",
        interval=ANY,
        schedule=True,
        none=True,
        elsewhere=("weight_decay",),  # where matrices have no weight decay
    ),
    # Which parameters are matrices, and how they are placed.
    "matrix_dims": Option(
        "which parameters are matrices, and which of their axes are inputs and outputs:"
        " None (the default rule, ``default_matrix_dims``), a rule ``(path, leaf) ->"
        " MatrixDims | None``, a function ``(params) -> tree``, or a tree (or prefix)"
        " of ``MatrixDims`` and None. ``optax.contrib.MuonDimensionNumbers`` can"
        " replace ``MatrixDims``; None for a parameter means AdamW.",
        elsewhere=("muon_weight_dimension_numbers", "weight_dimension_numbers"),
    ),
    "shardings": Option(
        "shardings of the parameters, to save communication on a mesh with Auto axes: a"
        " tree like the parameters (or prefix) of ``NamedSharding`` or"
        " ``PartitionSpec``, or a function ``(params) -> tree``."
    ),
}
