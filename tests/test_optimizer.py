# SPDX-License-Identifier: Apache-2.0
"""What a complete optimizer keeps of its parameters between updates, and what not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import normpre_optax as npo
from tests import cases

SHAPES = {"up": {"kernel": (4, 8), "bias": (8,)}, "down": {"kernel": (8, 4)}}
PARAMS = cases.numbers(SHAPES)
GRADS = cases.numbers(SHAPES, 1)


def norms_of_rows(params):
    """Arrays that depend on the parameters: tracers inside jit."""
    return jax.tree.map(lambda x: jnp.sqrt(jnp.mean(x * x)), params)


def ones(params):
    """Arrays that do not."""
    return jax.tree.map(lambda x: jnp.ones(()), params)


@pytest.mark.parametrize("option", ["row_norms", "learning_rate_multipliers"])
@pytest.mark.parametrize("function", [norms_of_rows, ones])
def test_arrays_of_one_trace_are_not_kept_for_the_next(option, function):
    """Two jitted programs, and an update outside of jit, with one optimizer."""
    tx = npo.normpre_h(0.02, 1e-3, **{option: function})
    expected = npo.normpre_h(0.02, 1e-3, **{option: function(PARAMS)})
    state = tx.init(PARAMS)
    wanted, _ = expected.update(GRADS, expected.init(PARAMS), PARAMS)

    @jax.jit
    def first(grads, state, params):
        return tx.update(grads, state, params)

    @jax.jit
    def second(grads, state, params):
        updates, _ = tx.update(grads, state, params)
        return jax.tree.map(lambda u: 2 * u, updates)

    with jax.checking_leaks():
        once, _ = first(GRADS, state, PARAMS)
        twice = second(GRADS, state, PARAMS)
    outside, _ = tx.update(GRADS, state, PARAMS)
    half = jax.tree.map(lambda u: u / 2, twice)
    for got in (once, half, outside):
        cases.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_the_parameters_of_a_jitted_init_are_not_kept():
    """A state may be created inside jit, and used by programs outside of it."""
    tx = npo.normpre_h(0.02, 1e-3, row_norms=norms_of_rows)
    with jax.checking_leaks():
        state = jax.jit(tx.init)(PARAMS)
        updates, _ = jax.jit(tx.update)(GRADS, state, PARAMS)
    wanted, _ = tx.update(GRADS, state, PARAMS)
    cases.assert_close(updates, wanted, rtol=1e-5, atol=1e-6)


def counted(calls):
    """A direction that counts how often it is made, and for how many matrices."""

    def direction(matrix_dims):
        calls.append(matrix_dims)
        return npo.scale_by_rmnp(matrix_dims=matrix_dims)

    return direction


@pytest.mark.parametrize("row_norms", [None, "keep", 0.5, norms_of_rows])
def test_a_direction_is_made_once_for_parameters_of_a_form(row_norms):
    calls = []
    tx = npo.with_adamw(
        counted(calls),
        0.02,
        norm_control="hyperball",
        row_norms=row_norms,
        adam_learning_rate=1e-3,
        weight_decay_mask=npo.decay_matrices_only,
    )
    assert calls == [None]  # the check at construction
    state = tx.init(PARAMS)
    for _ in range(3):
        _, state = tx.update(GRADS, state, PARAMS)
    assert len(calls) == 2
    tx.init({"other": jnp.ones((3, 5))})
    tx.update(GRADS, state, PARAMS)
    assert len(calls) == 3


def test_functions_of_parameters_are_asked_at_every_update():
    """Outside of jit, what they return may depend on values."""

    def not_zero(params):
        return jax.tree.map(lambda x: bool(np.any(x)), params)

    tx = npo.rmnp(0.1, weight_decay=0.5, weight_decay_mask=not_zero)
    still = npo.rmnp(0.1, weight_decay=0.5, weight_decay_mask=lambda params: False)
    pruned = jax.tree.map(jnp.zeros_like, PARAMS)
    state = tx.init(pruned)
    decayed, _ = tx.update(GRADS, state, PARAMS)
    fixed, _ = still.update(GRADS, state, PARAMS)
    expected = jax.tree.map(lambda u, x: u - 0.1 * 0.5 * x, fixed, PARAMS)
    cases.assert_close(decayed, expected, rtol=1e-5, atol=1e-6)


def test_one_optimizer_serves_several_models_in_turn():
    tx = npo.normpre_g(0.1)
    small = {"kernel": jnp.ones((2, 3))}
    alone = functools.partial(cases.first_update, npo.normpre_g(0.1))
    for params in (PARAMS, small, PARAMS):
        updates = cases.first_update(tx, params, params)
        cases.assert_close(updates, alone(params, params))
        assert optax.tree.norm(updates) > 0
