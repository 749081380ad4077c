# SPDX-License-Identifier: Apache-2.0
"""``divided``: what it takes, and where it sends matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import normpre_optax as npo


def gaussian(shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("factory", [npo.normpre_g, npo.normpre_l, npo.muon])
def test_divide_is_yes_or_no(factory):
    with pytest.raises(TypeError, match="divide must be True or False"):
        factory(0.01, divide="auto")


def test_divided_refuses_what_is_no_stage():
    with pytest.raises(TypeError, match=r"inner must be an optax\.GradientTransformation"):
        npo.divided(3)
    with pytest.raises(TypeError, match="work must be a function"):
        npo.divided(optax.identity(), work=7)


def test_a_stage_with_state_for_each_matrix_is_not_divided():
    stage = npo.divided(npo.precondition_locally(2, 1, warm_start=True))
    plain = npo.precondition_locally(2, 1, warm_start=True)
    mesh = jax.make_mesh((8,), ("fsdp",))
    kernel = jax.device_put(gaussian((16, 32)), NamedSharding(mesh, PartitionSpec("fsdp")))
    found = []
    for inner in (stage, plain):
        tx = npo.as_matrices(npo.MatrixDims(0, 1), inner)
        found.append(jax.jit(tx.update)({"up": kernel}, tx.init({"up": kernel}))[0]["up"])
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((16, 21), (("data", "fsdp"), None)),  # taken for the other axis, they do not divide it
        ((16, 24), (None, ("data", "fsdp"))),
        ((16, 24), ("data", "fsdp")),
    ],
)
@pytest.mark.parametrize("stage", [npo.divided(npo.precondition_globally()), npo.precondition_locally(2, 1)])
def test_inside_a_chain_of_optax_matrices_are_turned_and_so_is_where_they_lie(stage, shape, spec):
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"))
    tx = npo.as_matrices(npo.MatrixDims(0, 1), optax.chain(stage, optax.scale(2.0)))
    kernel = gaussian(shape)
    there = {"up": jax.device_put(kernel, NamedSharding(mesh, PartitionSpec(*spec)))}
    found, _ = jax.jit(tx.update)(there, tx.init(there), there)
    expected, _ = tx.update({"up": kernel}, tx.init({"up": kernel}), {"up": kernel})
    assert found["up"].sharding.is_equivalent_to(there["up"].sharding, 2)
    np.testing.assert_allclose(found["up"], expected["up"], atol=1e-5)  # sums in another order, entries near one
