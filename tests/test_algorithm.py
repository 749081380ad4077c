# SPDX-License-Identifier: Apache-2.0
"""Algorithm 1 over several steps against the float64 reference, in the way of every
platform; and the AdamW group.

In float32 every step starts from the reference's weights, rounded to float32 for both,
so that each update is held to the rounding of one step (momentum, orientation and draws
run on by themselves). In float64 both run freely, and the weights at the end are
compared at 1e-10.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import normpre_optax as npo
from normpre_optax.linalg import sketch
from normpre_optax.linalg.platforms import on
from normpre_optax.stages import tpu_groups
from tests import cases, reference
from tests.cases import EPS32, EPS64

STEPS = 6
LEARNING_RATE, WEIGHT_DECAY = 0.03, 0.1
RANK, OVERSAMPLE, SEED = (
    2,
    1,
    11,
)  # three draws for dimensions of five and seven: a real sketch, and a rank that binds
SKETCH = {"rank": RANK, "oversample": OVERSAMPLE, "seed": SEED}

DECAY = {"weight_decay": WEIGHT_DECAY, "matrix_dims": cases.DIMS}
OPTIMIZERS = {
    "newton_schulz": functools.partial(npo.normpre_g, compute_dtype=jnp.float32),
    "msign": functools.partial(npo.normpre_g, ns_steps=None),
    "exact": functools.partial(npo.normpre_l, method="exact", rank=RANK),
    "sketch": functools.partial(npo.normpre_l, compute_dtype=jnp.float32, **SKETCH),
    "newton_schulz-usual": npo.normpre_g,  # in bfloat16 on a TPU
    "sketch-usual": functools.partial(npo.normpre_l, **SKETCH),  # in bfloat16 on a GPU
}


def draws(path, index, step, shape):
    return cases.omega(SEED, step, path, index, shape, RANK + OVERSAMPLE)


def run_reference(oracle, w, gradients, round_to=np.float64):
    """The reference, matrix by matrix: yields (W_t, Psi_t, W_t+1) for every step."""
    trace = {name: np.zeros_like(x, np.float64) for name, x in w.items()}
    for step, gradient in enumerate(gradients):
        w = {name: x.astype(round_to).astype(np.float64) for name, x in w.items()}
        trace = cases.each_matrix(
            lambda n, i, m, g: oracle.momentum * m + np.float64(g), trace, gradient
        )
        psi = cases.each_matrix(
            lambda n, i, m, x, t=step: oracle.normalized(m, x, t), trace, w
        )

        def advance(name, index, m, x, t=step):
            omega = draws(name, index, t, x.shape) if oracle.stage == "sketch" else None
            direction = oracle.direction(m, x, t, omega)
            return reference.decoupled_step(x, direction, LEARNING_RATE, WEIGHT_DECAY)

        new = cases.each_matrix(advance, trace, w)
        yield w, psi, new
        w = new


def tolerance(stage, psi, step, name, index, eps):
    """Bound on ||T - T_reference|| / ||T_reference|| from the rounding of one step,
    given the reference's Psi.

    Everything before the spectral stage works on rows: Psi has a relative error of
    about ten eps (momentum, the cancellation in the tangent, the norm). The spectral
    stage amplifies it by the Lipschitz constant of its map.
    """
    error = 10 * eps
    singular = np.linalg.svd(psi, compute_uv=False)
    if stage == "newton_schulz":
        start = singular / np.linalg.norm(singular)
        return (
            error
            * reference.newton_schulz_lipschitz(start)
            / np.linalg.norm(reference.newton_schulz_scalar(start))
        )
    if stage == "msign":
        # U V^T moves by ||dPsi|| / sigma_min.
        return error * np.linalg.norm(psi) / singular[-1]
    # Clipping all modes is a projection: Lipschitz one. Cutting after r of them rotates
    # the selected subspace by ||dGamma|| / (lambda_r - lambda_r+1), and a rotation
    # costs at most the change sigma_1 - 1 that is applied there.
    top = singular[: RANK + 1] ** 2
    factor = 1.0
    if len(top) > RANK and top[RANK - 1] > 1:
        factor += 2 * top[0] / (top[RANK - 1] - top[RANK])
    if stage == "sketch":
        # The same for the Ritz values; and each of the two orthonormal bases is as
        # exact as its Y is well conditioned.
        wide = psi if psi.shape[0] <= psi.shape[1] else psi.T
        first = wide @ draws(name, index, step, psi.shape)
        second = wide @ (wide.T @ np.linalg.qr(first)[0])
        values = np.linalg.svd(np.linalg.qr(second)[0].T @ wide, compute_uv=False) ** 2
        factor = np.linalg.cond(first) + np.linalg.cond(second)
        if len(values) > RANK and values[RANK - 1] > 1:
            factor += 2 * values[0] / (values[RANK - 1] - values[RANK])
    return error * factor


PLAIN = ("alternating", "relaxed")
COMBINATIONS = [
    *(("newton_schulz", *PLAIN, platform) for platform in ("cpu", "tpu", "gpu")),
    *(("newton_schulz-usual", *PLAIN, platform) for platform in ("cpu", "tpu")),
    *(
        ("newton_schulz", *how, "cpu")
        for how in (("rows", "strict"), ("columns", "none"))
    ),
    *((stage, *PLAIN, "cpu") for stage in ("msign", "exact")),
    *(
        ("sketch", "both", "strict", "cpu"),
        ("sketch", *PLAIN, "tpu"),
        ("sketch-usual", *PLAIN, "gpu"),
    ),
]
SIDES, TANGENTS = (
    ("alternating", "rows", "columns", "both"),
    ("relaxed", "strict", "none"),
)
THOROUGH = itertools.product(
    list(OPTIMIZERS)[:4], SIDES, TANGENTS, ("cpu", "tpu", "gpu")
)


@cases.rows(
    "stage orientation tangent platform",
    *COMBINATIONS,
    *(
        pytest.param(*x, marks=pytest.mark.thorough)
        for x in THOROUGH
        if x not in COMBINATIONS
    ),
)
def test_steps_agree_with_the_reference(stage, orientation, tangent, platform):
    """With a zero row, a zero matrix and one in a stack."""
    tx = OPTIMIZERS[stage](
        LEARNING_RATE, orientation=orientation, tangent=tangent, **DECAY
    )
    kind, _, usual = stage.partition("-")
    # Psi and the thin factors are rounded to bfloat16, 2^-9 each; modes of a truncated
    # sketch are close to each other and rotate by a few times that. Newton-Schulz on a
    # TPU reads a rounded Psi, and its slope at large singular values is a few.
    rounding = 2**-6 if usual and platform != "cpu" else 0.0
    oracle = reference.NormPre(kind, orientation, tangent, rank=RANK, eps=EPS32)
    w, gradients = cases.weights(), cases.gradients(STEPS)
    for gradient in gradients:
        gradient["wide"][2] = gradient["twin"][:] = gradient["stack"][1] = 0
    state = tx.init(cases.to_layout(w))
    update = functools.partial(on, platform, cases.one_by_one_jit(tx.update))
    for step, (before, psi, after) in enumerate(
        run_reference(oracle, w, gradients, np.float32)
    ):
        params = cases.to_layout(before, jnp.float32)
        updates, state = update(cases.to_layout(gradients[step]), state, params)

        def check(name, index, new, old, moved, p, t=step):
            error = np.linalg.norm(moved - (new - old)) / np.linalg.norm(new - old)
            some = (
                p if kind == "sketch" else p[p.any(axis=1)]
            )  # a zero row has no part in the conditioning
            bound = (
                tolerance(kind, some, t, name, index, EPS32) if p.any() else 4 * EPS32
            )  # weight decay alone
            assert error <= bound + rounding, (t, name, index, error / bound)
            return np.zeros(0)

        cases.each_matrix(check, after, before, cases.from_layout(updates), psi)


@pytest.mark.parametrize("stage", list(OPTIMIZERS)[:4])
def test_free_steps_agree_in_float64(monkeypatch, stage):
    # Normal draws are float32 and may differ by a unit in the last place between two
    # compiled programs, far above 1e-10. Rounded to sixteenths they are the same for
    # both.
    fine = sketch.draws
    monkeypatch.setattr(
        sketch, "draws", lambda *given: jnp.round(16 * fine(*given)) / 16
    )
    cases.omega.cache_clear()
    oracle = reference.NormPre(stage, rank=RANK, eps=EPS64)
    gradients = cases.gradients(STEPS)
    *_, (_, _, expected) = run_reference(oracle, cases.weights(), gradients)
    cases.omega.cache_clear()
    with jax.enable_x64(True):
        options = (
            {"compute_dtype": jnp.float64}
            if stage in ("sketch", "newton_schulz")
            else {}
        )
        tx = OPTIMIZERS[stage](LEARNING_RATE, **DECAY, **options)
        got = cases.path(
            tx._replace(update=cases.quick_jit(tx.update)), gradients, dtype=jnp.float64
        )
    for name, x in expected.items():
        # eps64 times an amplification of at most 1e4 a step (see `tolerance`), over
        # steps of size 0.006.
        assert np.linalg.norm(got[name] - x) <= 1e-10 * np.linalg.norm(x), name


def first_directions(tx):
    w, (gradient,) = cases.weights(), cases.gradients(1)
    params, grads = (cases.to_layout(x) for x in (w, gradient))
    return w, gradient, cases.from_layout(cases.first_update(tx, grads, params))


@cases.rows(
    "name steps headroom scale",
    ("you", 3, 1.0, "schatten"),
    ("polar_express", 5, 1.02, "frobenius"),
)
def test_coefficients_steps_and_scale_reach_the_spectral_stage(
    name, steps, headroom, scale
):
    oracle = reference.NormPre(
        "newton_schulz",
        table=reference.TABLES[name][:steps],
        headroom=headroom,
        scale=scale,
    )
    options = {"ns_coefficients": name, "ns_steps": steps, "ns_scale": scale}
    tx = npo.normpre_g(1.0, **options, weight_decay=0.0, matrix_dims=cases.DIMS)
    w, gradient, got = first_directions(tx)
    expected = cases.each_matrix(
        lambda n, i, g, x: -oracle.direction(np.float64(g), np.float64(x), 0),
        gradient,
        w,
    )
    for key, x in expected.items():
        # 10 eps, times a slope at zero of 970 at most, times the RMS.
        np.testing.assert_allclose(got[key], x, atol=10 * EPS32 * 970 * 0.2)


@cases.rows(
    "method rank level",
    ("exact", 0.25, None),
    ("exact", 99, 0.5),
    ("sketch", 0.25, 0.5),
    ("products", 3, None),
)
def test_shares_and_thresholds_reach_the_spectral_stage(method, rank, level):
    """With a sketch of the whole smaller dimension; ``products`` clips every mode that
    the sketch sees.
    """
    more = {
        "oversample": 99,
        "power_iterations": 2,
        "rms": None,
        "matrix_dims": cases.DIMS,
    }
    tx = npo.scale_by_normpre_l(
        rank=rank, method=method, relative_threshold=level, **more
    )
    w, gradient, got = first_directions(tx)

    def expected(name, index, g, x):
        psi = reference.unit_rows(reference.tangent_rows(np.float64(g), np.float64(x)))
        kept = (
            max(1, round(rank * min(psi.shape)))
            if isinstance(rank, float)
            else 99
            if method == "products"
            else rank
        )
        return (
            reference.precondition_adaptively(psi, kept, level)
            if level
            else reference.precondition_exact(psi, kept)
        )

    for name, x in cases.each_matrix(expected, gradient, w).items():
        # A full basis is as exact as the Gram matrices are conditioned, 1e4 at most;
        # the sign of `products` is settled to 1e-3 of the largest eigenvalue, times the
        # change that is applied there.
        np.testing.assert_allclose(
            got[name], x, atol=5e-3 if method == "products" else 1e-4, err_msg=name
        )


@pytest.mark.parametrize("name", ["normpre_l-small", "muon-hyperball"])
def test_groups_on_a_tpu_change_neither_updates_nor_state(monkeypatch, name):
    params, found = cases.to_layout(cases.weights()), []
    for limit in (
        tpu_groups.GROUP_BYTES,
        300,
    ):  # all at once; one or two parameters at a time
        monkeypatch.setattr(tpu_groups, "GROUP_BYTES", limit)
        tx = cases.make(
            name, 0.1, matrix_dims=cases.DIMS
        )  # jax traces one function once
        update = functools.partial(on, "tpu", cases.one_by_one_jit(tx.update))
        gradients = map(cases.to_layout, cases.gradients(2))
        found.append(cases.steps(update, tx.init(params), params, gradients))
    # Small problems are solved in other batches: rounding, times the condition of the
    # sketch's basis, below 1e2.
    cases.assert_close(*found, rtol=0, atol=2e-6)


def test_where_a_sketch_is_computed_in_bfloat16(x64):
    for dtype, compute_dtype, expected in (
        (jnp.float32, None, ["gpu"]),
        (jnp.float32, jnp.float32, []),
        (jnp.float32, jnp.bfloat16, ["cpu", "tpu", "gpu"]),
        (jnp.float64, None, []),
    ):
        psi, tx = (
            jnp.ones((5, 12), dtype),
            npo.precondition_locally(2, 1, compute_dtype=compute_dtype),
        )
        programs = {
            name: on(name, jax.make_jaxpr(tx.update), psi, tx.init(psi))
            for name in ("cpu", "tpu", "gpu")
        }
        assert [
            name for name, program in programs.items() if "bf16" in str(program)
        ] == expected
        assert {program.out_avals[0].dtype for program in programs.values()} == {
            jnp.dtype(dtype)
        }


def test_the_stages_in_a_chain_are_algorithm_1():
    stages = (
        npo.project_to_tangent(),
        npo.normalize_rows(),
        npo.precondition_globally(),
        npo.scale_to_rms(0.2),
    )
    chain = npo.direction(optax.trace(0.95), *stages, matrix_dims=cases.DIMS)
    *_, got = first_directions(chain)
    *_, expected = first_directions(
        npo.scale_by_normpre_g(orientation="rows", matrix_dims=cases.DIMS)
    )
    for name, x in expected.items():
        np.testing.assert_allclose(
            got[name], x, atol=4 * 485 * EPS32 * 0.2, err_msg=name
        )  # the slope at zero


def test_a_direction_is_a_stage_of_another_and_a_complete_optimizer_is_not():
    tx = npo.direction(
        npo.scale_by_muon(), npo.scale_to_rms(0.1), matrix_dims=cases.DIMS
    )
    same = optax.chain(
        npo.scale_by_muon(matrix_dims=cases.DIMS),
        npo.scale_to_rms(0.1, matrix_dims=cases.DIMS),
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        list(first_directions(tx)),
        list(first_directions(same)),
    )
    with pytest.raises(TypeError, match="a complete optimizer cannot be a stage"):
        npo.normpre(1e-2, npo.muon(1e-2)).init({"kernel": jnp.ones((4, 8))})


def test_normpre_with_a_stage_is_the_optimizer_of_that_stage():
    for stage, one in (
        (npo.precondition_globally, "normpre_g"),
        (npo.precondition_locally, "normpre_l"),
    ):
        tx = npo.scale_by_normpre(
            stage(rms=0.2), nesterov=True, rms=None, matrix_dims=cases.DIMS
        )
        same = getattr(npo, f"scale_by_{one}")(nesterov=True, matrix_dims=cases.DIMS)
        jax.tree.map(
            np.testing.assert_array_equal,
            list(first_directions(tx)),
            list(first_directions(same)),
        )


# The AdamW group.


mixed = functools.partial(
    cases.numbers, {"up": {"kernel": (5, 8), "bias": (8,), "scale": (8,)}}
)


def test_everything_that_is_not_a_matrix_uses_adamw():
    """With the learning rate, decay and moments of the matrices, or with its own."""
    schedule = optax.linear_schedule(0.1, 0.01, 5)
    own = {
        "adam_learning_rate": 0.03,
        "adam_b1": 0.8,
        "adam_b2": 0.9,
        "adam_eps": 1e-3,
        "adam_weight_decay": 0.2,
    }

    def roll(tx):
        params = mixed(0)
        state = tx.init(params)
        for step in range(3):
            updates, state = tx.update(mixed(step + 1), state, params)
            params = optax.apply_updates(params, updates)
        return params["up"]

    expected = roll(optax.adamw(schedule, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1))
    expected_own = roll(optax.adamw(0.03, b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.2))
    got, got_own = roll(npo.rmnp(schedule)), roll(npo.rmnp(schedule, **own))
    for name in ("bias", "scale"):
        np.testing.assert_allclose(got[name], expected[name], rtol=8 * EPS32)
        np.testing.assert_allclose(got_own[name], expected_own[name], rtol=8 * EPS32)
    np.testing.assert_array_equal(got["kernel"], got_own["kernel"])


@pytest.mark.parametrize(("masked", "as_callable"), [("kernel", True), ("bias", False)])
def test_weight_decay_is_decoupled_and_its_mask_is_read_on_the_whole_tree(
    masked, as_callable
):
    def mask(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: path[-1].key != masked, params
        )

    params, grads = mixed(0), mixed(1)
    given = mask if as_callable else mask(params)
    free, half = (
        cases.first_update(
            npo.rmnp(0.1, weight_decay=decay, weight_decay_mask=given), grads, params
        )["up"]
        for decay in (0.0, 0.5)
    )
    for name, weight in params["up"].items():
        expected = 0.0 if name == masked else -0.1 * 0.5 * weight
        np.testing.assert_allclose(half[name] - free[name], expected, atol=4 * EPS32)


def test_a_sketch_of_less_than_a_quarter_costs_a_sixth_of_newton_schulz():
    """XLA's count of operations before compilation, a layer of GPT-2 Small: a row of
    docs/choosing.md.
    """
    shapes = {
        "qkv": (768, 2304),
        "proj": (768, 768),
        "up": (768, 3072),
        "down": (3072, 768),
    }
    params = {
        name: {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)}
        for name, shape in shapes.items()
    }

    def operations(tx):
        lowered = jax.jit(tx.update).lower(
            params, jax.eval_shape(tx.init, params), params
        )
        return lowered.cost_analysis()["flops"]

    share = operations(npo.scale_by_normpre_l(rank=0.22)) / operations(
        npo.scale_by_normpre_g()
    )
    assert share == pytest.approx(0.172, abs=0.001)
