# SPDX-License-Identifier: Apache-2.0
"""The monitor records the diagnostics of momentum, weight and update, and does not
change the optimizer.
"""

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

KERNELS = ["blocks/down/kernel", "blocks/up/kernel"]
CHEAP = ("row_norms", "alignment", "update_rms")  # nothing to decompose: compiles fast


def numbers(seed):
    def draw(*shape):
        return jnp.asarray(0.5 * cases.gaussian(shape, seed), jnp.float32)

    return {
        "blocks": {
            "up": {"kernel": draw(4, 8), "bias": draw(8)},
            "down": {"kernel": draw(8, 4), "bias": draw(4)},
        },
        "wte": {"embedding": draw(8, 4)},
    }


def first_record(tx, params=None):
    """The state after one step whose gradients are numbers(1), or the parameters."""
    grads, params = (numbers(1), numbers(0)) if params is None else (params, params)
    return monitored(
        cases.quick_jit(tx.update)(grads, tx.init(params), params)[1]
    ).record


@cases.rows(
    "tx record",
    (npo.normpre_l(1e-2, rank=2), ("mode_energies", "alignment")),
    pytest.param(npo.muon(1e-2), diagnostics.NAMES, marks=pytest.mark.slow),
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
        jax.tree.map(
            np.testing.assert_array_equal,
            (updates, state),
            (same, watching.inner_state),
        )


def test_the_record_is_that_of_the_last_due_step_and_of_its_momentum_weight_and_update():
    names = ["mode_energies", "alignment", "row_norms"]
    tx = monitor(npo.normpre_l(1e-2, rank=2), every=2, rank=2, record=names)
    step, params, state = cases.quick_jit(tx.update), numbers(0), tx.init(numbers(0))
    assert monitored(state).step == -1
    seen = []
    for i in range(1, 5):
        updates, state = step(numbers(i), state, params)
        seen.append((monitored(state), params, updates))
        params = optax.apply_updates(params, updates)
    assert [int(one.step) for one, _, _ in seen] == [0, 0, 2, 2]
    (record, weights, updates), (later, _, _) = (
        (
            one.record,
            params["blocks"]["up"]["kernel"],
            updates["blocks"]["up"]["kernel"],
        )
        for one, params, updates in seen[2:]
    )
    jax.tree.map(np.testing.assert_array_equal, record, later)
    assert sorted(record) == KERNELS
    gradients = [numbers(i)["blocks"]["up"]["kernel"] for i in (1, 2, 3)]
    momentum = gradients[2] + 0.95 * (gradients[1] + 0.95 * gradients[0])
    expected = diagnostics.measure(
        momentum,
        weights,
        MatrixDims(0, 1),
        names=names,
        gradient=gradients[2],
        update=updates,
        rank=2,
    )
    # float32, in another order of summation; the decompositions carry a rounding to a
    # few times itself.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5),
        record["blocks/up/kernel"],
        expected,
    )


def test_signal_orientation_parameters_and_layers_say_what_is_measured():
    tx = monitor(
        optax.sgd(0.1),
        signal="gradient",
        orientation="columns",
        record=CHEAP,
        parameters="*/up/*",
    )
    record = first_record(tx)
    assert list(record) == ["blocks/up/kernel"]
    kernel, found = numbers(0)["blocks"]["up"]["kernel"], record["blocks/up/kernel"]
    # (in, out): its rows are the columns of (out, in)
    np.testing.assert_allclose(
        found["row_norms"].largest, [jnp.linalg.norm(kernel, axis=1).max()]
    )
    assert float(found["alignment"][0]) == pytest.approx(1, abs=1e-6), (
        "the update descends"
    )
    tx = monitor(
        optax.sgd(0.1),
        signal="gradient",
        record="row_norms",
        matrix_dims=MatrixDims(1, 2),
    )
    found = first_record(tx, {"layers": jnp.ones((3, 2, 5))})
    np.testing.assert_allclose(
        found["layers"]["row_norms"].mean, [2**0.5] * 3, rtol=1e-6
    )


def test_inside_a_chain_and_a_scan():
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        monitor(optax.sgd(0.1, 0.9), record=CHEAP, every=2),
    )
    params = numbers(0)

    def step(state, _):
        state = tx.update(params, state, params)[1]
        return state, monitored(state).step

    _, seen = jax.lax.scan(step, tx.init(params), length=4)
    assert seen.tolist() == [0, 0, 2, 2]


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_on_a_mesh_it_is_the_record_of_one_device(axis_type):
    """A matrix that is sharded along both axes; the updates are sharded as the
    parameters.
    """
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(axis_type,) * 2)
    kernel, gradient = (
        numbers(0)["blocks"]["up"]["kernel"],
        numbers(1)["blocks"]["up"]["kernel"],
    )
    tx = monitor(optax.sgd(0.1, 0.9), record=["spectra", "update_rms"])
    found = []
    alone = {"a": kernel, "k": 2 * kernel}, {"a": gradient, "k": 3 * gradient}
    for params, grads in (
        alone,
        jax.device_put(alone, NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))),
    ):
        updates, state = cases.quick_jit(tx.update)(grads, tx.init(params), params)
        found.append(jax.tree.map(np.asarray, monitored(state).record))
    assert updates["k"].sharding.is_equivalent_to(params["k"].sharding, 2)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *found
    )  # eight singular values in float32
    np.testing.assert_allclose(
        found[0]["k"]["update_rms"], 3 * found[0]["a"]["update_rms"], rtol=1e-6
    )


def test_an_nnx_optimizer():
    """It passes variables to init and arrays to update; its state contains boxes."""
    net = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    tx = monitor(npo.normpre(1e-2, optax.identity(), orientation="rows"), record=CHEAP)
    optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)
    for _ in range(2):
        optimizer.update(net, jax.tree.map(jnp.ones_like, nnx.state(net, nnx.Param)))
    step, record = monitored(optimizer.opt_state)
    assert (int(step), list(record)) == (0, ["kernel"])
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(record))


def test_what_is_unknown_is_refused_with_the_list():
    params, sgd = numbers(0), optax.sgd(0.1)
    tx = monitor(sgd, signal="gradient", record=CHEAP)
    for said, call in {
        r"\['spectrum'\]; choose from spectra, mode_energies": lambda: monitor(
            sgd, record=["spectrum"]
        ),
        r"'\*/bias' matches no matrix; choose from blocks/down/kernel, blocks/up/kernel": (
            lambda: monitor(sgd, parameters=["*kernel", "*/bias"]).init(params)
        ),
        r"has no momentum .* for 'blocks/down/kernel'.*signal='gradient'": lambda: (
            monitor(sgd).init(params)
        ),
        "needs the parameters": lambda: tx.update(params, tx.init(params)),
        "has 0 monitors": lambda: monitored(sgd.init(params)),
    }.items():
        with pytest.raises(ValueError, match=said):
            call()
