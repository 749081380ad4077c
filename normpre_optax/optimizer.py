# SPDX-License-Identifier: Apache-2.0
"""From a direction of matrices to a complete optimizer.

``with_adamw`` adds AdamW for all other parameters, weight decay and learning rates.
``complete`` makes the optimizers of this library, such as ``muon``, from their
directions.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from normpre_optax.checks import PASS_PARAMS, check_dtype_of, warn_user
from normpre_optax.docstrings import join_sections, split_sections
from normpre_optax.hyperball import check_relative_rate, constrain_norms
from normpre_optax.linalg.products import at_least_float32
from normpre_optax.options import DimsTree, Dtype, Number, PyTree, checked
from normpre_optax.parameters.broadcast import numbers, whole_tree
from normpre_optax.parameters.cautions import cautions
from normpre_optax.parameters.roles import keeps_norms, row_norms_by_path
from normpre_optax.parameters.rules import Assignment, ParamSpec, assign
from normpre_optax.parameters.tree import is_box, leaves
from normpre_optax.sharding.placement import (
    place_state,
    sharded_like,
    specs_from,
    without_devices,
)
from normpre_optax.stages.stage import CompleteOptimizer, refuse_complete_optimizer

Rate = Any  # a Number or a schedule; optax's type of both has no numbers of NumPy
DECAY = 0.1

# What errors end in.
ARGUMENTS = (
    "Arguments are update(grads, state, params), in Equinox with eqx.filter(model,"
    " eqx.is_inexact_array)"
)
NEEDS_ADAM_LEARNING_RATE = (
    'norm_control="hyperball" needs adam_learning_rate, the learning rate of the AdamW'
    " group: learning_rate is the size of a step relative to the weights of the matrix"
    " group"
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
    weight_decay: Number | Callable = DECAY,
    weight_decay_mask: PyTree = None,
    learning_rate_multipliers: PyTree = None,
    norm_control: Literal["none", "hyperball"] = "none",
    row_norms: Literal["keep"] | Any = None,
    adam_learning_rate: Number | Callable | None = None,
    adam_b1: Number = 0.9,
    adam_b2: Number = 0.95,
    adam_eps: Number = 1e-8,
    adam_weight_decay: Number | Callable | None = None,
    mu_dtype: Dtype | None = None,
    matrix_dims: DimsTree = None,
    shardings: PyTree = None,
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
    _check_direction(direction)
    hyperball = norm_control == "hyperball"
    keep = False
    if hyperball:
        if adam_learning_rate is None:
            raise TypeError(NEEDS_ADAM_LEARNING_RATE)
        keep = keeps_norms(row_norms)
        check_relative_rate(learning_rate, keep)
    elif row_norms is not None:
        raise ValueError('row_norms has no effect without norm_control="hyperball"')
    adam = optax.scale_by_adam(adam_b1, adam_b2, adam_eps, mu_dtype=mu_dtype)
    complete = MatricesAndAdamW(
        direction=direction,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
        learning_rate_multipliers=learning_rate_multipliers,
        hyperball=hyperball,
        keep_norms=keep,
        row_norms=row_norms,
        adam=adam,
        adam_learning_rate=adam_learning_rate,
        adam_weight_decay=adam_weight_decay,
        matrix_dims=matrix_dims,
        shardings=without_devices(shardings),
    )
    return CompleteOptimizer(complete.init, complete.update)


def _check_direction(direction: object) -> None:
    """Raise a TypeError for what returns no direction when called with the axes."""
    if callable(direction):
        # Called once without axes, so that wrong options fail at construction.
        made = direction(matrix_dims=None)
        if isinstance(made, CompleteOptimizer):
            # Two learning rates, with two minus signs, would go uphill.
            raise TypeError(
                "direction returns a complete optimizer, with a learning rate of its"
                " own: pass its direction, such as scale_by_muon"
            )
        if isinstance(made, optax.GradientTransformation):
            return
    raise TypeError(
        "direction must be a function that returns an optax.GradientTransformation"
        " when called with matrix_dims=, such as scale_by_muon or"
        f" functools.partial(scale_by_muon, nesterov=False); got {direction!r}"
    )


class ParameterOptions(NamedTuple):
    """What the options that are trees, or functions of parameters, say of each.

    Attributes:
        specs: from ``shardings``, in the order of the parameters; None is unknown.
        decays: from ``weight_decay_mask``, in the order of the parameters.
        multipliers: from ``learning_rate_multipliers``, by path; None is one for all.
        row_norms: from ``row_norms``, by path; none without Hyperball.
    """

    specs: list[PartitionSpec] | None
    decays: list[bool]
    multipliers: dict[str, Number] | None
    row_norms: dict[str, Number]

    def are_static(self) -> bool:
        """Return whether no number is an array, which may belong to one trace."""
        entries = [*self.row_norms.values()]
        if self.multipliers is not None:
            entries += self.multipliers.values()
        return not any(isinstance(x, jax.Array | np.ndarray) for x in entries)


class Known(NamedTuple):
    """What is known of parameters of one form.

    Attributes:
        assignment: their groups.
        state: a tree like the state of the optimizer, of ``jax.ShapeDtypeStruct``.
    """

    assignment: Assignment
    state: optax.OptState


class Built(NamedTuple):
    """The transformation of both groups, and the options that it was built with."""

    options: ParameterOptions
    transformation: optax.GradientTransformationExtraArgs


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MatricesAndAdamW:
    """An optimizer of two groups: a direction for matrices, AdamW for the rest.

    ``init`` and ``update`` are those of an optax transformation. The groups, and the
    transformation of both, depend on the parameters. They are kept by the form of the
    parameters: structure, shapes and dtypes (see ``_form``).

    Attributes:
        direction: the direction of matrices with the axes ``matrix_dims=``.
        hyperball: whether matrices are under Hyperball.
        keep_norms: whether Hyperball keeps the norms that matrices have.
        adam: the direction of the AdamW group.
        known: what is known of parameters, by their form.
        built: the transformation of parameters, by their form.
        directions: the direction of matrices, by the assignment.

    All other fields are the options of ``with_adamw``.
    """

    direction: Callable[..., optax.GradientTransformation]
    learning_rate: Rate
    weight_decay: Rate
    weight_decay_mask: PyTree
    learning_rate_multipliers: PyTree
    hyperball: bool
    keep_norms: bool
    row_norms: PyTree
    adam: optax.GradientTransformation
    adam_learning_rate: Rate | None
    adam_weight_decay: Rate | None
    matrix_dims: DimsTree
    shardings: PyTree
    known: dict[Hashable, Known] = dataclasses.field(default_factory=dict)
    built: dict[Hashable, Built] = dataclasses.field(default_factory=dict)
    directions: dict[Hashable, optax.GradientTransformation] = dataclasses.field(
        default_factory=dict
    )

    def init(self, params: optax.Params) -> optax.OptState:
        """Return the state of new parameters, placed as they are."""
        assignment = self.assign(params)
        norms_by_role = self.hyperball and self.row_norms is None
        for caution in cautions(assignment, params, norms_by_role):
            warn_user(caution)
        form = _form(params)
        # What was built had the groups of an earlier `init`. These may be others:
        # `matrix_dims` may be a function.
        self.built.pop(form, None)
        transformation = self.transformation_of(form, params, assignment)
        # The state is like these: moments of half-precision parameters are float32.
        weights = jax.tree.map(at_least_float32, params)
        state = transformation.init(weights)
        self.known[form] = Known(assignment, _abstract(state))
        return place_state(transformation, state, weights)

    def update(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        """Return the steps of the parameters, in their dtypes, and the new state."""
        if "matrix_dims" in extra_args:  # from a direction, through a wrapper of optax
            refuse_complete_optimizer()
        if params is None:
            raise ValueError(f"this optimizer needs the parameters: {PASS_PARAMS}")
        updates = _like("gradients", updates, params, ARGUMENTS)
        weights = jax.tree.map(at_least_float32, params)
        form = _form(params)
        if form not in self.known:  # a checkpoint is restored without `init`
            self.known[form] = self.known_of(form, params, weights)
        known = self.known[form]
        state = _like("state", state, known.state, CREATOR)
        # Placed before they are converted: float32 has more bytes to communicate.
        arrays = jax.tree.map(jnp.asarray, updates)
        placed = jax.tree.map(sharded_like, arrays, params)
        gradients = jax.tree.map(at_least_float32, placed)
        transformation = self.transformation_of(form, params, known.assignment)
        steps, state = transformation.update(gradients, state, weights, **extra_args)
        return optax.tree.cast_like(steps, params), state

    def assign(self, params: optax.Params) -> Assignment:
        """Return the group of every parameter."""
        for path, leaf in leaves(params).items():
            check_dtype_of(path, leaf.dtype)
        return assign(params, self.matrix_dims)

    def known_of(
        self, form: Hashable, params: optax.Params, weights: optax.Params
    ) -> Known:
        """Return the groups and the form of the state, of which nothing is computed."""
        assignment = self.assign(params)
        transformation = self.transformation_of(form, params, assignment)
        return Known(assignment, jax.eval_shape(transformation.init, weights))

    def transformation_of(
        self, form: Hashable, params: optax.Params, assignment: Assignment
    ) -> optax.GradientTransformationExtraArgs:
        """Return the transformation of both groups: the kept one, if it still holds.

        Options may be functions of the parameters, so they are evaluated every time.
        """
        options = self.options_of(params, assignment)
        if not options.are_static():
            # Not kept: an array may be a tracer, which must not outlive its trace.
            return self.build(params, assignment, options)
        kept = self.built.get(form)
        if kept is None or kept.options != options:
            kept = Built(options, self.build(params, assignment, options))
            self.built[form] = kept
        return kept.transformation

    def options_of(
        self, params: optax.Params, assignment: Assignment
    ) -> ParameterOptions:
        """Return what the options that are trees say of every parameter."""
        specs = None
        if self.shardings is not None:
            specs = specs_from(list(assignment), params, self.shardings)
        decays = [True] * len(assignment)
        if self.weight_decay_mask is not None:
            decays = _bools("weight_decay_mask", self.weight_decay_mask, params)
        multipliers = None
        times = self.learning_rate_multipliers
        if times is not None:
            each = numbers("learning_rate_multipliers", times, params)
            multipliers = dict(zip(assignment, each, strict=True))
        row_norms = {}
        if self.hyperball:
            row_norms = row_norms_by_path(self.row_norms, params, assignment)
        return ParameterOptions(specs, decays, multipliers, row_norms)

    def build(
        self, params: optax.Params, assignment: Assignment, options: ParameterOptions
    ) -> optax.GradientTransformationExtraArgs:
        """Return the transformation of both groups, with these options."""
        if options.specs is not None:
            assignment = _with_shardings(assignment, options.specs)
        labels = _entry_per_box(params, map(_group, assignment.values()))
        # Also where everything decays: the state is the same with and without a mask,
        # and with and without multipliers, so both may change at a restart.
        mask = _entry_per_box(params, options.decays)
        multiply = _multiplication(assignment, options.multipliers)
        decay = functools.partial(optax.add_decayed_weights, mask=lambda _: mask)
        parts: dict[Hashable, optax.GradientTransformation] = {
            "matrix": self.matrix_group(assignment, options, multiply, decay),
            "adamw": self.adamw_group(multiply, decay),
        }
        # The labels and the mask are functions, because a tree of them may be callable,
        # such as an Equinox module.
        return optax.partition(parts, lambda _: labels)

    def matrix_group(
        self,
        assignment: Assignment,
        options: ParameterOptions,
        multiply: optax.GradientTransformation,
        decay: Callable[[Rate], optax.GradientTransformation],
    ) -> optax.GradientTransformation:
        """Return the transformation of matrices."""
        direction = self.direction_of(assignment)
        if not self.hyperball:
            # Weight decay follows the multipliers, which do not change it.
            step = optax.scale_by_learning_rate(self.learning_rate)
            return optax.chain(direction, multiply, decay(self.weight_decay), step)
        # Without weight decay: the norm is set at every step.
        step = constrain_norms(
            self.learning_rate,
            # From the complete tree: the transformation sees only matrices, but the
            # norms depend on the width and on all layers.
            row_norms=lambda _: options.row_norms,
            keep=self.keep_norms,
            multipliers=options.multipliers,
            matrix_dims=assignment,
        )
        return optax.chain(direction, step)

    def adamw_group(
        self,
        multiply: optax.GradientTransformation,
        decay: Callable[[Rate], optax.GradientTransformation],
    ) -> optax.GradientTransformation:
        """Return the transformation of all other parameters."""
        learning_rate = self.adam_learning_rate
        if learning_rate is None:
            learning_rate = self.learning_rate
        weight_decay = self.adam_weight_decay
        if weight_decay is None:
            weight_decay = self.weight_decay
        step = optax.scale_by_learning_rate(learning_rate)
        return optax.chain(self.adam, multiply, decay(weight_decay), step)

    def direction_of(self, assignment: Assignment) -> optax.GradientTransformation:
        """Return the direction of matrices, the same one in all updates."""
        specs = tuple(assignment.values())
        if specs not in self.directions:
            self.directions[specs] = self.direction(matrix_dims=assignment)
        return self.directions[specs]


def _bools(name: str, given: PyTree, params: optax.Params) -> list[bool]:
    """Return an option that is a tree of bools, as a list with one per parameter."""
    tree = whole_tree(name, given, params, (bool, np.bool_), "bools")
    return jax.tree.leaves(tree)


def _group(spec: ParamSpec) -> str:
    """Return the group of a parameter."""
    if spec.dims is None:
        return "adamw"
    return "matrix"


def _with_shardings(assignment: Assignment, specs: list[PartitionSpec]) -> Assignment:
    """Return an assignment that has the sharding of every parameter."""
    pairs = zip(assignment.values(), specs, strict=True)
    return Assignment(
        (spec.path, spec._replace(sharding=sharding)) for spec, sharding in pairs
    )


def _entry_per_box(params: optax.Params, entries: Iterable[Any]) -> PyTree:
    """Return a tree like the parameters, with these entries.

    A box of one array becomes its entry, so that optax masks the box: nnx.eval_shape
    shards every Variable, also one that is empty.
    """
    tree = jax.tree.structure(params).unflatten(entries)
    return jax.tree.map(_unboxed, tree, is_leaf=is_box)


def _unboxed(box: PyTree) -> PyTree:
    """Return the entry of a box that has one; else the tree itself."""
    entries = jax.tree.leaves(box)
    if len(entries) == 1:
        return entries[0]
    return box


def _multiplication(
    assignment: Assignment, multipliers: dict[str, Number] | None
) -> optax.GradientTransformation:
    """Return what multiplies the update of every parameter by its number."""
    if multipliers is None:
        return optax.identity()

    def multiply(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        arrays, treedef = jax.tree.flatten(updates)
        # Those of one group.
        paths = assign(params, assignment)
        pairs = zip(paths, arrays, strict=True)
        return treedef.unflatten([multipliers[path] * u for path, u in pairs])

    return optax.stateless(multiply)


def _form(tree: PyTree) -> Hashable:
    """Return the structure, shapes and dtypes of a tree."""
    arrays, treedef = jax.tree.flatten(tree)
    # A Python number has no dtype.
    kinds = [(jnp.shape(x), getattr(x, "dtype", type(x))) for x in arrays]
    return treedef, tuple(kinds)


def _abstract(tree: PyTree) -> PyTree:
    """Return a tree of the shapes and dtypes of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _like(what: str, given: PyTree, wanted: PyTree, hint: str) -> PyTree:
    """Return the arrays of a tree in the structure of another.

    A checkpoint may have other containers of equal names.

    Raises:
        ValueError: at the first array that only one of the trees has, or of another
            shape.
    """
    here = _by_path(given)
    there = _by_path(wanted)
    for path in here | there:
        in_both = path in here and path in there
        if not in_both or np.shape(here[path]) != np.shape(there[path]):
            own = _shape_at(path, here)
            expected = _shape_at(path, there)
            raise ValueError(f"{what}: {path!r} has {own}, expected {expected}. {hint}")
    return jax.tree.structure(wanted).unflatten([here[path] for path in there])


def _by_path(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a tree by path."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): x
        for path, x in jax.tree.leaves_with_path(tree)
    }


def _shape_at(path: str, arrays: dict[str, Any]) -> str:
    """Return the shape of an array in words."""
    if path not in arrays:
        return "nothing"
    return f"shape {np.shape(arrays[path])}"


# The parts of a complete optimizer's docstring, from those of its direction.
_COMPLETE = {
    "": """{text}

Hidden matrices use ``scale_by_{name}``, everything else uses AdamW: ``W <- W - lr
(direction + wd W)``.""",
    "Args": """    learning_rate: number or schedule.
{args}""",
    "Returns": "    The complete optimizer; its state is that of ``optax.partition``.",
    "Raises": """    TypeError: if an option does not exist or has the wrong type.
    ValueError: if a number is out of range, or no rule covers a parameter; see
        ``with_adamw``.""",
    "Example": """    >>> import jax.numpy as jnp, normpre_optax as npo
    >>> tx = npo.{name}({example})
    >>> params = {{"dense": {{"kernel": jnp.eye(4, 8), "bias": jnp.ones(8)}}}}
    >>> updates, state = tx.update(params, tx.init(params), params)""",
}
_HYPERBALL = _COMPLETE | {
    "": """{text}

Hidden matrices use ``scale_by_{name}`` and ``hyperball``, ``W <- R N(N(W) - lr N(D))``:
the first update sets the norm ``R`` of every matrix, so the scale of the initialization
only affects the first gradient. Everything else uses AdamW. It is for training from
scratch. ``row_norms="keep"`` keeps the norms of trained weights.""",
    "Args": """    learning_rate: of hidden matrices: size of a step relative to the
        weights, number or schedule.
        ``learning_rate_by_length(steps)`` is a good peak.
    adam_learning_rate: of the AdamW group, number or schedule: what you use with AdamW.
{args}
    adam_weight_decay: weight decay of the AdamW group; None means 0.1.""",
}


def complete(
    direction: Callable[..., optax.GradientTransformationExtraArgs],
    example: str = "1e-3",
    hyperball: bool = False,
) -> Callable[..., optax.GradientTransformationExtraArgs]:
    """Return the complete optimizer ``x`` of a direction ``scale_by_x``.

    ``x(learning_rate, ...)`` has the options of the direction and of ``with_adamw``.
    Its docstring is that of the direction, with their descriptions.

    Args:
        direction: function that returns the direction.
        example: arguments in the docstring's example.
        hyperball: whether the optimizer is always under Hyperball. It then requires
            ``adam_learning_rate``.
    """
    own = inspect.signature(direction).parameters
    added = _options_of_with_adamw(hyperball)
    fixed = {}
    if hyperball:
        fixed = {"norm_control": "hyperball", "adam_weight_decay": DECAY}

    def make(**options: Any) -> optax.GradientTransformationExtraArgs:
        if options.get("norm_control") == "hyperball":
            _refuse_a_size(options, own)
        of_direction = {k: x for k, x in options.items() if k in own}
        # The axes are those of the complete tree: with_adamw passes them.
        of_direction.pop("matrix_dims", None)
        of_with_adamw = {k: x for k, x in options.items() if k in added}
        partial = functools.partial(direction, **of_direction)
        return with_adamw(partial, **(fixed | of_with_adamw))

    name = direction.__name__.removeprefix("scale_by_")
    make.__name__ = name
    make.__qualname__ = name
    make.__module__ = direction.__module__
    make.__doc__ = _complete_docstring(name, direction.__doc__, example, hyperball)
    return checked(make, _complete_signature(own, added))


def _options_of_with_adamw(hyperball: bool) -> dict[str, inspect.Parameter]:
    """Return the options that ``with_adamw`` adds to those of a direction."""
    options = dict(inspect.signature(with_adamw).parameters)
    del options["direction"]
    required = ["learning_rate"]
    if hyperball:
        required.append("adam_learning_rate")
        del options["norm_control"]
        del options["weight_decay"]
        decay = options["adam_weight_decay"]
        options["adam_weight_decay"] = decay.replace(default=DECAY)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for name in required:
        required_option = options[name].replace(
            kind=kind, default=inspect.Parameter.empty
        )
        options[name] = required_option
    return options


def _complete_signature(
    own: Mapping[str, inspect.Parameter], added: Mapping[str, inspect.Parameter]
) -> inspect.Signature:
    """Return the signature of a complete optimizer.

    The order is: learning rates, options of the direction, all others.
    """
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    rates = [p for p in added.values() if p.kind != keyword_only]
    others = [p for p in added.values() if p.kind == keyword_only and p.name not in own]
    return inspect.Signature([*rates, *own.values(), *others])


def _refuse_a_size(
    options: dict[str, Any], own: Mapping[str, inspect.Parameter]
) -> None:
    """Raise a ValueError for an option of the step's size, which Hyperball sets."""
    for option in {"rms", "convention"} & own.keys() & options.keys():
        value = options[option]
        # optax.inject_hyperparams passes defaults too, as arrays if they are numbers.
        if not isinstance(value, jax.Array) and value != own[option].default:
            raise ValueError(
                f'{option} has no effect with norm_control="hyperball", which sets the'
                " size of steps"
            )


def _complete_docstring(
    name: str, doc: str | None, example: str, hyperball: bool
) -> str:
    """Return the docstring of a complete optimizer, from that of its direction."""
    sections = split_sections(doc)
    template = _COMPLETE
    if hyperball:
        template = _HYPERBALL
    own = {
        "name": name,
        "text": sections[""],
        "args": sections.get("Args", ""),
        "example": example,
    }
    for section, text in template.items():
        sections[section] = text.format(**own)
    return join_sections(sections)
