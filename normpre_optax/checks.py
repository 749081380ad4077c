# SPDX-License-Identifier: Apache-2.0
"""Arguments that would silently compute something wrong: refused by name when the
optimizer is constructed.
"""

import contextlib
import math
import reprlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

PASS_PARAMS = (
    "call update(grads, state, params). In an Equinox loop that is"
    " optimizer.update(grads, state, eqx.filter(model, eqx.is_inexact_array)); a loop"
    " that never passes params (brax) needs that third argument"
)
# Numbers that may be a schedule.
SCHEDULES = {
    "learning_rate",
    "adam_learning_rate",
    "weight_decay",
    "adam_weight_decay",
    "slow_weight",
}
# Ranges [least, below) of numbers, by the name of the option.
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("momentum", "b2", "adam_b1", "adam_b2"), (0, 1)),
    **dict.fromkeys(SCHEDULES | {"eps"}, (0, math.inf)),
    **dict.fromkeys(("strength", "metric_strength"), (0, 10)),
    **dict.fromkeys(
        ("fast", "slow", "slow_momentum", "slow_weight", "gradient_share", "decay"),
        (0, 1),
    ),
    "clip": (1, math.inf),
    **dict.fromkeys(("rms", "relative_threshold", "adam_eps"), (1e-15, 1e15)),
}
TREES = {
    "row_norms": (1e-15, 1e15),
    "learning_rate_multipliers": (0, math.inf),
}  # of trees of numbers


# Numbers that may be None.
OPTIONAL = {"rms", "relative_threshold", "adam_learning_rate", "adam_weight_decay"}


def check_numbers(**options: Any) -> None:
    """Raise an error for options in ``RANGES`` that are not numbers or out of range,
    and for dtypes that are none.

    A schedule is checked at step 0.

    Example:
        >>> from normpre_optax.checks import check_numbers
        >>> check_numbers(momentum=1.5)
        Traceback (most recent call last):
        ...
        ValueError: momentum must be in [0, 1), got 1.5
    """
    for name, value in options.items():
        if (
            name in ("compute_dtype", "mu_dtype", "accumulator_dtype")
            and value is not None
        ):
            _check_dtype(name, value)
        if name not in RANGES or (value is None and name in OPTIONAL):
            continue
        scheduled = callable(value) and name in SCHEDULES
        number = _at_step_0(name, value) if scheduled else value
        hint = " (optax.inject_hyperparams makes a schedule of it)" * callable(number)
        check_number(name + "(0)" * scheduled, number, *RANGES[name], hint)


def _at_step_0(name: str, schedule: Any) -> Any:
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


def check_function(name: str, value: Any, form: str) -> None:
    """Raise a TypeError for what is not a function; ``form`` says of what."""
    if not callable(value):
        raise TypeError(f"{name} must be a function {form}, got {value!r}")


def check_dtype_of(path: str, dtype: Any) -> None:
    """Raise a TypeError for a parameter whose dtype has no gradient."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        fix = (
            "leave it out of the parameters; for an Equinox model: eqx.filter(model,"
            " eqx.is_inexact_array)"
        )
        raise TypeError(
            f"parameter {path!r} has dtype {dtype}, which has no gradient: {fix}"
        )


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Raise a ValueError for a value that is not one of the choices; no array is."""
    array = hasattr(value, "shape")
    if array or value not in choices:
        fix = " (under optax.inject_hyperparams, add it to static_args)" * array
        raise ValueError(f"{name}={value!r} is not one of {tuple(choices)}{fix}")


def check_number(
    name: str, value: Any, least: float, below: float, hint: str = ""
) -> None:
    """Raise an error for a value that is not one number in [least, below); a traced
    number may be any.
    """
    kinds = int | float | np.number | np.ndarray | jax.Array
    if (
        not isinstance(value, kinds)
        or np.ndim(value)
        or jnp.result_type(value).kind in "bc"
    ):
        raise TypeError(f"{name} must be a number{hint}, got {reprlib.repr(value)}")
    if (
        not isinstance(value, Tracer)
        and not least <= np.asarray(value, np.float32) < below
    ):  # as an update rounds it
        raise ValueError(f"{name} must be in [{least:g}, {below:g}), got {value}")


def _check_dtype(name: str, value: Any) -> None:
    kinds = ("bfloat16", "float32", "float64") + ("narrow",) * (name == "compute_dtype")
    with contextlib.suppress(TypeError):
        array = isinstance(value, np.generic | np.ndarray | jax.Array)
        if (
            not array
            and ("narrow" if value == "narrow" else jnp.dtype(value).name) in kinds
        ):
            return
    raise TypeError(f"{name} must be {', '.join(kinds)} or None, got {value!r}")


def static_int(name: str, value: Any, least: int, below: int = 2**31) -> int:
    """Return ``value`` if it is an int in [least, below) that is known when the program
    is traced.

    Example:
        >>> from normpre_optax.checks import static_int
        >>> static_int("rank", 32, least=1)
        32
    """
    if isinstance(value, jax.Array):
        fix = (
            "Under optax.inject_hyperparams, pass"
            " static_args=normpre_optax.static_args(factory)"
        )
        raise TypeError(
            f"{name} must be a Python int, as shapes depend on it; got {value}. {fix}"
        )
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if not least <= value < below:
        raise ValueError(
            f"{name} must be at least {least} and below {below}, got {value}"
        )
    return int(value)
