# SPDX-License-Identifier: Apache-2.0
"""Clipping and the exact matrix sign: Propositions 1 and 2."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normpre_optax import precondition_locally
from normpre_optax.linalg.eigenspace import leading_modes_exact
from normpre_optax.linalg.spectrum import clip_modes, clipped_squares, exact_msign
from normpre_optax.platforms import on
from tests import cases, reference
from tests.cases import EPS32, gaussian, with_spectrum


def unit(shape, seed=0):
    return reference.unit_rows(gaussian(shape, seed))


def clipped(psi, rank):
    return np.asarray(clip_modes(jnp.asarray(psi), leading_modes_exact(jnp.asarray(psi), rank)), np.float64)


@pytest.mark.parametrize("shape", [(5, 12), (6, 6), (1, 4)])
def test_at_full_rank_it_is_the_projection_of_proposition_1(x64, shape):
    psi = unit(shape)
    got = clipped(psi, min(shape))
    np.testing.assert_allclose(got, reference.projection_on_unit_ball(psi), atol=1e-12)
    assert np.linalg.norm(got, 2) <= 1 + 1e-12


def test_no_other_matrix_of_the_unit_ball_is_nearer(x64):
    psi, random = 1.5 * unit((5, 9)), np.random.default_rng(1)
    best = clipped(psi, 5)
    value = reference.proposition_1_objective(best, psi)
    for size in (1e-3, 1e-2, 0.1, 1.0):
        for _ in range(50):
            other = reference.projection_on_unit_ball(best + size * random.standard_normal(psi.shape))
            assert reference.proposition_1_objective(other, psi) >= value - 1e-12


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_at_rank_r_it_reaches_the_optimum_of_proposition_2(x64, rank):
    psi = 3 * unit((5, 9))  # four modes above one, one below
    delta = (clipped(psi, rank) - psi) @ np.linalg.pinv(psi)
    assert np.linalg.matrix_rank(delta, tol=1e-10) <= rank
    value = reference.proposition_2_objective(delta, psi)
    assert value == pytest.approx(reference.proposition_2_optimum(psi, rank), abs=1e-12)
    random = np.random.default_rng(2)
    u, s, vt = np.linalg.svd(delta)
    for size in (1e-3, 1e-2, 0.1, 1.0):
        for _ in range(50):
            u2, s2, vt2 = np.linalg.svd(delta + size * random.standard_normal(delta.shape))
            other = (u2[:, :rank] * s2[:rank]) @ vt2[:rank]
            assert reference.proposition_2_objective(other, psi) >= value - 1e-12
    # Dropping or moving the weakest of the selected modes is worse, so the test above can fail.
    worse = (u[:, : rank - 1] * s[: rank - 1]) @ vt[: rank - 1]
    assert reference.proposition_2_objective(worse, psi) > value + 1e-3


def test_modes_below_one_are_left_alone_bit_for_bit():
    psi = jnp.asarray(0.4 * unit((3, 30)), jnp.float32)  # nearly orthogonal rows of length 0.4
    assert np.linalg.norm(psi, 2) < 1
    np.testing.assert_array_equal(clip_modes(psi, leading_modes_exact(psi, 3)), psi)


@pytest.mark.parametrize("shape", [(5, 12), (12, 5), (6, 6), (1, 4), (4, 1), (1, 1)])
def test_msign_agrees_with_the_reference(x64, shape):
    x = gaussian(shape)
    # The condition of U V^T is 1 / sigma_min: at most 100 for these, times a few eps.
    assert np.linalg.svd(x, compute_uv=False).min() > 0.01
    np.testing.assert_allclose(exact_msign(jnp.asarray(x)), reference.msign(x), atol=1e-12)


def test_msign_of_rank_deficient_and_zero_matrices():
    u, _ = np.linalg.qr(gaussian((6, 2)))
    v, _ = np.linalg.qr(gaussian((9, 2), 1))
    x = u @ np.diag([3.0, 1e-2]) @ v.T
    np.testing.assert_allclose(exact_msign(jnp.asarray(x, jnp.float32)), u @ v.T, atol=4 * 300 * EPS32)
    assert not np.any(exact_msign(jnp.zeros((3, 4))))


def test_msign_of_a_bad_matrix_spoils_no_neighbour():
    x = gaussian((3, 4, 6)).astype(np.float32)
    clean = np.asarray(exact_msign(jnp.asarray(x)))
    x[1, 0, 0] = np.nan
    hurt = np.asarray(exact_msign(jnp.asarray(x)))
    assert np.isnan(hurt[1]).any()
    np.testing.assert_allclose(hurt[[0, 2]], clean[[0, 2]], atol=4 * EPS32)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(
    ("values", "rank"),
    [
        ([3.0, 2.0, 1.5, 0.9, 0.5], 2),  # some are clipped
        ([3.0, 2.0, 1.5, 0.9, 0.5], 5),
        ([0.9, 0.5, 0.3, 0.2, 0.1], 3),  # none is
        ([0.0] * 5, 2),
    ],
)
def test_what_clipping_leaves_of_the_squares_is_known_without_measuring(platform, columns, values, rank):
    psi = jnp.asarray(with_spectrum(6, 10, values), jnp.float32)
    modes = leading_modes_exact(psi, rank)
    stored = psi.mT if columns else psi
    got = on(platform, clipped_squares)(stored, jnp.sum(psi**2, keepdims=True), modes, columns=columns)
    exact = sum(min(s, 1) ** 2 if i < rank else s**2 for i, s in enumerate(values))
    # A difference of sums in which at least an eighth is left: eight times ten roundings.
    np.testing.assert_allclose(got, [[exact]], rtol=80 * EPS32)


def test_where_little_is_left_a_cpu_measures_it_and_others_know_a_bound():
    """One mode of length 300 and nothing else: of 9e4 squares one is left, and the difference is off by 1e-2."""
    stack = np.stack([with_spectrum(6, 10, [300.0]), with_spectrum(6, 10, [2.0, 1.0])])
    psi = jnp.asarray(stack, jnp.float32)
    modes = leading_modes_exact(psi, 2)
    squares = jnp.sum(psi**2, axis=(-2, -1), keepdims=True)
    for platform, error in (("cpu", 4 * 300 * EPS32), ("tpu", 0.05), ("gpu", 0.05)):
        # Measured: 300 eps in the coordinates of the result, twice, and twice that in its square; known: 9e4 eps, times
        # two for the sum and the eigenvalue.
        np.testing.assert_allclose(np.ravel(on(platform, clipped_squares)(psi, squares, modes)), [1.0, 2.0], rtol=error)
    # Eigenvalues that rounding has brought above the sum: no less than one mode is left, and never a negative number.
    high = modes._replace(values=modes.values * (1 + 1e-3))
    assert (on("tpu", clipped_squares)(psi, squares, high)[0] >= 1).all()


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_the_squares_of_a_bad_matrix_are_its_own(platform):
    psi = np.stack([with_spectrum(4, 6, [3.0, 1.0])] * 3).astype(np.float32)
    psi[1, 0, 0] = np.nan
    psi = jnp.asarray(psi)
    squares = jnp.sum(psi**2, axis=(-2, -1), keepdims=True)
    program = jax.jit(lambda x, s: clipped_squares(x, s, leading_modes_exact(x, 1)))
    got = np.ravel(on(platform, program)(psi, squares))
    assert np.isnan(got[1])
    np.testing.assert_allclose(got[[0, 2]], 2, rtol=80 * EPS32)


@pytest.mark.parametrize("method", ["exact", "sketch"])
@pytest.mark.parametrize("rms", [None, 0.2])
def test_a_threshold_is_a_threshold_of_one_for_the_matrix_divided_by_it(x64, method, rms):
    psi = with_spectrum(9, 6, [5.0, 3.0, 2.0, 1.0, 0.5, 0.2])
    of_one, of_two, mean, of_an_array = (
        precondition_locally(6, 0, 0, method=method, threshold=threshold).at_rms(rms)
        for threshold in (1.0, 2.0, "mean", jnp.float64(0.7))
    )
    for tx, level in ((of_two, 2.0), (mean, np.sqrt(np.sum(psi**2) / 6)), (of_an_array, 0.7)):
        expected = cases.first_update(of_one, psi / level, None) * (1 if rms else level)
        np.testing.assert_allclose(cases.first_update(tx, psi, None), expected, rtol=1e-12, atol=1e-12)
    assert not cases.first_update(mean, 0 * psi, None).any()


@pytest.mark.parametrize("wrong", [0, -1.0, "median", None])
def test_what_is_no_threshold(wrong):
    with pytest.raises((TypeError, ValueError), match="threshold"):
        precondition_locally(threshold=wrong)
