# SPDX-License-Identifier: Apache-2.0
"""The sketch that starts from the modes of the step before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normpre_optax as npo
from tests import cases, reference

RANK, OVERSAMPLE = 2, 1
COLD = npo.precondition_locally(RANK, OVERSAMPLE)
WARM = npo.precondition_locally(RANK, OVERSAMPLE, warm_start=True)


def drifting(steps, shape=(24, 40), modes=6, seed=0):
    """Unit-row matrices (m, n) with a few strong modes that turn a little from step to step, in noise."""
    random = np.random.default_rng(seed)
    left, right = (random.standard_normal((n, modes)) for n in shape)
    for _ in range(steps):
        left, right = (x + 0.1 * random.standard_normal(x.shape) for x in (left, right))
        yield reference.unit_rows(left @ right.T + 0.5 * random.standard_normal(shape))


def run(tx, matrices, state=None):
    """Updates step by step, and the last state."""
    found = []
    for x in matrices:
        x = {"w": jnp.asarray(x)}
        state = tx.init(x) if state is None else state
        new, state = cases.updater(tx)(x, state)
        found.append(np.asarray(new["w"], np.float64))
    return found, state


def test_the_first_step_is_the_step_without_warm_start():
    shapes = [(6, 9), (9, 6), (7, 7), (2, 5, 8), (2, 9)]
    x = [jnp.asarray(cases.gaussian(shape, i), jnp.float32) for i, shape in enumerate(shapes)]
    cold, warm = (cases.first_update(tx, x, x) for tx in (COLD, WARM))
    # The same draws by two programs, which may round them differently, times the slope of the sketch.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), warm, cold)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (7, 7)])
@pytest.mark.parametrize("power_iterations", [0, 1])
def test_later_steps_sketch_the_modes_of_the_step_before(x64, shape, power_iterations):
    """Against Algorithm 2 with Omega = [fresh draws, V Sigma of the modes found before]; only its span matters."""
    tx = npo.precondition_locally(RANK, OVERSAMPLE, power_iterations, warm_start=True)
    steps = 3
    matrices = [3 * np.random.default_rng(i).standard_normal(shape) for i in range(steps)]
    found, state = run(tx, matrices)
    kept = None
    for step, (psi, new) in enumerate(zip(matrices, found, strict=True)):
        wide = psi if shape[0] <= shape[1] else psi.T
        omega = cases.omega(0, step, "w", 0, wide.shape, RANK + OVERSAMPLE)
        if kept is not None:
            # From jitted code a draw may differ by one unit in the last place of float32.
            omega = np.concatenate([cases.omega(0, step, "w", 0, wide.shape, OVERSAMPLE), kept], axis=1)
        expected = reference.precondition_sketch(wide, omega, RANK, power_iterations)
        expected = expected if shape[0] <= shape[1] else expected.T
        np.testing.assert_allclose(new, expected, atol=1e-5)
        u, _ = reference.interaction_sketch(wide, omega, RANK, power_iterations)
        kept = wide.T @ u
    assert state.subspace["w"].shape == (RANK, max(shape))


def test_it_is_closer_to_exact_clipping_with_fewer_passes():
    exact = npo.precondition_locally(RANK, method="exact")
    cheap = npo.precondition_locally(RANK, OVERSAMPLE, 0, warm_start=True)
    steps = 20
    truth, cold, warm = (run(tx, drifting(steps))[0][5:] for tx in (exact, COLD, cheap))
    errors = [np.mean([np.linalg.norm(a - b) for a, b in zip(found, truth, strict=True)]) for found in (cold, warm)]
    assert errors[1] < 0.5 * errors[0], errors


def test_modes_that_were_lost_are_found_again():
    """After a step without a gradient nothing is kept; each step finds as many modes again as it draws directions."""
    matrices = list(drifting(6))
    tx = npo.precondition_locally(4, 2, 2, warm_start=True)
    _, state = run(tx, [*matrices[:1], np.zeros_like(matrices[0])])
    assert not state.subspace["w"].any()
    found, _ = run(tx, matrices[1:], state)
    whole, _ = run(npo.precondition_locally(4, 2, 2), matrices[1:])
    above_one = [[np.sum(np.linalg.svd(x, compute_uv=False) > 1.05) for x in xs] for xs in (found, whole)]
    assert above_one[0][0] > above_one[1][0]
    assert above_one[0][2:] <= above_one[1][2:], above_one


def test_a_bad_matrix_leaves_its_neighbours_alone():
    x = np.random.default_rng(3).standard_normal((3, 5, 8)).astype(np.float32)
    spoiled = x.copy()
    spoiled[1, 0, 0] = np.nan
    (clean,), kept = run(WARM, [x])
    (found,), bad = run(WARM, [spoiled])
    assert np.isnan(found[1]).any()
    np.testing.assert_array_equal(found[[0, 2]], clean[[0, 2]])
    np.testing.assert_array_equal(bad.subspace["w"][jnp.array([0, 2])], kept.subspace["w"][jnp.array([0, 2])])


def test_the_layout_does_not_matter():
    """Stored as (in, out) or as (out, in): the same updates and the same subspace, step after step."""
    in_out, out_in = (
        npo.scale_by_normpre_l(
            rank=RANK, oversample=OVERSAMPLE, power_iterations=0, warm_start=True, matrix_dims=npo.MatrixDims(i, 1 - i)
        )
        for i in (0, 1)
    )

    def numbers(seed):
        x = {str(shape): cases.gaussian(shape, seed).astype(np.float32) for shape in ((5, 8), (8, 5), (6, 6))}
        return x, jax.tree.map(np.transpose, x)

    w, turned_w = numbers(9)
    state, turned_state = in_out.init(w), out_in.init(turned_w)
    for step in range(3):
        g, turned_g = numbers(step)
        found, state = cases.updater(in_out)(g, state, w)
        turned, turned_state = cases.updater(out_in)(turned_g, turned_state, turned_w)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b.T, atol=2e-5), found, turned)


def test_a_state_of_the_other_kind_is_refused():
    x = {"w": jnp.ones((4, 6))}
    for tx, other in ((WARM, COLD), (COLD, WARM)):
        with pytest.raises(ValueError, match=r"warm_start=.*call init again"):
            tx.update(x, other.init(x))
    optimizers = [npo.normpre_l(1e-3, warm_start=warm) for warm in (False, True)]
    for tx, other in (optimizers, optimizers[::-1]):
        with pytest.raises(ValueError, match=r"state is not of this optimizer.*subspace.*warm_start.*init\(params\)"):
            tx.update(x, other.init(x), x)


@pytest.mark.parametrize("tx", [npo.scale_by_dion(rank=2), npo.scale_by_normpre_l(rank=2, warm_start=True)])
def test_the_first_draws_of_one_shape_are_one_draw(tx):
    """Compiled matrix by matrix, `init` of 168 of them takes the better part of a minute."""
    one, five = ({str(i): jnp.zeros((8, 8)) for i in range(layers)} for layers in (1, 5))
    calls = [jax.jit(tx.init).lower(params).as_text().count("call @") for params in (one, five)]
    assert calls[0] == calls[1] > 0
