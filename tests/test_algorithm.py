# SPDX-License-Identifier: Apache-2.0
"""Twelve steps of every variant, orientation and tangent mode against the float64 reference.

Two kinds of comparison. In float32 the weights are teacher-forced: every step starts from the reference's weights,
rounded to float32 for both, so that each of the twelve updates is held to the rounding of one step, and a tolerance
derived from that step's conditioning is meaningful (momentum, orientation and draws still run on by themselves). In
float64 both run freely for twelve steps, and only the weights at the end are compared, at 1e-10.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import normpre_optax as npo
from normpre_optax.transforms import draws as drawing
from tests import cases, reference
from tests.cases import EPS32, EPS64

STEPS = 12
LEARNING_RATE, WEIGHT_DECAY = 0.03, 0.1
RANK, OVERSAMPLE, SEED = 2, 1, 11  # three draws for sides of five and seven: a real sketch, and a budget that binds

OPTIMIZERS = {
    "newton_schulz": npo.normpre_g,
    "msign": functools.partial(npo.normpre_g, ns_steps=None),
    "exact": functools.partial(npo.normpre_l, method="exact", rank=RANK),
    "sketch": functools.partial(npo.normpre_l, method="sketch", rank=RANK, oversample=OVERSAMPLE, seed=SEED),
}
ORIENTATIONS = ["alternating", "rows", "columns", "both"]
TANGENTS = [("relaxed", 1.0), ("bounded", 1.0), ("strict", 1.0), ("none", 1.0), ("relaxed", 0.7)]


def draws(path, index, step, shape):
    return cases.omega(SEED, step, path, index, shape, RANK + OVERSAMPLE)


def run_reference(oracle, steps, w, gradients, round_to=np.float64):
    """The reference, matrix by matrix: yields (W_t, Psi_t, W_t+1) for every step."""
    trace = {name: np.zeros_like(x, np.float64) for name, x in w.items()}
    for step, gradient in zip(range(steps), gradients, strict=True):
        w = {name: x.astype(round_to).astype(np.float64) for name, x in w.items()}
        trace = cases.each_matrix(lambda n, i, m, g: oracle.accumulate(m, np.float64(g)), trace, gradient)
        psi = cases.each_matrix(lambda n, i, m, x, t=step: oracle.normalised(m, x, t), trace, w)

        def advance(name, index, m, x, t=step):
            omega = draws(name, index, t, x.shape) if oracle.stage == "sketch" else None
            direction = oracle.direction(m, x, t, omega)
            return reference.decoupled_step(x, direction, LEARNING_RATE, WEIGHT_DECAY)

        new = cases.each_matrix(advance, trace, w)
        yield w, psi, new
        w = new


def tolerance(stage, psi, step, name, index, eps):
    """Bound on ||T - T_reference|| / ||T_reference|| from the rounding of one step, given the reference's Psi.

    Everything before the spectral stage is row-wise: Psi carries a relative error of about ten eps (momentum, the
    cancellation in the tangent, the norm). The spectral stage then amplifies it by the Lipschitz constant of its map.
    """
    error = 10 * eps
    singular = np.linalg.svd(psi, compute_uv=False)
    if stage == "newton_schulz":
        start = singular / np.linalg.norm(singular)
        return error * reference.newton_schulz_lipschitz(start) / np.linalg.norm(reference.newton_schulz_scalar(start))
    if stage == "msign":
        # U V^T moves by ||dPsi|| / sigma_min.
        return error * np.linalg.norm(psi) / singular[-1]
    # Clipping all modes is a projection: Lipschitz one. Cutting after r of them turns the selected subspace by
    # ||dGamma|| / (lambda_r - lambda_r+1), and a turn costs at most the change sigma_1 - 1 that is applied there.
    top = singular[: RANK + 1] ** 2
    factor = 1.0
    if len(top) > RANK and top[RANK - 1] > 1:
        factor += 2 * top[0] / (top[RANK - 1] - top[RANK])
    if stage == "sketch":
        # The same for the Ritz values; and each of the two orthonormal bases is as exact as its Y is well conditioned.
        wide = psi if psi.shape[0] <= psi.shape[1] else psi.T
        first = wide @ draws(name, index, step, psi.shape)
        second = wide @ (wide.T @ np.linalg.qr(first)[0])
        values = np.linalg.svd(np.linalg.qr(second)[0].T @ wide, compute_uv=False) ** 2
        factor = np.linalg.cond(first) + np.linalg.cond(second)
        if len(values) > RANK and values[RANK - 1] > 1:
            factor += 2 * values[0] / (values[RANK - 1] - values[RANK])
    return error * factor


def combinations():
    """Every variant x orientation x tangent mode; the default run asks each option once, and each variant.

    Newton-Schulz takes every orientation and every mode; the sketch, which is told how matrices lie, every orientation.
    """
    for stage, orientation, (tangent, radius) in itertools.product(OPTIMIZERS, ORIENTATIONS, TANGENTS):
        plain = orientation == ORIENTATIONS[0], (tangent, radius) == TANGENTS[0]
        usual = all(plain) or (stage == "newton_schulz" and any(plain)) or (stage == "sketch" and plain[1])
        yield pytest.param(
            stage,
            orientation,
            tangent,
            radius,
            marks=() if usual else pytest.mark.thorough,
            id=f"{stage}-{orientation}-{tangent}-{radius}",
        )


@pytest.mark.parametrize(("stage", "orientation", "tangent", "radius"), list(combinations()))
def test_twelve_steps_agree_with_the_reference(stage, orientation, tangent, radius):
    tx = OPTIMIZERS[stage](
        LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        orientation=orientation,
        tangent=tangent,
        tangent_radius=radius,
        matrix_dims=cases.DIMS,
    )
    oracle = reference.NormPre(stage, orientation, tangent, radius, rank=RANK, eps=EPS32)
    w, gradients = cases.weights(), cases.gradients(STEPS)
    state = tx.init(cases.as_jax(cases.to_layout(w)))
    update = cases.quick_jit(tx.update)  # `test_contract` holds the optimised program to it
    worst = 0.0
    for step, (before, psi, after) in enumerate(run_reference(oracle, STEPS, w, gradients, np.float32)):
        params = cases.as_jax(cases.to_layout(before), jnp.float32)
        updates, state = update(cases.as_jax(cases.to_layout(gradients[step])), state, params)
        got = cases.from_layout(updates)

        def check(name, index, new, old, moved, p, t=step):
            nonlocal worst
            expected = new - old
            error = np.linalg.norm(moved - expected) / np.linalg.norm(expected)
            bound = tolerance(stage, p, t, name, index, EPS32)
            worst = max(worst, error / bound)
            return np.zeros(0)

        cases.each_matrix(check, after, before, got, psi)
    assert worst <= 1, f"error is {worst:.2f} times what rounding can explain"


@pytest.mark.parametrize(
    ("stage", "orientation", "tangent"),
    [*((stage, "alternating", "relaxed") for stage in OPTIMIZERS), ("sketch", "both", "strict")],
)
def test_twelve_free_steps_agree_in_float64(monkeypatch, stage, orientation, tangent):
    # Normal draws are float32 and may differ by a unit in the last place from one compiled program to the next, which
    # is far above 1e-10. Rounded to sixteenths they are the same for both sides.
    fine = drawing.sketch_draws
    monkeypatch.setattr(drawing, "sketch_draws", lambda *where: jnp.round(16 * fine(*where)) / 16)
    oracle = reference.NormPre(stage, orientation, tangent, rank=RANK, eps=EPS64)
    w, gradients = cases.weights(), cases.gradients(STEPS)
    *_, (_, _, expected) = run_reference(oracle, STEPS, w, gradients)
    with jax.enable_x64(True):
        tx = OPTIMIZERS[stage](
            LEARNING_RATE, weight_decay=WEIGHT_DECAY, orientation=orientation, tangent=tangent, matrix_dims=cases.DIMS
        )
        update = cases.quick_jit(tx.update)
        params = cases.as_jax(cases.to_layout(w), jnp.float64)
        state = tx.init(params)
        for gradient in gradients:
            updates, state = update(cases.as_jax(cases.to_layout(gradient), jnp.float64), state, params)
            params = optax.apply_updates(params, updates)
        got = cases.from_layout(params)
        assert all(x.dtype == jnp.float64 for x in jax.tree.leaves(params))
    for name, x in expected.items():
        # eps64 times an amplification of at most 1e4 a step (see `tolerance`), over twelve steps of size 0.006.
        assert np.linalg.norm(got[name] - x) <= 1e-10 * np.linalg.norm(x), name


def test_newton_schulz_tables_reach_the_optimizer():
    w, (gradient,) = cases.weights(), cases.gradients(1)
    params, grads = (cases.as_jax(cases.to_layout(x)) for x in (w, gradient))
    for name, headroom in (("you", 1.0), ("polar_express", 1.02)):
        oracle = reference.NormPre("newton_schulz", table=reference.TABLES[name], headroom=headroom)
        tx = npo.normpre_g(1.0, ns_coefficients=name, weight_decay=0.0, matrix_dims=cases.DIMS)
        got = cases.from_layout(cases.first_update(tx, grads, params))
        expected = cases.each_matrix(
            lambda n, i, g, x, oracle=oracle: -oracle.direction(np.float64(g), np.float64(x), 0), gradient, w
        )
        for key, x in expected.items():
            # 10 eps, times a slope at zero of 970 at the very most.
            np.testing.assert_allclose(got[key], x, atol=10 * EPS32 * 970 * 0.2)


@pytest.mark.parametrize("steps", [1, 3])
def test_the_number_of_iterations_reaches_the_optimizer(steps):
    w, (gradient,) = cases.weights(), cases.gradients(1)
    params, grads = (cases.as_jax(cases.to_layout(x)) for x in (w, gradient))
    oracle = reference.NormPre("newton_schulz", table=(reference.MUON,) * steps)
    tx = npo.normpre_g(1.0, ns_steps=steps, weight_decay=0.0, matrix_dims=cases.DIMS)
    got = cases.from_layout(cases.first_update(tx, grads, params))
    expected = cases.each_matrix(lambda n, i, g, x: -oracle.direction(np.float64(g), np.float64(x), 0), gradient, w)
    for key, x in expected.items():
        np.testing.assert_allclose(got[key], x, atol=10 * EPS32 * 485 * 0.2)


def mixed(seed=0):
    random = np.random.default_rng(seed)
    return cases.as_jax(
        {
            "up": {"kernel": random.standard_normal((5, 8)), "bias": random.standard_normal(8)},
            "norm": {"scale": random.standard_normal(8)},
        },
        jnp.float32,
    )


def roll(tx, steps=5):
    """Parameters after a few steps on gradients that are the same for every optimizer."""
    params, update = mixed(), cases.quick_jit(tx.update)
    state = tx.init(params)
    for step in range(steps):
        updates, state = update(mixed(step + 1), state, params)
        params = optax.apply_updates(params, updates)
    return params


def vectors(params):
    return {"bias": params["up"]["bias"], "scale": params["norm"]["scale"]}


def test_everything_that_is_no_matrix_gets_adamw():
    schedule = optax.linear_schedule(0.1, 0.01, 5)
    expected = vectors(roll(optax.adamw(schedule, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)))
    for make in (npo.normpre_g, npo.normpre_l, npo.muon, npo.mano):
        got = vectors(roll(make(schedule)))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=8 * EPS32), got, expected)


def test_adamw_has_its_own_rate_decay_and_moments():
    own = {"adam_learning_rate": 0.03, "adam_b1": 0.8, "adam_b2": 0.9, "adam_eps": 1e-3, "adam_weight_decay": 0.2}
    expected = roll(optax.adamw(0.03, b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.2))
    got = roll(npo.normpre_g(0.1, **own))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=8 * EPS32), vectors(got), vectors(expected))
    kernel = roll(npo.normpre_g(0.1))["up"]["kernel"]
    np.testing.assert_array_equal(got["up"]["kernel"], kernel)  # and the matrices do not notice


def test_weight_decay_is_decoupled_and_multiplied_by_the_learning_rate():
    params, grads = mixed(), mixed(1)
    updates = {}
    for decay in (0.0, 0.5):
        tx = npo.normpre_g(0.1, weight_decay=decay, adam_weight_decay=0.0)
        updates[decay] = cases.first_update(tx, grads, params)
    difference = updates[0.5]["up"]["kernel"] - updates[0.0]["up"]["kernel"]
    np.testing.assert_allclose(difference, -0.1 * 0.5 * params["up"]["kernel"], atol=2 * EPS32)
    np.testing.assert_array_equal(updates[0.5]["up"]["bias"], updates[0.0]["up"]["bias"])


@pytest.mark.parametrize("as_callable", [True, False])
@pytest.mark.parametrize("masked", ["kernel", "bias"])
def test_the_weight_decay_mask_is_read_on_the_whole_tree(masked, as_callable):
    def mask(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != masked, params)

    params, grads = mixed(), mixed(1)
    updates = {}
    for key, kwargs in {
        "mask": {"weight_decay": 0.5, "weight_decay_mask": mask if as_callable else mask(params)},
        "none": {"weight_decay": 0.0},
        "all": {"weight_decay": 0.5},
    }.items():
        tx = npo.normpre_g(0.1, **kwargs)
        updates[key], _ = tx.update(grads, tx.init(params), params)  # a program without a mask is shared by all cases
    for module, name in (("up", "kernel"), ("up", "bias"), ("norm", "scale")):
        same, other = ("none", "all") if name == masked else ("all", "none")
        np.testing.assert_array_equal(updates["mask"][module][name], updates[same][module][name])
        assert np.any(updates["mask"][module][name] != updates[other][module][name])


def test_low_precision_momentum_changes_storage_only():
    params, grads = mixed(), mixed(1)
    tx, low = npo.normpre_g(0.1), npo.normpre_g(0.1, mu_dtype=jnp.bfloat16)
    stored = [x for x in jax.tree.leaves(low.init(params)) if x.shape == (5, 8)]
    assert [x.dtype for x in stored] == [jnp.bfloat16]
    updates, low_updates = cases.first_update(tx, grads, params), cases.first_update(low, grads, params)
    # On the first step the momentum is the gradient; the rounding to bfloat16 concerns what is kept, and only that, or
    # at most the 2^-9 of one rounding times the slope of Newton-Schulz at these singular values (a few tens).
    assert low_updates["up"]["kernel"].dtype == jnp.float32
    error = np.linalg.norm(low_updates["up"]["kernel"] - updates["up"]["kernel"])
    assert error <= 2**-9 * 50 * np.linalg.norm(updates["up"]["kernel"])


def test_a_sketch_of_less_than_a_quarter_of_the_side_costs_less_than_a_quarter_of_newton_schulz():
    """XLA's count of operations before compilation, a layer of GPT-2 Small: a row of docs/choosing.md."""
    shapes = {"qkv": (768, 2304), "proj": (768, 768), "up": (768, 3072), "down": (3072, 768)}
    params = {name: {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)} for name, shape in shapes.items()}

    def operations(tx):
        lowered = jax.jit(tx.update).lower(params, jax.eval_shape(tx.init, params), params)
        return lowered.cost_analysis()["flops"]

    share = operations(npo.scale_by_normpre_l(rank=0.22)) / operations(npo.scale_by_normpre_g())
    assert share == pytest.approx(0.234, abs=0.001)
