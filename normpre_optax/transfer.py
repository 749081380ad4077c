# SPDX-License-Identifier: Apache-2.0
"""Rates that were tuned elsewhere: on a smaller model, or for another Muon, whose updates are of another size."""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import optax

from normpre_optax.parameters.dims import matrix_shape
from normpre_optax.parameters.rules import Choice, adams_inputs, pieces, resolve
from normpre_optax.transforms.checks import choice, number, static_int

UPDATES = ("orthogonal", "relative", "elementwise")
# What an orthogonal (rows, columns) is multiplied by. torch calls its two by what they do to the learning rate.
_WIDTH = lambda rows, columns: math.sqrt(max(1, rows / columns))  # noqa: E731
_RMS = lambda rows, columns: 0.2 * math.sqrt(max(rows, columns))  # noqa: E731
MUONS: dict[str, Callable[[int, int], float]] = {
    "keller": _WIDTH,
    "original": _WIDTH,
    "moonlight": _RMS,
    "match_rms_adamw": _RMS,
}


def rates_by_width(
    params: Any, base: Any, *, update: Literal["orthogonal", "relative", "elementwise"], matrix_dims: Any = None
) -> Any:
    """How many times its learning rate a parameter should have where the rate was tuned on a narrower model.

    A matrix (out, in) = m x n changes what it makes of its inputs alike at all widths if the largest singular value of
    its step goes with ``sqrt(m / n)``. With m0 x n0 in the tuned model and t the longer side, its rate is multiplied by

    - ``"orthogonal"``: ``sqrt(m / (n t)) / sqrt(m0 / (n0 t0))``, for steps of one RMS at all widths whose singular
      values are equal: ``normpre_g``, ``normpre_l``, ``muon`` (as it comes), ``muoneq``, ``adamuon``. One over the
      square root of the width;
    - ``"relative"``: 1, for steps as long as the weights (``norm_control="hyperball"``), and for those that already are
      ``sqrt(max(1, m / n))`` long (``muon(convention="keller")``, ``normuon``);
    - ``"elementwise"``: ``n0 / n``, for steps of one RMS at all widths of which few singular values are large: AdamW.

    AdamW's part: ``n0 / n`` for an output head of its own, and for what a rule gave to AdamW although it looks like a
    matrix; 1 for tables, gains and biases. Weight decay is left as it is, ``lr wd``: that much of the weights goes at
    every width. For the first weights the same condition says standard deviations of ``c / sqrt(n)``.

    Args:
        params: the model's, arrays or shapes.
        base: those of the model that the rates were tuned on: the same tree.
        update: what the steps of matrices are like.
        matrix_dims: which parameters are matrices; see ``hybrid``. Of blocks of given sizes the largest decides.

    Returns:
        A tree of numbers, for ``rate_multipliers`` of every optimizer.

    Raises:
        ValueError: if ``update`` is unknown, or the trees differ.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import rates_by_width
        >>> wide, tuned = ({"up": {"kernel": jnp.zeros((d, 4 * d)), "bias": jnp.zeros(4 * d)}} for d in (256, 64))
        >>> rates_by_width(wide, tuned, update="orthogonal")
        {'up': {'bias': 1.0, 'kernel': 0.5}}

    References:
        Yang, Simon and Bernstein, A Spectral Condition for Feature Learning, arXiv 2310.17813.
    """
    choice("update", update, UPDATES)
    here, there = resolve(params, matrix_dims), resolve(base, matrix_dims)
    if list(here) != list(there):
        raise ValueError(
            f"params and base are different trees: only one of them has {sorted(set(here) ^ set(there))[:1]}"
        )

    for path, one in here.items():
        if len(one.shape) != len(there[path].shape):
            raise ValueError(f"parameter {path!r} has shape {one.shape}, in base {there[path].shape}")

    def slowness(one: Choice) -> float:
        one = max(pieces(one), key=lambda block: math.prod(block.shape))  # a parameter has one rate
        if one.dims is None:
            return float(adams_inputs(one))
        _, m, n = matrix_shape(one.shape, one.dims)
        return {"orthogonal": math.sqrt(n * max(m, n) / m), "relative": 1.0, "elementwise": float(n)}[update]

    rates = [slowness(there[path]) / slowness(one) for path, one in here.items()]
    return jax.tree.structure(params).unflatten(rates)


def learning_rate_from_muon(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float,
    *,
    convention: Literal["keller", "original", "moonlight", "match_rms_adamw"] | float,
    shape: tuple[int, int] | None = None,
    rms: float = 0.2,
) -> tuple[optax.ScalarOrSchedule, float]:
    """Learning rate and weight decay for steps as large as a Muon's that was tuned elsewhere.

    Muon's update is an orthogonal matrix (out, in) = m x n, of RMS ``max(m, n)^(-1/2)``, times its convention's scale:

    - ``"keller"`` (Keller Jordan's code, ``optax.contrib.muon`` as it comes) and ``"original"``
      (``torch.optim.Muon(adjust_lr_fn=...)``, its default): ``sqrt(max(1, m / n))``, an RMS of ``1 / sqrt(n)``;
    - ``"moonlight"`` and torch's ``"match_rms_adamw"``: ``0.2 sqrt(max(m, n))``, an RMS of 0.2;
    - a number: ``consistent_rms`` of ``optax.contrib.muon``, the RMS itself.

    The rate becomes as much larger as ``rms`` is smaller, and the decay as much smaller: ``lr wd`` stays what it was.

    Args:
        learning_rate: Muon's, number or schedule.
        weight_decay: Muon's, decoupled and multiplied by the learning rate, as all of these do.
        convention: of the Muon that it was tuned with.
        shape: (out, in) of the matrices whose steps are to stay as large, which ``"keller"`` and ``"original"`` depend
            on: ``(d, d)`` for a model of width d. Matrices with more inputs make larger steps than before.
        rms: of the update here: 0.2 for NormPre, for ``muon`` and most relatives as they come.

    Returns:
        The learning rate (a schedule if a schedule was given) and the weight decay.

    Raises:
        TypeError: if one of them is no number.
        ValueError: if ``convention`` is unknown, or depends on the ``shape`` that is missing or none.

    Example:
        >>> from normpre_optax import learning_rate_from_muon, normpre_g
        >>> rate, decay = learning_rate_from_muon(0.02, 0.1, convention="keller", shape=(768, 768))
        >>> print(f"{rate:.1e}, {decay:.2f}")
        3.6e-03, 0.55
        >>> tx = normpre_g(rate, weight_decay=decay)

    References:
        Jordan et al., Muon, 2024; Liu et al., arXiv 2502.16982; ``torch.optim.Muon``; ``optax.contrib.muon``.
    """
    number("weight_decay", weight_decay, least=0)
    number("rms", rms, least=1e-15)
    if isinstance(convention, str):
        choice("convention", convention, tuple(MUONS))
        if shape is None and MUONS[convention] is _WIDTH:
            raise ValueError(f"{convention=} depends on the shape of a matrix: give shape=(outputs, inputs)")
        rows, columns = _shape((1, 1) if shape is None else shape)
        size = MUONS[convention](rows, columns) / math.sqrt(max(rows, columns))
    else:
        number("convention", convention, least=1e-15)
        size = convention
    times = size / rms
    if callable(learning_rate):
        return lambda step: times * learning_rate(step), weight_decay / times
    number("learning_rate", learning_rate, least=0)
    return times * learning_rate, weight_decay / times


def _shape(shape) -> tuple[int, int]:
    if not isinstance(shape, tuple | list) or len(shape) != 2:
        raise ValueError(f"shape must be two positive ints, (outputs, inputs), got {shape!r}")
    return static_int("shape[0]", shape[0], least=1), static_int("shape[1]", shape[1], least=1)
