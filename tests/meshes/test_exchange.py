# SPDX-License-Identifier: Apache-2.0
"""``divided``: what it takes, and where it sends matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import normpre_optax as npo
from normpre_optax.platforms import on
from tests import cases


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


DIVIDED, WHOLE = npo.divided(npo.precondition_globally(1)), npo.precondition_locally(2, 1)


@pytest.mark.parametrize(
    ("stage", "shape", "spec"),
    [
        (DIVIDED, (16, 21), (("data", "fsdp"), None)),  # taken for the other axis, they do not divide it
        (DIVIDED, (16, 256), (None, "data")),  # pieces of whole lines, by columns
        (DIVIDED, (256, 24), ("data", None)),  # and by rows
        (DIVIDED, (16, 24), ("data", "fsdp")),
        (WHOLE, (16, 21), (("data", "fsdp"), None)),
        (WHOLE, (16, 24), ("data", "fsdp")),
        # Those differ in what is exchanged.
        pytest.param(WHOLE, (16, 256), (None, "data"), marks=pytest.mark.thorough),
        pytest.param(WHOLE, (256, 24), ("data", None), marks=pytest.mark.thorough),
    ],
)
def test_inside_a_chain_of_optax_matrices_are_turned_and_so_is_where_they_lie(stage, shape, spec):
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"))
    tx = npo.as_matrices(npo.MatrixDims(0, 1), optax.chain(stage, optax.scale(2.0)))
    kernel = gaussian(shape)
    there = {"up": jax.device_put(kernel, NamedSharding(mesh, PartitionSpec(*spec)))}
    found, expected = (jax.jit(tx.update)(x, tx.init(x), x)[0] for x in (there, {"up": kernel}))
    assert found["up"].sharding.is_equivalent_to(there["up"].sharding, 2)
    np.testing.assert_allclose(found["up"], expected["up"], atol=1e-5)  # sums in another order, entries near one


def test_a_matrix_keeps_its_name_on_the_device_that_treats_it():
    """What a stage draws depends on the parameter and the place in its stack, wherever they are computed."""

    def named(updates, state, params=None, *, matrix_ids, **extra_args):
        del params, extra_args
        place = lambda u, ids: u * 0 + ids[..., 0, None, None] % 1000 + 100_000 * ids[..., 1, None, None]  # noqa: E731
        return jax.tree.map(place, updates, matrix_ids), state

    stage = npo.divided(optax.GradientTransformationExtraArgs(optax.init_empty_state, named))
    tx = npo.as_matrices(lambda path, leaf: npo.MatrixDims(leaf.ndim - 2, leaf.ndim - 1), stage)
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"))
    shapes = {"layers": (4, 8, 16), "up": (8, 16), "down": (16, 8), "out": (8, 8)}
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    spec = lambda x: PartitionSpec(*(None,) * (x.ndim - 2), "fsdp", "data")  # noqa: E731
    there = {name: jax.device_put(x, NamedSharding(mesh, spec(x))) for name, x in params.items()}
    found, _ = jax.jit(tx.update)(there, tx.init(there), there)
    expected, _ = tx.update(params, tx.init(params), params)
    assert len({float(x[..., 0, 0].max()) for x in expected.values()}) == len(shapes)
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x)


@pytest.mark.parametrize(("compute_dtype", "rounds"), [(None, True), (jnp.float32, False)])
def test_on_a_tpu_what_travels_is_rounded_where_products_are(compute_dtype, rounds):
    mesh = jax.make_mesh((8,), ("fsdp",))
    there = {"up": jax.device_put(gaussian((64, 48)), NamedSharding(mesh, PartitionSpec("fsdp")))}
    tx = npo.as_matrices(npo.MatrixDims(0, 1), npo.orthogonalize(compute_dtype=compute_dtype))
    plain, tpu = (jax.jit(on(kind, tx.update))(there, tx.init(there))[0]["up"] for kind in ("gpu", "tpu"))
    error = float(jnp.linalg.norm(tpu - plain) / jnp.linalg.norm(plain))
    # Once each way, by at most 2^-9 of an entry; five steps for a flat spectrum hardly enlarge it.
    assert 0 < error < 2**-7 if rounds else error == 0


@pytest.mark.parametrize(("kind", "gathers"), [("gpu", True), ("tpu", False)])
def test_what_all_devices_have_is_shared_out_but_on_a_tpu(kind, gathers):
    mesh = jax.make_mesh((8,), ("data",))
    params = {f"up_{i}": gaussian((16, 24)) for i in range(4)}
    there = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    tx = npo.as_matrices(npo.MatrixDims(0, 1), npo.orthogonalize(ns_steps=1))
    lowered = jax.jit(on(kind, tx.update)).lower(there, tx.init(there))
    assert ("all_gather" in lowered.as_text()) == gathers
    found, expected = lowered.compile()(there, tx.init(there))[0], cases.first_update(tx, params, None)
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, atol=1e-5)
