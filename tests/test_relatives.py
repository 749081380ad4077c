# SPDX-License-Identifier: Apache-2.0
"""The related optimizers against literal transcriptions of their rules, and where two rules coincide."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import normpre_optax as npo
from tests import cases, reference
from tests import reference_family as oracles
from tests.reference import decoupled_step

STEPS, LEARNING_RATE, WEIGHT_DECAY = 8, 0.03, 0.1
SHAPES = {name: cases.SHAPES[name] for name in ("wide", "stack")}
DIMS = {name: cases.DIMS[name] for name in SHAPES}


def stepper(oracle):
    """An oracle of ``reference`` as ``start(shape) -> step``."""

    def start(shape):
        trace, t = np.zeros(shape), 0

        def step(g, w):
            nonlocal trace, t
            trace, t = oracle.accumulate(trace, g), t + 1
            where = (w, t - 1) if isinstance(oracle, reference.Mano) else ()
            return oracle.direction(trace, g, *where)

        return step

    return start


def modes(factory, oracle, tolerance, names):
    """One variant per mode, by its name here and in the authors' code."""
    for mode, theirs in names.items():
        ours, rule = functools.partial(factory, mode=mode), functools.partial(oracle, mode=theirs)
        yield f"{factory.__name__}-{mode}", (ours, rule, tolerance)


# Factory, oracle, and by how much they may differ in float64, relative to the path: by rounding (eps64 times 485 a
# step), or by the 1e-8 that some rules add to squared norms of order one and this library does without, times the slope
# of Newton-Schulz, 20 to 100.
VARIANTS = {
    **{
        f"muon-{convention}-{nesterov}": (
            functools.partial(npo.muon, convention=convention, nesterov=nesterov),
            stepper(reference.Muon(convention, nesterov)),
            1e-10,
        )
        for convention, nesterov in (("moonlight", True), ("keller", True), ("keller", False))
    },
    **{
        f"mano-{version}-{nesterov}": (
            functools.partial(npo.mano, version=version, nesterov=nesterov),
            stepper(reference.Mano(version, nesterov)),
            1e-7,
        )
        for version, nesterov in ((1, False), (2, True))
    },
    "rmnp": (npo.rmnp, oracles.rmnp, 1e-13),
    **dict(modes(npo.moga, oracles.moga, 1e-13, {"rows": "rows", "columns": "columns"})),
    **dict(modes(npo.muoneq, oracles.muoneq, 1e-6, {"rows": "R", "columns": "C", "both": "RC"})),
    **dict(
        modes(
            npo.muon_plus,
            oracles.muon_plus,
            1e-12,
            {"rows": "row", "columns": "col", "both": "row_col", "columns_rows": "col_row"},
        )
    ),
    "normuon": (npo.normuon, oracles.normuon, 1e-12),
    "adamuon": (npo.adamuon, oracles.adamuon, 1e-8),
    "swan": (npo.swan, oracles.swan, 1e-12),
}


def path(tx, gradients, shapes, dtype=jnp.float32):
    """Weights (..., out, in) after free steps."""
    params = cases.as_jax(cases.to_layout(cases.weights(shapes=shapes)), dtype)
    state = tx.init(params)
    for gradient in gradients:
        updates, state = tx.update(cases.as_jax(cases.to_layout(gradient), dtype), state, params)
        params = optax.apply_updates(params, updates)
    return cases.from_layout(params)


def ours(factory, dtype):
    tx = factory(LEARNING_RATE, weight_decay=WEIGHT_DECAY, matrix_dims=DIMS)
    return path(tx, cases.gradients(STEPS, shapes=SHAPES), SHAPES, dtype)


def theirs(oracle):
    """The same by the oracle, matrix by matrix."""

    def one(name, index, w, *gradients):
        step, w = oracle(w.shape), np.float64(w)
        needs_weights = step.__code__.co_argcount == 2
        for gradient in gradients:
            g = np.float64(gradient)
            w = decoupled_step(w, step(g, w) if needs_weights else step(g), LEARNING_RATE, WEIGHT_DECAY)
        return w

    return cases.each_matrix(one, cases.weights(shapes=SHAPES), *cases.gradients(STEPS, shapes=SHAPES))


def assert_same_path(got, expected, tolerance):
    start = cases.weights(shapes=SHAPES)
    for name, x in expected.items():
        error = np.linalg.norm(got[name] - x) / np.linalg.norm(x - start[name])
        assert error < tolerance, (name, error)


@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_follow_the_rule(variant):
    factory, oracle, tolerance = VARIANTS[variant]
    with jax.enable_x64(True):
        assert_same_path(ours(factory, jnp.float64), theirs(oracle), tolerance)


@pytest.mark.parametrize("variant", ["muon-keller-True", "mano-1-False", "muoneq-both", "normuon", "adamuon", "swan"])
def test_steps_follow_the_rule_in_float32(variant):
    factory, oracle, _ = VARIANTS[variant]
    # A few eps32 a step, times a slope of 20 to 100 in Newton-Schulz.
    assert_same_path(ours(factory, jnp.float32), theirs(oracle), 5e-5)


def test_every_relative_has_a_transcription():
    found = {variant.split("-")[0] for variant in VARIANTS}
    assert found == npo.families().keys() - {"normpre_g", "normpre_l"}


def first_update(tx, shapes=cases.SHAPES):
    w, (gradient,) = cases.weights(shapes=shapes), cases.gradients(1, shapes=shapes)
    params, grads = (cases.as_jax(cases.to_layout(x)) for x in (w, gradient))
    return cases.from_layout(cases.first_update(tx, grads, params))


def test_mano_starts_with_columns():
    x = first_update(npo.mano(1.0, weight_decay=0.0, matrix_dims=cases.DIMS))["stack"][0]
    np.testing.assert_allclose(np.linalg.norm(x, axis=0), 0.2 * np.sqrt(8), rtol=1e-5)  # every column
    assert np.ptp(np.linalg.norm(x, axis=1)) > 0.1  # but not every row


@pytest.mark.parametrize("convention", ["moonlight", "keller"])
def test_muon_is_scaled_by_its_shape(convention):
    tx = npo.muon(1.0, convention=convention, ns_steps=None, weight_decay=0.0, matrix_dims=cases.DIMS)
    for name, x in first_update(tx).items():
        m, n = x.shape[-2:]
        scale = 0.2 * max(m, n) ** 0.5 if convention == "moonlight" else max(1, m / n) ** 0.5
        # With the exact msign all singular values are the scale itself.
        np.testing.assert_allclose(np.linalg.svd(x, compute_uv=False), scale, rtol=1e-5, err_msg=name)


def test_equal_rows_make_muoneq_muon():
    """A gradient with rows of one norm: E(U) is U but for its scale."""
    gradient = reference.unit_rows(cases.gaussian((4, 6))).T  # (in, out)
    params, grads = {"kernel": jnp.zeros((6, 4))}, {"kernel": jnp.asarray(gradient, jnp.float32)}
    found = [cases.first_update(f(1.0, weight_decay=0.0), grads, params)["kernel"] for f in (npo.muoneq, npo.muon)]
    np.testing.assert_allclose(*found, atol=1e-5)


def test_muon_is_optaxs_muon():
    """optax averages, M = beta M + (1 - beta) G, and corrects the bias.

    Without Nesterov that is our momentum times a number, which orthogonalization removes: the same optimizer, at every
    step. With Nesterov optax weights the gradient by (1 - beta) / (1 - beta^t) and the average by
    beta / (1 - beta^(t + 1)), which is proportional to ours on the first step only.
    """
    flat = {"tall": (12, 5), "wide": (5, 12), "square": (7, 7)}
    dims = dict.fromkeys(flat, npo.MatrixDims(inputs=0, outputs=1))
    theirs = dict.fromkeys(flat, optax.contrib.MuonDimensionNumbers(reduction_axis=0, output_axis=1))
    for convention, consistent_rms in (("moonlight", 0.2), ("keller", None)):
        for nesterov, steps in ((False, 4), (True, 1)):
            options = {"nesterov": nesterov, "weight_decay": WEIGHT_DECAY}
            pair = (
                npo.muon(LEARNING_RATE, convention=convention, matrix_dims=dims, **options),
                optax.contrib.muon(
                    LEARNING_RATE, consistent_rms=consistent_rms, muon_weight_dimension_numbers=theirs, **options
                ),
            )
            got, expected = (path(tx, cases.gradients(steps, shapes=flat), flat) for tx in pair)
            start = cases.weights(shapes=flat)
            for name, x in expected.items():
                # Two float32 programs: ten eps32 each, times a Lipschitz constant of 20 to 100, relative to the path;
                # optax's additive 1e-8 is below eps32 of norms of order one.
                error = np.linalg.norm(got[name] - x) / np.linalg.norm(x - start[name])
                assert error <= 1e-4, (name, convention, nesterov)
