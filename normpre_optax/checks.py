# SPDX-License-Identifier: Apache-2.0
"""Arguments that would silently compute something wrong: refused by name when the optimizer is constructed."""

import math
import operator
from typing import Any

import jax
import numpy as np

PASS_PARAMS = (
    "call update(grads, state, params). In an Equinox loop that is optimizer.update(grads, state, eqx.filter(model, "
    "eqx.is_inexact_array)); a loop that never passes params (brax) needs that third argument"
)
# Ranges [least, below) of numbers, by the name of the option.
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("momentum", "b2", "adam_b1", "adam_b2"), (0, 1)),
    **dict.fromkeys(
        ("learning_rate", "adam_learning_rate", "weight_decay", "adam_weight_decay", "adam_eps"), (0, math.inf)
    ),
    **dict.fromkeys(("rms", "threshold"), (1e-15, 1e15)),
}


def check_numbers(**options: Any) -> None:
    """Raise an error for options in ``RANGES`` that are not numbers, or out of range; None, schedules and arrays pass.

    Example:
        >>> from normpre_optax.checks import check_numbers
        >>> check_numbers(momentum=1.5)
        Traceback (most recent call last):
        ...
        ValueError: momentum must be in [0, 1), got 1.5
    """
    for name, value in options.items():
        if name not in RANGES or value is None or callable(value) or isinstance(value, jax.Array):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float | np.number | np.ndarray) or np.ndim(value):
            raise TypeError(f"{name} must be a number, got {value!r}")
        least, below = RANGES[name]
        if not least <= value < below:
            raise ValueError(f"{name} must be in [{least:g}, {below:g}), got {value}")


def static_int(name: str, value: Any, least: int, below: int = 2**63) -> int:
    """Return ``value`` if it is an int in [least, below) that is known when the program is traced.

    Example:
        >>> from normpre_optax.checks import static_int
        >>> static_int("rank", 32, least=1)
        32
    """
    if isinstance(value, jax.Array):
        raise TypeError(
            f"{name} determines shapes and cannot be traced, got {value}. Under optax.inject_hyperparams, pass "
            "static_args=normpre_optax.static_args(factory)"
        )
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r}") from None
    if not least <= value < below:
        raise ValueError(
            f"{name} must be at least {least}" + f" and below {below}" * (below < 2**63) + f", got {value}"
        )
    return value
