# SPDX-License-Identifier: Apache-2.0
"""Variants of ``normpre_h`` for comparison with it: one choice of its metric, momenta
or schedule at a time.

``normpre_h_variant`` is ``normpre_h`` with further options.
``muon_falling_hyperball`` is Muon under Hyperball with a momentum that falls during the
run. ``soap_hyperball`` is a ceiling: SOAP's direction (Vyas et al., arXiv 2409.11321)
under Hyperball, which keeps two Gram matrices and their eigenbases.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from normpre_optax import (
    direction,
    per_parameter,
    precondition_globally,
    two_momenta,
    with_adamw,
    with_metric,
)
from normpre_optax.linalg.batches import one_at_a_time
from normpre_optax.optimizer import complete
from normpre_optax.options import checked
from normpre_optax.parameters.dims import (
    MatrixDims,
    from_matrices,
    split_axes,
    to_matrices,
)
from normpre_optax.parameters.roles import (
    matrix_shapes,
    model_width,
    residual_outputs,
    row_norms_by_role,
)
from normpre_optax.parameters.rules import assign, assigned

Sides = Literal["both", "before", "after"]
Statistic = Literal["gradient", "momentum", "residual"]
Follows = Literal["run", "rate"]
Norms = Literal[
    "role", "ones", "unequal", "width", "keep", "half_k", "twice_k", "k_times_32"
]


@checked
def normpre_h_variant(
    learning_rate: Any,
    adam_learning_rate: Any,
    *,
    momentum: float = 0.85,
    slow_momentum: float = 0.98,
    slow_weight: float = 0.56,
    gradient_share: float = 0.05,
    onset: int = 0,
    ramp: float = 4.0,
    end: int = 0,
    last_slow_weight: float | None = None,
    falls_from: float = 0.25,
    follows: Follows = "run",
    metric_strength: float = 0.5,
    clip: float = 2.0,
    decay: float = 0.95,
    sides: Sides = "both",
    statistic: Statistic = "gradient",
    frozen_after: int = 0,
    norms: Norms = "role",
    radial: bool = True,
    peak_power: float = 0.0,
    steps: int = 0,
    ns_steps: int = 5,
    ns_norm: Literal["frobenius", "schatten"] = "schatten",
    learning_rate_multipliers: Any = None,
    adam_b1: float = 0.9,
    adam_b2: float = 0.95,
    adam_weight_decay: Any = 0.1,
    weight_decay_mask: Any = None,
    matrix_dims: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """``normpre_h`` with these further options.

    Args:
        learning_rate: schedule of the matrix group.
        adam_learning_rate: schedule of the AdamW group.
        momentum: as in ``normpre_h``.
        slow_momentum: as in ``normpre_h``.
        slow_weight: as in ``normpre_h``, reached after ``onset`` and ``ramp``.
        gradient_share: of ``two_momenta``.
        onset: steps without the slow average.
        ramp: power of ``1 - slow_momentum^t`` that multiplies the weight at step t; 0
            for none.
        end: steps until the weight is zero again, linearly from ``onset``; 0 keeps it.
        last_slow_weight: weight at the end of the run; None keeps ``slow_weight``.
        falls_from: share of the run after which the weight falls to it.
        follows: whether it falls linearly in the "run", or with the learning "rate".
        metric_strength: as in ``normpre_h``.
        clip: of ``with_metric``.
        decay: of ``with_metric``.
        sides: where the metric is applied: before and after the spectral stage, or only
            once.
        statistic: what the metric averages the squares of: the gradient, ``U``, or the
            gradient less the fast average.
        frozen_after: steps after which the metric does not change; 0 never freezes it.
        norms: row norms: as in ``normpre_h`` by "role"; "ones" for all; reduced where
            the outputs are the width and the inputs are not ("unequal"), or wherever
            the outputs are the "width"; or "keep" those of the initialization. Or those
            by role with a wrong number k of matrices that write: half of it, twice, or
            32 times.
        radial: whether ``U`` keeps its part along the weights, as whole matrices.
        peak_power: front-loaded learning rate ``peak (1 - (t / steps)^power)``; 0 keeps
            the schedule.
        steps: of the run, for ``peak_power`` and ``last_slow_weight``.
        ns_steps: as in ``normpre_h``.
        ns_norm: as in ``normpre_h``.
        learning_rate_multipliers: as in ``normpre_h``.
        adam_b1: as in ``normpre_h``.
        adam_b2: as in ``normpre_h``.
        adam_weight_decay: as in ``normpre_h``.
        weight_decay_mask: as in ``normpre_h``.
        matrix_dims: as in ``normpre_h``.
    """

    share = constant(slow_weight)
    if last_slow_weight is not None and follows == "run":
        share = falling(slow_weight, last_slow_weight, falls_from, steps)
    elif last_slow_weight is not None:
        share = following(learning_rate, slow_weight, last_slow_weight, steps)
    if end:
        share = product(share, falling(1.0, 0.0, onset / end, end))
    if ramp:
        share = product(share, lambda t: (1 - slow_momentum ** (t + 1.0)) ** ramp)
    weight = from_step(onset, share)
    metric = Metric(metric_strength, clip, decay, sides, statistic, frozen_after)

    def chain(matrix_dims: Any) -> optax.GradientTransformation:
        spectral = precondition_globally(ns_steps, ns_norm=ns_norm)
        stages = [two_momenta(momentum, slow_momentum, weight, gradient_share)]
        if not radial:
            stages.append(per_parameter(_without_radial_part))
        stages += metric.around(spectral, momentum)
        return direction(*stages, matrix_dims=matrix_dims)

    rates = [learning_rate, adam_learning_rate]
    if peak_power:
        rates = [_front_loaded(rate, peak_power, steps) for rate in rates]
    return with_adamw(
        chain,
        rates[0],
        norm_control="hyperball",
        row_norms=NORMS[norms],
        adam_learning_rate=rates[1],
        learning_rate_multipliers=learning_rate_multipliers,
        adam_b1=adam_b1,
        adam_b2=adam_b2,
        adam_weight_decay=adam_weight_decay,
        weight_decay_mask=weight_decay_mask,
        matrix_dims=matrix_dims,
    )


class Metric(NamedTuple):
    """The options of the metric of ``normpre_h_variant``."""

    strength: float
    clip: float
    decay: float
    sides: Sides
    statistic: Statistic
    frozen_after: int

    def around(self, spectral: Any, momentum: float) -> list[Any]:
        """Return the spectral stage with the metric before and after it, or once."""
        if self.sides == "both":
            return [self.stage(spectral, self.strength, momentum)]
        # Around the identity, the metric is applied twice: at half the strength, that
        # is once.
        once = self.stage(optax.identity(), self.strength / 2, momentum)
        return [once, spectral] if self.sides == "before" else [spectral, once]

    def stage(self, inside: Any, strength: float, momentum: float) -> Any:
        """Return the metric around a stage."""
        metric: Any = with_metric(inside, strength, self.clip, self.decay)
        if self.frozen_after:
            metric = _frozen(metric, self.frozen_after)
        if self.statistic != "gradient":
            metric = _measured(metric, self.statistic, momentum)
        return metric


# Row norms that need no name of a layer, for comparison with those by role. Functions
# of the parameters, or what ``row_norms`` accepts.


def _reduced(params: Any, chosen: Callable[[int, int, int], bool]) -> Any:
    """Return ``sqrt(in / (out k))`` for the k chosen matrices, 1 for all others.

    Args:
        params: the tree of parameters, without stacked layers.
        chosen: function of outputs, inputs and the width of the model.
    """
    found = assign(params)
    width = model_width(found)
    shapes = matrix_shapes(found)
    reduced = [path for path, (m, n) in shapes.items() if chosen(m, n, width)]
    norms = dict.fromkeys(found, 1.0)
    for path in reduced:
        m, n = shapes[path]
        norms[path] = math.sqrt(n / (m * len(reduced)))
    return jax.tree.structure(params).unflatten(norms.values())


def _reduced_unequal(params: Any) -> Any:
    """Reduce the matrices whose outputs are the width, and whose inputs are not."""
    return _reduced(params, lambda m, n, width: m == width != n)


def _reduced_all(params: Any) -> Any:
    """Reduce every matrix whose outputs are the width: queries, too."""
    return _reduced(params, lambda m, n, width: m == width)


def _with_wrong_k(factor: float) -> Callable[[Any], Any]:
    """Norms by role with k multiplied by a factor."""

    def norms_of(params: Any) -> Any:
        found = assign(params)
        norms = dict.fromkeys(found, 1.0) | row_norms_by_role(found)
        for path in residual_outputs(found):
            norms[path] /= math.sqrt(factor)
        return jax.tree.structure(params).unflatten(norms.values())

    return norms_of


NORMS: dict[str, Any] = {
    "role": None,
    "ones": 1.0,
    "unequal": _reduced_unequal,
    "width": _reduced_all,
    "keep": "keep",
    "half_k": _with_wrong_k(0.5),
    "twice_k": _with_wrong_k(2.0),
    "k_times_32": _with_wrong_k(32.0),
}


def product(first: Callable, second: Callable) -> Callable[[Any], Any]:
    """A schedule that is the product of two."""
    return lambda t: first(t) * second(t)


def from_step(start: int, schedule: Callable) -> Callable[[Any], Any]:
    """A schedule that is zero before a step."""
    return lambda t: jnp.where(t >= start, schedule(t), 0.0)


def constant(value: float) -> Callable[[Any], Any]:
    """A schedule that has one value."""
    return lambda t: value


def falling(first: float, last: float, start: float, steps: int) -> Callable:
    """A schedule that falls linearly from a share ``start`` of the run to its end."""
    if steps < 1:
        raise ValueError("a weight that falls during the run needs steps=")

    def value(t: Any) -> Any:
        fallen = jnp.clip((t / steps - start) / (1 - start), 0, 1)
        return first + (last - first) * fallen

    return value


def following(rate: Callable, first: float, last: float, steps: int) -> Callable:
    """A schedule that falls as a learning rate falls from its peak to zero."""
    if steps < 1:
        raise ValueError("a weight that follows the learning rate needs steps=")
    peak = _peak(rate, steps)

    def value(t: Any) -> Any:
        return last + (first - last) * rate(t) / peak

    return value


def _peak(schedule: Callable, steps: int) -> float:
    """The largest of the learning rates of every tenth step."""
    return float(jnp.max(jnp.stack([schedule(t) for t in range(0, steps, 10)])))


class FallingMomentumState(NamedTuple):
    """Number of updates, and the average of the gradients."""

    count: Any
    average: Any


def falling_momentum(
    momentum: Callable[[Any], Any],
) -> optax.GradientTransformation:
    """Nesterov's momentum with a decay that is a schedule.

    ``M = b M + (1 - b) G`` and ``U = (1 - b) G + b M``: with a constant b, Muon's
    momentum times 1 - b.
    """

    def init(params):
        return FallingMomentumState(
            jnp.zeros((), jnp.int32), optax.tree.zeros_like(params)
        )

    def update(updates, state, params=None):
        b = momentum(state.count)
        average = optax.tree.update_moment(updates, state.average, b, 1)
        new = optax.tree.update_moment(updates, average, b, 1)
        return new, FallingMomentumState(state.count + 1, average)

    return optax.GradientTransformation(init, update)


@checked
def scale_by_falling_muon(
    *,
    momentum: float = 0.97,
    last_momentum: float = 0.91,
    falls_from: float = 0.25,
    steps: int = 0,
    matrix_dims: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Muon with a momentum whose age, ``1 / (1 - momentum)``, falls linearly."""
    age = falling(1 / (1 - momentum), 1 / (1 - last_momentum), falls_from, steps)

    def decay(t: Any) -> Any:
        return 1 - 1 / age(t)

    return direction(
        falling_momentum(decay), precondition_globally(), matrix_dims=matrix_dims
    )


muon_falling_hyperball = complete(scale_by_falling_muon, hyperball=True)


def _front_loaded(schedule: Callable, power: float, steps: int) -> Callable:
    """A tenth of the peak is left at the end, as in the program's schedule."""
    peak = _peak(schedule, steps)
    warmup = 100
    return lambda t: (
        peak
        * jnp.minimum(
            (t + 1) / (warmup + 1), 0.1 + 0.9 * (1 - jnp.clip(t / steps, 0, 1) ** power)
        )
    )


class CountedState(NamedTuple):
    """Number of updates and a state."""

    count: Any
    inner: Any


def _frozen(metric: Any, after: int) -> optax.GradientTransformationExtraArgs:
    """Keep the metric's state, which alone decides about the update, as it is after
    some steps.
    """

    def update(updates, state, params=None, **extra):
        new, inner = metric.update(updates, state.inner, params, **extra)
        kept = jax.tree.map(
            lambda old, x: jnp.where(state.count >= after, old, x), state.inner, inner
        )
        return new, CountedState(state.count + 1, kept)

    def init(params, *, matrix_dims=None):  # those of the direction
        inner = metric.init(params, matrix_dims=matrix_dims)
        return CountedState(jnp.zeros((), jnp.int32), inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _measured(
    metric: Any, statistic: str, decay: float
) -> optax.GradientTransformationExtraArgs:
    """Pass another matrix than the gradient to the metric: the update, or the gradient
    less its fast average.
    """

    def init(params, *, matrix_dims=None):  # those of the direction
        inner = metric.init(params, matrix_dims=matrix_dims)
        return CountedState(optax.ema(decay).init(params), inner)

    def update(updates, state, params=None, *, gradients: Any = None, **extra):
        average, ema = optax.ema(decay).update(gradients, state.count)
        measured = (
            updates
            if statistic == "momentum"
            else jax.tree.map(jnp.subtract, gradients, average)
        )
        new, inner = metric.update(
            updates, state.inner, params, gradients=measured, **extra
        )
        return new, CountedState(ema, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _without_radial_part(u: jax.Array, w: jax.Array, dims: MatrixDims) -> jax.Array:
    """Remove from a matrix its part along the weights."""
    _, outputs, inputs = split_axes(u.ndim, dims)
    uw, ww = (jnp.sum(x, outputs + inputs, keepdims=True) for x in (u * w, w * w))
    return u - jnp.where(ww == 0, 0, uw / jnp.where(ww == 0, 1, ww)) * w


class SoapState(NamedTuple):
    """Number of updates, and for every parameter a ``SoapMatrices``."""

    count: Any
    matrices: Any


class SoapMatrices(NamedTuple):
    """Averages of ``G G^T`` and ``G^T G``, their eigenvectors, and Adam's moments, the
    second in their basis.
    """

    left: jax.Array
    right: jax.Array
    bases: tuple[jax.Array, jax.Array]
    first: jax.Array
    second: jax.Array


def scale_by_soap(
    *,
    b1: float = 0.95,
    b2: float = 0.95,
    gram_decay: float = 0.95,
    every: int = 5,
    matrix_dims: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam in the eigenbases of the averages of ``G G^T`` and ``G^T G``, which are
    recomputed every few steps.
    """

    def eigenvectors(x: jax.Array) -> jax.Array:
        return jax.vmap(one_at_a_time(lambda gram: jnp.linalg.eigh(gram)[1]))(x)

    def zeros(x: jax.Array) -> SoapMatrices:
        grams = [jnp.zeros((len(x), x.shape[axis], x.shape[axis])) for axis in (1, 2)]
        bases = grams[0] + jnp.eye(x.shape[1]), grams[1] + jnp.eye(x.shape[2])
        return SoapMatrices(
            grams[0], grams[1], bases, jnp.zeros_like(x), jnp.zeros_like(x)
        )

    def init(params):
        found = assigned(params, None, matrix_dims).values()
        stacks = [
            to_matrices(x, spec.dims)
            for x, spec in zip(jax.tree.leaves(params), found, strict=True)
        ]
        return SoapState(jnp.zeros((), jnp.int32), [zeros(x) for x in stacks])

    def step(
        g: jax.Array, old: SoapMatrices, count: Any
    ) -> tuple[jax.Array, SoapMatrices]:
        left = gram_decay * old.left + (1 - gram_decay) * g @ g.mT
        right = gram_decay * old.right + (1 - gram_decay) * g.mT @ g

        def renewed():
            return (eigenvectors(left), eigenvectors(right))

        q, p = jax.lax.cond(count % every == 1 % every, renewed, lambda: old.bases)
        first = b1 * old.first + (1 - b1) * g
        second = b2 * old.second + (1 - b2) * (q.mT @ g @ p) ** 2
        u = (1 - b1) * g + b1 * first / (1 - b1**count)
        d = (q.mT @ u @ p) / (jnp.sqrt(second / (1 - b2**count)) + 1e-12)
        return q @ d @ p.mT, SoapMatrices(left, right, (q, p), first, second)

    def update(updates, state, params=None, **_):
        specs, count = assigned(updates, params, matrix_dims).values(), state.count + 1
        leaves, treedef = jax.tree.flatten(updates)
        found = [
            step(to_matrices(g, s.dims), m, count)
            for g, s, m in zip(leaves, specs, state.matrices, strict=True)
        ]
        new = [
            from_matrices(d, s.dims, g.shape)
            for (d, _), s, g in zip(found, specs, leaves, strict=True)
        ]
        return treedef.unflatten(new), SoapState(
            count, [matrices for _, matrices in found]
        )

    return optax.GradientTransformationExtraArgs(init, update)


soap_hyperball = complete(scale_by_soap, hyperball=True)
