# SPDX-License-Identifier: Apache-2.0
"""Refuse arguments that would silently compute something wrong.

Errors name the argument, at the call that constructs the optimizer. Warnings name the
user's line.
"""

import contextlib
import reprlib
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from normpre_optax.option_table import OPTIONS, Option

PASS_PARAMS = (
    "call update(grads, state, params). In an Equinox loop that is"
    " optimizer.update(grads, state, eqx.filter(model, eqx.is_inexact_array)); a loop"
    " that never passes params (brax) needs that third argument"
)

_PACKAGE = str(Path(__file__).parent)


def warn_user(message: str) -> None:
    """Warn at the innermost line of the stack that is outside of this package.

    The number of frames between differs: ``muon`` calls ``with_adamw``, and both can be
    called by a user.
    """
    # Level 1 is this function, level 2 its caller.
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level)


def check_numbers(**options: Any) -> None:
    """Raise an error for a number or dtype that its entry of ``OPTIONS`` excludes.

    A schedule is checked at step 0.

    Example:
        >>> from normpre_optax.checks import check_numbers
        >>> check_numbers(momentum=1.5)
        Traceback (most recent call last):
        ...
        ValueError: momentum must be in [0, 1), got 1.5
    """
    for name, value in options.items():
        known = OPTIONS.get(name, Option())
        if known.dtypes and value is not None:
            _check_dtype(name, value, known.dtypes)
        if known.interval is not None and not known.tree:
            _check_number_or_schedule(name, value, known)


def _check_number_or_schedule(name: str, value: object, known: Option) -> None:
    """Raise an error for a value that is neither a number nor an allowed schedule."""
    if value is None and known.none:
        return
    if callable(value) and known.schedule:
        check_number(f"{name}(0)", _at_step_0(name, value), name)
        return
    hint = ""
    if callable(value):
        hint = " (optax.inject_hyperparams makes a schedule of it)"
    check_number(name, value, name, hint)


def _at_step_0(name: str, schedule: Callable[[Any], Any]) -> Any:
    """Return the first value of a schedule; 0 if it fails outside a training run."""
    value = 0
    try:
        value = schedule(0)
        jax.eval_shape(schedule, jax.ShapeDtypeStruct((), jnp.int32))  # as in an update
    except OverflowError as error:
        raise ValueError(
            f"{name} is a schedule of int32 steps: write 2**31 and above as floats"
            f" ({error})"
        ) from error
    except Exception as error:  # it may need a training run
        if "positional argument" in str(error):
            raise TypeError(
                f"{name} must be a number, or a function of the step: {error}"
            ) from error
    return value


def check_function(name: str, value: object, form: str) -> None:
    """Raise a TypeError for what is not a function; ``form`` says of what."""
    if not callable(value):
        raise TypeError(f"{name} must be a function {form}, got {value!r}")


def check_dtype_of(path: str, dtype: jax.typing.DTypeLike) -> None:
    """Raise a TypeError for a parameter whose dtype has no gradient."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        fix = (
            "leave it out of the parameters; for an Equinox model: eqx.filter(model,"
            " eqx.is_inexact_array)"
        )
        raise TypeError(
            f"parameter {path!r} has dtype {dtype}, which has no gradient: {fix}"
        )


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Raise a ValueError for a value that is not one of the choices; no array is."""
    allowed = tuple(choices)
    if hasattr(value, "shape"):
        fix = " (under optax.inject_hyperparams, add it to static_args)"
        raise ValueError(f"{name}={value!r} is not one of {allowed}{fix}")
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not one of {allowed}")


def check_number(what: str, value: object, option: str, hint: str = "") -> None:
    """Raise an error for a value that is not one number in the range of an option.

    A traced number may be any.

    Args:
        what: how the error names the value.
        value: the value.
        option: name of the option in ``OPTIONS``, for the range.
        hint: what the error says besides, if the value is not a number.
    """
    interval = OPTIONS[option].interval
    assert interval is not None, option
    if not _is_number(value):
        raise TypeError(f"{what} must be a number{hint}, got {reprlib.repr(value)}")
    if isinstance(value, Tracer):
        return
    least, below = interval
    rounded = np.asarray(value, np.float32)  # as an update rounds it
    if not least <= rounded < below:
        raise ValueError(f"{what} must be in [{least:g}, {below:g}), got {value}")


def _is_number(value: object) -> bool:
    """Return whether a value is one real number, of Python, NumPy or JAX."""
    if not isinstance(value, int | float | np.number | np.ndarray | jax.Array):
        return False
    return np.ndim(value) == 0 and jnp.result_type(value).kind not in "bc"


def _check_dtype(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise a TypeError for what is not one of the dtypes with these names."""
    if _dtype_name(value) not in allowed:
        raise TypeError(f"{name} must be {', '.join(allowed)} or None, got {value!r}")


def _dtype_name(value: object) -> str | None:
    """Return the name of a dtype, "narrow" for itself, or None for anything else."""
    # A value with a dtype, such as jnp.float32(0.5), would pass as that dtype.
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return None
    if value == "narrow":
        return "narrow"
    with contextlib.suppress(TypeError):
        return jnp.dtype(value).name  # pyright: ignore
    return None


def static_int(name: str, value: object, least: int, below: int = 2**31) -> int:
    """Return an int that is known when the program is traced.

    Raises:
        TypeError: for anything else, such as a traced number.
        ValueError: for an int outside of [least, below).

    Example:
        >>> from normpre_optax.checks import static_int
        >>> static_int("rank", 32, least=1)
        32
    """
    if isinstance(value, jax.Array):
        fix = (
            "Under optax.inject_hyperparams, pass"
            " static_args=normpre_optax.static_args(f) for its argument f"
        )
        raise TypeError(
            f"{name} must be a Python int, as shapes depend on it; got an array. {fix}"
        )
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if not least <= value < below:
        raise ValueError(
            f"{name} must be at least {least} and below {below}, got {value}"
        )
    return int(value)
