# SPDX-License-Identifier: Apache-2.0
"""What must hold for any input: sizes, symmetries, optimality, invariances, and where the sketch's draws come from."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import normpre_optax as npo
from tests import cases, reference
from tests.cases import EPS32, updater

STAGES = {
    "newton_schulz": npo.precondition_globally(),
    "msign": npo.precondition_globally(ns_steps=None),
    "exact": npo.precondition_locally(rank=3, method="exact"),
    "sketch": npo.precondition_locally(rank=2, oversample=1),
}


DIMS = {
    "flax": lambda path, leaf: npo.MatrixDims(inputs=leaf.ndim - 2, outputs=leaf.ndim - 1),
    "torch": lambda path, leaf: npo.MatrixDims(inputs=leaf.ndim - 1, outputs=leaf.ndim - 2),
}


def direction(stage, layout="flax", **options):
    """One object, and one program, for the same options."""
    return made(stage, layout, **{"orientation": "alternating", "tangent": "relaxed", "rms": 0.2, **options})


@functools.cache
def made(stage, layout, **options):
    return npo.scale_by_normpre(STAGES[stage], matrix_dims=DIMS[layout], **options)


def directions(tx, steps, w, scale=1.0, shapes=cases.SHAPES):
    """The directions of a few steps at fixed weights, as (…, out, in) in float64."""
    params, update = cases.as_jax(cases.to_layout(w), jnp.float32), updater(tx)
    state, out = tx.init(params), []
    for gradient in cases.gradients(steps, shapes=shapes):
        grads = jax.tree.map(lambda g: g * jnp.float32(scale), cases.as_jax(cases.to_layout(gradient), jnp.float32))
        updates, state = update(grads, state, params)
        out.append(cases.from_layout(updates))
    return out


def rms(x):
    return np.sqrt(np.mean(np.square(x), axis=(-2, -1)))


@pytest.mark.parametrize(
    ("stage", "orientation", "target"), [*((stage, "alternating", 0.2) for stage in STAGES), ("exact", "both", 0.05)]
)
def test_every_matrix_of_the_update_has_the_target_rms(stage, orientation, target):
    for step in directions(direction(stage, orientation=orientation, rms=target), 3, cases.weights()):
        for name, x in step.items():
            np.testing.assert_allclose(rms(x), target, rtol=1e-5, err_msg=name)  # each slice of a stack by itself


def test_rms_is_measured_before_the_cast_to_bfloat16():
    w, (gradient,) = cases.weights(), cases.gradients(1)
    params, grads = (cases.as_jax(cases.to_layout(x), jnp.bfloat16) for x in (w, gradient))
    for name, x in cases.from_layout(cases.first_update(direction("newton_schulz"), grads, params)).items():
        # Entries are rounded to 2^-9 each, up or down; a mean of 35 or more of them moves by less than 2^-9.
        np.testing.assert_allclose(rms(x), 0.2, rtol=2**-9, err_msg=name)


@pytest.mark.parametrize("stage", ["newton_schulz", "exact"])
def test_without_rms_the_spectral_stage_speaks_for_itself(stage):
    w = cases.weights()
    free = directions(direction(stage, rms=None), 2, w)
    scaled = directions(direction(stage), 2, w)
    for a, b in zip(free, scaled, strict=True):
        for name, x in a.items():
            np.testing.assert_allclose(0.2 * x / rms(x)[..., None, None], b[name], rtol=1e-4, atol=1e-6)
            assert np.all(np.abs(rms(x) - 0.2) > 1e-3)  # rms=None is not a hidden 0.2


@pytest.mark.parametrize(
    ("stage", "tangent"), [("newton_schulz", "strict"), ("exact", "relaxed"), ("sketch", "relaxed")]
)
def test_a_column_step_is_the_transposed_row_step_of_the_transpose(stage, tangent):
    # The sketch reads the rows of a square matrix, so there its draws meet the other side: equal up to the draws.
    names = [name for name in cases.SHAPES if not (stage == "sketch" and name == "square")]
    shapes = {name: cases.SHAPES[name] for name in names}
    w = cases.weights(shapes=shapes)
    on = {"stage": stage, "tangent": tangent}
    columns = direction(**on, orientation="columns")
    rows = direction(**on, orientation="rows", layout="torch")
    other = direction(**on, orientation="rows")
    a, b, c = (directions(tx, 2, w, shapes=shapes) for tx in (columns, rows, other))
    for x, y, z in zip(a, b, c, strict=True):
        for name in names:
            # Two float32 programs for the same numbers: rounding, times the slope of Newton-Schulz (20 or so here).
            np.testing.assert_allclose(x[name], y[name], atol=2e-5, err_msg=name)
            assert np.linalg.norm(x[name] - z[name]) > 0.1 * np.linalg.norm(x[name])  # rows are not columns


@pytest.mark.parametrize("stage", ["newton_schulz", "exact"])
def test_alternating_is_rows_then_columns(stage):
    w = cases.weights()
    both = {key: directions(direction(stage, orientation=key), 4, w) for key in ("alternating", "rows", "columns")}
    for step, found in enumerate(both["alternating"]):
        expected = both["rows" if step % 2 == 0 else "columns"][step]
        for name, x in found.items():
            np.testing.assert_allclose(x, expected[name], atol=2e-5, err_msg=f"step {step}, {name}")


@pytest.mark.parametrize("stage", ["newton_schulz", "msign", "exact"])
def test_a_stack_is_a_loop_over_its_layers(stage):
    w, gradients = cases.weights(), cases.gradients(3)
    stacked = directions(direction(stage), 3, w)
    for i in range(3):
        tx = direction(stage)
        params, update = {"stack": jnp.asarray(w["stack"][i].T)}, updater(tx)
        state = tx.init(params)
        for step, gradient in enumerate(gradients):
            updates, state = update({"stack": jnp.asarray(gradient["stack"][i].T)}, state, params)
            np.testing.assert_allclose(updates["stack"].T, stacked[step]["stack"][i], atol=2e-5)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_sketched_stack_is_a_loop_over_its_layers_at_equal_draws(layer):
    w = cases.weights()["stack"]
    gradients = [gradient["stack"] for gradient in cases.gradients(2)]
    tx = direction("sketch")
    update = updater(tx)

    def run(keep):
        """The whole stack, or one with every other layer at zero: a slice's draws belong to its place in the stack."""
        params = {"w": jnp.asarray(np.swapaxes(w * keep, 1, 2))}
        state, out = tx.init(params), []
        for gradient in gradients:
            updates, state = update({"w": jnp.asarray(np.swapaxes(gradient * keep, 1, 2))}, state, params)
            out.append(np.asarray(updates["w"]))
        return out

    alone = np.zeros((3, 1, 1), np.float32)
    alone[layer] = 1
    for whole, single in zip(run(np.ones((3, 1, 1), np.float32)), run(alone), strict=True):
        np.testing.assert_allclose(single[layer], whole[layer], atol=4 * EPS32)
        assert not np.any(np.delete(single, layer, axis=0))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", [(5, 12), (12, 5), (7, 7)])
def test_exact_clipping_at_full_rank_is_the_projection_on_the_unit_ball(shape, seed):
    gradient = np.random.default_rng(seed).standard_normal(shape)
    tx = npo.scale_by_normpre(
        npo.precondition_locally(rank=1000, method="exact"),
        tangent="none",
        rms=None,
        matrix_dims=npo.MatrixDims(inputs=1, outputs=0),
    )
    params = {"w": jnp.zeros(shape, jnp.float32)}
    got = np.asarray(cases.first_update(tx, {"w": jnp.asarray(gradient, jnp.float32)}, params)["w"], np.float64)
    psi = reference.unit_rows(gradient)
    # The projection is Lipschitz one: a few eps of ||Psi||_F = sqrt(rows).
    np.testing.assert_allclose(got, reference.projection_on_unit_ball(psi), atol=20 * EPS32)
    assert np.linalg.norm(got, 2) <= 1 + 20 * EPS32


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_exact_clipping_at_rank_r_is_the_best_refinement(rank):
    # Correlated rows, so that four singular values or more exceed one.
    random = np.random.default_rng(5)
    psi = 2 * reference.unit_rows(random.standard_normal((6, 12)) + 0.5 * random.standard_normal((1, 12)))
    assert (np.linalg.svd(psi, compute_uv=False) > 1.01).sum() >= 5
    tx = npo.precondition_locally(rank=rank, method="exact")
    got = np.asarray(cases.first_update(tx, jnp.asarray(psi, jnp.float32), None), np.float64)
    delta = (got - psi) @ np.linalg.pinv(psi)
    value = reference.proposition_2_objective(delta, psi)
    assert value == pytest.approx(reference.proposition_2_optimum(psi, rank), rel=1e-4)
    for size in (0.01, 0.1, 1.0):
        for _ in range(30):
            u, s, vt = np.linalg.svd(delta + size * random.standard_normal(delta.shape))
            competitor = (u[:, :rank] * s[:rank]) @ vt[:rank]
            assert reference.proposition_2_objective(competitor, psi) > value * (1 - 1e-4)


def test_the_sketch_tends_to_the_exact_result_as_power_iterations_grow():
    """Of a tall matrix; the modes of a wide one: tests/linalg/test_eigenspace.py."""
    random = np.random.default_rng(3)
    u, _ = np.linalg.qr(random.standard_normal((20, 12)))
    v, _ = np.linalg.qr(random.standard_normal((12, 12)))
    psi = jnp.asarray(u @ np.diag(np.geomspace(4, 0.2, 12)) @ v.T, jnp.float32)

    def clipped(**kwargs):
        return np.asarray(cases.first_update(npo.precondition_locally(rank=3, **kwargs), psi, None), np.float64)

    exact = clipped(method="exact")
    errors = [np.linalg.norm(clipped(oversample=1, power_iterations=p) - exact) for p in (0, 1, 3, 16)]
    assert all(later < 0.7 * earlier for earlier, later in itertools.pairwise(errors)), errors
    # (sigma_5 / sigma_3)^2 = 0.34 a power: 16 of them leave 3e-8 of the first error; then it is all rounding.
    assert errors[-1] < 1e-4


def test_an_oversampled_sketch_of_the_whole_side_is_exact():
    psi = jnp.asarray(reference.unit_rows(np.random.default_rng(0).standard_normal((6, 15))), jnp.float32)
    exact = cases.first_update(npo.precondition_locally(rank=2, method="exact"), psi, None)
    sketch = cases.first_update(npo.precondition_locally(rank=2, oversample=8), psi, None)
    np.testing.assert_allclose(sketch, exact, atol=1e-5)  # six draws span all six rows, whatever they are


def test_singular_values_after_newton_schulz_lie_in_its_band():
    """0.68 to 1.14 for singular values of Psi / ||Psi||_F above 0.0052; `test_newton_schulz` derives the band."""
    w = cases.weights()
    floor = 0.0052
    unscaled = npo.scale_by_normpre(optax.identity(), rms=None, matrix_dims=cases.DIMS)
    psi = directions(unscaled, 4, w)
    out = directions(direction("newton_schulz", rms=None), 4, w)
    for before, after in zip(psi, out, strict=True):
        for name, x in before.items():
            singular = np.linalg.svd(x, compute_uv=False)
            assert (singular[..., -1] / np.linalg.norm(x, axis=(-2, -1)) > floor).all()
            image = np.linalg.svd(after[name], compute_uv=False)
            assert image.min() > 0.68, name
            assert image.max() < 1.14, name


@pytest.mark.parametrize(
    ("stage", "tangent"),
    [(stage, "relaxed") for stage in STAGES] + [("newton_schulz", mode) for mode in ("bounded", "strict", "none")],
)
def test_the_direction_does_not_see_the_scale_of_the_gradients(stage, tangent):
    w, tx = cases.weights(), direction(stage, tangent=tangent, orientation="alternating")
    plain = directions(tx, 3, w)
    for scale in (1e-15, 2.0**-49, 1e-3, 1e5, 2.0**49, 1e15):
        for a, b in zip(directions(tx, 3, w, scale), plain, strict=True):
            for name, x in a.items():
                relative = np.linalg.norm(x - b[name], axis=(-2, -1)) / np.linalg.norm(b[name], axis=(-2, -1))
                assert relative.max() < 1e-5, (name, scale)


# The sketch's draws.


@functools.cache
def sketching(seed):
    return npo.scale_by_normpre(
        npo.precondition_locally(rank=2, oversample=1, seed=seed),
        tangent="none",
        orientation="rows",
        matrix_dims=DIMS["flax"],
    )


def sketched(params, grads, seed=0, steps=1):
    tx = sketching(seed)
    update, state, out = updater(tx), tx.init(params), []
    for _ in range(steps):
        updates, state = update(grads, state, params)
        out.append(jax.tree.map(np.asarray, updates))
    return out


def kernel(seed=0, shape=(8, 10), dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def test_draws_depend_on_the_seed_the_step_and_the_leaf():
    one = {"up": {"kernel": kernel()}}
    first, second = sketched(one, one, steps=2)
    np.testing.assert_array_equal(first["up"]["kernel"], sketched(one, one)[0]["up"]["kernel"])
    # Constant gradients: momentum only grows in scale, and the direction forgets it. What differs is drawn.
    assert np.abs(first["up"]["kernel"] - second["up"]["kernel"]).max() > 1e-3
    assert np.abs(first["up"]["kernel"] - sketched(one, one, seed=1)[0]["up"]["kernel"]).max() > 1e-3
    two = {"up": {"kernel": kernel()}, "down": {"kernel": kernel()}}
    both = sketched(two, two)[0]
    assert np.abs(both["up"]["kernel"] - both["down"]["kernel"]).max() > 1e-3
    # ... and on nothing of the other leaves.
    np.testing.assert_array_equal(both["up"]["kernel"], first["up"]["kernel"])


def test_layers_of_a_stack_are_drawn_apart_and_do_not_depend_on_its_length():
    stack = {"w": jnp.stack([kernel()] * 3)}
    three = sketched(stack, stack)[0]["w"]
    assert min(np.abs(three[i] - three[j]).max() for i, j in ((0, 1), (0, 2), (1, 2))) > 1e-3
    two = sketched({"w": stack["w"][:2]}, {"w": stack["w"][:2]})[0]["w"]
    np.testing.assert_allclose(two, three[:2], atol=4 * EPS32)


def test_draws_do_not_depend_on_the_dtype():
    grads = {"w": kernel(dtype=jnp.bfloat16)}  # numbers that both dtypes hold
    low = sketched({"w": kernel(dtype=jnp.bfloat16)}, grads)[0]["w"]
    assert low.dtype == jnp.bfloat16
    single = sketched({"w": kernel()}, jax.tree.map(lambda x: x.astype(jnp.float32), grads))[0]["w"]
    np.testing.assert_allclose(low.astype(np.float64), single, rtol=2**-8)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), grads)
        double = sketched(wide, wide)[0]["w"]
    assert double.dtype == np.float64
    np.testing.assert_allclose(single, double, atol=1e-5)


def test_draws_do_not_depend_on_the_sharding():
    devices = np.array(jax.devices("cpu"))
    assert devices.size >= 4  # conftest makes them
    mesh = jax.sharding.Mesh(devices[:4].reshape(2, 2), ("a", "b"))
    grads = {"w": kernel()}
    expected = sketched(grads, grads)[0]["w"]
    for spec in (("a", None), (None, "b"), ("a", "b")):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        sharded = jax.device_put(grads, sharding)
        np.testing.assert_allclose(sketched(sharded, sharded)[0]["w"], expected, atol=1e-5, err_msg=str(spec))


def test_a_resumed_run_draws_what_the_uninterrupted_one_would_have_drawn():
    tx = npo.normpre_l(0.01, rank=2, oversample=1)
    params = {"w": {"kernel": kernel()}}
    state = tx.init(params)
    history = []
    for step in range(4):
        updates, state = tx.update({"w": {"kernel": kernel(step + 1)}}, state, params)
        params = optax.apply_updates(params, updates)
        history.append((jax.tree.map(np.asarray, params), jax.tree.map(np.asarray, state)))
    # From NumPy copies after the second step, as a checkpoint would give them back, in a fresh optimizer.
    fresh = npo.normpre_l(0.01, rank=2, oversample=1)
    params, state = jax.tree.map(jnp.asarray, history[1])
    for step in (2, 3):
        updates, state = fresh.update({"w": {"kernel": kernel(step + 1)}}, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(params["w"]["kernel"], history[3][0]["w"]["kernel"])
