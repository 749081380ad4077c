# SPDX-License-Identifier: Apache-2.0
"""A direction passes its axes to ``init``; wrappers that do not are reported."""

import jax
import numpy as np
import optax
import pytest

import normpre_optax as npo
from normpre_optax.stages import scale_by_row_moment
from tests import cases

# An axis order that the default rule does not assume for a name like "kernel".
DIMS = npo.MatrixDims(inputs=1, outputs=0)
PARAMS = cases.numbers({"up": {"kernel": (8, 6)}}, 1)


def updated(stage):
    tx = npo.direction(stage, matrix_dims=DIMS)
    return cases.steps(tx.update, tx.init(PARAMS), PARAMS, [PARAMS] * 2)


def stages():
    return [npo.with_metric(npo.precondition_globally()), scale_by_row_moment()]


@pytest.mark.parametrize("stage", stages(), ids=["metric", "row_moment"])
def test_axes_reach_the_init_of_stages_in_directions_and_metrics(stage):
    expected = updated(stage)
    inside = npo.direction(optax.trace(0.0), npo.direction(stage))
    jax.tree.map(np.testing.assert_array_equal, updated(inside)[0], expected[0])
    around = npo.with_metric(stage, strength=0.0)
    updates, _ = updated(around)
    cases.assert_close(updates, expected[0], rtol=1e-6)


@pytest.mark.parametrize("stage", stages(), ids=["metric", "row_moment"])
def test_a_chain_of_optax_does_not_lose_axes_silently(stage):
    with pytest.raises(ValueError, match=r"'up/kernel'.*direction instead"):
        updated(optax.chain(stage))


def test_a_chain_of_optax_works_with_axes_of_its_own():
    own = scale_by_row_moment(matrix_dims=DIMS)
    expected, _ = updated(scale_by_row_moment())
    updates, _ = updated(optax.chain(own))
    jax.tree.map(np.testing.assert_array_equal, updates, expected)


def test_a_complete_optimizer_is_refused_inside_of_wrappers_too():
    message = "a complete optimizer cannot be a stage"
    for wrap in (npo.direction, npo.with_metric):
        with pytest.raises(TypeError, match=message):
            wrap(npo.muon(1e-2))
    with pytest.raises(TypeError, match=message):
        updated(optax.chain(npo.muon(1e-2)))


def test_a_complete_optimizer_is_no_direction():
    """Its steps point downhill, and with_adamw would turn them around."""

    def complete(matrix_dims=None):
        return npo.muon(1e-2, matrix_dims=matrix_dims)

    with pytest.raises(TypeError, match="direction returns a complete optimizer"):
        npo.with_adamw(complete, 1e-2)
