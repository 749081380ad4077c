# SPDX-License-Identifier: Apache-2.0
"""Blocks of given sizes, q, k and v of grouped-query attention: as parameters of their own would be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import normpre_optax as npo
from tests import cases

SIZES, ENDS = (16, 8, 8), [16, 24]
FUSED = {
    "qkv": npo.MatrixDims(0, 1, output_blocks=SIZES),
    "heads": npo.MatrixDims(0, (1, 2), output_blocks=SIZES),
    "layers": npo.MatrixDims(2, 1, output_blocks=SIZES),
    "up": npo.MatrixDims(0, 1),
    "bias": None,
}
SHAPES = {"qkv": (8, 32), "heads": (8, 8, 4), "layers": (2, 32, 8), "up": (8, 16), "bias": (32,)}
CUT = {"qkv": 1, "heads": 1, "layers": 1}  # the axis that is cut
APART = {name: dims and npo.MatrixDims(dims.inputs, dims.outputs) for name, dims in FUSED.items()}


def numbers(seed: int, names=tuple(SHAPES)) -> dict[str, np.ndarray]:
    return {name: cases.gaussian(SHAPES[name], seed).astype(np.float32) for name in names}


def apart(tree: dict) -> dict:
    """Blocks as parameters of their own; ``heads`` has axes of four outputs."""
    units = {"heads": 4}
    return {
        name: tuple(np.split(x, [end // units.get(name, 1) for end in ENDS], CUT[name])) if name in CUT else x
        for name, x in tree.items()
    }


def together(tree: dict) -> dict:
    return {name: np.concatenate(x, CUT[name]) if name in CUT else x for name, x in tree.items()}


# A stack of layers and one of the others for each: the trees are what makes compiling long.
OPTIMIZERS = {
    "normpre_g-hyperball": (functools.partial(npo.normpre_g, norm_control="hyperball"), "layers heads up"),
    "normpre_l-given": (
        functools.partial(
            npo.normpre_l,
            **{"rank": 4, "power_iterations": 0, "warm_start": True},
            norm_control=functools.partial(npo.hold_norm, lambda rows, columns: rows + columns / 2),
        ),
        "layers qkv",
    ),
    "dion-brake": (functools.partial(npo.dion, rank=4, norm_control="brake_matrix"), "layers heads up"),
    "muoneq-row_gains": (functools.partial(npo.muoneq, norm_control="row_gains"), "layers qkv bias"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_blocks_are_as_parameters_of_their_own(name):
    factory, leaves = OPTIMIZERS[name]
    params = numbers(0, leaves.split())
    alone = apart(params)
    fused, parts = (factory(0.1, matrix_dims={leaf: dims[leaf] for leaf in params}) for dims in (FUSED, APART))
    state, state_apart = fused.init(params), parts.init(alone)
    for step in range(2):
        grads = numbers(1 + step, params)
        updates, state = cases.updater(fused)(grads, state, params)
        expected, state_apart = cases.updater(parts)(apart(grads), state_apart, alone)
        for leaf, x in together(expected).items():
            # Sums of up to 256 squares in another order.
            np.testing.assert_allclose(updates[leaf], x, rtol=2e-5, atol=2e-6, err_msg=leaf)
        params, alone = (jax.tree.map(np.add, *pair) for pair in ((params, updates), (alone, expected)))


def test_equal_sizes_are_a_number_of_blocks():
    """But for what draws numbers, which goes by names."""
    params, grads = (numbers(seed, ("heads", "layers")) for seed in (0, 1))
    steps = []
    for blocks in (4, (8, 8, 8, 8)):
        dims = {name: npo.MatrixDims(FUSED[name].inputs, FUSED[name].outputs, blocks) for name in params}
        tx = npo.normpre_g(0.1, ns_steps=1, matrix_dims=dims)
        steps.append(tx.update(grads, tx.init(params), params)[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *steps)


INPUTS, OUTPUTS = ("fsdp", None), (None, "fsdp")


@pytest.mark.parametrize(
    ("axis_type", "spec"),
    [
        (AxisType.Explicit, INPUTS),
        (AxisType.Auto, OUTPUTS),
        pytest.param(AxisType.Explicit, OUTPUTS, marks=pytest.mark.thorough),
        pytest.param(AxisType.Auto, INPUTS, marks=pytest.mark.thorough),
    ],
)
def test_on_a_mesh(axis_type, spec):
    here, grads = ({"qkv": numbers(seed)["qkv"]} for seed in (0, 1))
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(axis_type,))
    there, grads_there = jax.device_put((here, grads), NamedSharding(mesh, PartitionSpec(*spec)))
    shardings = None if axis_type is AxisType.Explicit else {"qkv": PartitionSpec(*spec)}
    dims = {"qkv": FUSED["qkv"]}
    plain = npo.normpre_g(0.1, matrix_dims=dims, norm_control="hyperball")
    tx = npo.normpre_g(0.1, matrix_dims=dims, norm_control="hyperball", shardings=shardings)
    expected, _ = plain.update(grads, plain.init(here), here)
    found, _ = cases.quick_jit(tx.update)(grads_there, tx.init(there), there)
    np.testing.assert_allclose(found["qkv"], expected["qkv"], atol=1e-6)
    assert found["qkv"].sharding.is_equivalent_to(there["qkv"].sharding, 2)


def test_what_lies_along_the_inputs_is_cut_where_it_lies():
    """Row lengths are sums over devices, of 32 numbers; nothing else travels."""
    mesh = jax.make_mesh((8,), ("fsdp",))
    params = {"qkv": jax.device_put(numbers(0)["qkv"], NamedSharding(mesh, PartitionSpec("fsdp")))}
    tx = npo.as_matrices({"qkv": FUSED["qkv"]}, npo.normalize_rows())
    text = jax.jit(tx.update).lower(params, tx.init(params)).compile().as_text()
    assert "all-reduce" in text
    assert not [word for word in ("all-gather", "all-to-all", "collective-permute") if word in text]


def test_it_shows():
    table = npo.explain({name: jnp.ones(shape) for name, shape in SHAPES.items()}, FUSED)
    rows = {line.split()[0]: line for line in table.splitlines() if line}
    assert "1 x (16 x 8), 2 x (8 x 8)" in rows["qkv"]
    assert "2 x (16 x 8), 4 x (8 x 8)" in rows["layers"]
    assert "13 matrices" in rows["matrix:"]


def test_a_monitor_looks_at_each_block():
    params = numbers(0)
    tx = npo.monitor(npo.muon(0.1, ns_steps=1, matrix_dims=FUSED), record=["row_norms"], matrix_dims=FUSED)
    _, state = cases.updater(tx)(numbers(1), tx.init(params), params)
    found = npo.monitored(state).record
    assert {"qkv/0", "qkv/1", "qkv/2", "layers/0", "up"} <= found.keys()
    lengths = np.linalg.norm(params["qkv"], axis=0)
    np.testing.assert_allclose(found["qkv/1"]["row_norms"].largest, [lengths[16:24].max()], rtol=1e-6)
