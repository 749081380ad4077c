# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz against the reference and against what its polynomial does to a known spectrum."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normpre_optax.linalg.newton_schulz import COEFFICIENTS, clipping_factor, newton_schulz, symmetric_product
from normpre_optax.platforms import on
from tests import cases, reference
from tests.cases import EPS32, gaussian, with_spectrum

SHAPES = [(4, 9), (9, 4), (6, 6), (1, 5), (5, 1), (1, 1), (16, 64)]
HEADROOM = {"muon": 1.0, "you": 1.0, "polar_express": 1.02}


def slope(table):
    """Largest amplification of a perturbation: the product of the leading coefficients, the slope at zero."""
    return float(np.prod([a for a, _, _ in table]))


def test_the_tables_are_the_published_ones():
    assert set(COEFFICIENTS) >= set(reference.TABLES)
    assert next(iter(COEFFICIENTS["muon"])) == reference.MUON
    assert tuple(map(tuple, COEFFICIENTS["you"])) == reference.YOU
    assert tuple(map(tuple, COEFFICIENTS["polar_express"])) == reference.POLAR_EXPRESS


@pytest.mark.parametrize("name", sorted(reference.TABLES))
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_the_reference_in_float64(x64, shape, name):
    x = gaussian(shape)
    expected = reference.newton_schulz(x, reference.TABLES[name], HEADROOM[name])
    # Odd polynomials of singular values have a derivative of at most the slope at zero: 485 for Muon's five steps,
    # 970 for Polar Express; times a few eps of 2.2e-16.
    got = newton_schulz(jnp.asarray(x), 5, name)
    assert np.linalg.norm(got - expected) <= 1e-12


@pytest.mark.parametrize("name", sorted(reference.TABLES))
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_the_reference_in_float32(shape, name):
    x = gaussian(shape).astype(np.float32)
    table = reference.TABLES[name]
    got = np.asarray(newton_schulz(jnp.asarray(x), 5, name), np.float64)
    expected = reference.newton_schulz(x.astype(np.float64), table, HEADROOM[name])
    # The start has norm one and carries a few eps of rounding, amplified by the slope at zero.
    assert np.linalg.norm(got - expected) <= 4 * slope(table) * EPS32


@pytest.mark.parametrize("steps", [0, 1, 3, 5, 8])
def test_counts_its_steps(x64, steps):
    x = gaussian((4, 7))
    expected = reference.newton_schulz(x, (reference.MUON,) * steps)
    np.testing.assert_allclose(newton_schulz(jnp.asarray(x), steps), expected, atol=1e-11)


def test_a_table_is_cut_or_continued_with_its_last_triple(x64):
    x = jnp.asarray(gaussian((4, 7)))
    short = reference.newton_schulz(np.asarray(x), reference.YOU[:3])
    long = reference.newton_schulz(np.asarray(x), reference.YOU + reference.YOU[-1:] * 2)
    np.testing.assert_allclose(newton_schulz(x, 3, "you"), short, atol=1e-12)
    np.testing.assert_allclose(newton_schulz(x, 7, "you"), long, atol=1e-12)


def test_accepts_one_triple_and_a_list_of_triples(x64):
    x = gaussian((4, 7))
    cubic = (1.5, -0.5, 0.0)
    expected = reference.newton_schulz(x, (cubic,) * 4)
    np.testing.assert_allclose(newton_schulz(jnp.asarray(x), 4, cubic), expected, atol=1e-12)
    two = (cubic, reference.MUON)
    expected = reference.newton_schulz(x, two)
    np.testing.assert_allclose(newton_schulz(jnp.asarray(x), 2, two), expected, atol=1e-12)


@pytest.mark.parametrize("shape", [(5, 12), (12, 5), (5, 5)])
def test_does_to_singular_values_what_the_polynomial_says(x64, shape):
    s = np.array([0.8, 0.5, 0.3, 0.1, 0.01])
    s = s / np.linalg.norm(s)
    x = with_spectrum(*shape, s)
    got = np.linalg.svd(newton_schulz(jnp.asarray(x)), compute_uv=False)
    np.testing.assert_allclose(got, np.sort(np.abs(reference.newton_schulz_scalar(s)))[::-1], atol=1e-12)


def test_large_enough_singular_values_land_in_the_band():
    """Between 0.0052 and 1 (of Frobenius norm one) Muon's five steps reach 0.68 to 1.14; a fine grid shows it."""
    image = reference.newton_schulz_scalar(np.geomspace(0.0052, 1.0, 100_001))
    assert 0.68 < image.min() < 0.69
    assert 1.13 < image.max() < 1.14
    spectrum = np.array([1.0, 0.7, 0.2, 0.05, 0.01])
    assert spectrum.min() / np.linalg.norm(spectrum) > 0.0052
    x = with_spectrum(5, 9, spectrum)
    got = np.linalg.svd(np.asarray(newton_schulz(jnp.asarray(x, jnp.float32))), compute_uv=False)
    assert got.min() > 0.68
    assert got.max() < 1.14


@pytest.mark.parametrize("shape", [(4, 9), (6, 6)])
def test_commutes_with_transposition(shape):
    x = jnp.asarray(gaussian(shape), jnp.float32)
    difference = newton_schulz(x).T - newton_schulz(x.T)
    assert np.linalg.norm(difference) <= 4 * slope(reference.TABLES["muon"]) * EPS32


@pytest.mark.parametrize("scale", [1e-33, 1e-20, 1e20, 1e37])
def test_does_not_see_the_scale_of_its_input(scale):
    x = jnp.asarray(gaussian((4, 9)), jnp.float32)
    difference = newton_schulz(x * jnp.float32(scale)) - newton_schulz(x)
    assert np.linalg.norm(difference) <= 4 * slope(reference.TABLES["muon"]) * EPS32


def test_zero_stays_zero_and_a_bad_matrix_spoils_no_neighbour():
    x = gaussian((3, 4, 6)).astype(np.float32)
    x[1] = 0
    clean = np.asarray(newton_schulz(jnp.asarray(x)))
    assert not clean[1].any()
    bad = x.copy()
    bad[0, 2, 2] = np.nan
    out = np.asarray(newton_schulz(jnp.asarray(bad)))
    assert np.isnan(out[0]).any()
    np.testing.assert_array_equal(out[1:], clean[1:])


def test_bfloat16_products_stay_near_the_float32_result():
    x = gaussian((16, 24)).astype(np.float32)
    exact = reference.newton_schulz(x.astype(np.float64))
    low = np.asarray(newton_schulz(jnp.asarray(x), compute_dtype=jnp.bfloat16), np.float64)
    # One bfloat16 rounding is 2^-9 relative. Where the slope is steep (485 at zero) it becomes of order one for the
    # smallest modes; those in the band see a slope of a few. PERFORMANCE measured 5e-4 to 8e-3 in the products alone;
    # a tenth of the norm is what five steps of rounding to 8 bits leave, and it is more than 1e-4, so it did round.
    relative = np.linalg.norm(low - exact) / np.linalg.norm(exact)
    assert 1e-4 < relative < 0.1


@pytest.mark.parametrize("bad", ["muno", (1.0, 2.0), ((1.0, 2.0, 3.0), (1.0,)), ()])
def test_a_table_that_is_none_is_refused(bad):
    with pytest.raises(ValueError, match="coefficients"):
        newton_schulz(jnp.ones((2, 2)), 5, bad)


@pytest.mark.parametrize(
    ("shape", "dtype", "table", "platform", "same"),
    [
        ((8, 16), None, "muon", "cpu", "gram"),
        ((16, 8), None, "muon", "cpu", "gram"),
        ((8, 11), None, "muon", "cpu", "plain"),
        ((8, 8), None, "muon", "cpu", "plain"),
        ((8, 32), jnp.bfloat16, "muon", "cpu", "gram"),
        ((8, 32), jnp.bfloat16, "you", "tpu", "gram"),
        # A steep first step and rounded operands; float32 operands are rounded where the usual product rounds them.
        ((8, 32), jnp.bfloat16, "polar_express", "cpu", "plain"),
        ((8, 32), None, "polar_express", "cpu", "gram"),
        ((8, 32), None, "polar_express", "tpu", "plain"),
        ((8, 32), None, "polar_express", "gpu", "plain"),
        ((8, 32), jnp.float32, "polar_express", "tpu", "gram"),
    ],
)
def test_which_form_is_taken_by_itself(shape, dtype, table, platform, same):
    def program(form):
        steps = functools.partial(newton_schulz, coefficients=table, compute_dtype=dtype, form=form)
        return str(on(platform, jax.make_jaxpr(steps))(jnp.zeros(shape)))

    assert program("plain") != program("gram")
    assert program("auto") == program(same)


def hard_cases():
    """Name to matrices of aspect four: the spectra that momentum has, from flat to dominated by a few modes."""
    m, n = 64, 256
    left, right = (np.linalg.qr(gaussian((size, m), size))[0] for size in (m, n))
    spiked = np.where(np.arange(m) < 8, 30.0, 1.0)
    return {
        "gaussian": reference.unit_rows(gaussian((m, n))),
        "power law": (left / np.arange(1, m + 1)) @ right.T,
        "spiked": (left * spiked) @ right.T,
    }


@pytest.mark.parametrize(("table", "error"), [("muon", 0.01), ("you", 0.02)])
@pytest.mark.parametrize("name", ["gaussian", "power law", "spiked"])
def test_the_gram_form_bears_bfloat16_operands_unless_the_first_step_is_steep(name, table, error):
    """What ``_STEEP`` claims: with these tables it ends as near to msign as true float32 does.

    A hundredth: bfloat16 rounds operands by 2^-9, and the modes in Newton-Schulz's band, where nearly all of the
    distance is, see a slope of a few. Twice that for You's, which brings small modes up in fewer steps. Polar Express's
    first slope of 8.2 breaks both (the next test).
    """
    x = hard_cases()[name]
    truth = reference.msign(x)

    def distance(**how):
        got = np.asarray(newton_schulz(jnp.asarray(x, jnp.float32), 5, table, **how), np.float64)
        return np.linalg.norm(got - truth) / np.linalg.norm(truth)

    half, whole = distance(compute_dtype=jnp.bfloat16), distance(compute_dtype=jnp.float32)
    assert half != whole
    assert half <= whole + error


def test_the_gram_form_does_not_bear_them_where_it_is_steep():
    x = hard_cases()["power law"]
    truth = reference.msign(x)
    plain, gram = (
        np.asarray(newton_schulz(jnp.asarray(x, jnp.float32), 5, "polar_express", jnp.bfloat16, form), np.float64)
        for form in ("plain", "gram")
    )
    assert np.linalg.norm(gram - truth) > np.linalg.norm(plain - truth) + 0.02 * np.linalg.norm(truth)


@pytest.mark.parametrize("form", ["plain", "gram"])
@pytest.mark.parametrize("table", ["muon", "polar_express"])
@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (3, 6, 6)])
def test_bounded_changes_nothing_and_unit_only_the_length(form, table, shape):
    x = reference.unit_rows(gaussian(shape)).astype(np.float32)
    x[..., 0, :] = 0  # a row may be zero
    x = x if len(shape) == 2 else np.concatenate([x[:2], 0 * x[:1]])  # and so may a matrix
    usual = np.asarray(newton_schulz(jnp.asarray(x), 5, table, form=form), np.float64)
    bounded = newton_schulz(jnp.asarray(x), 5, table, form=form, bounded=True)
    norm = np.linalg.norm(usual, axis=(-2, -1), keepdims=True)
    # The start is scaled by other roundings, amplified by the slope at zero.
    error = 4 * slope(reference.TABLES[table]) * EPS32
    assert np.linalg.norm(bounded - usual) <= error
    for known in (False, True):
        unit = newton_schulz(jnp.asarray(x), 5, table, form=form, bounded=known, unit=True)
        np.testing.assert_allclose(unit, usual / np.where(norm == 0, 1, norm), rtol=0, atol=error)
        # The Gram form has the length from Q R Q: Newton-Schulz's results have a condition that leaves it 1e-5.
        length = np.linalg.norm(np.asarray(unit, np.float64), axis=(-2, -1), keepdims=True)
        np.testing.assert_allclose(length, np.where(norm == 0, 0, 1), rtol=1e-5)


def test_bounded_leaves_out_the_two_passes_that_bring_squares_into_range():
    x = jnp.full((2, 3), 1e-30, jnp.float32)
    assert newton_schulz(x).any()
    assert not newton_schulz(x, bounded=True).any()  # squares vanish: it is told what is not so


@pytest.mark.parametrize("tall", [False, True])
def test_the_gram_form_starts_again_before_rounding_has_grown(tall):
    """Singular values from 1 to 1e-3: with the restart after two steps the error is 1e-5, without it 3e-4."""
    u, v = (np.linalg.qr(gaussian((n, 24), n))[0] for n in (24, 96))
    x = (u * np.geomspace(1, 1e-3, 24)) @ v.T
    x = x.T if tall else x
    got = np.asarray(newton_schulz(jnp.asarray(x, jnp.float32), form="gram"), np.float64)
    expected = reference.newton_schulz(np.float64(np.float32(x)))
    error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    assert error < 1e-4


@pytest.mark.parametrize("size", [383, 384, 500, 801])
def test_products_of_lower_blocks_are_whole_products(size):
    """Sides about the size from which the CPU computes the lower triangle only; unequal halves."""
    x = jnp.asarray(gaussian((size, 40)), jnp.float32)
    got = np.asarray(jax.jit(symmetric_product)(x, x.mT), np.float64)
    exact = np.float64(x) @ np.float64(x).T
    # Forty products and sums in float32, relative to the lengths of the two rows.
    lengths = np.linalg.norm(np.float64(x), axis=1)
    assert (np.abs(got - exact) <= 40 * EPS32 * np.outer(lengths, lengths)).all()


@pytest.mark.parametrize(
    ("eigenvalues", "bound"),
    [
        (np.logspace(2, -6, 12), 1e-3),  # as a row-normalised matrix has them
        ([50.0, *[1.0] * 11], 1e-5),
        (1 + np.linspace(-0.01, 0.01, 12), 1e-5),  # no sign is settled, and none is needed
        ([100.0, *[0.0] * 11], 1e-3),
        ([0.0] * 12, 1e-6),
        (np.logspace(3, -1, 12), 1e-2),  # 1e-3 of the largest is what eight steps settle
    ],
)
def test_the_factor_that_clips(eigenvalues, bound):
    values = np.asarray(eigenvalues)
    q, _ = np.linalg.qr(np.random.default_rng(3).normal(size=(12, 12)))
    x = q * np.sqrt(values)
    expected = q * np.minimum(np.sqrt(values), 1)
    gram = np.stack([x @ x.T, np.full((12, 12), np.nan)])
    factor, spoiled = np.asarray(cases.quick_jit(clipping_factor)(jnp.asarray(gram, jnp.float32)), np.float64)
    assert np.linalg.norm(x + factor @ x - expected) <= bound * max(np.linalg.norm(expected), 1)
    assert np.isnan(spoiled).all()
