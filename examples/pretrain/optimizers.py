# SPDX-License-Identifier: Apache-2.0
"""The optimizers by name, such as "normpre_l,rank=8".

Only this file of the program imports ``normpre_optax``. To add an optimizer, put a
factory with the options of ``with_adamw`` into ``OPTIMIZERS``; ``adamw`` shows how to
make one of a direction.
"""

import ast
import inspect
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
        *(options[f"adam_{name}"] for name in ("b1", "b2", "eps")),
        mu_dtype=options["mu_dtype"],
    )
    return with_adamw(lambda matrix_dims: adam, learning_rate, **options)


adamw.__signature__ = inspect.signature(with_adamw)  # pyright: ignore
Factory = Callable[..., optax.GradientTransformationExtraArgs]
Update = Literal["orthogonal", "relative", "elementwise"] | None
OPTIMIZERS: dict[str, Factory] = {"adamw": adamw}
# How an optimizer's step depends on the shape, for ``multipliers_by_width``.
UPDATES: dict[str, Update] = {"adamw": "elementwise"}
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
}
GIVEN |= {
    "weight_decay",
    "adam_weight_decay",
    "weight_decay_mask",
    "matrix_dims",
    "shardings",
}


def settings_of(optimizer: str) -> tuple[str, dict[str, Any]]:
    """The name and all settings of "normpre_l,rank=8": keyword arguments of the
    library's function, and ``layers``.

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
    known = inspect.signature(OPTIMIZERS[name]).parameters.values()
    settings = {
        x.name: x.default
        for x in known
        if x.kind == x.KEYWORD_ONLY and x.name not in GIVEN
    } | {"layers": ""}
    for key, text in given.items():
        if key not in settings:
            raise RunError(
                f"--optimizer: {name} has no setting {key!r}; it has"
                f" {', '.join((*settings, *IN_NAMES))}"
            )
        try:
            settings[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            settings[key] = text
    if settings.get("row_norms") not in (None, "keep"):
        raise RunError(
            f"--optimizer: row_norms must be keep, got {settings['row_norms']!r}"
        )
    return name, settings


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
        **{
            option: getattr(config, option)
            for option in ("weight_decay", "adam_b1", "adam_b2", "seed")
        },
        "weight_decay_mask": decay_matrices_only,
        "matrix_dims": matrix_dims(settings.pop("layers")),
        "learning_rate_multipliers": learning_rate_multipliers(config),
    }
    accepted = inspect.signature(OPTIMIZERS[name]).parameters
    try:
        given = {option: value for option, value in given.items() if option in accepted}
        optimizer = OPTIMIZERS[name](learning_rate, **settings, **given)
    except (ValueError, TypeError) as error:
        raise RunError(f"--optimizer {config.optimizer}: {error}") from error
    return optax.with_extra_args_support(
        optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)
    )


def learning_rate_multipliers(config: Config) -> Callable[[Any], Any] | None:
    """Learning-rate multipliers of this model relative to one of ``--base-width``; None
    without that flag.
    """
    if config.base_width is None:
        return None
    narrower, (name, settings) = (
        config.base_width / config.model.width,
        settings_of(config.optimizer),
    )
    relative = is_relative(config.optimizer) or settings.get("convention") == "keller"
    update = "relative" if relative else UPDATES.get(name)
    if update is None:
        raise RunError(
            f"--base-width: how the learning rate of {name} depends on the width is"
            " unknown"
        )

    def multipliers(params: Any) -> Any:
        hidden = hidden_matrices(params)

        def base_shape(name: str, leaf: jax.Array) -> jax.ShapeDtypeStruct:
            axes = (
                [leaf.ndim - 1]
                if name.endswith("/bias")
                else [0]
                if name == "head/kernel"
                else []
            )
            if name in hidden:
                axes = (
                    np.ravel(
                        [
                            *np.ravel(hidden[name].inputs),
                            *np.ravel(hidden[name].outputs),
                        ]
                    )
                    % leaf.ndim
                )
            sizes = [
                round(size * narrower) if axis in axes else size
                for axis, size in enumerate(leaf.shape)
            ]
            return jax.ShapeDtypeStruct(tuple(sizes), leaf.dtype)

        base = jax.tree.structure(params).unflatten(
            [base_shape(*item) for item in by_name(params).items()]
        )
        return multipliers_by_width(
            params, base, update=update, matrix_dims=matrix_dims(settings["layers"])
        )

    return multipliers


def matrix_dims(layers: str) -> Callable[[Any], Any] | None:
    """A rule that leaves matrices whose path has none of ``layers``, joined by +, to
    AdamW; None for all of them.
    """
    if not layers:
        return None

    def chosen(params: Any) -> Any:
        wanted = [part for part in layers.split("+") if part]
        kept = {
            name: d
            for name, d in hidden_matrices(params).items()
            if any(part in name for part in wanted)
        }
        if not kept:
            raise RunError(
                f"--optimizer: layers={layers} is in no hidden matrix's path; see"
                " parameters.txt of a run"
            )
        return jax.tree.unflatten(
            jax.tree.structure(params), [kept.get(name) for name in by_name(params)]
        )

    return chosen


def parameter_table(params: Any, config: Config) -> tuple[str, str]:
    """Which parameters the matrix optimizer has and which AdamW: a table, and its
    totals in one line.
    """
    name, settings = settings_of(config.optimizer)
    if name == "adamw":
        every = f"every parameter uses AdamW ({len(jax.tree.leaves(params))} arrays)"
        return every, every
    table = explain(params, matrix_dims(settings["layers"]))
    if not is_relative(config.optimizer) or settings.get("row_norms") is not None:
        table = "\n".join(
            x
            for x in table.splitlines()
            if not x.startswith("row norms under Hyperball:")
        )
    totals = [
        " ".join(x.split())
        for x in table.rpartition("\n\n")[2].splitlines()
        if not x.startswith("note:")
    ]
    return table, "; ".join(totals)


def hidden_matrices(params: Any) -> dict[str, MatrixDims]:
    """Axes of the hidden matrices, by name."""
    found = {
        name: default_matrix_dims(name, leaf) for name, leaf in by_name(params).items()
    }
    return {name: dims for name, dims in found.items() if isinstance(dims, MatrixDims)}


@jax.jit
def norms(params: Any) -> dict[str, jax.Array]:
    """Norms of the hidden matrices' rows (output neurons) and columns.

    ``row_norm`` and ``rows_beyond_1`` are their mean and the share above one, where the
    relaxed tangent reverses the radial part of a step. ``row_norm/mlp/up`` and so on
    are the means of each kind of layer.
    """
    leaves, found = by_name(params), {}
    for side, summed in (("row", "inputs"), ("column", "outputs")):
        kinds: dict[str, list[jax.Array]] = {}
        for name, dims in hidden_matrices(params).items():
            squares = jnp.sum(jnp.square(leaves[name]), axis=getattr(dims, summed))
            kinds.setdefault(kind_of(name), []).append(whole(jnp.sqrt(squares)).ravel())
        every = jnp.concatenate([x for kind in kinds.values() for x in kind])
        found |= {f"{side}_norm": every.mean(), f"{side}s_beyond_1": (every > 1).mean()}
        found |= {
            f"{side}_norm/{name}": jnp.concatenate(parts).mean()
            for name, parts in kinds.items()
        }
    return found


def kind_of(name: str) -> str:
    """The layer of a matrix, in any block: ``mlp/up`` of ``blocks/0/mlp/up/kernel``."""
    return "/".join(part for part in name.split("/")[1:-1] if not part.isdigit())
