# SPDX-License-Identifier: Apache-2.0
"""The optimizers by name, such as "normpre_l,rank=8".

Only this file of the program imports ``normpre_optax``. To add an optimizer, put a
factory with the options of ``with_adamw`` into ``OPTIMIZERS``; ``adamw`` shows how to
make one of a direction.
"""

import ast
import inspect
import itertools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from normpre_optax import (
    MatrixDims,
    decay_matrices_only,
    default_matrix_dims,
    explain,
    learning_rate_by_length,  # noqa: F401  for configs.py
    multipliers_by_width,
    optimizers,
    with_adamw,
)

from .config import Config, RunError
from .mesh import by_name, whole
from .names import IN_NAMES, is_relative, split_name

Schedule = Callable[[jax.typing.ArrayLike], jax.typing.ArrayLike]


def adamw(
    learning_rate: Schedule, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """AdamW for every parameter, hidden matrices included."""
    adam = optax.scale_by_adam(
        options["adam_b1"],
        options["adam_b2"],
        options["adam_eps"],
        mu_dtype=options["mu_dtype"],
    )
    return with_adamw(lambda matrix_dims: adam, learning_rate, **options)


adamw.__signature__ = inspect.signature(with_adamw)  # pyright: ignore
Factory = Callable[..., optax.GradientTransformationExtraArgs]
Update = Literal["orthogonal", "relative", "elementwise"]
OPTIMIZERS: dict[str, Factory] = {"adamw": adamw}
# How an optimizer's step depends on the shape, for ``multipliers_by_width``.
UPDATES: dict[str, Update | None] = {"adamw": "elementwise"}
LABELS = {"adamw": "AdamW"}  # names in tables and plots
for _name, _found in optimizers().items():
    OPTIMIZERS[_name] = _found.factory
    UPDATES[_name] = _found.update
    LABELS[_name] = _found.label
# Arguments of a factory that options of the program set.
GIVEN = {
    "learning_rate",
    "adam_learning_rate",
    "learning_rate_multipliers",
    "adam_b1",
    "adam_b2",
    "seed",
    "weight_decay",
    "adam_weight_decay",
    "weight_decay_mask",
    "matrix_dims",
    "shardings",
}


def settings_of(optimizer: str) -> tuple[str, dict[str, Any]]:
    """The name and all settings of "normpre_l,rank=8".

    The settings are keyword arguments of the library's function, and ``layers``:
    ``layers=attention/out+mlp`` leaves the matrices whose path has none of these parts
    to AdamW.

    Raises:
        RunError: if there is no such optimizer, or it has no such setting.
    """
    name, given = split_name(optimizer)
    if name not in OPTIMIZERS:
        raise RunError(
            f"--optimizer must be one of {', '.join(OPTIMIZERS)}, got {name!r}"
        )
    settings = default_settings(name)
    for key, text in given.items():
        if key not in settings:
            known = ", ".join((*settings, *IN_NAMES))
            raise RunError(
                f"--optimizer: {name} has no setting {key!r}; it has {known}"
            )
        settings[key] = literal(text)
    if settings.get("row_norms") not in (None, "keep"):
        raise RunError(
            f"--optimizer: row_norms must be keep, got {settings['row_norms']!r}"
        )
    return name, settings


def default_settings(name: str) -> dict[str, Any]:
    """The settings of an optimizer that its name may have, with their defaults."""
    options = inspect.signature(OPTIMIZERS[name]).parameters.values()
    settings = {
        option.name: option.default
        for option in options
        if option.kind == option.KEYWORD_ONLY and option.name not in GIVEN
    }
    return settings | {"layers": ""}


def literal(text: str) -> Any:
    """The Python literal that a text spells, else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def make_optimizer(
    config: Config, learning_rate: Schedule
) -> optax.GradientTransformationExtraArgs:
    """Clipping, then the optimizer that ``config`` names.

    Raises:
        RunError: if there is no such optimizer, or it refuses a setting.
    """
    name, settings = settings_of(config.optimizer)
    adam = config.adam_learning_rate or config.learning_rate
    given = {
        "adam_learning_rate": lambda t: adam / config.learning_rate * learning_rate(t),
        "adam_weight_decay": config.weight_decay,
        "weight_decay": config.weight_decay,
        "adam_b1": config.adam_b1,
        "adam_b2": config.adam_b2,
        "seed": config.seed,
        "weight_decay_mask": decay_matrices_only,
        "matrix_dims": matrix_dims(settings.pop("layers")),
        "learning_rate_multipliers": learning_rate_multipliers(config),
    }
    accepted = inspect.signature(OPTIMIZERS[name]).parameters
    given = {option: value for option, value in given.items() if option in accepted}
    try:
        optimizer = OPTIMIZERS[name](learning_rate, **settings, **given)
    except (ValueError, TypeError) as error:
        raise RunError(f"--optimizer {config.optimizer}: {error}") from error
    clipping = optax.clip_by_global_norm(config.clip_norm)
    return optax.with_extra_args_support(optax.chain(clipping, optimizer))


def learning_rate_multipliers(config: Config) -> Callable[[Any], Any] | None:
    """Learning-rate multipliers of this model relative to one of ``--base-width``.

    None without that flag; else a function of the tree of parameters.
    """
    if config.base_width is None:
        return None
    _, settings = settings_of(config.optimizer)
    update = update_of(config.optimizer)
    narrower = config.base_width / config.model.width

    def multipliers(params: Any) -> Any:
        hidden = hidden_matrices(params)
        base = [
            base_shape(leaf, width_axes(name, leaf, hidden.get(name)), narrower)
            for name, leaf in by_name(params).items()
        ]
        return multipliers_by_width(
            params,
            jax.tree.structure(params).unflatten(base),
            update=update,
            matrix_dims=matrix_dims(settings["layers"]),
        )

    return multipliers


def update_of(optimizer: str) -> Update:
    """How the step of an optimizer depends on the shape.

    Raises:
        RunError: if that is unknown.
    """
    name, settings = settings_of(optimizer)
    if is_relative(optimizer) or settings.get("convention") == "keller":
        return "relative"
    update = UPDATES.get(name)
    if update is None:
        raise RunError(
            f"--base-width: how the learning rate of {name} depends on the width is"
            " unknown"
        )
    return update


def width_axes(name: str, leaf: jax.Array, dims: MatrixDims | None) -> set[int]:
    """The axes of a parameter that grow with the width of the model."""
    if dims is not None:
        axes = [*np.ravel(dims.inputs), *np.ravel(dims.outputs)]
        return {int(axis) % leaf.ndim for axis in axes}
    if name.endswith("/bias"):
        return {leaf.ndim - 1}
    if name == "head/kernel":
        return {0}
    return set()


def base_shape(
    leaf: jax.Array, axes: set[int], narrower: float
) -> jax.ShapeDtypeStruct:
    """The shape of a parameter in a model that is ``narrower``, along ``axes``."""
    sizes = list(leaf.shape)
    for axis in axes:
        sizes[axis] = round(sizes[axis] * narrower)
    return jax.ShapeDtypeStruct(tuple(sizes), leaf.dtype)


def matrix_dims(layers: str) -> Callable[[Any], Any] | None:
    """A rule that leaves the matrices of other ``layers`` to AdamW.

    ``layers`` are parts of paths, joined by +; "" has no rule. The rule is a function
    of the tree of parameters.
    """
    if not layers:
        return None
    wanted = [part for part in layers.split("+") if part]

    def chosen(params: Any) -> Any:
        kept = {
            name: dims
            for name, dims in hidden_matrices(params).items()
            if any(part in name for part in wanted)
        }
        if not kept:
            raise RunError(
                f"--optimizer: layers={layers} is in no hidden matrix's path; see"
                " parameters.txt of a run"
            )
        dims = [kept.get(name) for name in by_name(params)]
        return jax.tree.unflatten(jax.tree.structure(params), dims)

    return chosen


def parameter_table(params: Any, config: Config) -> tuple[str, str]:
    """Which parameters the matrix optimizer has and which AdamW.

    Returns:
        A table, and its totals in one line.
    """
    name, settings = settings_of(config.optimizer)
    if name == "adamw":
        every = f"every parameter uses AdamW ({len(jax.tree.leaves(params))} arrays)"
        return every, every
    table = explain(params, matrix_dims(settings["layers"]))
    if not is_relative(config.optimizer) or settings.get("row_norms") is not None:
        # What `explain` says of Hyperball without options does not hold here.
        table = without_lines(table, "row norms under Hyperball:")
    _, _, totals = table.rpartition("\n\n")
    lines = without_lines(totals, "note:").splitlines()
    return table, "; ".join(map(without_columns, lines))


def without_columns(line: str) -> str:
    """A line of a table with one space between words."""
    return " ".join(line.split())


def without_lines(text: str, start: str) -> str:
    """A text without the lines that start so."""
    lines = [line for line in text.splitlines() if not line.startswith(start)]
    return "\n".join(lines)


def hidden_matrices(params: Any) -> dict[str, MatrixDims]:
    """Axes of the hidden matrices of a tree of parameters, by name."""
    found = {}
    for name, leaf in by_name(params).items():
        dims = default_matrix_dims(name, leaf)
        if isinstance(dims, MatrixDims):
            found[name] = dims
    return found


@jax.jit
def norms(params: Any) -> dict[str, jax.Array]:
    """Norms of the hidden matrices' rows (output neurons) and columns.

    ``row_norm`` and ``rows_beyond_1`` are their mean and the share above one, where the
    relaxed tangent reverses the radial part of a step. ``row_norm/mlp/up`` and so on
    are the means of each kind of layer.
    """
    rows: dict[str, list[jax.Array]] = {}
    columns: dict[str, list[jax.Array]] = {}
    leaves = by_name(params)
    for name, dims in hidden_matrices(params).items():
        kind = kind_of(name)
        rows.setdefault(kind, []).append(norms_over(leaves[name], dims.inputs))
        columns.setdefault(kind, []).append(norms_over(leaves[name], dims.outputs))
    return means_of("row", rows) | means_of("column", columns)


def norms_over(matrix: jax.Array, axes: int | tuple[int, ...]) -> jax.Array:
    """Norms over axes, flattened and on every device."""
    squares = jnp.sum(jnp.square(matrix), axis=axes)
    return whole(jnp.sqrt(squares)).ravel()


def means_of(side: str, kinds: dict[str, list[jax.Array]]) -> dict[str, jax.Array]:
    """Means of norms: of all, and of each kind of layer; and the share above one."""
    every = jnp.concatenate(list(itertools.chain(*kinds.values())))
    found = {f"{side}_norm": every.mean(), f"{side}s_beyond_1": (every > 1).mean()}
    for name, parts in kinds.items():
        found[f"{side}_norm/{name}"] = jnp.concatenate(parts).mean()
    return found


def kind_of(name: str) -> str:
    """The layer of a matrix, in any block: ``mlp/up`` of ``blocks/0/mlp/up/kernel``."""
    return "/".join(part for part in name.split("/")[1:-1] if not part.isdigit())
