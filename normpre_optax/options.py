# SPDX-License-Identifier: Apache-2.0
"""Options of optimizers: their types, and errors for misspelled and invalid ones.

``option_table`` has what is known of each option.
"""

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_origin

import jax

from normpre_optax.checks import check_choice, check_numbers
from normpre_optax.deprecation import with_present_names
from normpre_optax.docstrings import describe, join_sections, split_sections
from normpre_optax.option_table import OPTIONS, Option
from normpre_optax.trees import DimsTree as DimsTree
from normpre_optax.trees import PyTree as PyTree

Number = jax.typing.ArrayLike
Coefficients = Literal["muon", "you", "polar_express"] | Sequence
# The norm that matrices are divided by before Newton-Schulz.
Norm = Literal["frobenius", "schatten"]
# The dtype of the operands of products.
Operands = Literal["narrow"] | Any
Dtype = jax.typing.DTypeLike

P = ParamSpec("P")
T = TypeVar("T")


def checked(
    factory: Callable[P, T], signature: inspect.Signature | None = None
) -> Callable[P, T]:
    """Return a factory that rejects misspelled and invalid options.

    Its docstring has the descriptions of shared options.

    Args:
        factory: function whose options are keyword-only.
        signature: the signature that ``help`` shows; None means that of the factory.

    Raises:
        TypeError: at a call with an option that does not exist, or has the wrong type.
        ValueError: at a call with a number out of range, or a choice that does not
            exist.
    """
    shown = _Signature.of(signature or inspect.signature(factory))

    @functools.wraps(factory)
    def checked_factory(*args: P.args, **kwargs: P.kwargs) -> T:
        options = _bind(factory.__name__, shown, args, kwargs)
        options = {name: _unmarked(value) for name, value in options.items()}
        check_numbers(**options)
        _check_kinds(options, shown.parameters)
        return factory(**options)  # pyright: ignore[reportCallIssue]

    sections = split_sections(factory.__doc__)
    sections["Args"] = describe(sections.get("Args", ""), shown.parameters)
    checked_factory.__doc__ = join_sections(sections)
    checked_factory.__signature__ = shown  # pyright: ignore[reportAttributeAccessIssue]
    return checked_factory


class _Signature(inspect.Signature):
    """A signature that marks the functions that are not schedules.

    ``optax.inject_hyperparams`` binds its arguments to the signature, and calls every
    function among them with the step, unless ``static_args`` has its name.
    """

    @classmethod
    def of(cls, signature: inspect.Signature) -> "_Signature":
        return cls(
            list(signature.parameters.values()),
            return_annotation=signature.return_annotation,
        )

    def bind(self, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
        bound = super().bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            if callable(value) and not _may_be_called(name, value):
                bound.arguments[name] = _NotASchedule(name, value)
        return bound


def _may_be_called(name: str, value: object) -> bool:
    """Return whether a function is a schedule, or is marked already."""
    known = OPTIONS.get(name, Option())
    return known.schedule or isinstance(value, _NotASchedule)


@dataclasses.dataclass(frozen=True)
class _NotASchedule:
    """A function that is the value of an option, and not to be called with the step."""

    option: str
    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        raise TypeError(
            f"{self.option} is not a schedule. Under optax.inject_hyperparams, pass"
            " static_args=normpre_optax.static_args(f) for its argument f"
        )


def _unmarked(value: Any) -> Any:
    if isinstance(value, _NotASchedule):
        return value.function
    return value


def _bind(
    function: str,
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[str, Any]:
    """Return the arguments of a call by name; raise a TypeError for a wrong call."""
    options = with_present_names(function, kwargs, signature.parameters, stacklevel=4)
    for name in options:
        if name not in signature.parameters:
            hint = _hint(name, signature.parameters)
            raise TypeError(f"{function}() has no option {name!r}: {hint}")
    try:
        return signature.bind(*args, **options).arguments
    except TypeError as error:
        raise TypeError(f"{function}(): {error}") from None


def _check_kinds(
    options: dict[str, Any], parameters: Mapping[str, inspect.Parameter]
) -> None:
    """Raise an error for a value that is not one of its choices, or not a bool."""
    for name, value in options.items():
        kind = parameters[name].annotation
        if get_origin(kind) is Literal:
            check_choice(name, value, get_args(kind))
        if kind is bool and not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")


def _hint(name: str, options: Iterable[str]) -> str:
    """Suggest the option that was meant."""
    known = tuple(options)
    for option in known:
        if option in OPTIONS and name in OPTIONS[option].elsewhere:
            return f"did you mean {option!r}?"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"its options are {', '.join(known)}"


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
    return frozenset(name for name, p in parameters.items() if not _is_number(p))


def _is_number(parameter: inspect.Parameter) -> bool:
    """Return whether the type of a parameter says that it is a number."""
    kind = parameter.annotation
    return kind is float or jax.Array in get_args(kind)
