# SPDX-License-Identifier: Apache-2.0
"""Learning rates by the length of a run, by width, and from another Muon."""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import optax

from normpre_optax.checks import (
    check_choice,
    check_number,
    check_numbers,
    static_int,
    warn_user,
)
from normpre_optax.parameters import roles
from normpre_optax.parameters.dims import blocks_of, matrix_shape
from normpre_optax.parameters.rules import assign
from normpre_optax.parameters.spec import Assignment, ParamSpec, Rule
from normpre_optax.parameters.vocabulary import words
from normpre_optax.stages.scale import CONVENTIONS
from normpre_optax.trees import PyTree

# The scale conventions that torch.optim.Muon has under other names.
_OF_TORCH = {"original": "keller", "match_rms_adamw": "moonlight"}
# What the law of ``learning_rate_by_length`` was fitted to and tested at.
_MEASURED = {
    "steps": (200, 3_000),
    "tokens_per_step": (1_024, 16_384),
    "width": (64, 768),
}


def learning_rate_by_length(
    steps: int, tokens_per_step: int = 1_024, width: int = 256
) -> float:
    """Return the peak learning rate of ``normpre_h`` for a run.

    ``0.016 (1500 / S)^0.6 (B / 1024)^0.134 (256 / d)^0.151``, rounded to two digits,
    with S steps, B tokens a step and width d; for fewer than 200 steps that of 200. The
    exponents were fitted to the best learning rates of 11 small settings; at three
    others, the law costs at most 0.005 nats. Elsewhere it is a guess: try half and
    double, too. The defaults are those of a small run, so pass all three.

    Args:
        steps: number of updates of the whole run, with a short warm-up and a decay to
            nearly zero.
        tokens_per_step: of all devices and micro-batches together.
        width: of the model, see ``model_width``.

    Returns:
        The size of a step relative to the weights, the learning rate under Hyperball.

    Raises:
        ValueError: if an argument is not a positive integer.

    Warns:
        UserWarning: outside of what was measured, 200 to 3,000 steps, 1,024 to 16,384
            tokens a step and widths of 64 to 768.

    Example:
        >>> from normpre_optax import learning_rate_by_length
        >>> learning_rate_by_length(1_500)
        0.016
        >>> learning_rate_by_length(3_000, tokens_per_step=16_384, width=768)
        0.013
    """
    given = {"steps": steps, "tokens_per_step": tokens_per_step, "width": width}
    sizes = {name: static_int(name, size, least=1) for name, size in given.items()}
    beyond = []
    for name, size in sizes.items():
        least, most = _MEASURED[name]
        if not least <= size <= most:
            beyond.append(_beyond(name, size))
    if beyond:
        warn_user(
            f"learning_rate_by_length was measured for {'; '.join(beyond)}. Try half"
            " and double of it, too"
        )
    shortest, _ = _MEASURED["steps"]
    rate = 0.016 * (1_500 / max(shortest, sizes["steps"])) ** 0.6
    rate *= (sizes["tokens_per_step"] / 1_024) ** 0.134
    rate *= (256 / sizes["width"]) ** 0.151
    return float(f"{rate:.2g}")


def _beyond(name: str, size: int) -> str:
    """Say how far a size is outside of what was measured."""
    least, most = _MEASURED[name]
    factor = max(size / most, least / size)
    side = "above" if size > most else "below"
    return f"{name} of {least:,} to {most:,}, and {size:,} is {factor:.3g} times {side}"


def model_width(params: PyTree, matrix_dims: PyTree | Rule = None) -> int:
    """Return the width of a model, for ``learning_rate_by_length``.

    It is the size that most matrices, norms and embeddings have in common, such as 768
    in GPT-2 Small.

    Args:
        params: the model's parameters, arrays or shapes.
        matrix_dims: which parameters are matrices; see ``normpre_g``.

    Returns:
        A positive number of elements.

    Raises:
        ValueError: if no parameter is a matrix.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import model_width
        >>> model_width({"up": jnp.zeros((64, 256)), "down": jnp.zeros((256, 64))})
        64
    """
    width = roles.model_width(assign(params, matrix_dims))
    if not width:
        raise ValueError("no parameter is a matrix: explain(params) shows them")
    return width


def multipliers_by_width(
    params: PyTree,
    base: PyTree,
    *,
    update: Literal["orthogonal", "relative", "elementwise"],
    matrix_dims: PyTree | Rule = None,
) -> PyTree:
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
    check_choice("update", update, _SLOWNESS)
    here = assign(params, matrix_dims)
    there = assign(base, matrix_dims)
    _check_equal_trees(here, there)
    multipliers = []
    for path, spec in here.items():
        narrow = _slowness(there[path], update)
        multipliers.append(narrow / _slowness(spec, update))
    return jax.tree.structure(params).unflatten(multipliers)


def _check_equal_trees(here: Assignment, there: Assignment) -> None:
    """Raise a ValueError if two models do not differ in the sizes of axes only."""
    for path in here.keys() ^ there.keys():
        raise ValueError(
            f"params and base are different trees: only one of them has {path!r}"
        )
    for path, spec in here.items():
        if len(spec.shape) != len(there[path].shape):
            raise ValueError(
                f"parameter {path!r} has shape {spec.shape}, in base"
                f" {there[path].shape}"
            )


def _slowness(spec: ParamSpec, update: str) -> float:
    """Return a number by which the best learning rate of a parameter is divided."""
    if spec.dims is None:
        return float(_adamw_inputs(spec))
    blocks = blocks_of(spec.shape, spec.dims)
    _, dims, shape = max(blocks, key=lambda block: math.prod(block[2]))
    _, outputs, inputs = matrix_shape(shape, dims)
    return _SLOWNESS[update](outputs, inputs)


def _slowness_of_orthogonal(m: int, n: int) -> float:
    """Return ``sqrt(n t / m)``, t = max(m, n), for a matrix (out, in) = m x n."""
    return math.sqrt(n * max(m, n) / m)


def _slowness_of_relative(m: int, n: int) -> float:
    return 1.0


def _slowness_of_elementwise(m: int, n: int) -> float:
    return float(n)


# By the kind of the matrix group's steps, see ``multipliers_by_width``.
_SLOWNESS: dict[str, Callable[[int, int], float]] = {
    "orthogonal": _slowness_of_orthogonal,
    "relative": _slowness_of_relative,
    "elementwise": _slowness_of_elementwise,
}


def _adamw_inputs(spec: ParamSpec) -> int:
    """Return the number of inputs of a parameter of the AdamW group that is a matrix.

    It is 1 for all but output heads and matrices that a user's rule passes to AdamW.
    """
    inputs = 1
    if spec.default is not None:
        _, _, inputs = matrix_shape(spec.shape, spec.default)
    elif spec.kind == "head" and len(spec.shape) == 2:
        is_out_in = "weight" in words(spec.path.split("/")[-1])
        inputs = spec.shape[int(is_out_in)]
    return max(1, inputs)


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
