# SPDX-License-Identifier: Apache-2.0
"""How parameters, gradients and state are sharded, and what is refused."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import normpre_optax as npo
from normpre_optax.sharding.placement import axes_in_use, mesh_of, sharded_like
from tests import cases
from tests.cases import put

KERNEL = jnp.asarray(cases.gaussian((8, 16)), jnp.float32)


def mesh_2x4(kind=AxisType.Explicit):
    return jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(kind,) * 2)


@cases.rows(
    "shardings error message",
    (
        {"up": {"kernel": 3}},
        TypeError,
        "must be a tree of NamedSharding, PartitionSpec and None",
    ),
    (
        {"down": PartitionSpec()},
        ValueError,
        "must be a tree like the parameters.*'up/kernel' is missing",
    ),
    ({"down": None}, ValueError, "'up/kernel' is missing"),
    (
        {"up": None, "down": PartitionSpec()},
        ValueError,
        "'down' is unknown",
    ),  # None is an entry: replicated
    (
        {"up": collections.OrderedDict(kernel=PartitionSpec())},
        ValueError,
        r"other containers .*nnx.as_pure\(state\)",
    ),
    (
        {"up": {"kernel": PartitionSpec(None, None, "fsdp")}},
        ValueError,
        "more entries than parameter 'up/kernel' of shape",
    ),
    (
        {"up": {"kernel": PartitionSpec("tensor")}},
        ValueError,
        "'up/kernel' .*no axis 'tensor'",
    ),
    (
        {"up": {"kernel": PartitionSpec(("data", "fsdp", "data"))}},
        ValueError,
        "'up/kernel' .*does not divide axis 0",
    ),
)
def test_shardings_that_do_not_fit_are_named(shardings, error, message):
    params = {"up": {"kernel": put(KERNEL, mesh_2x4(AxisType.Auto), None, "fsdp")}}
    tx = npo.normpre_g(0.01, shardings=shardings)
    with pytest.raises(error, match=message):
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
        assert (
            "all_to_all"
            in jax.jit(tx.update).lower(params, tx.init(params), params).as_text()
        )


def test_gradients_are_sharded_like_explicit_parameters_on_one_mesh():
    mesh = mesh_2x4()
    there = put(KERNEL, mesh, "data", "fsdp")
    assert sharded_like(KERNEL, there).sharding == there.sharding
    assert jax.jit(sharded_like)(put(KERNEL, mesh), there).sharding.is_equivalent_to(
        there.sharding, 2
    )
    assert mesh_of({"w": KERNEL}) is None
    assert mesh_of({"w": KERNEL, "v": there}).axis_names == ("data", "fsdp")
    with pytest.raises(ValueError, match="two meshes"):
        mesh_of([there, put(KERNEL, jax.make_mesh((8,), ("fsdp",)))])


def test_axes_that_share_small_problems():
    """Those that shard rows or columns of some matrix and the batch of none; the
    largest if nothing is known.
    """
    mesh = jax.make_mesh((1, 2, 4), ("one", "expert", "fsdp")).abstract_mesh
    arrays = [jnp.ones((4, 8, 8)), jnp.ones((8, 8))]
    dims = [npo.MatrixDims(1, 2), npo.MatrixDims(0, 1)]
    used = axes_in_use(
        mesh,
        "ab",
        arrays,
        dims,
        [PartitionSpec("expert", "fsdp"), PartitionSpec("one", "expert")],
    )
    assert (set(used.all), used.matrices, used.shared) == (
        {"expert", "fsdp"},
        ("fsdp",),
        [False, True],
    )
    assert axes_in_use(mesh, "ab", arrays, dims, [None, None]) == (
        ("fsdp",),
        ("fsdp",),
        [False, True],
    )


def test_manual_axes_beside_explicit_ones_are_named():
    kinds = (AxisType.Auto, AxisType.Explicit)
    mesh = jax.make_mesh(
        (2, 2), ("replica", "fsdp"), axis_types=kinds, devices=jax.devices()[:4]
    )
    tx = npo.normpre_g(0.01)

    def step(w):
        return tx.update(w, tx.init(w), w)[0]

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(
            step,
            axis_names={"replica"},
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
        )
        with pytest.raises(ValueError, match=r"axes \['replica'\].*AxisType\.Auto"):
            jax.eval_shape(mapped, {"kernel": put(KERNEL, mesh, None, "fsdp")})


def test_a_map_over_an_explicit_axis_names_the_other_way():
    mesh = jax.make_mesh(
        (2,), ("model",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2]
    )
    params = {"kernel": put(jnp.ones((2, 4, 8)), mesh, "model")}
    tx = npo.muon(0.01)
    step = jax.vmap(lambda w: tx.update(w, tx.init(w), w)[0])
    with pytest.raises(ValueError, match=r"use jax\.shard_map over that axis"):
        jax.eval_shape(step, params)
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=PartitionSpec("model"),
        out_specs=PartitionSpec("model"),
    )
    assert jax.eval_shape(mapped, params)["kernel"].shape == (2, 4, 8)


NAMES = (*npo.optimizers(), "muon-keller")
COMPILED = (
    "normpre_g",
    "normuon",
    "normpre_h",
    "muon-keller",
)  # by default: one per kind of state


@cases.rows(
    "name kind",
    *(
        [(name, AxisType.Explicit) for name in NAMES]
        + [
            pytest.param(
                n, AxisType.Auto, marks=() if n in COMPILED else pytest.mark.slow
            )
            for n in NAMES
        ]
    ),
)
def test_init_places_the_state_where_every_update_leaves_it(name, kind):
    """So that one compilation serves all steps. On Explicit axes the traced types have
    the shardings.
    """
    mesh = jax.make_mesh(
        (2, 2), ("fsdp", "tensor"), axis_types=(kind,) * 2, devices=jax.devices()[:4]
    )
    params = {
        "up": {
            "kernel": put(KERNEL, mesh, "fsdp", "tensor"),
            "bias": put(KERNEL[0], mesh),
        },
        "layers": {
            "proj": {"kernel": put(KERNEL.reshape(2, 8, 8), mesh, None, "fsdp")}
        },
    }
    tx = cases.make(name, 0.01)
    state = tx.init(params)
    if kind == AxisType.Explicit:
        after = jax.eval_shape(tx.update, params, state, params)[1]
        assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, after)
        return
    out = jax.tree.map(lambda x: x.sharding, params)
    update = cases.quick_jit(
        lambda g, s, p: tx.update(g, s, p), out_shardings=(out, None)
    )
    for _ in range(2):
        _, state = update(params, state, params)
    assert update._cache_size() == 1


def test_the_state_on_a_mesh_is_the_same_tree_and_shares_the_axes_of_its_parameter():
    there, here = (
        npo.normpre_l(0.01, rank=2).init({"up": {"kernel": x}})
        for x in (put(KERNEL, mesh_2x4(), "fsdp"), KERNEL)
    )
    assert jax.tree.structure(there) == jax.tree.structure(here)
    jax.tree.map(np.testing.assert_array_equal, there, here)
    state = npo.normuon(0.01).init(
        {"layers": {"up": put(jnp.ones((3, 16, 32)), mesh_2x4(), None, "data", "fsdp")}}
    )
    (moment,) = [x for x in jax.tree.leaves(state) if x.shape == (3, 1, 32)]
    assert tuple(moment.sharding.spec) == (None, None, "fsdp")
