# SPDX-License-Identifier: Apache-2.0
"""Leading modes, exact and sketched, against dense decompositions and against Algorithm 2 taken literally."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normpre_optax.linalg import eigenspace, spectrum
from tests import cases, reference
from tests.cases import EPS32, gaussian, with_spectrum

# Compiled whole: run eagerly, every inner loop would compile anew at every call.
clip_modes = jax.jit(spectrum.clip_modes)
leading_modes_exact = jax.jit(eigenspace.leading_modes_exact, static_argnums=1)
leading_modes_sketch = jax.jit(
    lambda psi, omega, rank, powers: eigenspace.leading_modes_sketch(psi, omega.mT, rank, powers), static_argnums=(2, 3)
)


SPECTRUM = np.array([4.0, 3.0, 2.2, 1.5, 1.2, 0.9, 0.5, 0.1])


@pytest.mark.parametrize("n", [8, 20])
@pytest.mark.parametrize("rank", [1, 3, 8, 50])
def test_exact_modes_of_a_known_spectrum(x64, n, rank):
    psi = with_spectrum(8, n, SPECTRUM)
    modes = leading_modes_exact(jnp.asarray(psi), rank)
    k = min(rank, 8)
    np.testing.assert_allclose(modes.values, SPECTRUM[:k] ** 2, rtol=1e-12)
    u = modes.vectors.T
    np.testing.assert_allclose(u.T @ u, np.eye(k), atol=1e-13)
    np.testing.assert_allclose(psi @ psi.T @ u, u * modes.values, atol=1e-12)
    np.testing.assert_allclose(modes.coordinates, u.T @ psi, atol=1e-13)


@pytest.mark.parametrize("power_iterations", [0, 1, 2])
@pytest.mark.parametrize(
    ("shape", "rank", "oversample"), [((8, 20), 1, 0), ((8, 20), 3, 2), ((8, 8), 3, 2), ((8, 8), 30, 8), ((1, 5), 4, 8)]
)
def test_sketched_modes_are_those_of_algorithm_2(x64, shape, rank, oversample, power_iterations):
    psi = reference.unit_rows(gaussian(shape))
    omega = gaussian((shape[1], min(shape[0], rank + oversample)), 7)
    modes = leading_modes_sketch(jnp.asarray(psi), jnp.asarray(omega), rank, power_iterations)
    _, values = reference.interaction_sketch(psi, omega, rank, power_iterations)
    got = np.asarray(modes.values)
    assert (np.diff(got) <= 1e-14).all()
    # The span of Y loses eps times the condition of Y: at p = 2 that is cond(psi)^5 eps, 1e-11 for these.
    above = lambda found: found[found > 1 + 1e-12]  # noqa: E731 (one row has a value of one, on either side of it)
    np.testing.assert_allclose(above(got), above(values), rtol=1e-9)
    expected = reference.precondition_sketch(psi, omega, rank, power_iterations)
    np.testing.assert_allclose(clip_modes(jnp.asarray(psi), modes), expected, atol=1e-9)


@pytest.mark.parametrize("shape", [(8, 20), (16, 16), (24, 64)])
def test_sketched_clipping_in_float32(shape):
    psi = reference.unit_rows(gaussian(shape)).astype(np.float32)
    omega = gaussian((shape[1], min(shape[0], 4 + 3)), 7).astype(np.float32)
    modes = leading_modes_sketch(jnp.asarray(psi), jnp.asarray(omega), 4, 1)
    got = np.asarray(clip_modes(jnp.asarray(psi), modes), np.float64)
    expected = reference.precondition_sketch(psi.astype(np.float64), omega.astype(np.float64), 4, 1)
    # cond(Y) is below 1e2 here: eps32 times that, relative to the norm of the update.
    assert np.linalg.norm(got - expected) <= 1e-5 * np.linalg.norm(expected)


def test_the_sketch_tends_to_the_exact_modes_as_powers_grow(x64):
    psi = with_spectrum(8, 20, [4.0, 3.0, 2.2, 1.5, 0.4, 0.3, 0.2, 0.1])
    omega = gaussian((20, 4), 3)
    exact = np.asarray(clip_modes(psi, leading_modes_exact(psi, 3)))
    errors = [np.linalg.norm(clip_modes(psi, leading_modes_sketch(psi, omega, 3, p)) - exact) for p in (0, 1, 2, 4, 8)]
    assert all(later < earlier for earlier, later in itertools.pairwise(errors))
    # A power step shrinks the part outside by (sigma_5 / sigma_3)^2 = (0.4 / 2.2)^2 = 0.03, so eight of them by 1e-12.
    assert errors[0] > 1e-2
    assert errors[3] < 1e-2
    assert errors[-1] < 1e-10


@pytest.mark.parametrize("power_iterations", [4, 14])
def test_many_powers_neither_overflow_nor_lose_the_small_modes_in_float32(power_iterations):
    psi = with_spectrum(24, 40, np.geomspace(30, 0.3, 24)).astype(np.float32)
    omega = jnp.asarray(gaussian((40, 16), 3), jnp.float32)
    modes = leading_modes_sketch(jnp.asarray(psi), omega, 8, power_iterations)
    # 30^(2 * 14 + 1) is beyond float32, and without orthonormal steps the eighth mode would drown in the first.
    np.testing.assert_allclose(np.asarray(modes.values), np.geomspace(30, 0.3, 24)[:8] ** 2, rtol=1e-3)


def test_low_rank_and_zero_matrices_give_finite_modes():
    low = gaussian((8, 1)) @ gaussian((1, 20), 1)
    for psi in (np.zeros((8, 20)), reference.unit_rows(low), np.ones((1, 1))):
        psi32 = jnp.asarray(psi, jnp.float32)
        omega = jnp.asarray(gaussian((psi.shape[1], min(psi.shape[0], 5)), 2), jnp.float32)
        for modes in (leading_modes_exact(psi32, 3), leading_modes_sketch(psi32, omega, 3, 1)):
            assert all(np.isfinite(np.asarray(part)).all() for part in modes)
            got = np.asarray(clip_modes(psi32, modes), np.float64)
            # A single mode: clipping it is the whole projection. sqrt(8) = 2.8 times a few eps on a near-rank-1 basis.
            np.testing.assert_allclose(got, reference.projection_on_unit_ball(psi), atol=3e-4)


def test_at_ties_the_objective_is_the_optimum():
    # Two equal singular values, rank one: which is clipped is arbitrary, how much is clipped is not.
    psi = with_spectrum(4, 9, [2.0, 2.0, 1.0, 0.5])
    got = np.asarray(clip_modes(jnp.asarray(psi, jnp.float32), leading_modes_exact(jnp.asarray(psi, jnp.float32), 1)))
    delta = (got - psi) @ np.linalg.pinv(psi)
    assert reference.proposition_2_objective(delta, psi) == pytest.approx(
        reference.proposition_2_optimum(psi, 1), rel=1e-5
    )


def test_a_bad_matrix_spoils_no_neighbour():
    psi = reference.unit_rows(gaussian((12, 10))).reshape(3, 4, 10).astype(np.float32)
    omega = jnp.asarray(gaussian((3, 10, 3), 1), jnp.float32)
    bad = psi.copy()
    bad[1, 0, 0] = np.nan
    for find in (lambda x: leading_modes_exact(x, 2), lambda x: leading_modes_sketch(x, omega, 2, 1)):
        clean, hurt = (np.asarray(clip_modes(jnp.asarray(x), find(jnp.asarray(x)))) for x in (psi, bad))
        np.testing.assert_allclose(hurt[[0, 2]], clean[[0, 2]], rtol=0, atol=4 * EPS32)
        assert np.isnan(hurt[1]).any()


def test_matrices_of_several_shapes_are_sketched_together_as_each_by_itself():
    """One small factorisation and one eigensolver serve all of one width, in whatever stacks they come."""
    shapes, widths = [(8, 20), (3, 6, 9), (4, 30), (8, 20)], [5, 5, 4, 5]
    psis = [jnp.asarray(reference.unit_rows(gaussian(s, i)), jnp.float32) for i, s in enumerate(shapes)]
    omegas = [jnp.asarray(gaussian((*s[:-2], w, s[-1]), 9), jnp.float32) for s, w in zip(shapes, widths, strict=True)]
    squares = [jnp.sum(x**2, axis=(-2, -1), keepdims=True) for x in psis]
    together = cases.quick_jit(lambda *given: eigenspace.leading_modes_sketches(*given, [3] * len(psis)))(
        psis, omegas, squares
    )
    sketch = cases.quick_jit(lambda psi, omega: eigenspace.leading_modes_sketch(psi, omega, 3))
    for psi, omega, modes in zip(psis, omegas, together, strict=True):
        alone = sketch(psi, omega)
        assert [x.shape for x in modes] == [x.shape for x in alone]
        # The products of small matrices run over a stack instead of over one: other sums, times cond(Y) of below 1e2.
        np.testing.assert_allclose(modes.values, alone.values, rtol=1e-5)
        clip = [np.asarray(clip_modes(psi, found)) for found in (modes, alone)]
        np.testing.assert_allclose(*clip, rtol=0, atol=2e-5)


def test_bases_on_the_long_side_span_the_same():
    """What a mesh asks for where rows are spread over devices: other bases between the power steps, the same modes."""
    psis = [jnp.asarray(reference.unit_rows(gaussian(s, 3)), jnp.float32) for s in ((8, 20), (6, 24))]
    omegas = [jnp.asarray(gaussian((5, x.shape[-1]), 4), jnp.float32) for x in psis]
    squares = [jnp.sum(x**2, keepdims=True) for x in psis]
    each = lambda f, problems: [None if one is None else f(one) for one in problems]  # noqa: E731
    short, long = (
        cases.quick_jit(
            lambda *given, s=spread: eigenspace.leading_modes_sketches(
                *given, [3, 3], 2, short_is_sharded=s, solve=each
            )
        )(psis, omegas, squares)
        for spread in ([False, False], [True, False])
    )
    for psi, a, b in zip(psis, short, long, strict=True):
        np.testing.assert_allclose(clip_modes(psi, a), clip_modes(psi, b), rtol=0, atol=2e-5)
    assert jnp.any(short[0].vectors != long[0].vectors)
    np.testing.assert_array_equal(short[1].vectors, long[1].vectors)
