# SPDX-License-Identifier: Apache-2.0
"""Learning rates by the length of a run, and from elsewhere: from a narrower model, or
from another Muon.
"""

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from normpre_optax.checks import (
    check_choice,
    check_number,
    check_numbers,
    static_int,
)
from normpre_optax.parameters.dims import blocks_of, matrix_shape
from normpre_optax.parameters.rules import (
    GIVEN,
    ParamSpec,
    UncoveredError,
    assign,
    default_matrix_dims,
)
from normpre_optax.parameters.tree import Leaf
from normpre_optax.parameters.vocabulary import words
from normpre_optax.stages.scale import CONVENTIONS

# The scale conventions that torch.optim.Muon has under other names.
_OF_TORCH = {"original": "keller", "match_rms_adamw": "moonlight"}


def learning_rate_by_length(steps: int) -> float:
    """Return the peak learning rate of ``normpre_h`` for a run of some steps.

    ``0.016 (1500 / steps)^0.6``, rounded to two digits, and for fewer than 200 steps
    that of 200. It was measured with 200 to 3,000 steps at widths of 64 to 256: half
    and double of it were worse in all nine settings, in the mean of two seeds. In three
    of four lengths, the best rate is lower for wider models, by up to 28 %. At width
    768, half was better (one seed). Elsewhere the rule is a guess; try half and double,
    too.

    Args:
        steps: number of updates of the whole run, with a short warm-up and a decay to
            nearly zero.

    Returns:
        The size of a step relative to the weights, the learning rate under Hyperball.

    Raises:
        ValueError: if ``steps`` is not a positive integer.

    Warns:
        UserWarning: outside of 200 to 3,000 steps.

    Example:
        >>> from normpre_optax import learning_rate_by_length
        >>> learning_rate_by_length(1_500)
        0.016
    """
    if not 200 <= static_int("steps", steps, least=1) <= 3000:
        said = (
            f"learning_rate_by_length was measured for 200 to 3,000 steps; for {steps},"
            " try half and double, too"
        )
        warnings.warn(said, stacklevel=2)
    return float(f"{1.6e-2 * (1500 / max(200, steps)) ** 0.6:.2g}")


def multipliers_by_width(
    params: Any,
    base: Any,
    *,
    update: Literal["orthogonal", "relative", "elementwise"],
    matrix_dims: Any = None,
) -> Any:
    """Return learning-rate multipliers by width, for a rate of a narrower model.

    A matrix (out, in) = m x n changes its outputs alike at all widths if the spectral
    norm of its step scales as ``sqrt(m / n)``. With m0 x n0 in the narrower model and t
    = max(m, n), the multiplier is

    - ``"orthogonal"``: ``sqrt(m / (n t)) / sqrt(m0 / (n0 t0))``, for steps of one RMS
      with equal singular values: ``normpre_g``, ``normpre_l``, ``muon``, ``muoneq``. It
      scales as the inverse root of the width;
    - ``"relative"``: 1, for steps relative to the weights
      (``norm_control="hyperball"``) and for those of spectral norm ``sqrt(max(1, m /
      n))`` (``muon(convention="keller")``, ``normuon``);
    - ``"elementwise"``: ``n0 / n``, for steps of one RMS with few large singular
      values, as AdamW's.

    In the AdamW group it is ``n0 / n`` for an untied output head and for matrices that
    a rule passes to AdamW, and 1 for embeddings, scales and biases. Initialize with
    standard deviations of ``c / sqrt(n)``.

    Args:
        params: the model's parameters, arrays or shapes.
        base: those of the narrower model: the same tree.
        update: kind of the matrix group's steps.
        matrix_dims: which parameters are matrices; see ``normpre_g``. The largest of
            several output blocks decides.

    Returns:
        A tree of numbers, for ``learning_rate_multipliers`` of every optimizer.

    Raises:
        ValueError: if ``update`` is unknown, or the trees differ.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import multipliers_by_width
        >>> wide, tuned = (
        ...     {"up": {"kernel": jnp.zeros((d, 4 * d)), "bias": jnp.zeros(4 * d)}}
        ...     for d in (256, 64)
        ... )
        >>> multipliers_by_width(wide, tuned, update="orthogonal")
        {'up': {'bias': 1.0, 'kernel': 0.5}}

    References:
        Yang, Simon and Bernstein, A Spectral Condition for Feature Learning, arXiv
        2310.17813.
    """
    slowness = {
        "orthogonal": lambda m, n: math.sqrt(n * max(m, n) / m),
        "relative": lambda m, n: 1.0,
        "elementwise": lambda m, n: float(n),
    }
    check_choice("update", update, slowness)
    here, there = assign(params, matrix_dims), assign(base, matrix_dims)
    for path in here.keys() ^ there.keys():
        raise ValueError(
            f"params and base are different trees: only one of them has {path!r}"
        )

    def of(spec: ParamSpec) -> float:
        if spec.dims is None:
            return float(_adamw_inputs(spec))
        _, dims, shape = max(
            blocks_of(spec.shape, spec.dims), key=lambda block: math.prod(block[2])
        )
        return slowness[update](*matrix_shape(shape, dims)[1:])

    for path, spec in here.items():
        if len(spec.shape) != len(there[path].shape):
            raise ValueError(
                f"parameter {path!r} has shape {spec.shape}, in base"
                f" {there[path].shape}"
            )
    return jax.tree.structure(params).unflatten(
        [of(there[path]) / of(spec) for path, spec in here.items()]
    )


def _adamw_inputs(spec: ParamSpec) -> int:
    """Return the number of inputs of an output head, or of a matrix that a user's rule
    passes to AdamW; else 1.
    """
    if spec.reason == GIVEN:
        with contextlib.suppress(UncoveredError):
            dims = default_matrix_dims(spec.path, Leaf(spec.shape, jnp.float32))
            return 1 if dims is None else max(1, matrix_shape(spec.shape, dims)[2])
    if spec.reason.startswith("output head") and len(spec.shape) == 2:
        return max(1, spec.shape["weight" in words(spec.path.split("/")[-1])])
    return 1


def learning_rate_from_muon(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float,
    *,
    convention: Literal["keller", "original", "moonlight", "match_rms_adamw"] | float,
    shape: tuple[int, int] | None = None,
    rms: float = 0.2,
) -> tuple[optax.ScalarOrSchedule, float]:
    """Convert another Muon's learning rate and decay; steps keep their size.

    Muon's update is an orthogonal matrix (out, in) = m x n, of RMS ``max(m,
    n)^(-1/2)``, times the scale of its convention: ``sqrt(max(1, m / n))`` for "keller"
    (Keller Jordan, ``optax.contrib.muon``) and "original" (the default of
    ``torch.optim.Muon``); ``0.2 sqrt(max(m, n))`` for "moonlight" and torch's
    "match_rms_adamw"; a number is ``consistent_rms`` of ``optax.contrib.muon``.

    Args:
        learning_rate: Muon's, number or schedule.
        weight_decay: Muon's, decoupled and multiplied by the learning rate.
        convention: of the other Muon.
        shape: (out, in) of the matrices whose steps keep their size, needed for
            "keller" and "original": ``(d, d)`` in a model of width d.
        rms: of the update here: 0.2 for NormPre, ``muon`` and most relatives.

    Returns:
        The learning rate (a schedule if a schedule was given) and the weight decay;
        their product is unchanged.

    Raises:
        ValueError: if ``convention`` is unknown, or needs a ``shape``.

    Example:
        >>> from normpre_optax import learning_rate_from_muon
        >>> lr, decay = learning_rate_from_muon(
        ...     0.02, 0.1, convention="keller", shape=(768, 768)
        ... )
        >>> print(f"{lr:.1e}, {decay:.2f}")
        3.6e-03, 0.55
    """
    check_numbers(learning_rate=learning_rate, weight_decay=weight_decay, rms=rms)
    times = _rms_of_muon(convention, shape) / rms
    converted: Any = _scaled(learning_rate, times)
    return converted, weight_decay / times


def _rms_of_muon(convention: str | float, shape: tuple[int, int] | None) -> float:
    """Return the root mean square of Muon's update of a matrix of this shape."""
    if not isinstance(convention, str):
        check_number("convention", convention, "rms")
        return convention
    name = _OF_TORCH.get(convention, convention)
    if name not in CONVENTIONS:
        raise ValueError(
            f"convention={convention!r} is not 'keller', 'original', 'moonlight',"
            " 'match_rms_adamw'"
        )
    if not shape and name == "moonlight":
        shape = (1, 1)  # its root mean square is 0.2 for every shape
    if not (isinstance(shape, tuple) and len(shape) == 2 and min(shape) > 0):
        raise ValueError(
            f"{convention=}: pass the shape of a matrix, shape=(outputs, inputs),"
            f" not {shape!r}"
        )
    m, n = shape
    return CONVENTIONS[name](m, n) / math.sqrt(max(m, n))


def _scaled(learning_rate: Any, times: float) -> Any:
    """Return a learning rate, number or schedule, times a number."""
    if not callable(learning_rate):
        return times * learning_rate
    given: Callable[[Any], Any] = learning_rate

    def schedule(step: Any) -> Any:
        return times * given(step)

    return schedule
