# SPDX-License-Identifier: Apache-2.0
"""From a direction for matrices to a complete optimizer: AdamW for the rest, weight
decay and learning rates.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Hashable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from normpre_optax.checks import PASS_PARAMS, check_dtype_of
from normpre_optax.docstrings import join_sections, split_sections
from normpre_optax.hyperball import (
    _hyperball,
    keeps,
    row_norms_of,
    warn_of_an_unusual_rate,
)
from normpre_optax.linalg.products import at_least_float32
from normpre_optax.options import Number, checked
from normpre_optax.parameters.broadcast import numbers, whole_tree
from normpre_optax.parameters.cautions import cautions
from normpre_optax.parameters.rules import Assignment, assign
from normpre_optax.parameters.tree import is_box, leaves
from normpre_optax.sharding.placement import place_state, sharded_like, specs_from
from normpre_optax.stages.stage import CompleteOptimizer, refuse_complete_optimizer

ARGUMENTS = (
    "Arguments are update(grads, state, params), in Equinox with eqx.filter(model,"
    " eqx.is_inexact_array)"
)
CREATOR = (
    "Use the optimizer, options and parameters that it was created with; or start with"
    " a new state, init(params)"
)


@checked
def with_adamw(
    direction: Callable[..., optax.GradientTransformation],
    learning_rate: Number | Callable,
    *,
    weight_decay: Number | Callable = 0.1,
    weight_decay_mask: Any = None,
    learning_rate_multipliers: Any = None,
    norm_control: Literal["none", "hyperball"] = "none",
    row_norms: Literal["keep"] | Any = None,
    adam_learning_rate: Number | Callable | None = None,
    adam_b1: Number = 0.9,
    adam_b2: Number = 0.95,
    adam_eps: Number = 1e-8,
    adam_weight_decay: Number | Callable | None = None,
    mu_dtype: Any = None,
    matrix_dims: Any = None,
    shardings: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Complete a direction: matrices use it, everything else uses AdamW.

    ``W <- W - lr (direction(G) + wd W)``. The groups are assigned from the whole tree
    at ``init``, or at the first ``update`` if the state comes from elsewhere, such as a
    checkpoint.

    Args:
        direction: function that returns a direction when called with ``matrix_dims=``,
            such as ``scale_by_muon`` or ``functools.partial(scale_by_muon,
            nesterov=False)``.
        learning_rate: number or schedule.

    Returns:
        The optimizer; its state is that of ``optax.partition`` over "matrix" and
        "adamw".

    Raises:
        TypeError: if an option does not exist or has the wrong type.
        ValueError: if a number is out of range; at ``init``, if no rule covers a
            parameter; at ``update``, if params are missing, or the state belongs to
            another optimizer.

    Example:
        >>> import functools, jax.numpy as jnp
        >>> from normpre_optax import scale_by_muon, with_adamw
        >>> tx = with_adamw(
        ...     functools.partial(scale_by_muon, nesterov=False), 1e-3, weight_decay=0.0
        ... )
        >>> sorted(
        ...     tx.init({"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}).inner_states
        ... )
        ['adamw', 'matrix']
    """
    if not callable(direction) or not isinstance(
        direction(matrix_dims=None), optax.GradientTransformation
    ):
        raise TypeError(
            "direction must be a function that returns an optax.GradientTransformation"
            " when called with matrix_dims=, such as scale_by_muon or"
            f" functools.partial(scale_by_muon, nesterov=False); got {direction!r}"
        )

    if norm_control == "hyperball":
        if adam_learning_rate is None:
            raise TypeError(
                'norm_control="hyperball" needs adam_learning_rate, the learning rate'
                " of the AdamW group: learning_rate is the size of a step relative to"
                " the weights of the matrix group"
            )
        warn_of_an_unusual_rate(learning_rate, row_norms, 6)  # the caller of muon(...)
    elif row_norms is not None:
        raise ValueError('row_norms has no effect without norm_control="hyperball"')

    @functools.lru_cache(maxsize=4)
    def of_matrices(specs: tuple) -> optax.GradientTransformation:
        """The direction of matrices with these axes."""
        return direction(matrix_dims=Assignment((spec.path, spec) for spec in specs))

    def optimizer(
        found: Assignment, params: Any
    ) -> optax.GradientTransformationExtraArgs:
        """The optimizer of these parameters."""
        if shardings is not None:
            each = zip(
                found.items(), specs_from(list(found), params, shardings), strict=True
            )
            found = Assignment(
                (path, spec._replace(sharding=sharding))
                for (path, spec), sharding in each
            )
        labels = jax.tree.structure(params).unflatten(
            ["matrix" if s.dims else "adamw" for s in found.values()]
        )
        mask, times = weight_decay_mask, learning_rate_multipliers
        # All optimizers have the same state, with and without mask and multipliers:
        # they may change at a restart.
        everything = jax.tree.map(lambda _: True, params)
        mask = (
            everything
            if mask is None
            else whole_tree(
                "weight_decay_mask", mask, params, (bool, np.bool_), "bools"
            )
        )

        # One entry per box, so that optax masks the box: nnx.eval_shape shards every
        # Variable, also one that is empty.
        def entry(box):
            return arrays[0] if len(arrays := jax.tree.leaves(box)) == 1 else box

        labels, mask = (
            jax.tree.map(entry, tree, is_leaf=is_box) for tree in (labels, mask)
        )
        if times is not None:
            times = dict(
                zip(
                    found,
                    numbers("learning_rate_multipliers", times, params),
                    strict=True,
                )
            )

        multiplied = optax.identity() if times is None else _multiplied(found, times)

        def decayed(decay):
            return optax.add_decayed_weights(decay, lambda _: mask)

        scaled: Any = optax.scale_by_learning_rate
        matrix = of_matrices(tuple(found.values()))
        if norm_control == "hyperball":
            norms = row_norms_of(row_norms, params, found)
            matrix = optax.chain(
                matrix,
                _hyperball(
                    learning_rate, times, lambda _: norms, keeps(row_norms), found
                ),
            )
        else:
            matrix = optax.chain(
                matrix, multiplied, decayed(weight_decay), scaled(learning_rate)
            )
        adam = optax.chain(
            optax.scale_by_adam(adam_b1, adam_b2, adam_eps, mu_dtype=mu_dtype),
            multiplied,
            decayed(weight_decay if adam_weight_decay is None else adam_weight_decay),
            scaled(learning_rate if adam_learning_rate is None else adam_learning_rate),
        )
        parts: dict[Hashable, optax.GradientTransformation] = {
            "matrix": matrix,
            "adamw": adam,
        }
        return optax.partition(
            parts, lambda _: labels
        )  # a tree of labels may be callable, such as an Equinox module

    known: dict[
        Any, tuple[Assignment, Any]
    ] = {}  # the assignment and what a state is like, for parameters of a form

    def groups(params: Any) -> Assignment:
        for path, leaf in leaves(params).items():
            check_dtype_of(path, leaf.dtype)
        return assign(params, matrix_dims)

    def init(params):
        found = groups(params)
        for caution in cautions(
            found, params, norm_control == "hyperball" and row_norms is None
        ):
            warnings.warn(caution, stacklevel=2)
        tx, weights = optimizer(found, params), jax.tree.map(at_least_float32, params)
        state = tx.init(weights)
        known[_form(params)] = (
            found,
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state),
        )
        return place_state(tx, state, weights)

    def update(updates, state, params=None, **extra_args):
        if "matrix_dims" in extra_args:  # from a direction, through a wrapper of optax
            refuse_complete_optimizer()
        if params is None:
            raise ValueError(f"this optimizer needs the parameters: {PASS_PARAMS}")
        updates = _like("gradients", updates, params, ARGUMENTS)
        weights = jax.tree.map(at_least_float32, params)
        if (form := _form(params)) not in known:
            found = groups(params)
            known[form] = found, jax.eval_shape(optimizer(found, params).init, weights)
        found, own = known[form]
        state = _like("state", state, own, CREATOR)
        updates = jax.tree.map(
            lambda u, p: at_least_float32(sharded_like(jnp.asarray(u), p)),
            updates,
            params,
        )
        new, state = optimizer(found, params).update(
            updates, state, weights, **extra_args
        )
        return (
            jax.tree.map(lambda u, p: u.astype(jnp.asarray(p).dtype), new, params),
            state,
        )

    return CompleteOptimizer(init, update)


# Sections of a complete optimizer's docstring, from the name and the text of its
# direction.
_COMPLETE = {
    "": (
        "{1}\n\nHidden matrices use ``scale_by_{0}``, everything else uses AdamW: ``W"
        " <- W - lr (direction + wd W)``."
    ),
    "Args": "    learning_rate: number or schedule.\n{2}",
    "Returns": "    The complete optimizer; its state is that of ``optax.partition``.",
    "Raises": (
        "    TypeError: if an option does not exist or has the wrong type.\n   "
        " ValueError: if a number is out of range, or no rule covers a parameter; see"
        " ``with_adamw``."
    ),
    "Example": (
        """    >>> import jax.numpy as jnp, normpre_optax as npo
    >>> tx = npo.{0}({3})
    >>> params = {{"dense": {{"kernel": jnp.eye(4, 8), "bias": jnp.ones(8)}}}}
    >>> updates, state = tx.update(params, tx.init(params), params)"""
    ),
}


_HYPERBALL = _COMPLETE | {
    "": (
        """{1}

Hidden matrices use ``scale_by_{0}`` and ``hyperball``, ``W <- R N(N(W) - lr N(D))``:
the first update sets the norm ``R`` of every matrix, so the scale of the initialization
only affects the first gradient. Everything else uses AdamW. It is for training from
scratch. ``row_norms="keep"`` keeps the norms of trained weights."""
    ),
    "Args": """
    learning_rate: of hidden matrices: size of a step relative to the weights, number or
        schedule.
        ``learning_rate_by_length(steps)`` is a good peak.
    adam_learning_rate: of the AdamW group, number or schedule: what you use with AdamW.
{2}
    adam_weight_decay: weight decay of the AdamW group; None means 0.1.""".removeprefix(
        "\n"
    ),
}


def complete(
    direction: Callable[..., Any], example: str = "1e-3", hyperball: bool = False
) -> Callable[..., optax.GradientTransformationExtraArgs]:
    """Return the complete optimizer of a direction ``scale_by_x``: ``x(learning_rate,
    ...)`` with the options of both.

    Its signature and docstring are those of the direction, with the options of
    ``with_adamw``.

    Args:
        direction: function that returns the direction.
        example: arguments in the docstring's example.
        hyperball: whether the optimizer is always under Hyperball. It then requires
            ``adam_learning_rate``.
    """
    own = inspect.signature(direction).parameters
    rest = {
        p.name: p
        for p in inspect.signature(with_adamw).parameters.values()
        if p.name != "direction"
    }
    fixed: dict[str, Any] = (
        {"norm_control": "hyperball", "adam_weight_decay": 0.1} if hyperball else {}
    )
    positional = ["learning_rate", *["adam_learning_rate"] * hyperball]
    if hyperball:
        del rest["norm_control"], rest["weight_decay"]
        rest["adam_weight_decay"] = rest["adam_weight_decay"].replace(default=0.1)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    first = [
        rest.pop(name).replace(kind=kind, default=inspect.Parameter.empty)
        for name in positional
    ]
    added = [p for name, p in rest.items() if name not in own]

    def optimizer(**options: Any) -> optax.GradientTransformationExtraArgs:
        of_direction = {
            name: value
            for name, value in options.items()
            if name in own and name != "matrix_dims"
        }
        for option in (
            {"rms", "convention"} & of_direction.keys()
            if options.get("norm_control") == "hyperball"
            else ()
        ):
            # optax.inject_hyperparams passes defaults too, as arrays if they are
            # numbers.
            if (
                not isinstance(options[option], jax.Array)
                and options[option] != own[option].default
            ):
                raise ValueError(
                    f'{option} has no effect with norm_control="hyperball", which sets'
                    " the size of steps"
                )
        of_rest = {
            name: value
            for name, value in options.items()
            if name in rest or name in positional
        }
        return with_adamw(
            functools.partial(direction, **of_direction), **(fixed | of_rest)
        )

    name, doc = (
        direction.__name__.removeprefix("scale_by_"),
        split_sections(direction.__doc__),
    )
    template = _HYPERBALL if hyperball else _COMPLETE
    optimizer.__name__ = optimizer.__qualname__ = name
    optimizer.__module__ = direction.__module__
    optimizer.__doc__ = join_sections(
        doc
        | {
            key: text.format(name, doc[""], doc.get("Args", ""), example)
            for key, text in template.items()
        },
    )
    return checked(optimizer, inspect.Signature([*first, *own.values(), *added]))


def _multiplied(
    found: Assignment, times: dict[str, Any]
) -> optax.GradientTransformation:
    """Multiply the update of every parameter by its number."""

    def f(updates: Any, params: Any) -> Any:
        leaves, treedef = jax.tree.flatten(updates)
        return treedef.unflatten(
            [
                times[path] * u
                for path, u in zip(assign(params, found), leaves, strict=True)
            ]
        )

    return optax.stateless(f)


def _form(tree: Any) -> tuple:
    """Return the structure, shapes and dtypes of a tree."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((jnp.shape(x), getattr(x, "dtype", type(x))) for x in leaves)


def _like(what: str, given: Any, wanted: Any, hint: str) -> Any:
    """Return the arrays of a tree in the structure of another: a checkpoint may have
    other containers of equal names.

    Raise a ValueError at the first array that only one of them has, or of another
    shape.
    """
    here, there = (
        {
            jax.tree_util.keystr(path, simple=True, separator="/"): x
            for path, x in jax.tree.leaves_with_path(tree)
        }
        for tree in (given, wanted)
    )
    for path in here | there:
        own, expected = (
            f"shape {np.shape(x[path])}" if path in x else "nothing"
            for x in (here, there)
        )
        if own != expected:
            raise ValueError(f"{what}: {path!r} has {own}, expected {expected}. {hint}")
    return jax.tree.structure(wanted).unflatten(here[path] for path in there)
