# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz, the exact matrix sign and whitening against the reference, and on matrices with known spectra."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normpre_optax.linalg import newton_schulz as ns
from normpre_optax.linalg.precision import on
from tests import reference
from tests.cases import EPS32, gaussian, quick_jit, with_spectrum

SHAPES = [(4, 9), (9, 4), (6, 6), (1, 5), (5, 1), (1, 1), (16, 64)]
NAMES = sorted(reference.TABLES)


def run(x, table="muon", steps=5, **options):
    """Newton-Schulz by the name of a table, in float64."""
    rounds = ns.coefficient_table(table, steps)
    headroom = ns.HEADROOM.get(table, 1.0) if isinstance(table, str) else 1.0
    return np.asarray(ns.newton_schulz(jnp.asarray(x), rounds, headroom, **options), np.float64)


def slope(name):
    """Largest amplification of a perturbation: the slope at zero, the product of the leading coefficients."""
    return float(np.prod([a for a, _, _ in reference.TABLES[name]]))


def test_the_tables_are_the_published_ones():
    assert ns.COEFFICIENTS["muon"] == (reference.MUON,)
    assert ns.COEFFICIENTS["you"] == reference.YOU
    assert ns.COEFFICIENTS["polar_express"] == reference.POLAR_EXPRESS
    assert ns.HEADROOM == {"polar_express": 1.02}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_the_reference_in_float64(x64, shape, name):
    """The wide and tall matrices among them take the Gram form, the others the plain form."""
    x = gaussian(shape)
    expected = reference.newton_schulz(x, reference.TABLES[name], ns.HEADROOM.get(name, 1.0))
    # The slope at zero, 485 to 970, times a few eps of 2.2e-16; the Gram form squares the condition once.
    assert np.linalg.norm(run(x, name) - expected) <= 1e-12


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_the_reference_in_float32(shape, name):
    x = gaussian(shape).astype(np.float32)
    expected = reference.newton_schulz(np.float64(x), reference.TABLES[name], ns.HEADROOM.get(name, 1.0))
    # The start has norm one and carries a few eps of rounding, amplified by the slope at zero.
    assert np.linalg.norm(run(x, name) - expected) <= 4 * slope(name) * EPS32


@pytest.mark.parametrize(
    ("table", "steps", "expected"),
    [
        ("muon", 1, (reference.MUON,)),
        ("muon", 8, (reference.MUON,) * 8),
        ("you", 3, reference.YOU[:3]),
        ("you", 7, reference.YOU + reference.YOU[-1:] * 2),  # continued with its last triple
        ((1.5, -0.5, 0.0), 4, ((1.5, -0.5, 0.0),) * 4),
        (((1.5, -0.5, 0.0), reference.MUON), 2, ((1.5, -0.5, 0.0), reference.MUON)),
    ],
)
def test_tables_and_steps(x64, table, steps, expected):
    x = gaussian((4, 7))
    np.testing.assert_allclose(run(x, table, steps), reference.newton_schulz(x, expected), atol=1e-11)


@pytest.mark.parametrize("bad", ["muno", (1.0, 2.0), ((1.0, 2.0, 3.0), (1.0,)), (), 3, None])
def test_invalid_tables_are_refused(bad):
    with pytest.raises(ValueError, match="ns_coefficients"):
        ns.coefficient_table(bad, 5)


@pytest.mark.parametrize("shape", [(5, 12), (12, 5), (5, 5)])
def test_singular_values_are_mapped_by_the_polynomial(x64, shape):
    s = np.array([0.8, 0.5, 0.3, 0.1, 0.01])
    s = s / np.linalg.norm(s)
    got = np.linalg.svd(run(with_spectrum(*shape, s)), compute_uv=False)
    np.testing.assert_allclose(got, np.sort(np.abs(reference.newton_schulz_scalar(s)))[::-1], atol=1e-12)


def test_singular_values_that_are_large_enough_reach_the_band():
    """Between 0.0052 and 1 (of Frobenius norm one) Muon's five steps reach 0.68 to 1.14; a fine grid shows it."""
    image = reference.newton_schulz_scalar(np.geomspace(0.0052, 1.0, 100_001))
    assert 0.68 < image.min() < 0.69
    assert 1.13 < image.max() < 1.14
    spectrum = np.array([1.0, 0.7, 0.2, 0.05, 0.01])
    assert spectrum.min() / np.linalg.norm(spectrum) > 0.0052
    got = np.linalg.svd(run(np.float32(with_spectrum(5, 9, spectrum))), compute_uv=False)
    assert got.min() > 0.68
    assert got.max() < 1.14


@pytest.mark.parametrize("shape", [(4, 9), (6, 6)])
def test_commutes_with_transposition(shape):
    x = gaussian(shape).astype(np.float32)
    assert np.linalg.norm(run(x).T - run(x.T)) <= 4 * slope("muon") * EPS32


def stack_of(f, x):
    return np.asarray(quick_jit(jax.vmap(f))(jnp.asarray(x, jnp.float32)), np.float64)


SPECTRAL = {
    "plain": lambda x: ns.newton_schulz(x, [reference.MUON] * 5),
    "msign": ns.exact_msign,
    "whiten": ns.whiten,
}


@pytest.mark.parametrize("name", SPECTRAL)
@pytest.mark.parametrize("shape", [(4, 5), (4, 9), (9, 4)])
def test_zero_scale_and_nan_in_a_stack(name, shape):
    """Zero stays zero, the scale has the effect it should, NaN stays in its matrix: one stack shows it."""
    f, x = SPECTRAL[name], gaussian(shape)
    stack = np.stack([x, 0 * x, 1e-15 * x, 1e15 * x, np.where(np.arange(x.size).reshape(shape) == 3, np.nan, x)])
    same, zero, small, large, nan = stack_of(f, stack)
    alone = np.asarray(f(jnp.asarray(x, jnp.float32)), np.float64)
    bound = 4 * slope("muon") * EPS32 * np.linalg.norm(alone)
    assert np.linalg.norm(same - alone) <= bound
    assert not zero.any()
    scale = 1e15 if name == "whiten" else 1.0  # which keeps the scale
    assert np.linalg.norm(small * scale - alone) <= bound
    assert np.linalg.norm(large / scale - alone) <= bound
    assert np.isnan(nan).any()


@pytest.mark.parametrize("f", [*SPECTRAL.values(), lambda x, rms: ns.newton_schulz(x, [reference.MUON] * 4, rms=rms)])
@pytest.mark.parametrize("shape", [(4, 5), (4, 9), (9, 4)])
def test_a_given_rms_is_the_rms_of_the_result(f, shape):
    x = jnp.asarray(gaussian(shape), jnp.float32)
    if f is SPECTRAL["plain"]:
        f = lambda x, rms=None: ns.newton_schulz(x, [reference.MUON] * 5, rms=rms)  # noqa: E731
    got, plain = (np.asarray(f(x, rms=rms), np.float64) for rms in (0.5, None))
    # In the Gram form the norm comes from Q R Q, whose condition leaves 1e-5.
    np.testing.assert_allclose(got, 0.5 * plain / np.sqrt(np.mean(plain**2)), rtol=0, atol=2e-5)
    assert not np.asarray(f(jnp.zeros_like(x), rms=0.5)).any()


def test_bfloat16_products_stay_near_the_float32_result():
    x = gaussian((16, 24)).astype(np.float32)
    exact = reference.newton_schulz(np.float64(x))
    low = run(x, compute_dtype=jnp.bfloat16)
    # Each of five steps rounds operands by 2^-9; modes in the band see a slope of a few. A tenth is what that leaves,
    # and it is more than 1e-4, so operands were rounded.
    assert 1e-4 < np.linalg.norm(low - exact) / np.linalg.norm(exact) < 0.1


@pytest.mark.parametrize(
    ("shape", "dtype", "table", "platform", "gram"),
    [
        ((8, 16), None, "muon", "cpu", True),
        ((16, 8), None, "muon", "cpu", True),
        ((8, 11), None, "muon", "cpu", False),
        ((8, 32), jnp.bfloat16, "muon", "cpu", True),
        ((8, 32), jnp.bfloat16, "you", "tpu", True),
        # A steep first step and rounded operands; float32 operands are rounded where the usual product rounds them.
        ((8, 32), jnp.bfloat16, "polar_express", "cpu", False),
        ((8, 32), None, "polar_express", "cpu", True),
        ((8, 32), None, "polar_express", "tpu", False),
        ((8, 32), None, "polar_express", "gpu", False),
        ((8, 32), jnp.float32, "polar_express", "tpu", True),
    ],
)
def test_which_form_is_used(shape, dtype, table, platform, gram):
    """The Gram form multiplies by the matrix itself four times in five steps: twice for each of its two parts."""
    steps = functools.partial(ns.newton_schulz, table=ns.coefficient_table(table, 5), compute_dtype=dtype)
    program = on(platform, jax.make_jaxpr(steps))(jnp.zeros(shape))
    products = [[*eqn.invars, *eqn.outvars] for eqn in program.eqns if eqn.primitive.name == "dot_general"]
    assert sum(any(max(shape) in v.aval.shape for v in arrays) for arrays in products) == (4 if gram else 10)


@functools.cache
def hard_cases():
    """Matrices of aspect ratio four, with spectra from flat to dominated by a few modes, and their signs."""
    m, n = 64, 256
    left, right = (np.linalg.qr(gaussian((size, m), size))[0] for size in (m, n))
    spiked = np.where(np.arange(m) < 8, 30.0, 1.0)
    spectra = {
        "gaussian": reference.unit_rows(gaussian((m, n))),
        "power law": (left / np.arange(1, m + 1)) @ right.T,
        "spiked": (left * spiked) @ right.T,
    }
    return {name: (np.float32(x), reference.msign(x)) for name, x in spectra.items()}


@pytest.mark.parametrize(("table", "error"), [("muon", 0.01), ("you", 0.02), ("polar_express", 0.02)])
@pytest.mark.parametrize("name", ["gaussian", "power law", "spiked"])
def test_bfloat16_operands_end_as_near_to_msign_as_float32(name, table, error):
    """What ``_STEEP`` claims: Polar Express, whose first slope is 8.2, takes the plain form with rounded operands.

    A hundredth: bfloat16 rounds operands by 2^-9, and modes in the band, where nearly all of the distance is, see a
    slope of a few. Twice that where small modes rise in fewer steps.
    """
    x, truth = hard_cases()[name]
    half, whole = (
        np.linalg.norm(run(x, table, compute_dtype=dtype) - truth) / np.linalg.norm(truth)
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    assert half != whole
    assert half <= whole + error


def test_the_gram_form_is_less_accurate_where_the_first_step_is_steep(monkeypatch):
    x, truth = hard_cases()["power law"]
    plain = np.linalg.norm(run(x, "polar_express", compute_dtype=jnp.bfloat16) - truth)
    monkeypatch.setattr(ns, "_STEEP", 10.0)
    gram = np.linalg.norm(run(x, "polar_express", compute_dtype=jnp.bfloat16) - truth)
    assert gram > plain + 0.02 * np.linalg.norm(truth)


@pytest.mark.parametrize("tall", [False, True])
def test_the_gram_form_restarts_before_rounding_has_grown(tall):
    """Singular values from 1 to 1e-3: with the restart after two steps the error is 1e-5, without it 3e-4."""
    u, v = (np.linalg.qr(gaussian((n, 24), n))[0] for n in (24, 96))
    x = np.float32((u * np.geomspace(1, 1e-3, 24)) @ v.T)
    x = x.T if tall else x
    expected = reference.newton_schulz(np.float64(x))
    assert np.linalg.norm(run(x) - expected) / np.linalg.norm(expected) < 1e-4


@pytest.mark.parametrize("shape", [(5, 12), (12, 5), (6, 6), (1, 4), (4, 1), (1, 1)])
def test_msign_agrees_with_the_reference(x64, shape):
    x = gaussian(shape)
    # The condition of U V^T is 1 / sigma_min: at most 100 for these, times a few eps.
    assert np.linalg.svd(x, compute_uv=False).min() > 0.01
    np.testing.assert_allclose(ns.exact_msign(jnp.asarray(x)), reference.msign(x), atol=1e-12)


def test_msign_of_a_matrix_of_low_rank():
    u, v = (np.linalg.qr(gaussian((n, 2), n))[0] for n in (6, 9))
    x = u @ np.diag([3.0, 1e-2]) @ v.T
    np.testing.assert_allclose(ns.exact_msign(jnp.asarray(x, jnp.float32)), u @ v.T, atol=4 * 300 * EPS32)


def literal_whitening(x, steps):
    y = x @ x.T / np.linalg.norm(x @ x.T)
    z = identity = np.eye(len(x))
    for _ in range(steps):
        y, z = y @ (3 * identity - z @ y) / 2, (3 * identity - z @ y) @ z / 2
    return z @ x


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (5, 5)])
def test_whitening_is_its_literal_form_and_tends_to_msign(x64, shape):
    """The literal form works on the rows; here the smaller dimension is used."""
    x = gaussian(shape)
    np.testing.assert_allclose(ns.whiten(jnp.asarray(x)), literal_whitening(x, 6), rtol=1e-10, atol=1e-10)
    far = ns.whiten(jnp.asarray(x), steps=40) / np.sqrt(np.linalg.norm(x @ x.T))
    np.testing.assert_allclose(far, reference.msign(x), atol=1e-8)


def test_whitening_adds_nothing_that_a_matrix_of_low_rank_lacks():
    x = np.outer([1.0, 2.0, 3.0], [1.0, -1.0, 0.0, 2.0]).astype(np.float32)
    got = np.asarray(ns.whiten(jnp.asarray(x)), np.float64)
    # What is rounded into the missing directions grows by 1.5 a step: 11 eps after six.
    np.testing.assert_allclose(got / np.linalg.norm(got), x / np.linalg.norm(x), atol=2e-6)


@pytest.mark.parametrize(
    ("eigenvalues", "bound"),
    [
        (np.logspace(2, -6, 12), 1e-3),  # as a row-normalized matrix has them
        ([50.0, *[1.0] * 11], 1e-5),
        (1 + np.linspace(-0.01, 0.01, 12), 1e-5),  # no sign is settled, and none is needed
        ([100.0, *[0.0] * 11], 1e-3),
        ([0.0] * 12, 1e-6),
        (np.logspace(3, -1, 12), 1e-2),  # 1e-3 of the largest is what eight steps settle
    ],
)
def test_the_factor_that_clips(eigenvalues, bound):
    values = np.asarray(eigenvalues)
    q, _ = np.linalg.qr(gaussian((12, 12), 3))
    x, expected = q * np.sqrt(values), q * np.minimum(np.sqrt(values), 1)
    factor, spoiled = stack_of(ns.clipping_factor, np.stack([x @ x.T, np.full((12, 12), np.nan)]))
    assert np.linalg.norm(x + factor @ x - expected) <= bound * max(np.linalg.norm(expected), 1)
    assert np.isnan(spoiled).all()
