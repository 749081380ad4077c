# SPDX-License-Identifier: Apache-2.0
"""How parameters, gradients and state are sharded, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import normpre_optax as npo
from normpre_optax.sharding.placement import axes_in_use, mesh_of, sharded_like
from tests import cases

KERNEL = jnp.asarray(cases.gaussian((8, 16)), jnp.float32)


def mesh_2x4(kind=AxisType.Explicit):
    return jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(kind,) * 2)


def put(x, mesh, *spec):
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


@pytest.mark.parametrize(
    ("shardings", "message"),
    [
        ({"up": {"kernel": 3}}, "must be a NamedSharding, PartitionSpec or None"),
        ({"down": PartitionSpec()}, "does not match the parameters"),
        ({"up": {"kernel": PartitionSpec(None, None, "fsdp")}}, "'up/kernel' of shape"),
        ({"up": {"kernel": PartitionSpec("tensor")}}, "'up/kernel' .*no axis 'tensor'"),
        ({"up": {"kernel": PartitionSpec(("data", "fsdp", "data"))}}, "'up/kernel'"),
    ],
)
def test_shardings_that_do_not_fit_are_named(shardings, message):
    params = {"up": {"kernel": put(KERNEL, mesh_2x4(AxisType.Auto), None, "fsdp")}}
    tx = npo.normpre_g(0.01, shardings=shardings)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), params)


def test_shardings_may_be_a_prefix_a_function_or_named():
    mesh = mesh_2x4(AxisType.Auto)
    params = {"up": {"kernel": put(KERNEL, mesh, "fsdp")}}
    for shardings in (
        PartitionSpec("fsdp"),
        {"up": NamedSharding(mesh, PartitionSpec("fsdp"))},
        lambda p: jax.tree.map(lambda _: PartitionSpec("fsdp"), p),
    ):
        tx = npo.normpre_g(0.01, ns_steps=1, shardings=shardings)
        assert "all_to_all" in jax.jit(tx.update).lower(params, tx.init(params), params).as_text()


def test_gradients_are_sharded_like_explicit_parameters():
    mesh = mesh_2x4()
    there = put(KERNEL, mesh, "data", "fsdp")
    assert sharded_like(KERNEL, there).sharding == there.sharding
    assert jax.jit(sharded_like)(put(KERNEL, mesh), there).sharding.is_equivalent_to(there.sharding, 2)


def test_the_mesh_of_arrays():
    mesh = mesh_2x4()
    assert mesh_of({"w": KERNEL}) is None
    assert mesh_of({"w": KERNEL, "v": put(KERNEL, mesh)}).axis_names == ("data", "fsdp")
    other = jax.make_mesh((8,), ("fsdp",))
    with pytest.raises(ValueError, match="two meshes"):
        mesh_of([put(KERNEL, mesh), put(KERNEL, other)])


def test_axes_that_share_small_problems():
    """Those that shard rows or columns of some matrix and the batch of none; the largest if nothing is known."""
    mesh = jax.make_mesh((1, 2, 4), ("one", "expert", "fsdp")).abstract_mesh
    arrays = [jnp.ones((4, 8, 8)), jnp.ones((8, 8))]
    dims = [npo.MatrixDims(1, 2), npo.MatrixDims(0, 1)]
    specs = [PartitionSpec("expert", "fsdp"), PartitionSpec("one", "expert")]
    used = axes_in_use(mesh, ["a", "b"], arrays, dims, specs)
    assert (set(used.all), used.matrices) == ({"expert", "fsdp"}, ("fsdp",))
    assert axes_in_use(mesh, ["a", "b"], arrays, dims, [None, None]).matrices == ("fsdp",)


def test_manual_axes_beside_explicit_ones_are_named():
    mesh = jax.make_mesh(
        (2, 2), ("replica", "fsdp"), axis_types=(AxisType.Auto, AxisType.Explicit), devices=jax.devices()[:4]
    )
    tx = npo.normpre_g(0.01)
    step = lambda w: tx.update(w, tx.init(w), w)[0]  # noqa: E731
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(step, axis_names={"replica"}, in_specs=PartitionSpec(), out_specs=PartitionSpec())
        with pytest.raises(ValueError, match=r"axes \['replica'\].*AxisType\.Auto"):
            jax.eval_shape(mapped, {"kernel": put(KERNEL, mesh, None, "fsdp")})


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", [*npo.families(), "muon-hyperball"])
def test_init_places_the_state_where_every_update_leaves_it(name, kind):
    """So that one compilation serves all steps."""
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(kind,) * 2, devices=jax.devices()[:4])

    def tree(seed):
        x = lambda *shape: jnp.asarray(cases.gaussian(shape, seed), jnp.float32)  # noqa: E731
        return {
            "up": {"kernel": put(x(8, 12), mesh, "fsdp", "tensor"), "bias": put(x(12), mesh)},
            "down": {"kernel": put(x(12, 8), mesh, "tensor", "fsdp")},
            "layers": {"proj": {"kernel": put(x(2, 6, 6), mesh, None, "fsdp")}},
        }

    params = tree(0)
    tx = cases.make(name, 0.01)
    update = cases.quick_jit(
        lambda g, s, p: tx.update(g, s, p), out_shardings=(jax.tree.map(lambda x: x.sharding, params), None)
    )
    state = tx.init(params)
    for seed in (1, 2):
        _, state = update(tree(seed), state, params)
    assert update._cache_size() == 1


def test_state_of_half_a_parameter_is_sharded_along_the_axes_that_are_left():
    mesh = mesh_2x4()
    params = {"layers": {"up": {"kernel": put(jnp.ones((3, 16, 32)), mesh, None, "data", "fsdp")}}}
    state = npo.normuon(0.01).init(params)
    (moment,) = [x for x in jax.tree.leaves(state) if x.shape == (3, 1, 32)]
    assert tuple(moment.sharding.spec) == (None, None, "fsdp")


def test_the_state_is_the_same_tree_on_a_mesh():
    there, here = (
        npo.normpre_l(0.01, rank=2).init({"up": {"kernel": x}}) for x in (put(KERNEL, mesh_2x4(), "fsdp"), KERNEL)
    )
    assert jax.tree.structure(there) == jax.tree.structure(here)
    jax.tree.map(np.testing.assert_array_equal, there, here)
