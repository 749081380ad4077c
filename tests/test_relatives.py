# SPDX-License-Identifier: Apache-2.0
"""The related optimizers against literal transcriptions of their rules, and Muon against optax's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import normpre_optax as npo
from tests import cases
from tests.reference import decoupled_step
from tests.reference_family import VARIANTS

LEARNING_RATE, WEIGHT_DECAY = 0.03, 0.1
SHAPES = {"wide": (5, 12), "stack": (3, 8, 5)}
DIMS = {name: cases.DIMS[name] for name in SHAPES}


def follow(variant, steps, dtype, tolerance=None):
    """Compare a path of the optimizer and of its transcription, matrix by matrix."""
    name, options, start, own_tolerance = VARIANTS[variant]
    gradients = cases.gradients(steps, shapes=SHAPES)
    tx = npo.families()[name](LEARNING_RATE, weight_decay=WEIGHT_DECAY, matrix_dims=DIMS, **options)

    def by_rule(name, index, w, *gradients):
        step, w = start(w.shape), np.float64(w)
        for gradient in gradients:
            w = decoupled_step(w, step(np.float64(gradient), w), LEARNING_RATE, WEIGHT_DECAY)
        return w

    expected = cases.each_matrix(by_rule, cases.weights(shapes=SHAPES), *gradients)
    cases.assert_same_path(cases.path(tx, gradients, SHAPES, dtype), expected, tolerance or own_tolerance)


@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_follow_the_rule(variant):
    with jax.enable_x64(True):
        follow(variant, 4, jnp.float64)


@pytest.mark.parametrize("variant", ["mano", "muoneq-both", "normuon", "adamuon", "swan"])
def test_steps_follow_the_rule_in_float32(variant):
    # A few eps32 a step, times a slope of 20 to 100 in Newton-Schulz.
    follow(variant, 4, jnp.float32, 5e-5)


def test_every_relative_has_a_transcription():
    assert {name for name, *_ in VARIANTS.values()} == npo.families().keys() - {"normpre_g", "normpre_l"}


@pytest.mark.parametrize(
    ("convention", "consistent_rms", "nesterov", "steps"), [("moonlight", 0.2, False, 4), ("keller", None, True, 1)]
)
def test_muon_is_optaxs_muon(convention, consistent_rms, nesterov, steps):
    """optax averages, M = beta M + (1 - beta) G, and corrects the bias.

    Without Nesterov that is our momentum times a number, which orthogonalization removes: the same optimizer, at every
    step. With Nesterov optax weights the gradient by (1 - beta) / (1 - beta^t) and the average by
    beta / (1 - beta^(t + 1)), which is proportional to ours on the first step only.
    """
    flat = {"tall": (12, 5), "wide": (5, 12)}
    options = {"nesterov": nesterov, "weight_decay": WEIGHT_DECAY}
    dims = dict.fromkeys(flat, npo.MatrixDims(inputs=0, outputs=1))
    theirs = dict.fromkeys(flat, optax.contrib.MuonDimensionNumbers(reduction_axis=0, output_axis=1))
    ours = npo.muon(LEARNING_RATE, convention=convention, matrix_dims=dims, **options)
    optaxs = optax.contrib.muon(
        LEARNING_RATE, consistent_rms=consistent_rms, muon_weight_dimension_numbers=theirs, **options
    )
    # Two float32 programs: ten eps32 each, times a Lipschitz constant of 20 to 100, relative to the path; optax's
    # additive 1e-8 is below eps32 of norms of order one.
    got, expected = (cases.path(tx, cases.gradients(steps, shapes=flat), flat) for tx in (ours, optaxs))
    cases.assert_same_path(got, expected, 1e-4)
