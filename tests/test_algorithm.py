# SPDX-License-Identifier: Apache-2.0
"""Algorithm 1 over several steps against the float64 reference; and the AdamW group.

The update is computed in the way of every platform. In float32 every step starts from
the reference's weights, rounded to float32 for both, so that each update is held to the
rounding of one step (momentum, orientation and draws run on by themselves). In float64
both run freely, and the weights at the end are compared at 1e-10.
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
LEARNING_RATE = 0.03
WEIGHT_DECAY = 0.1
# Three draws for dimensions of five and seven: a real sketch, and a rank that binds.
RANK = 2
OVERSAMPLE = 1
SEED = 11
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

    def averaged(name, index, m, g):
        return oracle.momentum * m + np.float64(g)

    trace = {name: np.zeros_like(x, np.float64) for name, x in w.items()}
    for step, gradient in enumerate(gradients):

        def normalized(name, index, m, x, t=step):
            return oracle.normalized(m, x, t)

        def advance(name, index, m, x, t=step):
            omega = None
            if oracle.stage == "sketch":
                omega = draws(name, index, t, x.shape)
            direction = oracle.direction(m, x, t, omega)
            return reference.decoupled_step(x, direction, LEARNING_RATE, WEIGHT_DECAY)

        w = {name: x.astype(round_to).astype(np.float64) for name, x in w.items()}
        trace = cases.each_matrix(averaged, trace, gradient)
        psi = cases.each_matrix(normalized, trace, w)
        new = cases.each_matrix(advance, trace, w)
        yield w, psi, new
        w = new


def rotation(values):
    """How much cutting after RANK of these eigenvalues amplifies an error.

    It rotates the selected subspace by ||dGamma|| / (lambda_r - lambda_r+1), and a
    rotation costs at most the change sigma_1 - 1 that is applied there.
    """
    if len(values) > RANK and values[RANK - 1] > 1:
        return 2 * values[0] / (values[RANK - 1] - values[RANK])
    return 0.0


def amplification_by_a_sketch(psi, omega):
    """That of Algorithm 2: of its Ritz values and of its two bases."""
    wide = psi if psi.shape[0] <= psi.shape[1] else psi.T
    first = wide @ omega
    first_basis, _ = np.linalg.qr(first)
    second = wide @ (wide.T @ first_basis)
    second_basis, _ = np.linalg.qr(second)
    ritz_values = np.linalg.svd(second_basis.T @ wide, compute_uv=False) ** 2
    # Each of the orthonormal bases is as exact as its Y is well conditioned.
    condition = np.linalg.cond(first) + np.linalg.cond(second)
    return condition + rotation(ritz_values)


def tolerance(stage, psi, step, name, index, eps):
    """Bound on ||T - T_reference|| / ||T_reference|| from the rounding of one step.

    Everything before the spectral stage works on rows: the reference's Psi has a
    relative error of about ten eps (momentum, the cancellation in the tangent, the
    norm). The spectral stage amplifies it by the Lipschitz constant of its map.
    """
    error = 10 * eps
    singular = np.linalg.svd(psi, compute_uv=False)
    if stage == "newton_schulz":
        start = singular / np.linalg.norm(singular)
        result = np.linalg.norm(reference.newton_schulz_scalar(start))
        return error * reference.newton_schulz_lipschitz(start) / result
    if stage == "msign":
        # U V^T moves by ||dPsi|| / sigma_min.
        return error * np.linalg.norm(psi) / singular[-1]
    if stage == "sketch":
        omega = draws(name, index, step, psi.shape)
        return error * amplification_by_a_sketch(psi, omega)
    # Clipping all modes is a projection: Lipschitz one.
    return error * (1.0 + rotation(singular[: RANK + 1] ** 2))


PLAIN = ("alternating", "relaxed")
COMBINATIONS = [
    ("newton_schulz", *PLAIN, "cpu"),
    ("newton_schulz", *PLAIN, "tpu"),
    ("newton_schulz", *PLAIN, "gpu"),
    ("newton_schulz-usual", *PLAIN, "cpu"),
    ("newton_schulz-usual", *PLAIN, "tpu"),
    ("newton_schulz", "rows", "strict", "cpu"),
    ("newton_schulz", "columns", "none", "cpu"),
    ("msign", *PLAIN, "cpu"),
    ("exact", *PLAIN, "cpu"),
    ("sketch", "both", "strict", "cpu"),
    ("sketch", *PLAIN, "tpu"),
    ("sketch-usual", *PLAIN, "gpu"),
]
ALL_COMBINATIONS = itertools.product(
    list(OPTIMIZERS)[:4],
    ("alternating", "rows", "columns", "both"),
    ("relaxed", "strict", "none"),
    ("cpu", "tpu", "gpu"),
)
OTHERS = [x for x in ALL_COMBINATIONS if x not in COMBINATIONS]


@cases.rows(
    "stage orientation tangent platform",
    *COMBINATIONS,
    *(pytest.param(*x, marks=pytest.mark.thorough) for x in OTHERS),
)
def test_steps_agree_with_the_reference(stage, orientation, tangent, platform):
    """With a zero row, a zero matrix and one in a stack."""
    options = {"orientation": orientation, "tangent": tangent} | DECAY
    tx = OPTIMIZERS[stage](LEARNING_RATE, **options)
    kind, _, usual = stage.partition("-")
    # Psi and the thin factors are rounded to bfloat16, 2^-9 each; modes of a truncated
    # sketch are close to each other and rotate by a few times that. Newton-Schulz on a
    # TPU reads a rounded Psi, and its slope at large singular values is a few.
    rounding = 2**-6 if usual and platform != "cpu" else 0.0
    oracle = reference.NormPre(kind, orientation, tangent, rank=RANK, eps=EPS32)
    w = cases.weights()
    gradients = cases.gradients(STEPS)
    for gradient in gradients:
        gradient["wide"][2] = 0
        gradient["twin"][:] = 0
        gradient["stack"][1] = 0
    state = tx.init(cases.to_layout(w))
    update = functools.partial(on, platform, cases.one_by_one_jit(tx.update))
    expected = run_reference(oracle, w, gradients, np.float32)
    for step, (before, psi, after) in enumerate(expected):
        params = cases.to_layout(before, jnp.float32)
        updates, state = update(cases.to_layout(gradients[step]), state, params)

        def check(name, index, new, old, moved, p, t=step):
            error = np.linalg.norm(moved - (new - old)) / np.linalg.norm(new - old)
            bound = 4 * EPS32  # of weight decay alone
            if p.any():
                # A zero row has no part in the conditioning.
                some = p if kind == "sketch" else p[p.any(axis=1)]
                bound = tolerance(kind, some, t, name, index, EPS32)
            assert error <= bound + rounding, (t, name, index, error / bound)
            return np.zeros(0)

        cases.each_matrix(check, after, before, cases.from_layout(updates), psi)


@pytest.mark.parametrize("stage", list(OPTIMIZERS)[:4])
def test_free_steps_agree_in_float64(monkeypatch, stage):
    # Normal draws are float32 and may differ by a unit in the last place between two
    # compiled programs, far above 1e-10. Rounded to sixteenths they are the same for
    # both.
    fine = sketch.draws

    def rounded(*given):
        return jnp.round(16 * fine(*given)) / 16

    monkeypatch.setattr(sketch, "draws", rounded)
    cases.omega.cache_clear()
    oracle = reference.NormPre(stage, rank=RANK, eps=EPS64)
    gradients = cases.gradients(STEPS)
    *_, (_, _, expected) = run_reference(oracle, cases.weights(), gradients)
    cases.omega.cache_clear()
    options = dict(DECAY)
    if stage in ("sketch", "newton_schulz"):
        options["compute_dtype"] = jnp.float64
    with jax.enable_x64(True):
        tx = OPTIMIZERS[stage](LEARNING_RATE, **options)
        tx = tx._replace(update=cases.quick_jit(tx.update))
        got = cases.path(tx, gradients, dtype=jnp.float64)
    for name, x in expected.items():
        # eps64 times an amplification of at most 1e4 a step (see `tolerance`), over
        # steps of size 0.006.
        assert np.linalg.norm(got[name] - x) <= 1e-10 * np.linalg.norm(x), name


def first_directions(tx):
    """The weights, their gradient and their first update, all (..., out, in)."""
    w = cases.weights()
    (gradient,) = cases.gradients(1)
    params = cases.to_layout(w)
    grads = cases.to_layout(gradient)
    return w, gradient, cases.from_layout(cases.first_update(tx, grads, params))


def assert_same_first_directions(a, b):
    """Bit for bit, with the weights and gradients."""
    trees = list(first_directions(a)), list(first_directions(b))
    jax.tree.map(np.testing.assert_array_equal, *trees)


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
    options = {"ns_coefficients": name, "ns_steps": steps, "ns_norm": scale}
    tx = npo.normpre_g(1.0, **options, weight_decay=0.0, matrix_dims=cases.DIMS)
    w, gradient, got = first_directions(tx)

    def expected(name, index, g, x):
        return -oracle.direction(np.float64(g), np.float64(x), 0)

    for key, x in cases.each_matrix(expected, gradient, w).items():
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
    """With a sketch of the whole smaller dimension.

    ``products`` clips every mode that the sketch sees.
    """
    tx = npo.scale_by_normpre_l(
        rank=rank,
        oversample=99,
        power_iterations=2,
        method=method,
        relative_threshold=level,
        rms=None,
        matrix_dims=cases.DIMS,
    )
    w, gradient, got = first_directions(tx)

    def clipped_modes(shape):
        if isinstance(rank, float):
            return max(1, round(rank * min(shape)))
        if method == "products":
            return 99
        return rank

    def expected(name, index, g, x):
        psi = reference.unit_rows(reference.tangent_rows(np.float64(g), np.float64(x)))
        modes = clipped_modes(psi.shape)
        if level:
            return reference.precondition_adaptively(psi, modes, level)
        return reference.precondition_exact(psi, modes)

    # A full basis is as exact as the Gram matrices are conditioned, 1e4 at most; the
    # sign of `products` is settled to 1e-3 of the largest eigenvalue, times the change
    # that is applied there.
    atol = 5e-3 if method == "products" else 1e-4
    for name, x in cases.each_matrix(expected, gradient, w).items():
        np.testing.assert_allclose(got[name], x, atol=atol, err_msg=name)


@pytest.mark.parametrize("name", ["normpre_l-small", "muon-hyperball"])
def test_groups_on_a_tpu_change_neither_updates_nor_state(monkeypatch, name):
    params = cases.to_layout(cases.weights())
    gradients = [cases.to_layout(gradient) for gradient in cases.gradients(2)]

    def steps_in_groups_of(limit):
        monkeypatch.setattr(tpu_groups, "GROUP_BYTES", limit)
        # A new optimizer each time, because jax traces one function once.
        tx = cases.make(name, 0.1, matrix_dims=cases.DIMS)
        update = functools.partial(on, "tpu", cases.one_by_one_jit(tx.update))
        return cases.steps(update, tx.init(params), params, gradients)

    all_at_once = steps_in_groups_of(tpu_groups.GROUP_BYTES)
    one_or_two_at_a_time = steps_in_groups_of(300)
    # Small problems are solved in other batches: rounding, times the condition of the
    # sketch's basis, below 1e2.
    cases.assert_close(all_at_once, one_or_two_at_a_time, rtol=0, atol=2e-6)


def test_where_a_sketch_is_computed_in_bfloat16(x64):
    for dtype, compute_dtype, expected in (
        (jnp.float32, None, ["gpu"]),
        (jnp.float32, jnp.float32, []),
        (jnp.float32, jnp.bfloat16, ["cpu", "tpu", "gpu"]),
        (jnp.float64, None, []),
    ):
        psi = jnp.ones((5, 12), dtype)
        tx = npo.precondition_locally(2, 1, compute_dtype=compute_dtype)
        found = []
        for name in ("cpu", "tpu", "gpu"):
            program = on(name, jax.make_jaxpr(tx.update), psi, tx.init(psi))
            assert program.out_avals[0].dtype == jnp.dtype(dtype)
            if "bf16" in str(program):
                found.append(name)
        assert found == expected


def test_the_stages_in_a_chain_are_algorithm_1():
    stages = (
        npo.project_to_tangent(),
        npo.normalize_rows(),
        npo.precondition_globally(),
        npo.scale_to_rms(0.2),
    )
    chain = npo.direction(optax.trace(0.95), *stages, matrix_dims=cases.DIMS)
    same = npo.scale_by_normpre_g(orientation="rows", matrix_dims=cases.DIMS)
    *_, got = first_directions(chain)
    *_, expected = first_directions(same)
    atol = 4 * 485 * EPS32 * 0.2  # with the slope of Newton-Schulz at zero
    for name, x in expected.items():
        np.testing.assert_allclose(got[name], x, atol=atol, err_msg=name)


def test_a_direction_is_a_stage_of_another_and_a_complete_optimizer_is_not():
    tx = npo.direction(
        npo.scale_by_muon(), npo.scale_to_rms(0.1), matrix_dims=cases.DIMS
    )
    same = optax.chain(
        npo.scale_by_muon(matrix_dims=cases.DIMS),
        npo.scale_to_rms(0.1, matrix_dims=cases.DIMS),
    )
    assert_same_first_directions(tx, same)
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
        assert_same_first_directions(tx, same)


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
    got = roll(npo.rmnp(schedule))
    got_own = roll(npo.rmnp(schedule, **own))
    for name in ("bias", "scale"):
        np.testing.assert_allclose(got[name], expected[name], rtol=8 * EPS32)
        np.testing.assert_allclose(got_own[name], expected_own[name], rtol=8 * EPS32)
    np.testing.assert_array_equal(got["kernel"], got_own["kernel"])


@pytest.mark.parametrize(("masked", "as_callable"), [("kernel", True), ("bias", False)])
def test_weight_decay_is_decoupled_and_its_mask_is_read_on_the_whole_tree(
    masked, as_callable
):
    def decays(path, _):
        return path[-1].key != masked

    def mask(params):
        return jax.tree_util.tree_map_with_path(decays, params)

    params = mixed(0)
    grads = mixed(1)
    given = mask if as_callable else mask(params)

    def first_update(decay):
        tx = npo.rmnp(0.1, weight_decay=decay, weight_decay_mask=given)
        return cases.first_update(tx, grads, params)["up"]

    free = first_update(0.0)
    half = first_update(0.5)
    for name, weight in params["up"].items():
        expected = 0.0 if name == masked else -0.1 * 0.5 * weight
        np.testing.assert_allclose(half[name] - free[name], expected, atol=4 * EPS32)


def test_a_sketch_of_less_than_a_quarter_costs_a_sixth_of_newton_schulz():
    """XLA's count of operations before compilation, for a layer of GPT-2 Small.

    It is a row of docs/choosing.md.
    """
    shapes = {
        "qkv": (768, 2304),
        "proj": (768, 768),
        "up": (768, 3072),
        "down": (3072, 768),
    }
    params = {}
    for name, shape in shapes.items():
        params[name] = {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)}

    def operations(tx):
        state = jax.eval_shape(tx.init, params)
        lowered = jax.jit(tx.update).lower(params, state, params)
        return lowered.cost_analysis()["flops"]

    of_a_sketch = operations(npo.scale_by_normpre_l(rank=0.22))
    of_newton_schulz = operations(npo.scale_by_normpre_g())
    assert of_a_sketch / of_newton_schulz == pytest.approx(0.172, abs=0.001)
