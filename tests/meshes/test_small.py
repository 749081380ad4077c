# SPDX-License-Identifier: Apache-2.0
"""``shared_out``: small problems that all devices have are each solved by one."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from normpre_optax.linalg.eigenspace import together
from normpre_optax.meshes.small import shared_out


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_every_problem_is_solved_once_along_the_axes_that_spread_matrices(axis_type):
    mesh = jax.make_mesh((2, 2, 2), ("data", "expert", "fsdp"), axis_types=(axis_type,) * 3)
    # Seven of one size, and four that stay with their experts, over the two of fsdp: 4 + 1 each. One, and nothing.
    specs = [PartitionSpec(*spec) for spec in ((None, "fsdp"), ("expert", None, "fsdp"), (None, None), (None, "fsdp"))]
    shapes, seen = [(7, 3, 3), (4, 3, 3), (2, 2)], []
    given = [np.random.default_rng(0).standard_normal(shape).astype(np.float32) for shape in shapes]
    placed = [
        jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec[:1]) if x.ndim > 2 else PartitionSpec()))
        for x, spec in zip(given, specs, strict=False)
    ]

    def square(x):
        seen.append(x.shape)
        return x @ x, x[..., :1, :]

    found = jax.jit(functools.partial(shared_out(together, mesh.abstract_mesh, specs), square))([*placed, None])
    assert seen == [((7 + 4 // 2 + 1) // 2, 3, 3), (2, 2)]
    assert found[3] is None
    for x, (squared, first) in zip(given, found[:3], strict=True):
        np.testing.assert_allclose(squared, x @ x, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(first, x[..., :1, :])
