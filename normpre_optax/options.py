# SPDX-License-Identifier: Apache-2.0
"""The options that optimizers share: type, default and meaning of each, once. Recipes declare their own likewise.

A factory names the group that it takes, ``**options: Unpack[MomentumOptions]``, and ``with_options`` does the rest: it
fills in defaults, refuses what is misspelt or of the wrong type, and shows the options in the signature and the
docstring as if they had been written there. Type checkers and editors read the groups themselves.
"""

import difflib
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec, TypedDict, TypeVar, get_args, get_type_hints

import jax
import optax

from normpre_optax.transforms.checks import is_number, of_type

P = ParamSpec("P")
R = TypeVar("R")
Group = TypeVar("Group")
Number = jax.typing.ArrayLike
Rate = optax.ScalarOrSchedule
Dtype = jax.typing.DTypeLike | None
Tangent = Literal["relaxed", "bounded", "strict", "none"]
Orientation = Literal["alternating", "rows", "columns", "both"]
NormControl = Literal["none", "brake", "brake_matrix", "relax", "hold", "hold_rows", "hyperball", "row_gains"]


class Option(NamedTuple):
    """Default and meaning of an option, and the range of a number."""

    default: Any
    meaning: str
    least: float | None = None
    below: float | None = None


class LayoutOptions(TypedDict, total=False):
    """Of directions and of what finishes them: how parameters are read and kept."""

    mu_dtype: Annotated[
        Dtype,
        Option(
            None,
            "dtype in which first moments are stored, AdamW's too; None means at least float32, also for bfloat16 "
            "parameters (whose updates of about ``0.2 lr`` can fall under one unit in the last place).",
        ),
    ]
    matrix_dims: Annotated[
        Any,
        Option(
            None,
            "which parameters are matrices, and which of their axes are inputs and outputs: None (the default rule, "
            "``default_matrix_dims``); a rule ``(path, leaf) -> MatrixDims | None``; a callable ``(params) -> tree``; "
            "or a tree (or prefix) of ``MatrixDims`` and None. ``optax.contrib.MuonDimensionNumbers`` will do for "
            "``MatrixDims``. None for a leaf means AdamW.",
        ),
    ]


class ComputeOptions(TypedDict, total=False):
    """Of whatever multiplies matrices."""

    compute_dtype: Annotated[
        Dtype,
        Option(
            None,
            "dtype of the operands of all products that orthogonalise, whiten or sketch, with sums in float32; where "
            "there are none, dtype of what is normalised. None is the device's usual product: one pass in bfloat16 on "
            "a TPU, TF32 on a GPU (sketches: bfloat16), float32 on a CPU. ``jnp.float32`` is true float32 everywhere.",
        ),
    ]


class DirectionOptions(ComputeOptions, LayoutOptions, total=False):
    """Of every direction."""


class MomentumOptions(DirectionOptions, total=False):
    """Of a direction with momentum."""

    momentum: Annotated[Number, Option(0.95, "``mu`` in ``M = mu M + G``.", least=0, below=1)]


class NormPreOptions(MomentumOptions, total=False):
    """Of NormPre, whatever its spectral stage."""

    nesterov: Annotated[
        bool, Option(False, "whether the update looks one gradient ahead, ``U = G + mu M``; not in the paper.")
    ]
    tangent: Annotated[
        Tangent,
        Option(
            "relaxed",
            '``"relaxed"`` (the paper), ``"bounded"``, ``"strict"`` or ``"none"``; see ``project_to_tangent``.',
        ),
    ]
    tangent_radius: Annotated[
        Number, Option(1.0, "row length at which the relaxed radial part vanishes; 1 in the paper.")
    ]
    orientation: Annotated[
        Orientation,
        Option(
            "alternating",
            '``"alternating"`` (rows first), ``"rows"``, ``"columns"``, or ``"both"`` (rows, then columns, on every '
            "step). Rows are output neurons.",
        ),
    ]
    rms: Annotated[
        Number | None,
        Option(0.2, "root mean square of every matrix update before the learning rate, or None for no scaling."),
    ]


class NewtonSchulzOptions(ComputeOptions, total=False):
    """Of a spectral stage by Newton-Schulz."""

    ns_steps: Annotated[int | None, Option(5, "Newton-Schulz iterations; None orthogonalises exactly.", least=1)]
    ns_coefficients: Annotated[
        str | Sequence,
        Option("muon", '``"muon"``, ``"you"``, ``"polar_express"``, a triple ``(a, b, c)``, or a triple a step.'),
    ]
    divide: Annotated[
        bool,
        Option(
            True,
            "on a mesh, send every matrix whole to one device and back, balanced by their work, instead of gathering "
            "it for every product; see ``divided``.",
        ),
    ]


class NesterovOptions(MomentumOptions, total=False):
    """Of a direction with momentum that may look ahead."""

    nesterov: Annotated[
        bool, Option(True, "whether the update looks one gradient ahead, ``U = G + mu M``, or is ``M`` itself.")
    ]


class OrthogonalOptions(NewtonSchulzOptions, NesterovOptions, total=False):
    """Of Muon and of what orthogonalises as Muon does."""


class SketchOptions(ComputeOptions, total=False):
    """Of NormPre-L's spectral stage."""

    rank: Annotated[
        int | float,
        Option(
            32,
            "spectral budget r: how many modes of a matrix may be clipped; below one, the share of its shorter side.",
        ),
    ]
    oversample: Annotated[int, Option(8, "o: extra directions of the sketch.", least=0)]
    power_iterations: Annotated[int, Option(1, "p: passes that sharpen the sketch.", least=0)]
    method: Annotated[
        Literal["sketch", "products", "exact"],
        Option(
            "sketch",
            '``"sketch"`` (the paper: thin products, eigenproblems of side r + o), ``"products"`` (products alone, '
            'which clip all r + o modes) or ``"exact"`` (an eigendecomposition of the shorter side).',
        ),
    ]
    seed: Annotated[int, Option(0, "of the sketch's draws.", least=0, below=2**32)]
    warm_start: Annotated[
        bool,
        Option(
            False,
            "start each sketch from the modes of the step before, and ``oversample`` >= 1 fresh directions. With "
            "``power_iterations=0`` it is as close to exact clipping as the default, in three products with the matrix "
            "instead of five; a departure from the paper, and ``rank`` rows more of state a matrix.",
        ),
    ]
    threshold: Annotated[
        Literal["mean"] | Number,
        Option(
            1.0,
            'to what singular values are clipped: 1 (the paper), another number, or ``"mean"``, the root mean square '
            "of all.",
        ),
    ]


class RestOptions(LayoutOptions, total=False):
    """Of finished optimizers beside their direction: decay, and AdamW for what is no matrix."""

    weight_decay: Annotated[
        Rate, Option(0.1, "decoupled, multiplied by the learning rate; number or schedule.", least=0)
    ]
    weight_decay_mask: Annotated[
        Any,
        Option(
            None,
            "tree of bools, or a callable ``(params) -> tree``, on the whole tree of parameters; None decays "
            "everything, ``no_gains_or_biases`` what its name says.",
        ),
    ]
    rate_multipliers: Annotated[
        Any,
        Option(
            None,
            "how many times its learning rate a parameter has: a tree of numbers, or a callable ``(params) -> tree``, "
            "on the whole tree (``rates_by_width``); decay stays ``lr wd``. None is 1 for all.",
        ),
    ]
    cautious: Annotated[
        bool, Option(False, "decay only entries that the update before decay would bring nearer to zero.")
    ]
    norm_control: Annotated[
        NormControl | Callable[..., optax.GradientTransformation],
        Option(
            "none",
            'what rules the lengths of matrices, after everything else: ``"brake"`` (rows), ``"brake_matrix"``, '
            '``"relax"`` (``brake_radially`` by the tangent\'s factor ``1 - r^2``), ``"hold"``, ``"hold_rows"``, '
            '``"hyperball"``, ``"row_gains"``; or a '
            "function that is called with ``matrix_dims=`` and makes a transformation of finished steps. What is held "
            "does not decay.",
        ),
    ]
    adam_learning_rate: Annotated[Rate | None, Option(None, "AdamW's, if it is to differ.", least=0)]
    adam_b1: Annotated[Number, Option(0.9, "AdamW's first decay rate.", least=0, below=1)]
    adam_b2: Annotated[Number, Option(0.95, "AdamW's second decay rate.", least=0, below=1)]
    adam_eps: Annotated[Number, Option(1e-8, "AdamW's epsilon.", least=0)]
    adam_weight_decay: Annotated[Rate | None, Option(None, "AdamW's, if it is to differ.", least=0)]
    shardings: Annotated[
        Any,
        Option(
            None,
            "where the parameters live, which only a mesh with Auto axes does not tell by itself: a tree like the "
            "parameters (or prefix) of ``NamedSharding`` or ``PartitionSpec``, or a callable ``(params) -> tree``.",
        ),
    ]


class NesterovOptimizer(NesterovOptions, RestOptions, total=False):
    """Of a finished optimizer with momentum that may look ahead."""


class OrthogonalOptimizer(OrthogonalOptions, RestOptions, total=False):
    """Of Muon and its relatives, finished."""


class NormPreOptimizer(NormPreOptions, RestOptions, total=False):
    """Of NormPre, finished, whatever its spectral stage."""


class NormPreGOptions(NewtonSchulzOptions, NormPreOptions, total=False):
    """Of ``scale_by_normpre_g``."""


class NormPreGOptimizer(NormPreGOptions, RestOptions, total=False):
    """Of ``normpre_g``."""


class NormPreLOptions(SketchOptions, NormPreOptions, total=False):
    """Of ``scale_by_normpre_l``."""

    divide: Annotated[
        bool,
        Option(
            False,
            "on a mesh, send every matrix whole to one device and back. The sketch's products with a sharded matrix "
            "need only thin pieces of it, so that is rarely worth it; not with ``warm_start``.",
        ),
    ]


class NormPreLOptimizer(NormPreLOptions, RestOptions, total=False):
    """Of ``normpre_l``."""


def with_options(factory: Callable[P, R]) -> Callable[P, R]:
    """Complete a factory that takes a group of options: defaults, signature, docstring, and errors by name.

    Every argument is held against its type: one of a ``Literal``'s choices, a bool, an int that is known when the
    program is traced, a dtype, a number in its range.

    Args:
        factory: a function that ends in ``**options: Unpack[...]``, of a group such as ``MomentumOptions``. What its
            own docstring says of an option goes before the group's text.

    Returns:
        The factory. It is called with all options of the group, the ones not given by their defaults.

    Example:
        >>> from typing import Unpack
        >>> from normpre_optax import options, scale_by_muon
        >>> @options.with_options
        ... def scale_by_my_muon(**given: Unpack[options.OrthogonalOptions]):
        ...     return scale_by_muon(**given | {"nesterov": False})
        >>> scale_by_my_muon(momentun=0.9)
        Traceback (most recent call last):
        ...
        TypeError: scale_by_my_muon() has no option 'momentun': did you mean 'momentum'?
    """
    signature = inspect.signature(factory, eval_str=True)
    *own, rest = signature.parameters.values()
    group = next(iter(get_args(rest.annotation)), None)
    hints = {} if group is None else get_type_hints(group, include_extras=True)
    shared = {name: get_args(hint) for name, hint in hints.items()}
    if rest.kind is not inspect.Parameter.VAR_KEYWORD or not shared or not all(map(_is_option, shared.values())):
        raise TypeError(
            f"{factory.__name__}() must end in **options: Unpack[G], where G is a TypedDict of "
            "Annotated[type, Option(default, meaning)]"
        )
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=kind)
        for name, (kind, option) in shared.items()
        if name not in {p.name for p in own}
    ]
    signature = signature.replace(parameters=[*own, *added])

    @functools.wraps(factory)
    def complete(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs.keys() - signature.parameters.keys():
            raise TypeError(f"{factory.__name__}() has no option {name!r}: {_hint(name, signature.parameters)}")
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{factory.__name__}(): {error}") from None
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            _, option = shared.get(name, (None, _OWN.get(name)))
            limits = {} if option is None else {"least": option.least, "below": option.below}
            of_type(name, value, signature.parameters[name].annotation, **limits)
        return factory(*bound.args, **bound.kwargs)

    complete.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
    complete.__doc__ = _documented(factory.__doc__, {p.name: shared[p.name][1].meaning for p in added})
    return complete


_OWN = {"learning_rate": Option(None, "number or schedule", least=0)}
# How optax's and torch's Muon, Keller Jordan's and AdamW call what has another name here.
_ELSEWHERE = {
    **dict.fromkeys(("lr", "eta", "step_size"), "learning_rate"),
    **dict.fromkeys(("beta", "mu"), "momentum"),
    **dict.fromkeys(("adam_lr", "adamw_lr"), "adam_learning_rate"),
    **dict.fromkeys(("muon_weight_dimension_numbers", "weight_dimension_numbers"), "matrix_dims"),
    **dict.fromkeys(("consistent_rms", "adjust_lr_fn"), "convention"),
    **dict.fromkeys(("b1", "b2", "eps"), "adam_{}"),
    "betas": "adam_b1",
    **{"ns_coeffs": "ns_coefficients", "wd": "weight_decay", "mask": "weight_decay_mask", "dtype": "compute_dtype"},
}


def _hint(name: str, names: Iterable[str]) -> str:
    """What was meant by an option that is none."""
    known = tuple(names)
    near = [_ELSEWHERE.get(name, "").format(name), *difflib.get_close_matches(name, known, n=1, cutoff=0.8)]
    meant = next((found for found in near if found in known), None)
    return f"did you mean {meant!r}?" if meant else f"it takes {', '.join(known)}"


def _is_option(parts: tuple) -> bool:
    return len(parts) == 2 and isinstance(parts[1], Option)


def _documented(doc: str | None, meanings: Mapping[str, str]) -> str | None:
    """A docstring with the options that it does not name itself at the end of its ``Args:``."""
    if doc is None:
        return None
    head, returns, tail = inspect.cleandoc(doc).partition("\nReturns:")
    lines = [
        textwrap.fill(f"{name}: {text}", 120, initial_indent=" " * 4, subsequent_indent=" " * 8)
        for name, text in meanings.items()
        if f"\n    {name}: " not in head
    ]
    start = head.rstrip() if "\nArgs:\n" in head else f"{head.rstrip()}\n\nArgs:"
    return "\n".join([start, *lines, returns + tail])


def pick(group: type[Group], options: Mapping[str, Any]) -> Group:
    """Those of some options that belong to a group.

    Args:
        group: such as ``RestOptions``.
        options: by name.

    Returns:
        A dictionary of the group.

    Example:
        >>> from normpre_optax import options
        >>> options.pick(options.RestOptions, {"momentum": 0.9, "weight_decay": 0.0})
        {'weight_decay': 0.0}
    """
    return group(**{name: value for name, value in options.items() if name in group.__annotations__})


def static_args(factory: Callable[..., Any]) -> frozenset[str]:
    """The arguments of a factory that ``optax.inject_hyperparams`` must not trace: all that are no numbers.

    Args:
        factory: an optimizer or a direction of this library, or one of yours whose arguments have types.

    Returns:
        Their names, for ``static_args=`` of ``optax.inject_hyperparams``.

    Example:
        >>> import optax
        >>> from normpre_optax import muon, static_args
        >>> tx = optax.inject_hyperparams(muon, static_args=static_args(muon))(learning_rate=1e-3)
    """
    arguments = inspect.signature(factory, eval_str=True).parameters.values()
    return frozenset(p.name for p in arguments if not is_number(p.annotation))
