# SPDX-License-Identifier: Apache-2.0
"""Where parameters lie: gradients come to them, and what is said of them is held against shapes and mesh."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import normpre_optax as npo


def test_gradients_that_lie_elsewhere_come_to_the_parameters():
    mesh = jax.make_mesh((8,), ("fsdp",))
    place = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))  # noqa: E731
    params, grads = {"bias": place(jnp.ones(8), "fsdp")}, {"bias": place(jnp.ones(8))}
    tx = npo.normpre_g(0.01)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    assert updates["bias"].sharding.is_equivalent_to(params["bias"].sharding, 1)


def test_an_eager_update_moves_gradients_that_lie_on_no_mesh():
    mesh = jax.make_mesh((8,), ("fsdp",))
    params = {"bias": jax.device_put(jnp.ones(8), NamedSharding(mesh, PartitionSpec("fsdp")))}
    tx = npo.normpre_g(0.01)
    updates, _ = tx.update({"bias": jnp.ones(8)}, tx.init(params), params)
    assert updates["bias"].sharding.is_equivalent_to(params["bias"].sharding, 1)


@pytest.mark.parametrize(
    ("shardings", "message"),
    [({"up": 3}, "expected NamedSharding, PartitionSpec or None"), ({"down": None}, "does not match the parameters")],
)
def test_shardings_that_are_none_are_refused(shardings, message):
    params = {"up": {"kernel": jnp.ones((4, 8))}}
    tx = npo.normpre_g(0.01, shardings=shardings)
    with pytest.raises(ValueError, match=message):
        tx.update(params, tx.init(params), params)


def test_a_callable_that_asks_tracers_where_they_lie_is_told_the_way_out():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    params = {"up": {"kernel": jax.device_put(jnp.ones((16, 32)), NamedSharding(mesh, PartitionSpec("fsdp")))}}
    tx = npo.normpre_g(0.01, shardings=lambda p: jax.tree.map(lambda x: x.sharding, p))
    with pytest.raises(ValueError, match="pass the tree itself"):
        jax.jit(tx.update)(params, tx.init(params), params)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (("nope",), "'up/kernel' of shape .16, 32.: the mesh has no axis 'nope', its axes are data, fsdp"),
        (("fsdp", None, None), "more entries than the parameter has axes"),
        (("data", "data"), "names 'data' twice"),
        ((None, ("data", "fsdp")), "data=2, fsdp=3 does not divide its axis 1"),
    ],
)
def test_a_place_that_does_not_fit_is_refused_by_the_parameters_name(spec, message):
    params = {"up": {"kernel": jax.ShapeDtypeStruct((16, 32), jnp.float32)}}
    mesh = jax.sharding.AbstractMesh((2, 3), ("data", "fsdp"))
    with pytest.raises(ValueError, match=message):
        npo.explain(params, mesh=mesh, shardings={"up": {"kernel": PartitionSpec(*spec)}})
