# SPDX-License-Identifier: Apache-2.0
"""The optimizers one can ask for by name, with the settings of a run.

This file and ``ablations.py`` are those of the program that know ``normpre_optax``.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from normpre_optax import MatrixDims, default_matrix_dims, explain, families

from .ablations import FROM_X
from .config import Config, RunError
from .mesh import whole

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]


def adamw(
    learning_rate: optax.ScalarOrSchedule, *, weight_decay: float, adam_b1: float = 0.9, adam_b2: float = 0.95
) -> optax.GradientTransformationExtraArgs:
    """AdamW for every parameter, with the moments the others use for embeddings, norms and biases."""
    return optax.with_extra_args_support(optax.adamw(learning_rate, b1=adam_b1, b2=adam_b2, weight_decay=weight_decay))


OPTIMIZERS = {"adamw": adamw, **families()}
# Rules whose updates are not scaled to the size of AdamW's, and want a learning rate of their own.
OWN_RATE = frozenset({"muon", "rmnp", "muon_plus", "normuon", "moga", "dion"})


def make_optimizer(config: Config, learning_rate: Schedule) -> optax.GradientTransformationExtraArgs:
    """Clipping, then the optimizer that ``config`` names, with those of its settings that it has.

    Raises:
        RunError: where the optimizer refuses a setting.
    """
    factory = OPTIMIZERS[config.optimizer]
    matrix = config.matrix
    if matrix.source == "x":
        factory = FROM_X.get(config.optimizer, factory)
    settings = {
        **vars(matrix),
        "weight_decay": config.weight_decay,
        "adam_b1": config.adam_b1,
        "adam_b2": config.adam_b2,
        "seed": config.seed,
        "convention": matrix.muon_convention,
        "compute_dtype": jnp.bfloat16 if matrix.bfloat16 else None,
        "matrix_dims": matrix_dims(matrix.layers),
    }
    if not matrix.mode:
        del settings["mode"]  # each optimizer's own default
    peak = learning_rate
    if config.optimizer in OWN_RATE and matrix.muon_ratio != 1:
        peak = lambda t: matrix.muon_ratio * learning_rate(t)  # noqa: E731
        settings["adam_learning_rate"] = learning_rate
    accepted = inspect.signature(factory).parameters
    try:
        optimizer = factory(peak, **{name: value for name, value in settings.items() if name in accepted})
    except (ValueError, TypeError) as error:
        raise RunError(f"{config.optimizer} refuses its --matrix settings: {error}") from error
    return optax.with_extra_args_support(optax.chain(clip(config.clip, config.clip_norm), optimizer))


def clip(policy: str, norm: float) -> optax.GradientTransformation:
    """What happens to gradients before the optimizer sees them.

    Args:
        policy: ``"global"`` scales all of them together, ``"matrix"`` every matrix (the last two axes; other parameters
            whole) by itself, ``"none"`` nothing.
        norm: what their Euclidean norm is brought down to where it is larger.
    """
    if policy == "global":
        return optax.clip_by_global_norm(norm)
    if policy == "none":
        return optax.identity()

    def clipped(grad: jax.Array) -> jax.Array:
        axes = tuple(range(grad.ndim))[-2:]
        length = jnp.sqrt(jnp.sum(jnp.square(grad.astype(jnp.float32)), axis=axes, keepdims=True))
        return jnp.where(length > norm, grad * (norm / length), grad).astype(grad.dtype)

    return optax.stateless(lambda updates, params: jax.tree.map(clipped, updates))


def matrix_dims(layers: str) -> Callable[[Any], Any] | None:
    """The rule that leaves matrices whose path has none of ``layers``, joined by +, to AdamW; None for all of them."""
    if not layers:
        return None

    def chosen(params: Any) -> Any:
        def dims(path: tuple, leaf: jax.Array) -> MatrixDims | None:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return default_matrix_dims(name, leaf) if any(part in name for part in layers.split("+")) else None

        found = jax.tree_util.tree_map_with_path(dims, params)
        if not jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, MatrixDims)):
            raise RunError(f"--matrix.layers {layers} is part of no hidden matrix's path; see parameters.txt of a run")
        return found

    return chosen


def parameter_table(params: Any, config: Config) -> tuple[str, str]:
    """Which parameters the optimizer treats as matrices and which go to AdamW: a table, and its totals in one line."""
    if config.optimizer == "adamw":
        return f"every parameter goes to AdamW ({len(jax.tree.leaves(params))} leaves)", "every parameter by AdamW"
    table = explain(params, matrix_dims(config.matrix.layers))
    totals = [" ".join(line.split()) for line in table.rpartition("\n\n")[2].splitlines()]
    return table, "; ".join(totals)


@jax.jit
def row_norms(params: Any) -> dict[str, jax.Array]:
    """Of all hidden matrices' rows (output neurons): mean and largest norm, and the share longer than one.

    The relaxed tangent turns the radial part of a step around for rows longer than one.
    """
    norms = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        dims = default_matrix_dims(jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        if isinstance(dims, MatrixDims):
            norms.append(whole(jnp.sqrt(jnp.sum(jnp.square(leaf), axis=dims.inputs))).ravel())
    rows = jnp.concatenate(norms)
    return {"row_norm": rows.mean(), "row_norm_max": rows.max(), "rows_beyond_1": (rows > 1).mean()}
