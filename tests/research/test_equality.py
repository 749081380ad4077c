# SPDX-License-Identifier: Apache-2.0
"""The comparison of two versions finds what differs, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np

from examples.research import equality


def record(*, update=1.0, path="['w']"):
    state = [np.float32(2.0), np.array([np.nan, 1.0], np.float32)]
    return {
        "updates": [[np.full((2, 2), update, np.float32)]],
        "state": state,
        "structure": [(path, (), "float32")],
    }


def test_equal_records_have_no_difference():
    old = {"updates": {"muon": record()}, "explain": {"test_a": ["a table"]}}
    assert equality.compare(old, old) == 0


def test_every_kind_of_difference_counts(capsys):
    old = {
        "updates": {"muon": record(), "rmnp": record(), "mano": record()},
        "explain": {"test_a": ["a table"]},
    }
    new = {
        "updates": {"muon": record(update=1 + 1e-6), "rmnp": record(path="['v']")},
        "explain": {"test_a": ["another table"]},
    }
    assert equality.compare(old, new) == 5
    said = capsys.readouterr().out
    for part in (
        "muon: 9.5e-07 of the largest entry",
        "rmnp: another state",
        "mano is missing",
        "test_a: a table",
        "test_a: another table",
    ):
        assert part in said


def test_an_optimizer_is_recorded():
    params = equality.parameters(jnp.float32)
    found = equality.steps(equality.MAIN["muon"](), params, 1)
    assert len(found["updates"][0]) == len(jax.tree.leaves(params))
    assert found["structure"]
    assert equality.difference(found, found) == 0
