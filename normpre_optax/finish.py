# SPDX-License-Identifier: Apache-2.0
"""From a direction for matrices to an optimizer for a model: AdamW for the rest, weight decay, learning rate."""

import functools
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Unpack, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import AxisType

from normpre_optax.meshes.specs import axes_of, like_parameters, mesh_of, specs_of
from normpre_optax.norm_control import brake_radially, hold_norm, hyperball, opened, rates, row_gains
from normpre_optax.options import Number, RestOptions, with_options
from normpre_optax.parameters.leaves import boxed_specs
from normpre_optax.parameters.rules import Choices, resolve
from normpre_optax.transforms.checks import number, same_trees, transformation
from normpre_optax.transforms.scale import add_cautious_decay
from normpre_optax.transforms.wrappers import at_least_float32


@with_options
def hybrid(
    direction: Callable[..., optax.GradientTransformation],
    learning_rate: optax.ScalarOrSchedule,
    **options: Unpack[RestOptions],
) -> optax.GradientTransformationExtraArgs:
    """Matrices by a direction, everything else by AdamW, decoupled weight decay and learning rate for both.

    ``W <- W - lr (direction(G) + wd W)``. Which parameter is a matrix is decided on the whole tree at every ``init``
    and ``update``, before it is partitioned.

    Args:
        direction: what makes the direction, called with ``matrix_dims=``: ``scale_by_muon``,
            ``functools.partial(scale_by_dion, rank=64)``, or a function of yours that hands it on to ``as_matrices``.
            Its updates point uphill.
        learning_rate: number or schedule.

    Returns:
        The finished optimizer; its state is that of ``optax.partition`` over ``"matrix"`` and ``"adamw"``.

    Raises:
        TypeError: if an option is misspelt or of another type.
        ValueError: if one is out of range; at ``init``, if a parameter of three or more axes is covered by no rule; at
            ``update``, if the parameters are missing, or the state is another optimizer's.

    Example:
        >>> import functools, jax.numpy as jnp
        >>> from normpre_optax import hybrid, scale_by_muon
        >>> tx = hybrid(functools.partial(scale_by_muon, nesterov=False), 1e-3, weight_decay=0.0)
        >>> sorted(tx.init({"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}).inner_states)
        ['adamw', 'matrix']
    """
    if not callable(direction):
        raise TypeError(
            "direction must be a function that makes one when it is called with matrix_dims=, such as scale_by_muon or "
            f"functools.partial(scale_by_muon, nesterov=False); got {direction!r}"
        )
    transformation("what direction makes", direction(matrix_dims=None))  # A bad option is named here, not at init.
    if callable(options["norm_control"]):
        try:
            controlled = options["norm_control"](matrix_dims=None)
        except TypeError as error:
            raise TypeError(
                f"norm_control must make a transformation when it is called with matrix_dims= alone: {error}. Those of "
                "this library go by name, such as 'hyperball'"
            ) from error
        transformation("what norm_control makes", controlled)
    compiled = _compiled(direction, learning_rate, options)

    def init(params):
        return _optimizer(direction, learning_rate, options, params).init(params)

    def update(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError(
                "this optimizer needs the parameters: call update(grads, state, params). In an Equinox loop that is "
                "optimizer.update(grads, state, eqx.filter(model, eqx.is_inexact_array)); a loop that never passes "
                "params (brax, for one) needs that third argument added."
            )
        same_trees(updates, params)
        updates = like_parameters(updates, params)
        traced = all(isinstance(x, jax.Array) for x in jax.tree.leaves(extra_args))
        step = compiled if traced else functools.partial(_update_with, direction, learning_rate, options)
        return step(updates, state, params, extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def _optimizer(direction: Callable, learning_rate, options: RestOptions, params) -> optax.GradientTransformation:
    """The optimizer of these very parameters."""
    found = resolve(params, options["matrix_dims"])
    if options["shardings"] is not None:
        found = _with(found, "spec", specs_of(params, options["shardings"]))
    else:
        found = _as_boxes_say(found, params)
    labels = jax.tree.structure(params).unflatten(["adamw" if c.dims is None else "matrix" for c in found.values()])
    mask = _whole_tree("weight_decay_mask", options["weight_decay_mask"], params, True, bool | np.bool_)
    betas = options["adam_b1"], options["adam_b2"], options["adam_eps"]
    adam_rate = learning_rate if options["adam_learning_rate"] is None else options["adam_learning_rate"]
    decay = options["weight_decay"]
    adam_decay = decay if options["adam_weight_decay"] is None else options["adam_weight_decay"]
    decayed = add_cautious_decay if options["cautious"] else optax.add_decayed_weights

    def finished(tx: optax.GradientTransformation, decay, rate, mask=mask) -> optax.GradientTransformation:
        return optax.chain(tx, decayed(decay, lambda _: mask), optax.scale_by_learning_rate(rate))

    adam = optax.scale_by_adam(*betas, mu_dtype=options["mu_dtype"])
    matrix, control, rest = direction(matrix_dims=found), options["norm_control"], adam
    if options["rate_multipliers"] is not None:
        numbers = _whole_tree("rate_multipliers", options["rate_multipliers"], params, 1.0, Number)
        for path, times in zip(found, jax.tree.leaves(numbers), strict=True):
            number(f"rate_multipliers of {path!r}", times, least=0)
        found = _with(found, "rate", jax.tree.leaves(numbers))
        rest = optax.chain(adam, _at_their_rates(found))
        if control != "hyperball":  # It forgets sizes, and reads the rates itself.
            matrix = optax.chain(matrix, _at_their_rates(found))
    if control == "row_gains":  # Of lengths and directions only lengths decay.
        directions = optax.chain(matrix, optax.scale_by_learning_rate(learning_rate))
        of_gains = opened(params).unflatten(jax.tree.leaves(mask))
        step = row_gains(directions, finished(rest, decay, adam_rate, of_gains), matrix_dims=found)
    elif control == "hyperball":
        step = optax.chain(matrix, hyperball(learning_rate, matrix_dims=found))
    else:
        step = finished(matrix, 0.0 if control in _HELD else decay, learning_rate)
        if control != "none":
            rule = _RULES[control] if isinstance(control, str) else control
            step = optax.chain(step, rule(matrix_dims=found))
    parts: dict[Hashable, optax.GradientTransformation] = {
        "matrix": step,
        "adamw": finished(rest, adam_decay, adam_rate),
    }
    # A tree of labels may itself be callable, such as an Equinox module.
    return at_least_float32(optax.partition(parts, lambda _: labels))


_AGAIN = (
    "What makes a state must be as init had it: the optimizer, the parameters, orientation, rank, warm_start, "
    "norm_control, and whether learning rates and decays are schedules. Or begin anew with init(params)."
)


def _refuse_foreign(state, own) -> None:
    """Say where a state is not what ``init`` makes, ``own``."""
    given, wanted = (
        {jax.tree_util.keystr(path): jnp.shape(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (state, own)
    )
    for name in given | wanted:
        if given.get(name) != wanted.get(name):
            is_there, belongs = (f"of shape {x[name]}" if name in x else "absent" for x in (given, wanted))
            raise ValueError(
                f"this state is not of this optimizer with these parameters: state{name} is {is_there}, and should be "
                f"{belongs}. {_AGAIN}"
            )


def _as_boxes_say(found: Choices, params) -> Choices:
    """Choices with where parameters lie on Auto axes, which JAX does not tell; a warning where boxes do not either."""
    mesh = mesh_of(params)
    if mesh is None or AxisType.Explicit in mesh.axis_types:
        return found
    known = lambda spec: spec is not None and {a for entry in spec for a in axes_of(entry)} <= set(mesh.shape)  # noqa: E731
    specs = [spec if known(spec) else None for spec in boxed_specs(params)]
    untold = any(spec is None and one.dims is not None for spec, one in zip(specs, found.values(), strict=True))
    arrays = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
    if untold and not all(x.sharding.is_fully_replicated for x in arrays):
        warnings.warn(
            "parameters lie spread over Auto axes of a mesh, of which JAX says nothing inside jit: XLA will gather "
            "matrices for every product, and may leave updates elsewhere than parameters. Give the optimizer "
            "shardings=jax.tree.map(lambda x: x.sharding, params), or the mesh Explicit axes, the default of "
            "jax.make_mesh",
            stacklevel=4,
        )
    return _with(found, "spec", specs)


def _with(found: Choices, field: str, values: Sequence) -> Choices:
    """What was decided, and one thing more of every parameter."""
    return Choices({path: one._replace(**{field: x}) for (path, one), x in zip(found.items(), values, strict=True)})


def _at_their_rates(found: Choices) -> optax.GradientTransformation:
    """Every update times its parameter's rate."""
    return optax.stateless(lambda updates, params: jax.tree.map(lambda u, x: x * u, updates, rates(params, found)))


def _relaxed(length: jax.Array) -> jax.Array:
    return 1 - length**2


_HELD = ("hold", "hold_rows")
_RULES = {
    "brake": brake_radially,
    "brake_matrix": functools.partial(brake_radially, per="matrix"),
    "relax": functools.partial(brake_radially, _relaxed),
    "hold": hold_norm,
    "hold_rows": functools.partial(hold_norm, per="rows"),
}


def _update_with(direction: Callable, learning_rate, options, updates, state, params, extra_args: dict):
    tx = _optimizer(direction, learning_rate, options, params)
    own = jax.eval_shape(tx.init, params)
    _refuse_foreign(state, own)
    try:
        return tx.update(updates, state, params, **extra_args)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        if jax.tree.structure(state) != jax.tree.structure(own):
            raise ValueError(f"this state is of another optimizer. {_AGAIN}") from error
        raise


def _compiled(direction: Callable, learning_rate, options: RestOptions) -> Callable:
    """``_update_with`` under jit: without that, the loops inside would be compiled anew on every step.

    ``optax.inject_hyperparams`` makes an optimizer on every step. Those of this library's directions that differ in
    arrays only, all else being plain data, share what is compiled.
    """
    factory = direction if isinstance(direction, functools.partial) else functools.partial(direction)
    values = [*factory.keywords.values(), learning_rate, *options.values()]
    numbers = [x for x in values if isinstance(x, jax.Array)]
    static = tuple((jax.Array, None) if isinstance(x, jax.Array) else (type(x), x) for x in values)
    is_ours = str(getattr(factory.func, "__module__", "")).startswith("normpre_optax.") and not factory.args
    if is_ours and all(isinstance(x, jax.Array) or type(x) in _PLAIN for x in values):
        return functools.partial(_shared(factory.func, tuple(factory.keywords), tuple(options), static), numbers)
    return jax.jit(functools.partial(_update_with, direction, learning_rate, options))


_PLAIN = (bool, int, float, str, type(None))


@functools.lru_cache(maxsize=16)
def _shared(factory: Callable, of_direction: tuple[str, ...], of_rest: tuple[str, ...], static: tuple) -> Callable:
    @jax.jit
    def update(numbers, updates, state, params, extra_args):
        left = iter(numbers)
        values = iter([next(left) if kind is jax.Array else x for kind, x in static])
        direction = functools.partial(factory, **{name: next(values) for name in of_direction})
        learning_rate, options = next(values), dict(zip(of_rest, values, strict=True))
        return _update_with(direction, learning_rate, options, updates, state, params, extra_args)

    return update


def _whole_tree(name: str, given, params, default, kind):
    """An option that is a tree, or makes one, on the whole of ``params``; None is ``default`` everywhere."""
    if given is None:
        return jax.tree.map(lambda _: default, params)
    kinds = get_args(kind)  # isinstance() of a Union does not know tracers
    is_tree = all(isinstance(leaf, kinds) for leaf in jax.tree.leaves(given))  # An Equinox module is callable.
    if not is_tree and not callable(given):
        what = "bools" if default is True else "numbers"
        raise TypeError(f"{name} must be a tree of {what} or a callable (params) -> tree, got {given!r}")
    try:
        return jax.tree.broadcast(given if is_tree else given(params), params)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} must be a tree like the parameters', or the top of one: {error}") from error
