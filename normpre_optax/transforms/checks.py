# SPDX-License-Identifier: Apache-2.0
"""Arguments that are refused where they are given, by name and with the way out."""

import math
import operator
import sys
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np
import optax


def static_int(name: str, value, least: int, below: int | None = None) -> int:
    """``value`` if it is an int of at least ``least`` that is known when the program is traced.

    Example:
        >>> from normpre_optax.transforms.checks import static_int
        >>> static_int("rank", 32, least=1)
        32
    """
    if isinstance(value, jax.Array):
        raise TypeError(
            f"{name} shapes the computation and cannot be traced, got {value}. Under optax.inject_hyperparams name it "
            f"in static_args: normpre_optax.static_args(factory) are the names that it must be given."
        )
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, got {value!r}")
    value = operator.index(value)
    _in_range(name, value, least, below)
    return value


def count_or_share(name: str, value) -> Callable[[int], int]:
    """How many of a whole are meant by a count, or by a share between zero and one.

    Example:
        >>> from normpre_optax.transforms.checks import count_or_share
        >>> count_or_share("rank", 32)(768), count_or_share("rank", 32)(16), count_or_share("rank", 0.25)(768)
        (32, 16, 192)
    """
    if not isinstance(value, float | np.floating):
        count = static_int(name, value, least=1)
        return lambda whole: min(count, whole)
    if not 0 < value < 1:
        raise ValueError(f"{name} must be an int, or a share between 0 and 1, got {value}")
    return lambda whole: max(1, round(value * whole))


def choice(name: str, value, allowed: tuple) -> None:
    """Refuse what is none of the choices.

    Example:
        >>> from normpre_optax.transforms.checks import choice
        >>> choice("first", "row", ("rows", "columns"))
        Traceback (most recent call last):
        ...
        ValueError: first='row' is not one of ('rows', 'columns')
    """
    if isinstance(value, jax.Array) or value not in allowed:
        traced = " (under optax.inject_hyperparams name it in static_args)" if isinstance(value, jax.Array) else ""
        raise ValueError(f"{name}={value!r} is not one of {allowed}{traced}")


def flag(name: str, value) -> None:
    """Refuse what is no bool.

    Example:
        >>> from normpre_optax.transforms.checks import flag
        >>> flag("divide", "yes")
        Traceback (most recent call last):
        ...
        TypeError: divide must be True or False, got 'yes'
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def float_dtype(name: str, dtype: jax.typing.DTypeLike | None) -> None:
    """Refuse what is no real floating-point dtype of 16 bits or more; None passes.

    Example:
        >>> from normpre_optax.transforms.checks import float_dtype
        >>> float_dtype("mu_dtype", "int8")
        Traceback (most recent call last):
        ...
        TypeError: mu_dtype must be a floating-point dtype such as jnp.bfloat16, of 16 bits or more, or None; got 'int8'
    """
    try:
        good = dtype is None or (jnp.issubdtype(jnp.dtype(dtype), jnp.floating) and jnp.finfo(dtype).bits >= 16)
    except TypeError:
        good = False
    if not good:
        raise TypeError(
            f"{name} must be a floating-point dtype such as jnp.bfloat16, of 16 bits or more, or None; got {dtype!r}"
        )


def number(name: str, value, least: float | None = None, below: float | None = None) -> None:
    """Refuse what is no number and no array of one, such as None or a string, and if it is known what is out of range.

    Example:
        >>> from normpre_optax.transforms.checks import number
        >>> number("weight_decay", None)
        Traceback (most recent call last):
        ...
        TypeError: weight_decay must be a number, got None
        >>> number("momentum", 1.5, least=0, below=1)
        Traceback (most recent call last):
        ...
        ValueError: momentum must lie in [0, 1), got 1.5
    """
    known = isinstance(value, int | float | np.number | np.ndarray)  # an array of JAX may be a tracer, or far away
    is_one = (known or isinstance(value, jax.Array)) and not np.ndim(value)
    if not (is_one and jnp.isdtype(jnp.result_type(value), ("integral", "real floating"))):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if known:
        _in_range(name, value, least, below)


def _in_range(name: str, value, least: float | None, below: float | None) -> None:
    if (least is not None and value < least) or not (below is None or value < below):
        span = f"must be at least {least}" if below is None else f"must lie in [{least}, {below})"
        raise ValueError(f"{name} {span}, got {value}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")


def is_number(kind: Any) -> bool:
    """Whether arguments of that type are numbers: float, or what may be an array; not what may be a count.

    Example:
        >>> import jax
        >>> from normpre_optax.transforms.checks import is_number
        >>> [is_number(kind) for kind in (float, jax.typing.ArrayLike, float | None, int, int | float, bool, str)]
        [True, True, True, False, False, False, False]
    """
    kinds = {kind, *get_args(kind)}
    return jax.Array in kinds or (float in kinds and int not in kinds)


def of_type(name: str, value, kind: Any, least: float | None = None, below: float | None = None) -> None:
    """Refuse an argument that is not of the type that it is declared with, or out of range.

    Args:
        name: of the argument.
        value: given for it.
        kind: its annotation: a ``Literal``, bool, int, a count or share (``int | float``), a dtype, or a number;
            if a callable belongs to it, for schedules too. Anything else is not looked at.
        least: smallest number.
        below: what numbers lie under.

    Raises:
        TypeError: if it is of another type.
        ValueError: if it is no choice of the ``Literal``, or a number out of range.

    Example:
        >>> from normpre_optax.transforms.checks import of_type
        >>> of_type("rank", 2.5, int)
        Traceback (most recent call last):
        ...
        TypeError: rank must be an int, got 2.5
    """
    kinds = get_args(kind)
    if get_origin(kind) is Literal:
        choice(name, value, kinds)
    elif kinds and get_origin(kinds[0]) is Literal:  # a name, or what else it may be
        if isinstance(value, str):
            choice(name, value, get_args(kinds[0]))
        elif get_origin(kinds[1]) is Callable:
            if not callable(value):
                raise TypeError(f"{name} must be one of {get_args(kinds[0])}, or a function; got {value!r}")
        else:
            of_type(name, value, kinds[1], least, below)
    elif kind is bool:
        flag(name, value)
    elif value is None and type(None) in kinds:
        return
    elif kind == int | float:
        count_or_share(name, value)
    elif kind is int or (int in kinds and jax.Array not in kinds):
        static_int(name, value, -sys.maxsize if least is None else int(least), None if below is None else int(below))
    elif kind == jax.typing.DTypeLike | None:
        float_dtype(name, value)
    elif is_number(kind) and not (callable(value) and any(get_origin(k) is Callable for k in kinds)):
        number(name, value, least, below)


def check_rms(rms) -> None:
    """Refuse what is no root mean square; None passes.

    Example:
        >>> from normpre_optax.transforms.checks import check_rms
        >>> check_rms(0)
        Traceback (most recent call last):
        ...
        ValueError: rms must be positive, or None for no scaling; got 0
    """
    if rms is not None:
        number("rms", rms)
    if not (rms is None or isinstance(rms, jax.Array) or rms > 0):
        raise ValueError(f"rms must be positive, or None for no scaling; got {rms}")


def transformation(name: str, value) -> None:
    """Refuse what is no optax transformation.

    Example:
        >>> from normpre_optax.transforms.checks import transformation
        >>> transformation("precondition", abs)
        Traceback (most recent call last):
        ...
        TypeError: precondition must be an optax.GradientTransformation, got <built-in function abs>; \
optax.stateless makes one of a function
    """
    if not isinstance(value, optax.GradientTransformation):
        raise TypeError(
            f"{name} must be an optax.GradientTransformation, got {value!r}; optax.stateless makes one of a function"
        )


def same_trees(updates, params) -> None:
    """Refuse gradients whose tree or shapes are not the parameters'.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.transforms.checks import same_trees
        >>> same_trees({"w": jnp.ones((3, 2))}, {"w": jnp.ones((2, 3))})
        Traceback (most recent call last):
        ...
        ValueError: the gradient of parameter 'w' has shape (3, 2), the parameter (2, 3)
    """
    gradient_shapes, shapes = (dict(_shapes(tree)) for tree in (updates, params))
    odd = sorted(set(gradient_shapes) ^ set(shapes))
    if odd:
        raise ValueError(
            f"gradients and parameters are different trees: only one of them has {odd[0]!r}. The order is "
            "update(grads, state, params)"
        )
    for path, shape in shapes.items():
        if gradient_shapes[path] != shape:
            raise ValueError(
                f"the gradient of parameter {path!r} has shape {gradient_shapes[path]}, the parameter {shape}"
            )


def _shapes(tree):
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), jnp.shape(leaf)
