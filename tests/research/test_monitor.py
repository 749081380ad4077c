# SPDX-License-Identifier: Apache-2.0
"""The monitor records the diagnostics of momentum, weight and update, and does not change the optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import normpre_optax as npo
from examples.research import diagnostics
from examples.research.monitor import monitor, monitored
from normpre_optax import MatrixDims
from tests import cases

SHAPES = {
    "blocks": {"up": {"kernel": (4, 8), "bias": (8,)}, "down": {"kernel": (8, 4), "bias": (4,)}},
    "wte": {"embedding": (8, 4)},
}
KERNELS = ["blocks/down/kernel", "blocks/up/kernel"]
CHEAP = ("row_norms", "alignment", "update_rms")  # nothing to decompose: compiles fast


def numbers(seed):
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(0.5 * random.standard_normal(shape), jnp.float32),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def steps(tx, count, start=0, state=None):
    """Updates and states of ``count`` steps with moving parameters, in one program that is traced once."""
    params, traces, out = numbers(0), [], []

    @cases.quick_jit
    def step(grads, state, params):
        traces.append(1)
        return tx.update(grads, state, params)

    state = tx.init(params) if state is None else state
    for i in range(start, start + count):
        updates, state = step(numbers(i + 1), state, params)
        params = optax.apply_updates(params, updates)
        out.append((updates, state, params))
    assert len(traces) == 1
    return out


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


@pytest.mark.parametrize(
    ("tx", "record"),
    [
        (npo.normpre_l(1e-2, rank=2), ("mode_energies", "alignment")),
        pytest.param(npo.muon(1e-2), diagnostics.NAMES, marks=pytest.mark.slow),
    ],
)
def test_updates_and_states_are_the_optimizers_to_the_last_bit(tx, record):
    """Compiled as users do, with all of LLVM's optimizations."""
    params, *grads = (numbers(seed)["blocks"]["up"] for seed in range(4))
    watched = monitor(tx, every=2, record=record)
    bare, wrapped = cases.users_jit(tx.update), cases.users_jit(watched.update)
    state, watching = tx.init(params), watched.init(params)
    for g in grads:
        updates, state = bare(g, state, params)
        same, watching = wrapped(g, watching, params)
        assert_equal((updates, state), (same, watching.inner_state))


def test_the_record_is_that_of_the_last_due_step_and_of_its_momentum_weight_and_update():
    tx = monitor(npo.normpre_l(1e-2, rank=2), every=2, rank=2, record=["mode_energies", "alignment", "row_norms"])
    assert monitored(tx.init(numbers(0))).step == -1
    found = steps(tx, 4)
    assert [int(monitored(state).step) for _, state, _ in found] == [0, 0, 2, 2]
    assert_equal(monitored(found[2][1]).record, monitored(found[3][1]).record)

    record = monitored(found[2][1]).record
    assert sorted(record) == KERNELS
    updates, _, _ = found[2]
    weight = found[1][2]["blocks"]["up"]["kernel"]
    gradients = [numbers(i)["blocks"]["up"]["kernel"] for i in (1, 2, 3)]
    momentum = gradients[2] + 0.95 * (gradients[1] + 0.95 * gradients[0])
    expected = diagnostics.measure(
        momentum,
        weight,
        MatrixDims(0, 1),
        names=["mode_energies", "alignment", "row_norms"],
        gradient=gradients[2],
        update=updates["blocks"]["up"]["kernel"],
        rank=2,
    )
    # float32, in another order of summation; the decompositions carry a rounding to a few times itself.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), record["blocks/up/kernel"], expected)


def test_signal_and_orientation_say_what_is_measured():
    tx = monitor(optax.sgd(0.1), signal="gradient", orientation="columns", record="row_norms", parameters="*/up/*")
    record = monitored(steps(tx, 1)[0][1]).record
    assert list(record) == ["blocks/up/kernel"]
    kernel = numbers(0)["blocks"]["up"]["kernel"]  # (in, out): its rows are the columns of (out, in)
    np.testing.assert_allclose(record["blocks/up/kernel"]["row_norms"].largest, [jnp.linalg.norm(kernel, axis=1).max()])


def test_alignment_is_positive_where_the_update_descends():
    record = monitored(steps(monitor(optax.sgd(0.1), signal="gradient", record="alignment"), 1)[0][1]).record
    assert [float(record[name]["alignment"][0]) for name in KERNELS] == pytest.approx([1, 1], abs=1e-6)


def test_a_layer_axis_and_matrix_dims():
    params = {"layers": jnp.ones((3, 2, 5))}
    tx = monitor(optax.sgd(0.1), signal="gradient", record="row_norms", matrix_dims=MatrixDims(1, 2))
    state = tx.update(params, tx.init(params), params)[1]
    np.testing.assert_allclose(monitored(state).record["layers"]["row_norms"].mean, [2**0.5] * 3, rtol=1e-6)


def test_inside_a_chain_and_a_scan():
    tx = optax.chain(optax.clip_by_global_norm(1.0), monitor(optax.sgd(0.1, 0.9), record=CHEAP, every=2))
    params = numbers(0)

    def step(state, _):
        state = tx.update(params, state, params)[1]
        return state, monitored(state).step

    _, seen = jax.lax.scan(step, tx.init(params), length=4)
    assert seen.tolist() == [0, 0, 2, 2]


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_on_a_mesh_it_is_the_record_of_one_device(axis_type):
    """A matrix that is sharded along both axes; the updates are sharded as the parameters."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(axis_type,) * 2)
    kernel, gradient = numbers(0)["blocks"]["up"]["kernel"], numbers(1)["blocks"]["up"]["kernel"]
    tx = monitor(optax.sgd(0.1, 0.9), record=["spectra", "update_rms"])
    place = lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec("fsdp", "tensor")))  # noqa: E731
    found = []
    alone = {"a": kernel, "k": 2 * kernel}, {"a": gradient, "k": 3 * gradient}
    for params, grads in (alone, jax.tree.map(place, alone)):
        updates, state = cases.quick_jit(tx.update)(grads, tx.init(params), params)
        found.append(jax.tree.map(np.asarray, monitored(state).record))
    assert updates["k"].sharding.is_equivalent_to(params["k"].sharding, 2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *found)  # eight singular values in float32
    np.testing.assert_allclose(found[0]["k"]["update_rms"], 3 * found[0]["a"]["update_rms"], rtol=1e-6)


def test_an_nnx_optimizer():
    """It passes variables to init and arrays to update; its state contains boxes."""
    net = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    tx = monitor(npo.normpre(1e-2, optax.identity(), orientation="rows"), record=CHEAP)
    optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)
    for _ in range(2):
        optimizer.update(net, jax.tree.map(jnp.ones_like, nnx.state(net, nnx.Param)))
    step, record = monitored(optimizer.opt_state)
    assert step == 0
    assert list(record) == ["kernel"]
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(record))


def test_what_is_unknown_is_refused_with_the_list():
    params = numbers(0)
    with pytest.raises(ValueError, match=r"\['spectrum'\]; choose from spectra, mode_energies"):
        monitor(optax.sgd(0.1), record=["spectrum"])
    with pytest.raises(
        ValueError, match=r"'\*/bias' matches no matrix; choose from blocks/down/kernel, blocks/up/kernel"
    ):
        monitor(optax.sgd(0.1), parameters=["*kernel", "*/bias"]).init(params)
    with pytest.raises(ValueError, match=r"has no momentum .* for 'blocks/down/kernel'.*signal='gradient'"):
        monitor(optax.sgd(0.1)).init(params)
    tx = monitor(optax.sgd(0.1), signal="gradient", record=CHEAP)
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(params, tx.init(params))
    with pytest.raises(ValueError, match="has 0 monitors"):
        monitored(optax.sgd(0.1).init(params))
