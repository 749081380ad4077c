# SPDX-License-Identifier: Apache-2.0
"""Hyperball against its literal transcription, alone in a chain and as an option."""

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import normpre_optax as npo
from tests import cases
from tests import reference_family as oracles

SHAPES = {"wide": (5, 12), "stack": (3, 8, 5)}
DIMS = {name: cases.DIMS[name] for name in SHAPES}


@pytest.mark.parametrize("alone", [False, True])
def test_steps_follow_the_published_rule(alone):
    rates = optax.piecewise_constant_schedule(0.1, {2: 0.1}) if alone else lambda step: 0.03
    direction = lambda matrix_dims: optax.identity()  # noqa: E731
    tx = npo.with_adamw(direction, 0.03, norm_control="hyperball", matrix_dims=DIMS)
    if alone:
        tx = npo.hyperball(rates, matrix_dims=DIMS)

    def by_rule(name, index, w, *gradients):
        w = start = np.float64(w)
        for step, gradient in enumerate(gradients):
            w = oracles.hyperball(start, w, np.float64(gradient), float(rates(step)))
        return w

    gradients = cases.gradients(4, shapes=SHAPES)
    with jax.enable_x64(True):
        got = cases.path(tx, gradients, SHAPES, jnp.float64)
    for name, w in cases.each_matrix(by_rule, cases.weights(shapes=SHAPES), *gradients).items():
        # The new norm comes from three sums; a schedule is float32.
        np.testing.assert_allclose(got[name], w, rtol=1e-6 if alone else 1e-11, atol=1e-13)


def test_every_block_layer_and_flattened_matrix_keeps_its_norm():
    shapes = {"qkv": (4, 18), "layers": (2, 4, 6), "bias": (6,), "heads": (4, 2, 3)}
    axes = {"qkv": npo.MatrixDims(0, 1, 3), "layers": npo.MatrixDims(1, 2), "heads": npo.MatrixDims(0, (1, 2))}
    tx = npo.rmnp(0.1, norm_control="hyperball", matrix_dims={**axes, "bias": None})
    params, grads = (
        {name: jnp.asarray(cases.gaussian(s, seed), jnp.float32) for name, s in shapes.items()} for seed in (0, 1)
    )
    new = optax.apply_updates(params, cases.first_update(tx, grads, params))

    def norms(tree):
        blocks = [*np.split(np.asarray(tree["qkv"], np.float64), 3, axis=1), *tree["layers"], tree["heads"]]
        return [np.linalg.norm(x) for x in blocks]

    np.testing.assert_allclose(norms(new), norms(params), rtol=2e-6)


def test_the_norm_is_that_at_init_whatever_happens_to_the_weights():
    tx, w, u = npo.hyperball(0.1), {"kernel": jnp.diag(jnp.array([3.0, 4.0]))}, {"kernel": jnp.ones((2, 2))}
    state = tx.init(w)
    for now in (3 * w["kernel"], jnp.zeros((2, 2)), w["kernel"].mT + 1):
        updates, _ = tx.update(u, state, {"kernel": now})
        moved = now - 0.1 * 5 * u["kernel"] / 2
        np.testing.assert_allclose(now + updates["kernel"], moved * 5 / jnp.linalg.norm(moved), rtol=1e-5)


def test_matrices_do_not_decay_but_the_adamw_group_does():
    params = {"kernel": jnp.eye(3), "bias": jnp.ones(3)}
    free, decayed = (
        cases.first_update(npo.rmnp(0.01, norm_control="hyperball", weight_decay=decay), params, params)
        for decay in (0.0, 0.5)
    )
    np.testing.assert_array_equal(free["kernel"], decayed["kernel"])
    np.testing.assert_allclose(free["bias"] - decayed["bias"], 0.005, rtol=1e-5)


def test_a_matrix_initialized_to_zero_is_named_and_takes_plain_steps():
    """Inside jit nothing is known of it."""
    tx = npo.rmnp(0.01, norm_control="hyperball")
    params = {"up": {"kernel": jnp.ones((3, 4))}, "down": {"kernel": jnp.zeros((4, 3))}, "bias": jnp.zeros(3)}
    with pytest.warns(UserWarning, match="'down/kernel' and 0 more are initialized to zero"):
        state = tx.init(params)
    grads = jax.tree.map(jnp.ones_like, params)
    step = lambda params: sum(map(jnp.sum, jax.tree.leaves(tx.update(grads, tx.init(params), params)[0])))  # noqa: E731
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(jax.grad(step)(params)))
    plain = cases.first_update(npo.scale_by_rmnp(), *[{"w": grads["down"]["kernel"]}] * 2)["w"]
    np.testing.assert_allclose(tx.update(grads, state, params)[0]["down"]["kernel"], -0.01 * plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(tx.init, params)
        tx.init({"up": params["up"]})
        npo.rmnp(0.01).init(params)


def test_a_learning_rate_of_adamw_is_named():
    """At construction, of a number and of a schedule; not where a traced number is one step's."""
    warmup = optax.warmup_cosine_decay_schedule
    for rate in (1e-3, warmup(0.0, 6e-4, 80, 800)):
        for make in (npo.hyperball, functools.partial(npo.muon, norm_control="hyperball")):
            with pytest.warns(UserWarning, match=r"the learning rate is at most \S+, like AdamW's") as seen:
                make(rate)
            assert seen[0].filename == __file__  # the line that a user can change
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rate in (1e-2, 0.0, warmup(0.0, 1.6e-2, 80, 800), lambda step: 1 / 0, jnp.float32(1e-4)):
            npo.muon(rate, norm_control="hyperball")
        npo.muon(1e-3)


def test_norms_are_in_no_box():
    """A box names the axes of its parameter, and programs make shardings of them; a norm has none of those axes."""
    box = nn.Partitioned(jnp.eye(4, 8), names=("embed", "mlp"))
    params, tx = {"up": {"kernel": box}}, npo.muon(1e-2, norm_control="hyperball")
    state = jax.eval_shape(tx.init, params)
    updates, after = jax.eval_shape(tx.update, params, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    boxes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nn.Partitioned))
    assert {x.value.shape for x in boxes if isinstance(x, nn.Partitioned) and jax.tree.leaves(x)} == {(4, 8)}
