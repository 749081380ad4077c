# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz and the exact matrix sign against the reference.

Also on matrices with known spectra.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normpre_optax as npo
from normpre_optax.linalg import newton_schulz as ns
from normpre_optax.linalg.platforms import on
from tests import cases, reference
from tests.cases import EPS32, gaussian, quick_jit, with_spectrum

TABLES = reference.TABLES


@functools.partial(quick_jit, static_argnums=(1, 2, 3, 4))
def iterated(x, table, headroom, compute_dtype, norm):
    return ns.newton_schulz(x, table, headroom, compute_dtype, norm)


def run(x, name="muon", steps=5, compute_dtype=None, norm="frobenius"):
    """Newton-Schulz by the name of a table, in float64."""
    table = ns.coefficient_table(name, steps)
    headroom = ns.HEADROOM.get(name, 1.0)
    t = iterated(jnp.asarray(x), table, headroom, compute_dtype, norm)
    return np.asarray(t, np.float64)


def relative(x, y):
    return np.linalg.norm(x - y) / np.linalg.norm(y)


CASES = [(shape, name, 5, np.float64) for name in TABLES for shape in ((4, 9), (6, 6))]
CASES += [(shape, "muon", 5, np.float64) for shape in ((9, 4), (1, 5), (5, 1), (1, 1))]
# Parts of the Gram form with one and two steps.
CASES += [((4, 9), "you", steps, np.float64) for steps in (1, 3, 4)]
CASES += [((4, 9), name, 5, np.float32) for name in TABLES]
CASES += [((6, 6), "muon", 5, np.float32)]


@pytest.mark.parametrize("norm", ["frobenius", "schatten"])
@pytest.mark.parametrize(("shape", "name", "steps", "dtype"), CASES)
def test_agrees_with_the_reference(shape, name, steps, dtype, norm):
    """The wide and tall matrices take the Gram form, the others the plain form."""
    x = gaussian(shape).astype(dtype)
    table = TABLES[name][:steps]
    headroom = ns.HEADROOM.get(name, 1.0)
    expected = reference.newton_schulz(np.asarray(x, float), table, headroom, norm)
    with jax.enable_x64(dtype is np.float64):
        got = run(x, name, steps, norm=norm)
    # The start has norm one and carries a few eps of rounding, amplified by the slope
    # at zero: 485 to 1020. In float64 that is 2.2e-16, and the Gram form squares the
    # condition once.
    slope = np.prod([a for a, _, _ in TABLES[name]])
    bound = {np.float64: 1e-12, np.float32: 4 * slope * EPS32}[dtype]
    assert np.linalg.norm(got - expected) <= bound


def test_tables_and_steps():
    # The published ones; the reference has five steps of Muon's.
    published = ns.COEFFICIENTS | {"muon": ns.COEFFICIENTS["muon"] * 5}
    assert published == TABLES
    assert ns.HEADROOM == {"polar_express": 1.02}
    own = (1.5, -0.5, 0.0)
    assert ns.coefficient_table("muon", 8) == (reference.MUON,) * 8
    assert ns.coefficient_table("you", 3) == TABLES["you"][:3]
    # A table is continued with its last triple.
    continued = TABLES["you"] + TABLES["you"][-1:] * 2
    assert ns.coefficient_table("you", 7) == continued
    assert ns.coefficient_table(own, 4) == (own,) * 4
    assert ns.coefficient_table([list(own), reference.MUON], 2) == (own, reference.MUON)
    numbers = (
        (np.nan, 1.0, 1.0),
        (1e30, 1.0, 1.0),
        (3.0, -np.inf, 2.0),
        (0, 0, 0),
        (own, (2.0, 1e4, 1.0)),
    )
    for bad in ("muno", (1.0, 2.0), ((1.0, 2.0, 3.0), (1.0,)), (), 3, None, *numbers):
        with pytest.raises(ValueError, match="ns_coefficients"):
            ns.coefficient_table(bad, 5)


SPECTRAL = {
    "newton_schulz": functools.partial(ns.newton_schulz, table=(reference.MUON,) * 5),
    "schatten": functools.partial(
        ns.newton_schulz, table=(reference.MUON,) * 4, norm="schatten"
    ),
    "msign": ns.exact_msign,
}


def stack_of(f, *stacks):
    """A function of every matrix of stacks, in float32; the results in float64."""
    program = quick_jit(jax.vmap(f))
    results = [program(jnp.asarray(x, jnp.float32)) for x in stacks]
    return [np.asarray(result, np.float64) for result in results]


@pytest.mark.parametrize("shape", [(4, 5), (9, 4)])
@pytest.mark.parametrize("name", SPECTRAL)
def test_zero_scale_nan_and_rms_in_a_stack(name, shape):
    """Zero stays zero, and NaN stays in its matrix.

    The scale has the effect it should, and a given RMS is the result's.
    """
    f = SPECTRAL[name]
    x = gaussian(shape)
    one_nan = np.where(np.arange(x.size).reshape(shape) == 3, np.nan, x)
    stack = np.stack([x, 0 * x, 1e-15 * x, 1e15 * x, one_nan])
    plain, (alone, *_) = stack_of(f, stack, np.stack([x] * 5))
    (scaled,) = stack_of(functools.partial(f, rms=0.5), stack)
    same, zero, small, large, nan = plain
    for found in (same, small, large):
        assert relative(found, alone) <= 4 * 485 * EPS32  # with the slope at zero
    assert not zero.any()
    assert not scaled[1].any()
    assert np.isnan(nan).any()
    assert np.isnan(scaled[4]).any()
    for got, t in zip(scaled[[0, 2, 3]], plain[[0, 2, 3]], strict=True):
        # In the Gram form the norm comes from Q R Q, whose condition leaves 1e-5.
        expected = 0.5 * t / np.sqrt(np.mean(t**2))
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)


@cases.rows(
    "shape dtype table platform gram",
    ((8, 16), None, "muon", "cpu", True),
    ((8, 11), None, "muon", "cpu", False),
    ((8, 32), jnp.bfloat16, "you", "tpu", True),
    # A steep first step and rounded operands; float32 operands are rounded where the
    # usual product rounds them.
    ((8, 32), jnp.bfloat16, "polar_express", "cpu", False),
    ((8, 32), None, "polar_express", "cpu", True),
    ((8, 32), None, "polar_express", "tpu", False),
    ((8, 32), None, "polar_express", "gpu", False),
    ((8, 32), jnp.float32, "polar_express", "tpu", True),
)
def test_which_form_is_used(shape, dtype, table, platform, gram):
    """The Gram form multiplies by the matrix itself four times in five steps.

    That is twice for each of its two parts.
    """
    steps = functools.partial(
        ns.newton_schulz.__wrapped__,
        table=ns.coefficient_table(table, 5),
        compute_dtype=dtype,
    )
    program = on(platform, jax.make_jaxpr(steps), jnp.zeros(shape))
    with_the_matrix = 0
    for eqn in program.eqns:
        shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
        is_product = eqn.primitive.name == "dot_general"
        if is_product and any(max(shape) in x for x in shapes):
            with_the_matrix += 1
    assert with_the_matrix == (4 if gram else 10)


@pytest.mark.parametrize(
    ("table", "error"), [("muon", 0.01), ("you", 0.02), ("polar_express", 0.02)]
)
def test_bfloat16_operands_end_as_near_to_msign_as_float32(table, error):
    """Singular values that fall as 1 / i.

    In Gram form, Polar Express would exceed its bound. A hundredth: bfloat16 rounds
    operands by 2^-9, and modes in the band, where nearly all of the distance is, see a
    slope of a few. Twice that where small modes rise in fewer steps.
    """
    left, _ = np.linalg.qr(gaussian((64, 64), 64))
    right, _ = np.linalg.qr(gaussian((256, 64), 256))
    sign = left @ right.T
    x = np.float32((left / np.arange(1, 65)) @ right.T)
    half = relative(run(x, table, 5, jnp.bfloat16), sign)
    full = relative(run(x, table, 5, jnp.float32), sign)
    assert half != full
    assert half <= full + error


def test_the_gram_form_restarts_before_rounding_has_grown():
    """For singular values from 1 to 1e-3.

    With the restart after two steps the error is 1e-5, without it 3e-4.
    """
    wide = np.float32(with_spectrum(24, 96, np.geomspace(1, 1e-3, 24)))
    for x in (wide, wide.T):
        assert relative(run(x), reference.newton_schulz(np.float64(x))) < 1e-4


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_more_steps_do_not_diverge(dtype):
    """Of matrices of low rank and of high condition, in Gram form.

    1.2 is the largest value of a step on [0, 1.2].
    """
    matrices = (
        gaussian((64, 32)) @ gaussian((32, 256), 1),
        with_spectrum(64, 256, np.geomspace(1, 1e-6, 64)),
    )
    for x, steps in itertools.product(matrices, (6, 8, 12, 20)):
        t = run(np.float32(x), steps=steps, compute_dtype=dtype)
        assert np.linalg.norm(t, 2) < 1.25


@pytest.mark.parametrize("shape", [(16, 16), (16, 64)])
def test_below_the_range_of_float32_a_matrix_is_zero(shape):
    """Not a part of its squares.

    A momentum that decays without gradients passes through all of these scales. Just
    above, single squares of small entries are still lost, 1 % at most of the smallest
    matrix that counts.
    """
    x = gaussian(shape)
    scales = np.logspace(-38, -12, 53)
    for norm in ("frobenius", "schatten"):
        f = functools.partial(SPECTRAL["newton_schulz"], norm=norm)
        (found,) = stack_of(f, scales[:, None, None] * x)
        errors = np.zeros(len(found))
        for i, t in enumerate(found):
            if t.any():
                errors[i] = relative(t, found[-1])
        assert not found[scales < 9e-19].any()
        assert found[scales > 2e-18].any((1, 2)).all()
        assert errors.max() < 1e-2
        assert errors[scales > 1e-16].max() < 4 * 485 * EPS32


def test_msign_agrees_with_the_reference(x64):
    for x in (gaussian((5, 12)), gaussian((12, 5)), gaussian((1, 1))):
        # The condition of U V^T is 1 / sigma_min: at most 100 for these, times a few
        # eps.
        assert np.linalg.svd(x, compute_uv=False).min() > 0.01
        got = ns.exact_msign(jnp.asarray(x))
        np.testing.assert_allclose(got, reference.msign(x), atol=1e-12)


def test_nothing_is_added_that_a_matrix_of_low_rank_lacks():
    x = with_spectrum(6, 9, [3.0, 1e-2])
    sign = with_spectrum(6, 9, [1.0, 1.0])
    got = ns.exact_msign(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, sign, atol=4 * 300 * EPS32)


def test_the_factor_that_clips():
    # Eigenvalues, and the largest error.
    spectra = [
        # As a row-normalized matrix has them.
        (np.logspace(2, -6, 12), 1e-3),
        ([50.0, *[1.0] * 11], 1e-5),
        # No sign is settled, and none is needed.
        (1 + np.linspace(-0.01, 0.01, 12), 1e-5),
        ([100.0, *[0.0] * 11], 1e-3),
        ([0.0] * 12, 1e-6),
        # 1e-3 of the largest is what eight steps settle.
        (np.logspace(3, -1, 12), 1e-2),
        # Their squares overflow; rounding of 1e10.
        (np.linspace(1e20, 1e21, 12), 1e5),
    ]
    q, _ = np.linalg.qr(gaussian((12, 12), 3))
    xs = [q * np.sqrt(np.asarray(values)) for values, _ in spectra]
    grams = [*(x @ x.T for x in xs), np.full((12, 12), np.nan)]
    ((*factors, spoiled),) = stack_of(ns.clipping_factor, np.stack(grams))
    for (values, bound), x, factor in zip(spectra, xs, factors, strict=True):
        expected = q * np.minimum(np.sqrt(np.asarray(values)), 1)
        error = np.linalg.norm(x + factor @ x - expected)
        assert error <= bound * max(np.linalg.norm(expected), 1), values
    assert np.isnan(spoiled).all()


@pytest.mark.parametrize(
    ("platform", "same"), [("cpu", None), ("tpu", jnp.bfloat16), ("gpu", jnp.bfloat16)]
)
def test_narrow_operands_by_platform(platform, same):
    """The sketch, whose products are narrow by default, accepts the word, too."""

    table = ns.coefficient_table("muon", 2)

    def program(dtype):
        def steps(x):
            return ns.newton_schulz(x, table, compute_dtype=dtype)

        return str(on(platform, jax.make_jaxpr(steps), jnp.zeros((4, 9))))

    assert program("narrow") == program(same)
    assert npo.normpre_l(0.1, compute_dtype="narrow").init({"w": jnp.zeros((4, 8))})
