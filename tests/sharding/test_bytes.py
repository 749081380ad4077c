# SPDX-License-Identifier: Apache-2.0
"""Bytes that an update communicates, counted in the compiled program: 24 matrices of
GPT-2 Small on eight devices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import normpre_optax as npo
from examples.research import hlo
from tests import cases

KERNELS = {
    "q": (768, 768),
    "k": (768, 768),
    "v": (768, 768),
    "o": (768, 768),
    "up": (768, 3072),
    "down": (3072, 768),
}
# name: sizes, axes, those that shard the rows, and the bound on Auto axes in MB
MESHES = {
    "fsdp 8": ((8,), ("fsdp",), ("fsdp",), 45),
    "data 2 x fsdp 4": ((2, 4), ("data", "fsdp"), ("fsdp",), 100),
    "fsdp 4 x tensor 2": ((4, 2), ("fsdp", "tensor"), ("fsdp", "tensor"), 120),
}


@functools.cache
def megabytes(name, mesh_name, kind):
    """Output bytes of the collectives of one update per device, in MB.

    optax's Muon has 1,038, 1,038 and 826.
    """
    sizes, names, spec, _ = MESHES[mesh_name]
    options = {"adam_learning_rate": 1e-3} if name == "normpre_h" else {}
    tx = getattr(npo, name)(1e-2, **options)
    mesh = jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))
    sharded = NamedSharding(mesh, PartitionSpec(*spec))
    replicated = NamedSharding(mesh, PartitionSpec())

    def leaf(shape):
        return {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharded)}

    def placed(x):
        sharding = sharded if x.size >= 768**2 else replicated
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    layer = {name: leaf(shape) for name, shape in KERNELS.items()}
    params = {f"layer{i}": layer for i in range(4)}
    state = jax.tree.map(placed, jax.eval_shape(tx.init, params))
    out = jax.tree.map(lambda x: x.sharding, params)
    lowered = jax.jit(tx.update, out_shardings=(out, None)).lower(params, state, params)
    text = lowered.compile(
        compiler_options={"xla_backend_optimization_level": 0}
    ).as_text()
    return hlo.cost(text).bytes / 1e6


DEFAULT = (("normpre_g", "fsdp 4 x tensor 2"),)  # the others run in CI
CASES = [(name, mesh) for name in npo.optimizers() for mesh in MESHES]


@cases.rows(
    "name mesh",
    *(
        [
            pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.slow)
            for case in CASES
        ]
    ),
)
def test_on_auto_axes_without_any_option(name, mesh):
    bound = 12 if name == "normpre_l" else MESHES[mesh][-1]
    assert megabytes(name, mesh, AxisType.Auto) <= bound


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("normpre_g", 29),
        ("normpre_h", 29),
        pytest.param("normpre_l", 10, marks=pytest.mark.slow),
    ],
)
def test_on_explicit_axes(name, bound):
    assert megabytes(name, "fsdp 8", AxisType.Explicit) <= bound


@pytest.mark.slow
def test_pure_data_parallel_axes_communicate_nothing_more():
    both = [
        megabytes("normpre_g", mesh, AxisType.Explicit)
        for mesh in ("fsdp 8", "data 2 x fsdp 4")
    ]
    # A device has twice as much of every matrix.
    np.testing.assert_allclose(both[1] / both[0], 2, rtol=0.05)


def test_factorizations_of_one_size_are_one_batched_call():
    """Else NormPre-L's step on a TPU grows by an estimated five microseconds for each
    of them, three per matrix.
    """
    mesh = jax.make_mesh((8,), ("fsdp",))
    tx = npo.normpre_l(1e-3)

    def factorizations(layers):
        sharded = NamedSharding(mesh, PartitionSpec("fsdp"))
        leaf = jax.ShapeDtypeStruct((64, 96), jnp.float32, sharding=sharded)
        params = {f"layer{i}": {"kernel": leaf} for i in range(layers)}
        program = jax.make_jaxpr(tx.update)(
            params, jax.eval_shape(tx.init, params), params
        )
        return sum(
            eqn.primitive.name == "cholesky" for eqn in cases.equations(program.jaxpr)
        )

    assert 0 < factorizations(2) == factorizations(4)
