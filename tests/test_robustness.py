# SPDX-License-Identifier: Apache-2.0
"""Finite input never gives NaN or infinity, for gradients up to 1e30 and weights up to 1e2 in magnitude, of any rank.

Hypothesis searches for counterexamples. Shapes are fixed, so that every optimizer compiles once; what varies is what is
in them, from single awkward numbers to matrices with structure (zero rows, rank one, parallel to the weights, ...).
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import normpre_optax as npo
from tests.cases import updater

# In the layout of the parameters, (…, in, out); the rank and the sketch below are larger than most of these sides.
SHAPES = {"row": (1, 6), "column": (6, 1), "scalar": (1, 1), "wide": (3, 5), "stack": (2, 4, 4)}
LEARNING_RATE = 0.5

FACTORIES = {
    "normpre_g": npo.normpre_g,
    "normpre_g-bounded-polar_express": functools.partial(
        npo.normpre_g, tangent="bounded", orientation="both", ns_coefficients="polar_express"
    ),
    "normpre_g-strict-bfloat16": functools.partial(
        npo.normpre_g, tangent="strict", orientation="columns", compute_dtype=jnp.bfloat16
    ),
    "normpre_g-msign": functools.partial(npo.normpre_g, ns_steps=None),
    "normpre_l-sketch": npo.normpre_l,
    "normpre_l-small-sketch": functools.partial(npo.normpre_l, rank=1, oversample=1, power_iterations=3),
    "normpre_l-warm": functools.partial(npo.normpre_l, rank=2, oversample=1, power_iterations=0, warm_start=True),
    "normpre_l-exact": functools.partial(npo.normpre_l, method="exact"),
    "muon-moonlight": npo.muon,
    "muon-keller": functools.partial(npo.muon, convention="keller"),
    "mano-1": npo.mano,
    "mano-2": functools.partial(npo.mano, version=2, nesterov=True),
}
RMS_IS_MEASURED = [name for name in FACTORIES if name.startswith("normpre")]


@functools.cache
def optimizer(name):
    return FACTORIES[name](
        LEARNING_RATE,
        weight_decay=0.0,
        matrix_dims=lambda path, leaf: npo.MatrixDims(inputs=leaf.ndim - 2, outputs=leaf.ndim - 1),
    )


AWKWARD = [0.0, 1.0, -1.0, 1e-45, 1e-38, -1e-38, 1.2e-38, 1e-20, 1e-7, 0.3, 1 + 1e-7, 3e3, -1e15, 1e30, -1e30]


def structured(kind, shape, seed, size):
    """Matrices (…, m, n) with the structures that break optimizers, of the given size."""
    random = np.random.default_rng(seed)
    m, n = shape[-2:]
    x = random.standard_normal(shape)
    if kind == "zero rows":
        x[..., : (m + 1) // 2, :] = 0
    elif kind == "zero columns":
        x[..., : (n + 1) // 2] = 0
    elif kind == "rank one":
        x = random.standard_normal((*shape[:-1], 1)) * random.standard_normal((*shape[:-2], 1, n))
    elif kind == "constant":
        x = np.ones(shape)
    elif kind == "one entry":
        x = np.zeros(shape)
        x[..., m // 2, n // 2] = 1
    elif kind == "orthogonal":
        x = np.broadcast_to(np.eye(m, n), shape)
    elif kind == "scattered":  # every row of another magnitude, 60 orders apart
        x = x * np.logspace(-30, 30, m)[:, None] / size
    return np.clip(x * size, -1e30, 1e30).astype(np.float32)


KINDS = ["gaussian", "zero rows", "zero columns", "rank one", "constant", "one entry", "orthogonal", "scattered"]


@st.composite
def matrices(draw, shape, largest):
    if draw(st.booleans()):
        numbers = [x for x in AWKWARD if abs(x) <= largest] + [largest, -largest]
        return draw(hnp.arrays(np.float32, shape, elements=st.sampled_from([float(np.float32(x)) for x in numbers])))
    size = draw(st.sampled_from([s for s in (1e-45, 1e-38, 1e-20, 1.0, 1e2, 1e10, 1e29) if s <= largest]))
    return np.clip(structured(draw(st.sampled_from(KINDS)), shape, draw(st.integers(0, 5)), size), -largest, largest)


@st.composite
def problems(draw):
    """Weights, and the gradients of two steps: both orientations see them."""
    weights = {name: draw(matrices(shape, 1e2)) for name, shape in SHAPES.items()}
    if draw(st.booleans()):  # gradients parallel to the weights: the tangent stage leaves rounding noise
        size = draw(st.sampled_from([1e-30, 1.0, 1e20]))
        gradients = [{name: (x * np.float32(size)).astype(np.float32) for name, x in weights.items()}] * 2
    else:
        gradients = [{name: draw(matrices(shape, 1e30)) for name, shape in SHAPES.items()} for _ in range(2)]
    return weights, gradients


@functools.cache
def initial_state(name, dtype):
    """What `init` returns for all of these parameters: none of these optimizers reads their values."""
    return optimizer(name).init({leaf: jnp.zeros(shape, dtype) for leaf, shape in SHAPES.items()})


def two_steps(name, weights, gradients, dtype=jnp.float32):
    params = {leaf: np.asarray(x, dtype) for leaf, x in weights.items()}
    state, out = initial_state(name, dtype), []
    for gradient in gradients:
        gradient = {leaf: np.asarray(x, dtype) for leaf, x in gradient.items()}
        updates, state = updater(optimizer(name))(gradient, state, params)
        out.append(updates)
    return out, state


def assert_sound(name, weights, gradients, dtype=jnp.float32):
    found, state = two_steps(name, weights, gradients, dtype)
    for step, updates in enumerate(found):
        for leaf, u in updates.items():
            u = np.asarray(u, np.float64)
            assert np.isfinite(u).all(), (name, step, leaf, weights[leaf], [g[leaf] for g in gradients])
            # No entry is larger than its matrix: sqrt(30) RMS, or sqrt(6) times MANO's and Muon's nominal 0.2 to 0.5.
            assert np.abs(u).max() <= LEARNING_RATE * 4, (name, step, leaf)
            if name in RMS_IS_MEASURED:
                assert np.sqrt(np.mean(u**2, axis=(-2, -1))).max() <= 0.2 * LEARNING_RATE * (1 + 2**-7)
    assert all(np.isfinite(np.asarray(leaf, np.float64)).all() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("name", FACTORIES)
@given(problem=problems())
def test_finite_input_gives_finite_updates(name, problem):
    assert_sound(name, *problem)


@pytest.mark.parametrize("name", ["normpre_g", "normpre_l-sketch", "mano-1"])
@given(problem=problems())
def test_finite_bfloat16_input_gives_finite_updates(name, problem):
    assert_sound(name, *problem, dtype=jnp.bfloat16)


@pytest.mark.parametrize("name", FACTORIES)
def test_every_structure_at_every_size(name):
    """The same without luck: all structures at the ends of the range, on the weights' side too."""
    for kind in KINDS:
        for size in (1e-38, 1e-20, 1.0, 1e29):
            gradient = {leaf: structured(kind, shape, 1, size) for leaf, shape in SHAPES.items()}
            for weight_kind, weight_size in ((kind, 1.0), ("gaussian", 20.0), ("zero rows", 1e-38)):
                weights = {leaf: structured(weight_kind, s, 2, weight_size) for leaf, s in SHAPES.items()}
                weights = {leaf: np.clip(x, -1e2, 1e2) for leaf, x in weights.items()}
                assert_sound(name, weights, [gradient, gradient])


@pytest.mark.parametrize("name", FACTORIES)
def test_zero_gradients_give_zero_updates(name):
    weights = {leaf: structured("gaussian", shape, 0, 1.0) for leaf, shape in SHAPES.items()}
    zero = {leaf: np.zeros(shape, np.float32) for leaf, shape in SHAPES.items()}
    for updates in two_steps(name, weights, [zero, zero])[0]:
        assert not any(np.any(np.asarray(u)) for u in updates.values())


@pytest.mark.parametrize("name", ["normpre_g", "normpre_g-msign", "normpre_l-sketch", "normpre_l-exact", "mano-1"])
def test_zero_rows_get_no_update_where_rows_are_active(name):
    """Zero output rows: nothing moves them on a row-oriented step, whatever the spectral stage does to the others."""
    weights = {leaf: structured("gaussian", shape, 0, 1.0) for leaf, shape in SHAPES.items()}
    # Output neurons are the last axis here.
    gradient = {leaf: structured("zero columns", shape, 1, 1.0) for leaf, shape in SHAPES.items()}
    updates = two_steps(name, weights, [gradient] * 2)[0][1 if name == "mano-1" else 0]  # MANO begins with columns
    for leaf, u in updates.items():
        zero = (SHAPES[leaf][-1] + 1) // 2
        # The singular vectors of a matrix with zero rows are zero there up to rounding.
        assert np.abs(np.asarray(u)[..., :zero]).max() <= 1e-6, leaf


@pytest.mark.parametrize("name", FACTORIES)
def test_a_bad_matrix_spoils_no_other(name):
    weights = {leaf: structured("gaussian", shape, 0, 1.0) for leaf, shape in SHAPES.items()}
    gradient = {leaf: structured("gaussian", shape, 1, 1.0) for leaf, shape in SHAPES.items()}
    bad = {leaf: x.copy() for leaf, x in gradient.items()}
    bad["stack"][0, 1, 1] = np.nan
    bad["wide"][0, 0] = np.inf
    good, hurt = (two_steps(name, weights, [g])[0][0] for g in (gradient, bad))
    for leaf in ("row", "column", "scalar"):
        np.testing.assert_array_equal(hurt[leaf], good[leaf])
    np.testing.assert_array_equal(hurt["stack"][1], good["stack"][1])
    assert np.isnan(hurt["stack"][0]).any()
    assert not np.isfinite(hurt["wide"]).all()


def test_training_through_zero_gradients_moves_on():
    """A run that starts on a plateau of zeros is not poisoned by it."""
    tx = optimizer("normpre_l-sketch")
    params = {leaf: jnp.asarray(structured("gaussian", shape, 0, 1.0)) for leaf, shape in SHAPES.items()}
    state = tx.init(params)
    for step in range(4):
        grads = jax.tree.map(jnp.zeros_like if step < 2 else jnp.ones_like, params)
        updates, state = updater(tx)(grads, state, params)
        params = optax.apply_updates(params, updates)
        assert all(np.isfinite(p).all() for p in jax.tree.leaves(params))
    assert all(np.any(np.asarray(u)) for u in updates.values())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (npo.muon(0.1, norm_control="hold"), r"trace\['dense'\] is of shape \(3, 5\), and should be absent"),
        (npo.normpre_l(0.1), "is of shape \\(\\), and should be absent"),
        (optax.sgd(0.1), "is absent, and should be of shape"),
    ],
)
def test_a_state_of_another_optimizer_is_named(given, said):
    params = {"dense": jnp.ones((3, 5))}
    with pytest.raises(ValueError, match="not of this optimizer with these parameters: state") as raised:
        npo.muon(0.1).update(params, given.init(params), params)
    assert re.search(said, str(raised.value)), raised.value
    assert "orientation, rank, warm_start, norm_control, and whether learning rates" in str(raised.value)
    with pytest.raises(ValueError, match=r"\['dense'\] is of shape \(3, 5\), and should be of shape \(3, 4\)"):
        npo.muon(0.1).update({"dense": jnp.ones((3, 4))}, npo.muon(0.1).init(params), {"dense": jnp.ones((3, 4))})


@pytest.mark.parametrize(
    ("factory", "before", "after"),
    [
        (npo.normpre_g, {"orientation": "rows"}, {}),
        (npo.normpre_g, {}, {"orientation": "rows"}),
        (npo.normpre_l, {"rank": 4, "warm_start": True}, {"rank": 6, "warm_start": True}),
        (npo.dion, {"rank": 4}, {"rank": 6}),
        (npo.muon, {}, {"learning_rate": lambda step: 0.1}),
        (npo.muon, {"weight_decay": lambda step: 0.1}, {}),
    ],
)
def test_a_state_of_other_options_is_refused_even_where_it_would_run(factory, before, after):
    params = {"dense": jnp.ones((16, 20))}
    given, tx = (factory(**{"learning_rate": 0.1} | options) for options in (before, after))
    with pytest.raises(ValueError, match="not of this optimizer with these parameters: state"):
        jax.eval_shape(tx.update, params, given.init(params), params)


def test_a_state_of_another_optimizer_is_refused_where_its_arrays_are_alike():
    params = {"dense": jnp.ones((16, 20))}
    with pytest.raises(ValueError, match="state is of another optimizer"):
        jax.eval_shape(npo.muoneq(0.1).update, params, npo.muon(0.1).init(params), params)
