# SPDX-License-Identifier: Apache-2.0
"""Options of optimizers: shared ones are described once, misspelled ones are errors."""

import difflib
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_origin

import jax

from normpre_optax.checks import check_choice, check_numbers

Number = jax.typing.ArrayLike
Coefficients = Literal["muon", "you", "polar_express"] | Sequence
Scale = Literal[
    "frobenius", "schatten"
]  # norm that matrices are divided by before Newton-Schulz
Operands = Literal["narrow"] | Any  # dtype of the operands of products

# Descriptions of shared options. An optimizer's own docstring goes first.
ARGS = {
    "Returns": (
        "    The direction, for matrices only. Its updates point uphill, like those of"
        " ``optax.scale_by_*``."
    ),
    "momentum": "``mu`` in ``M = mu M + G``.",
    "nesterov": "whether the update uses ``U = G + mu M`` instead of ``M``.",
    "ns_steps": "Newton-Schulz iterations; None orthogonalizes exactly.",
    "ns_coefficients": (
        '"muon", "you", "polar_express", a triple ``(a, b, c)``, or one triple per'
        " step."
    ),
    "ns_scale": (
        'norm that matrices are divided by before the iterations. "schatten" is closer'
        ' to the largest singular value than "frobenius"; see'
        " ``precondition_globally``."
    ),
    "compute_dtype": (
        "dtype of the operands of large products; sums are in float32. None means the"
        " platform's default for float32: one bfloat16 pass on a TPU, TF32 on a GPU"
        " (sketches: bfloat16), float32 on a CPU. ``jnp.float32`` means true float32"
        ' everywhere, and "narrow" bfloat16 on a TPU or GPU and float32 on a CPU.'
    ),
    "mu_dtype": (
        "dtype of the first moments, including AdamW's. None means float32, even for"
        " bfloat16 parameters."
    ),
    "matrix_dims": (
        "which parameters are matrices, and which of their axes are inputs and outputs:"
        " None (the default rule, ``default_matrix_dims``), a rule ``(path, leaf) ->"
        " MatrixDims | None``, a function ``(params) -> tree``, or a tree (or prefix)"
        " of ``MatrixDims`` and None. ``optax.contrib.MuonDimensionNumbers`` can"
        " replace ``MatrixDims``; None for a parameter means AdamW."
    ),
    "rms": (
        "root mean square of every matrix update before the learning rate, or None for"
        " no scaling."
    ),
    "weight_decay": (
        "decoupled weight decay, multiplied by the learning rate; number or schedule."
    ),
    "weight_decay_mask": (
        "tree of bools, or a function ``(params) -> tree``; None decays all parameters;"
        " ``decay_matrices_only`` excludes norms and biases."
    ),
    "learning_rate_multipliers": (
        "tree of numbers, or a function ``(params) -> tree``: the learning rate of each"
        " parameter is multiplied by its number (``multipliers_by_width``); its weight"
        " decay is not. None means 1. Under Hyperball, 0 keeps the direction of a"
        " matrix, but its norm is still set."
    ),
    "norm_control": (
        '"hyperball" sets the Frobenius norm of every matrix and makes the learning'
        " rate the size of a step relative to it; matrices then have no weight decay,"
        ' and ``adam_learning_rate`` must be given. "none" does nothing.'
    ),
    "row_norms": (
        "root mean square norm of the rows of matrices under Hyperball; None chooses it"
        ' by the role of the matrix, "keep" keeps the norm that every matrix has. See'
        " ``hyperball``."
    ),
    "adam_learning_rate": (
        "learning rate of the AdamW group; None means that of the matrix group."
    ),
    "adam_b1": "decay rate of AdamW's first moment.",
    "adam_b2": "decay rate of AdamW's second moment.",
    "adam_eps": "AdamW's epsilon.",
    "adam_weight_decay": (
        "weight decay of the AdamW group; None means that of the matrix group."
    ),
    "shardings": (
        "shardings of the parameters, to save communication on a mesh with Auto axes: a"
        " tree like the parameters (or prefix) of ``NamedSharding`` or"
        " ``PartitionSpec``, or a function ``(params) -> tree``."
    ),
}
# Names in optax's and torch's Muon, Keller Jordan's Muon and AdamW.
_ELSEWHERE = {
    **dict.fromkeys(("lr", "eta", "step_size"), "learning_rate"),
    **dict.fromkeys(("beta", "mu"), "momentum"),
    **dict.fromkeys(("adam_lr", "adamw_lr"), "adam_learning_rate"),
    **dict.fromkeys(
        ("muon_weight_dimension_numbers", "weight_dimension_numbers"), "matrix_dims"
    ),
    **dict.fromkeys(("consistent_rms", "adjust_lr_fn"), "convention"),
    **{
        "b1": "adam_b1",
        "b2": "adam_b2",
        "eps": "adam_eps",
        "betas": "adam_b1",
        "ns_coeffs": "ns_coefficients",
    },
    **{
        "wd": "weight_decay",
        "weight_decay": "adam_weight_decay",
        "mask": "weight_decay_mask",
    },
    "dtype": "compute_dtype",
}


P = ParamSpec("P")
T = TypeVar("T")


def checked(
    factory: Callable[P, T], signature: inspect.Signature | None = None
) -> Callable[P, T]:
    """Return a factory that rejects misspelled and invalid options, and describes
    shared options in its docstring.

    Args:
        factory: function whose options are keyword-only.
        signature: the signature that ``help`` shows; None means that of the factory.

    Raises:
        TypeError: at a call with an option that does not exist, or has the wrong type.
        ValueError: at a call with a number out of range, or a choice that does not
            exist.
    """
    signature = signature or inspect.signature(factory)
    parameters = signature.parameters

    @functools.wraps(factory)
    def complete(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs.keys() - parameters.keys():
            raise TypeError(
                f"{factory.__name__}() has no option {name!r}:"
                f" {_hint(name, parameters)}"
            )
        try:
            options = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{factory.__name__}(): {error}") from None
        check_numbers(**options)
        for name, value in options.items():
            kind = parameters[name].annotation
            if get_origin(kind) is Literal:
                check_choice(name, value, get_args(kind))
            if kind is bool and not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {value!r}")
        return factory(**options)  # pyright: ignore[reportCallIssue]

    complete.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
    complete.__doc__ = docstring(sections(factory.__doc__), parameters)
    return complete


def _hint(name: str, names: Iterable[str]) -> str:
    """Suggest the option that was meant."""
    known = tuple(names)
    near = [
        _ELSEWHERE.get(name),
        *difflib.get_close_matches(name, known, n=1, cutoff=0.8),
    ]
    meant = next((found for found in near if found in known), None)
    return (
        f"did you mean {meant!r}?" if meant else f"its options are {', '.join(known)}"
    )


def sections(doc: str | None) -> dict[str, str]:
    """Split a docstring into its text ("") and its sections ("Args", ...)."""
    parts = re.split(
        r"^(Args|Returns|Raises|Example|References):\n",
        inspect.cleandoc(doc or ""),
        flags=re.MULTILINE,
    )
    return {"": parts[0].rstrip()} | {
        name: text.rstrip() for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def docstring(found: dict[str, str], names: Iterable[str]) -> str:
    """Join sections to a docstring, with descriptions of the shared options among
    ``names``.
    """
    described = found.get("Args", "")
    lines = [
        textwrap.fill(
            f"{name}: {ARGS[name]}",
            84,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
        )
        for name in names
        if name in ARGS and not re.search(rf"^    {name}: ", described, re.MULTILINE)
    ]
    args = "\n".join(filter(None, [described.rstrip(), *lines]))
    found = {"": "", "Returns": ARGS["Returns"]} | found | {"Args": args}
    order = ("Args", "Returns", "Raises", "Example", "References")
    return "\n\n".join(
        [found[""], *(f"{name}:\n{found[name]}" for name in order if found.get(name))]
    )


def static_args(factory: Callable[..., Any]) -> frozenset[str]:
    """Return the arguments that ``optax.inject_hyperparams`` must not trace.

    They are all that are not numbers.

    Args:
        factory: an optimizer or a direction of this library.

    Returns:
        Their names, for ``static_args=`` of ``optax.inject_hyperparams``.

    Example:
        >>> import optax
        >>> from normpre_optax import muon, static_args
        >>> tx = optax.inject_hyperparams(muon, static_args=static_args(muon))(
        ...     learning_rate=1e-3
        ... )
    """
    parameters = inspect.signature(factory).parameters
    numbers = {
        name
        for name, p in parameters.items()
        if p.annotation is float or jax.Array in get_args(p.annotation)
    }
    return frozenset(parameters.keys() - numbers)
