# SPDX-License-Identifier: Apache-2.0
"""From a direction for matrices to an optimizer for a model: AdamW for the rest, weight decay, learning rate."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec

from normpre_optax.meshes.specs import like_parameters, specs_of
from normpre_optax.parameters.leaves import views
from normpre_optax.parameters.rules import resolve
from normpre_optax.transforms.checks import float_dtype, number, same_trees
from normpre_optax.transforms.wrappers import at_least_float32

STATIC_ARGS = frozenset(
    {
        "precondition",
        "ns_steps",
        "ns_coefficients",
        "rank",
        "oversample",
        "power_iterations",
        "method",
        "seed",
        "warm_start",
        "divide",
        "shardings",
        "convention",
        "version",
        "mode",
        "whitening_steps",
        "nesterov",
        "tangent",
        "orientation",
        "mu_dtype",
        "compute_dtype",
        "matrix_dims",
        "weight_decay_mask",
    }
)
"""Arguments that `optax.inject_hyperparams` must not trace. optax wants only those that a factory has:
`static_args=STATIC_ARGS & inspect.signature(normpre_g).parameters.keys()`."""


class RestOptions(NamedTuple):
    """What the finished optimizers share beside their direction, with their defaults; see `normpre` for each."""

    weight_decay: jax.typing.ArrayLike = 0.1
    weight_decay_mask: object = None
    mu_dtype: jax.typing.DTypeLike | None = None
    matrix_dims: object = None
    adam_learning_rate: optax.ScalarOrSchedule | None = None
    adam_b1: jax.typing.ArrayLike = 0.9
    adam_b2: jax.typing.ArrayLike = 0.95
    adam_eps: jax.typing.ArrayLike = 1e-8
    adam_weight_decay: jax.typing.ArrayLike | None = None
    shardings: object = None


def assemble(
    direction: Callable[[object], optax.GradientTransformation],
    learning_rate: optax.ScalarOrSchedule,
    options: RestOptions,
) -> optax.GradientTransformationExtraArgs:
    """Matrices by ``direction``, everything else by AdamW, decoupled weight decay and learning rate for both.

    ``W <- W - lr (direction(G) + wd W)``. Which parameter is a matrix is decided on the whole tree at every ``init``
    and ``update``, before it is partitioned.

    Args:
        direction: builds the matrix direction for a rule ``(path, leaf) -> MatrixDims``.
        learning_rate: number or schedule.
        options: the rest.

    Returns:
        The finished optimizer; its state is that of ``optax.partition`` over ``"matrix"`` and ``"adamw"``.

    Raises:
        ValueError: if ``update`` is called without parameters, or a parameter is covered by no rule.
    """
    for name, rate in (("learning_rate", learning_rate), ("adam_learning_rate", options.adam_learning_rate)):
        if not callable(rate) and (rate is not None or name == "learning_rate"):
            number(name, rate)
    number("weight_decay", options.weight_decay)
    float_dtype("mu_dtype", options.mu_dtype)
    direction(None)  # A bad option is named here, not at init.
    adam_rate = learning_rate if options.adam_learning_rate is None else options.adam_learning_rate
    adam_decay = options.weight_decay if options.adam_weight_decay is None else options.adam_weight_decay
    adam = optax.scale_by_adam(options.adam_b1, options.adam_b2, options.adam_eps, mu_dtype=options.mu_dtype)

    def optimizer_for(params) -> optax.GradientTransformationExtraArgs:
        found = resolve(params, options.matrix_dims)
        treedef = jax.tree.structure(params)
        labels = treedef.unflatten(["adamw" if c.dims is None else "matrix" for c in found.values()])
        mask = _decay_mask(options.weight_decay_mask, params)

        def finished(tx, decay, rate):
            return optax.chain(tx, optax.add_decayed_weights(decay, lambda _: mask), optax.scale_by_learning_rate(rate))

        matrix = direction(lambda path, leaf: found[path].dims)
        return at_least_float32(
            optax.partition(
                {
                    "matrix": finished(matrix, options.weight_decay, learning_rate),
                    "adamw": finished(adam, adam_decay, adam_rate),
                },
                lambda _: labels,  # a tree of labels may itself be callable, such as an Equinox module
            )
        )

    def told(params) -> dict[str, dict[str, PartitionSpec]]:
        if options.shardings is None:
            return {}
        return {"told": dict(zip(views(params), specs_of(params, options.shardings), strict=True))}

    # Called outside jit, the loops inside would be compiled anew on every step; this keeps them.
    @jax.jit
    def compiled(updates, state, params):
        return optimizer_for(params).update(updates, state, params, **told(params))

    def init(params):
        return optimizer_for(params).init(params)

    def update(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError(
                "this optimizer needs the parameters: call update(grads, state, params). In an Equinox loop that is "
                "optimizer.update(grads, state, eqx.filter(model, eqx.is_inexact_array)); a loop that never passes "
                "params (brax, for one) needs that third argument added."
            )
        same_trees(updates, params)
        updates = like_parameters(updates, params)
        if extra_args:
            return optimizer_for(params).update(updates, state, params, **told(params), **extra_args)
        return compiled(updates, state, params)

    return optax.GradientTransformationExtraArgs(init, update)


def _decay_mask(mask, params):
    """The mask as a tree on the whole of ``params``; None decays everything."""
    if mask is None:
        return jax.tree.map(lambda _: True, params)
    is_tree = all(isinstance(leaf, bool | np.bool_) for leaf in jax.tree.leaves(mask))  # An Equinox module is callable.
    return mask if is_tree else mask(params)
