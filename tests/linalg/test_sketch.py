# SPDX-License-Identifier: Apache-2.0
"""Clipping by sketch, by products and exactly.

Against dense decompositions, Algorithm 2 taken literally, and Propositions 1 and 2.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normpre_optax.linalg import sketch
from normpre_optax.linalg.platforms import on
from tests import cases, reference
from tests.cases import EPS32, gaussian, with_spectrum


def clipping(psi, rank, threshold, rest=0.0):
    """The ``rank`` leading singular values to a threshold.

    Or to ``rest`` times the RMS of the others.
    """
    fixed = sketch.to_threshold(sketch.sum_of_squares(psi), rank, threshold)
    share = rest**2 / max(1, psi.shape[-2] - rank)
    return fixed._replace(share=jnp.full_like(fixed.total, share))


@functools.cache
def program(rank, powers=1, products=False, rest=0.0):
    """The clipped matrices and their squares, for lists of wide matrices.

    It is compiled as a whole.
    """

    def clip(psis, omegas, threshold):
        clippings = [clipping(psi, rank, threshold, rest) for psi in psis]
        found = sketch.clip_by_sketch(psis, omegas, clippings, powers, products)
        clipped = []
        for psi, (left, right, squares) in zip(psis, found, strict=True):
            clipped.append((psi + left.mT @ right, squares))
        return clipped

    return cases.quick_jit(clip)


def checked(psi, t, squares):
    """The clipped matrix in float64, after a look at its sum of squares."""
    rounding = 200 * jnp.finfo(t.dtype).eps * np.nansum(np.square(psi))
    expected = np.sum(np.square(t), axis=(-2, -1), keepdims=True)
    np.testing.assert_allclose(squares, expected, rtol=0, atol=rounding)
    return np.asarray(t, np.float64)


def sketched(psi, omega, rank, powers=1, products=False, threshold=1.0, rest=0.0):
    """One matrix or stack; ``omega`` is the paper's (larger dimension, l)."""
    clip = program(rank, powers, products, rest)
    (found,) = clip([jnp.asarray(psi)], [jnp.asarray(omega).mT], threshold)
    t, squares = found
    return checked(psi, t, squares)


def exact(psi, rank, threshold=1.0, rest=0.0):
    psi = jnp.asarray(psi)
    wanted = clipping(psi, rank, threshold, rest)
    left, right, squares = sketch.clip_exactly(psi, wanted)
    return checked(psi, psi + left.mT @ right, squares)


def unit(shape, seed=0):
    return reference.unit_rows(gaussian(shape, seed))


def test_exact_clipping_of_a_known_spectrum(x64):
    spectrum = np.array([4.0, 3.0, 2.2, 1.5, 1.2, 0.9, 0.5, 0.1])
    for rank, threshold in ((1, 1.0), (3, 2.5), (50, 2.5)):
        is_leading = np.arange(8) < rank
        clipped = np.where(is_leading, np.minimum(spectrum, threshold), spectrum)
        got = exact(with_spectrum(8, 20, spectrum), rank, threshold)
        expected = with_spectrum(8, 20, clipped)
        np.testing.assert_allclose(got, expected, atol=1e-12)


@cases.rows(
    "shape rank extra powers",
    ((8, 20), 3, 1, 0),
    ((8, 20), 3, 1, 2),
    ((8, 8), 1, 0, 1),
    ((1, 5), 4, 8, 1),
)
def test_the_sketch_is_algorithm_2(x64, shape, rank, extra, powers):
    psi = unit(shape)
    omega = gaussian((shape[1], min(shape[0], rank + extra)), 7)
    expected = reference.precondition_sketch(psi, omega, rank, powers)
    # The reference's powers lose eps times cond(psi)^5, 1e-11 for these. The Gram
    # matrix that is orthonormalized is reduced by 2 l eps; the result depends on it by
    # its square.
    np.testing.assert_allclose(sketched(psi, omega, rank, powers), expected, atol=1e-9)


def test_the_sketch_tends_to_the_exact_result_with_more_powers(x64):
    psi = with_spectrum(8, 20, [4.0, 3.0, 2.2, 1.5, 0.4, 0.3, 0.2, 0.1])
    omega = gaussian((20, 4), 3)
    truth = exact(psi, 3)

    def error(powers):
        return np.linalg.norm(sketched(psi, omega, 3, powers) - truth)

    none = error(0)
    one = error(1)
    eight = error(8)
    # A power shrinks what is outside by (sigma_5 / sigma_3)^2 = (0.4 / 2.2)^2 = 0.03:
    # eight of them by 1e-12.
    assert none > max(1e-2, one)
    assert one > 1e-10 > eight


def test_many_powers_neither_overflow_nor_lose_small_modes():
    singular = np.geomspace(30, 0.3, 24)
    u, _ = np.linalg.qr(gaussian((24, 24), 24))
    v, _ = np.linalg.qr(gaussian((40, 24), 40))
    psi = np.float32((u * singular) @ v.T)
    omega = np.float32(gaussian((40, 16), 3))
    got = sketched(psi, omega, rank=8, powers=14)
    # 30^29 is beyond float32, and without orthonormal bases in between the eighth mode
    # would be lost in the first.
    clipped = np.where(np.arange(24) < 8, 1.0, singular)
    np.testing.assert_allclose(np.diag(u.T @ got @ v), clipped, atol=1e-3 * 30)
    np.testing.assert_allclose(np.diag(u.T @ got @ v)[:8], 1.0, rtol=5e-3)


@pytest.mark.parametrize("products", [False, True])
def test_matrices_of_low_rank_and_zero(products):
    def product(m, n, rank):
        return reference.unit_rows(unit((m, rank), 1) @ gaussian((rank, n), 2))

    project = np.vectorize(reference.projection_on_unit_ball, signature="(m,n)->(m,n)")
    small = np.float32([np.zeros((8, 20)), product(8, 20, 1), product(8, 20, 2)])
    for psi in small, np.float32(product(64, 200, 1)):
        *batch, _, columns = psi.shape
        draws = np.float32(gaussian((columns, 5), 2))
        omega = np.broadcast_to(draws, (*batch, columns, 5))
        got = sketched(psi, omega, 3, products=products)
        # One or two modes: clipping them is the projection. A few eps times sqrt(64) on
        # a basis of rank one; the sign of `products` is settled to 1e-3 of the largest
        # eigenvalue.
        np.testing.assert_allclose(got, project(np.float64(psi)), atol=3e-4)
    for psi in small:
        np.testing.assert_allclose(exact(psi, 3), project(np.float64(psi)), atol=3e-4)


def test_full_rank_is_the_projection_of_proposition_1(x64):
    psi = 1.5 * unit((5, 12))
    expected = reference.projection_on_unit_ball(psi)
    np.testing.assert_allclose(exact(psi, 5), expected, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 3])
def test_rank_r_reaches_the_optimum_of_proposition_2(x64, rank):
    """Eckart-Young: the change has rank r.

    It misses the projection by the smaller excesses ``sigma_i - 1`` alone.
    """
    psi = 3 * unit((5, 9))  # four modes above one, one below
    got = exact(psi, rank)
    excess = np.maximum(np.linalg.svd(psi, compute_uv=False) - 1, 0)
    assert np.linalg.matrix_rank(got - psi, tol=1e-10) <= rank
    missed = np.sum(np.square(got - reference.projection_on_unit_ball(psi)))
    assert missed == pytest.approx(np.sum(np.square(excess[rank:])), abs=2e-12)


def test_modes_below_the_threshold_are_not_touched():
    psi = np.float32(0.4 * unit((3, 30)))  # nearly orthogonal rows of norm 0.4
    assert np.linalg.norm(psi, 2) < 1
    omega = np.float32(gaussian((30, 3)))
    np.testing.assert_array_equal(exact(psi, 3), psi)
    np.testing.assert_array_equal(sketched(psi, omega, 3), psi)


@pytest.mark.parametrize("shape", [(5, 12), (2, 7, 7)])
def test_products_clip_what_eigenvectors_of_the_same_sketch_clip(shape):
    """All modes that the sketch sees.

    Gram matrices are 4 x 4, with condition numbers below 1e3 in float32.
    """
    decaying = gaussian(shape, 2) * 0.5 ** np.arange(shape[-1])
    psi = np.float32(reference.unit_rows(decaying))
    omega = np.float32(gaussian((*shape[:-2], shape[-1], 4), 5))
    for threshold in (1.0, 0.25):
        got = sketched(psi, omega, 1, 2, products=True, threshold=threshold)
        expected = sketched(psi, omega, 4, 2, products=False, threshold=threshold)
        atol = 1e-4 * np.abs(expected).max()
        np.testing.assert_allclose(got, expected, rtol=0, atol=atol)


def test_leading_modes_are_clipped_to_the_rest(x64):
    """By each method; a sketch with six power steps has these modes to (0.3 / 2)^13."""
    psi = with_spectrum(8, 20, [4.0, 3.0, 2.5, 2.0, 0.3, 0.3, 0.2, 0.1])
    rest = 0.25
    omega = gaussian((20, 4))
    expected = reference.precondition_adaptively(psi, 4, rest)
    np.testing.assert_allclose(exact(psi, 4, 0.0, rest), expected, atol=1e-12)
    for products in (False, True):
        got = sketched(psi, omega, 4, 6, products, 0.0, rest)
        np.testing.assert_allclose(got, expected, atol=1e-8)


def test_one_batched_call_per_size_of_problem():
    """On an accelerator.

    A CPU loops, because batched LAPACK calls side by side can deadlock it.
    """
    psis = [jnp.ones((8, 20)), jnp.ones((3, 6, 9))]
    omegas = [jnp.ones((5, 20)), jnp.ones((3, 5, 9))]
    clippings = [clipping(psi, 3, 1.0) for psi in psis]

    def clip(psis, omegas):
        return sketch.clip_by_sketch(psis, omegas, clippings, 0)

    for platform in ("cpu", "tpu", "gpu"):
        # A new function each time, because jax traces one function once.
        program = on(platform, jax.make_jaxpr(lambda *args: clip(*args)), psis, omegas)
        found = [eqn.primitive.name for eqn in cases.equations(program.jaxpr)]
        assert found.count("eigh") == 1
        assert found.count("cholesky") == 2  # for Y, and for the Gram matrix of Q
        assert bool({"while", "scan"} & {*found}) == (platform == "cpu")


def test_the_inverse_factor_is_finite_for_every_semidefinite_matrix():
    """Dependent rows, zero rows, condition numbers beyond float32.

    It is exact where there is something.
    """
    y = np.float32(gaussian((6, 9)))
    y[3] = y[0] + 1e-7 * y[1]
    y[4] = 0
    y[5] = y[2]
    inverse = np.asarray(sketch._inverse_cholesky(jnp.asarray(y @ y.T)), np.float64)
    assert np.isfinite(inverse).all()
    q = inverse @ y
    # The condition of three rows is below ten.
    np.testing.assert_allclose(q[:3] @ q[:3].T, np.eye(3), atol=20 * EPS32 * 10)
    assert np.linalg.norm(q, axis=1).max() < 1.1
    assert not q[4].any()
    assert np.isnan(sketch._inverse_cholesky(jnp.full((3, 3), jnp.nan))).any()


def test_draws_never_change():
    """Not with the user's choice of generator, nor with a later version.

    So a resumed run draws what it would have drawn.
    """
    with jax.default_prng_impl("rbg"):
        found = sketch.draws(3, 5, jnp.array([17, 2], jnp.uint32), (2, 3))
    expected = [
        [-0.5771456, -1.5907036, -0.41013402],
        [1.1442941, -1.3229197, 0.6540548],
    ]
    np.testing.assert_allclose(found, expected, rtol=4 * EPS32)


def test_draws_computed_together_are_those_of_each_matrix():
    ids = jnp.asarray(sketch.matrix_ids("a", (3, 2)))
    drawn = sketch.draws(3, 5, ids, (2, 6))
    assert drawn.shape == (3, 2, 2, 6)
    for place in np.ndindex(3, 2):
        # One stream of bits for each matrix, but two programs may round its logarithm
        # by a unit apart.
        alone = sketch.draws(3, 5, ids[place], (2, 6))
        np.testing.assert_allclose(drawn[place], alone, rtol=4 * EPS32)
    of_another_path = jnp.asarray(sketch.matrix_ids("b", (3, 2)))
    for unlike in (
        sketch.draws(3, 5, of_another_path, (2, 6)),
        sketch.draws(3, 5, ids[::-1], (2, 6)),
        sketch.draws(3, 6, ids, (2, 6)),
        sketch.draws(4, 5, ids, (2, 6)),
    ):
        assert np.abs(unlike - drawn).max() > 0.1
