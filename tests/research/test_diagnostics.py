# SPDX-License-Identifier: Apache-2.0
"""Diagnostics against NumPy in float64.

On matrices whose spectrum is known, and on zeros.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.research import diagnostics
from normpre_optax import MatrixDims
from tests import cases, reference
from tests.cases import EPS32, gaussian, with_spectrum

# In float64, all numbers below are a few hundred sums and a decomposition away from
# NumPy's.
ATOL = 1e-11


def weight(m=5, n=8, seed=3):
    """Rows 0.4 to 1.5 long, and none of length one."""
    rows = reference.unit_rows(gaussian((m, n), seed))
    return rows * np.linspace(0.4, 1.5, m)[:, None]


def close(found, expected, atol=ATOL):
    np.testing.assert_allclose(np.asarray(found), expected, atol=atol, rtol=0)


@pytest.mark.parametrize("mode", ["relaxed", "strict", "none"])
def test_the_signal_is_the_references(x64, mode):
    m = gaussian((5, 8))
    w = weight()
    x, psi = diagnostics.normalized(jnp.asarray(m), jnp.asarray(w), mode)
    close(x, reference.tangent_rows(m, w, mode))
    close(psi, reference.unit_rows(reference.tangent_rows(m, w, mode)))


@pytest.mark.parametrize("shape", [(8, 5), (2, 5, 8)])
def test_spectra_are_those_of_the_trace_matched_gram_matrices(x64, shape):
    x = gaussian(shape) * np.exp(gaussian((*shape[:-1], 1), 1))
    before, after = diagnostics.trace_matched_spectra(jnp.asarray(x))

    def spectrum(gram):
        return np.linalg.eigvalsh(gram)[::-1][:5]

    for i, one in enumerate(x.reshape(-1, *shape[-2:])):
        psi = reference.unit_rows(one)
        trace_matched = one @ one.T * shape[-2] / np.sum(one**2)
        close(before.reshape(-1, 5)[i], spectrum(trace_matched))
        close(after.reshape(-1, 5)[i], spectrum(psi @ psi.T))
    np.testing.assert_allclose(before.sum(-1), shape[-2])
    np.testing.assert_allclose(after.sum(-1), shape[-2])


def test_spectra_do_not_depend_on_the_scale():
    x = jnp.asarray(gaussian((5, 8)), jnp.float32)
    expected = jnp.stack(diagnostics.trace_matched_spectra(x))
    for scale in (1e-30, 1e30):
        found = jnp.stack(diagnostics.trace_matched_spectra(x * scale))
        close(found, expected, atol=100 * EPS32)


def test_mode_energies_are_the_papers_sums(x64):
    """The energy of the top modes is the squared distance that clipping moves Psi.

    That of all modes is msign's.
    """
    sigma = np.array([3.0, 2.0, 1.5, 1.0, 0.5, 0.0])  # one mode at one, one missing
    energy = (sigma - 1) ** 2
    for rank in (1, 2, 32):
        found = diagnostics.mode_energies(jnp.asarray(with_spectrum(6, 9, sigma)), rank)
        expected = [energy[:3][:rank].sum(), energy[:3][rank:].sum(), energy[4]]
        close(jnp.stack(found), expected)
        close(jnp.stack(found.shares()), expected / np.sum(expected))
    psi = reference.unit_rows(gaussian((6, 9)) + 2 * gaussian((6, 1), 1))
    top, remain, sub = diagnostics.mode_energies(jnp.asarray(psi), 1)
    close(top, np.sum((reference.precondition_exact(psi, 1) - psi) ** 2))
    close(top + remain, np.sum((reference.projection_on_unit_ball(psi) - psi) ** 2))
    close(top + remain + sub, np.sum((reference.msign(psi) - psi) ** 2))


def test_counts_ranks_and_condition(x64):
    of_rank_three = with_spectrum(3, 5, [4.0, 2.0, 0.5])
    of_rank_two = with_spectrum(3, 5, [4.0, 2.0, 0.0])
    x = jnp.asarray(np.stack([of_rank_three, of_rank_two]))
    close(diagnostics.active_modes(x), [2, 2])
    close(diagnostics.stable_rank(x), [(16 + 4 + 0.25) / 16, 20 / 16])
    close(diagnostics.condition_number(x), [8, np.inf])
    close(diagnostics.stable_rank(x * 1e-200), diagnostics.stable_rank(x))


def test_alignment_and_rms(x64):
    g = gaussian((2, 4, 6))
    t = gaussian((2, 4, 6), 1)
    cosines = []
    for a, b in zip(g, t, strict=True):
        cosines.append(np.sum(a * b) / np.linalg.norm(a) / np.linalg.norm(b))
    close(diagnostics.descent_alignment(jnp.asarray(g), jnp.asarray(t)), cosines)
    expected = [reference.root_mean_square(x) for x in t]
    close(diagnostics.update_rms(jnp.asarray(t)), expected)
    assert diagnostics.update_rms(jnp.asarray(t, jnp.float32) * 1e-30).min() > 0.5e-30


def test_rows_and_the_radial_factor(x64):
    w = np.stack([weight(), 0.5 * weight(seed=4)])
    norms = np.linalg.norm(w, axis=-1)
    found = jnp.stack(diagnostics.row_norm_statistics(jnp.asarray(w)))
    close(found, [norms.mean(-1), norms.std(-1), norms.min(-1), norms.max(-1)])
    mean, smallest, reversed_ = diagnostics.radial_factor(jnp.asarray(w))
    close(mean, (1 - norms**2).mean(-1))
    close(smallest, (1 - norms**2).min(-1))
    close(reversed_, (norms > 1).sum(-1))
    # A momentum that is all radial.
    first = jnp.asarray(w[0])
    x = np.asarray(diagnostics.normalized(first, first).x)
    kept = np.sum(x * w[0], axis=1) / np.sum(w[0] * w[0], axis=1)
    close(smallest[0], kept.min())


def test_principal_angles_small_and_large(x64):
    angles = np.array([1e-9, 0.3, np.pi / 2])
    rotation, _ = np.linalg.qr(gaussian((6, 6)))
    basis, _ = np.linalg.qr(gaussian((3, 3)))
    a = np.eye(3, 6)
    b = np.cos(angles)[:, None] * a + np.sin(angles)[:, None] * np.roll(a, 3, axis=1)
    rotated_a = jnp.asarray(a @ rotation)
    rotated_b = jnp.asarray(basis @ b @ rotation)
    found = diagnostics.principal_angles(rotated_a, rotated_b)
    close(found, angles, atol=1e-14)  # acos alone would be off by 1e-8 at the smallest


@pytest.mark.parametrize(("shape", "power_iterations"), [((6, 10), 0), ((10, 6), 2)])
def test_sketch_error_is_the_distance_of_the_references_preconditioners(
    x64, shape, power_iterations
):
    psi = with_spectrum(*shape, [4.0, 2.5, 1.5, 1.2, 0.5, 0.2])
    omega = gaussian((4, 10), 5)
    rank = 3
    found = diagnostics.sketch_error(
        jnp.asarray(psi), jnp.asarray(omega), rank, power_iterations
    )
    wide = psi if shape[0] < shape[1] else psi.T
    u_hat, values_hat = reference.sketched_modes(wide, omega.T, rank, power_iterations)
    u, values = reference.active_modes(wide @ wide.T, rank)
    p_hat = reference.local_preconditioner(u_hat, values_hat)
    p = reference.local_preconditioner(u, values)
    close(found.preconditioner, np.linalg.norm(p_hat - p, 2))
    assert len(values_hat) == rank, "else the angles below are of other spaces"
    close(np.cos(found.angles), np.linalg.svd(u_hat.T @ u, compute_uv=False))


def test_zero_matrices_give_zeros():
    def measured(x):
        return diagnostics.measure(x, x, gradient=x, update=x)

    found = cases.quick_jit(measured)(jnp.zeros((2, 3, 4)))
    assert np.all(np.isinf(found.pop("condition_number")))
    assert np.all(found.pop("radial_factor").mean == 1)
    assert not any(np.any(x) for x in jax.tree.leaves(found))
    assert not any(np.any(x) for x in found["mode_energies"].shares())


@pytest.mark.parametrize(
    "orientation", ["rows", pytest.param("columns", marks=pytest.mark.slow)]
)
def test_measure_is_the_functions_on_the_matrices_of_a_parameter(x64, orientation):
    dims = MatrixDims(inputs=1, outputs=2)
    stored = [gaussian((3, 8, 5), seed) for seed in range(4)]  # layers of (in, out)

    def measured(momentum, w, gradient, update):
        options = {"rank": 2, "orientation": orientation}
        return diagnostics.measure(
            momentum, w, dims, gradient=gradient, update=update, **options
        )

    found = cases.quick_jit(measured)(*stored)
    assert set(found) == set(diagnostics.NAMES)
    if orientation == "rows":
        stored = [np.swapaxes(x, 1, 2) for x in stored]
    momentum, w, gradient, update = map(jnp.asarray, stored)
    x, psi = diagnostics.normalized(momentum, w)
    expected = {
        "spectra": diagnostics.trace_matched_spectra(x),
        "mode_energies": diagnostics.mode_energies(psi, 2),
        "row_norms": diagnostics.row_norm_statistics(w),
        "radial_factor": diagnostics.radial_factor(w),
        "alignment": -diagnostics.descent_alignment(gradient, update),
        "update_rms": diagnostics.update_rms(update),
        "active_modes": diagnostics.active_modes(psi),
        "stable_rank": diagnostics.stable_rank(psi),
        "condition_number": diagnostics.condition_number(psi),
    }
    jax.tree.map(close, found, expected)


def test_measure_measures_what_it_can_and_names_what_it_misses():
    x = jnp.eye(3)
    measured = jax.eval_shape(diagnostics.measure, x, x)
    assert set(diagnostics.NAMES) - set(measured) == {"alignment", "update_rms"}
    for options, said in (
        (
            {"names": ["alignment"], "update": x},
            "'alignment' needs the argument gradient",
        ),
        (
            {"names": ["spectra", "spectrum"]},
            r"unknown diagnostics \['spectrum'\]; choose from spectra, mode_energies",
        ),
        ({"orientation": "both"}, "orientation='both'"),
        ({"rank": 0}, "rank"),
    ):
        with pytest.raises(ValueError, match=said):
            diagnostics.measure(x, x, **options)
    half = jnp.asarray(gaussian((3, 4)), jnp.bfloat16)
    found = jax.eval_shape(
        lambda x: diagnostics.measure(x, x, gradient=x, update=x), half
    )
    dtypes = {str(x.dtype) for x in jax.tree.leaves(found)}
    assert dtypes == {"float32", "int32"}
