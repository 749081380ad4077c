# SPDX-License-Identifier: Apache-2.0
"""The monitor records the diagnostics of momentum, weight and update.

It does not change the optimizer.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

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
    if params is None:
        params, grads = numbers(0), numbers(1)
    else:
        grads = params
    _, state = cases.quick_jit(tx.update)(grads, tx.init(params), params)
    return monitored(state).record


@cases.rows(
    "tx record",
    (npo.normpre_l(1e-2, rank=2), ("mode_energies", "alignment")),
    pytest.param(npo.muon(1e-2), diagnostics.NAMES, marks=pytest.mark.slow),
)
def test_updates_and_states_are_the_optimizers_to_the_last_bit(tx, record):
    """Compiled as users do, with all of LLVM's optimizations."""
    params, *grads = (numbers(seed)["blocks"]["up"] for seed in range(4))
    watched = monitor(tx, every=2, record=record)
    bare = cases.users_jit(tx.update)
    wrapped = cases.users_jit(watched.update)
    state = tx.init(params)
    watching = watched.init(params)
    for g in grads:
        updates, state = bare(g, state, params)
        same, watching = wrapped(g, watching, params)
        expected = (updates, state)
        found = (same, watching.inner_state)
        jax.tree.map(np.testing.assert_array_equal, expected, found)


def test_the_record_is_that_of_the_last_due_step():
    """Of its momentum, weight and update."""
    names = ["mode_energies", "alignment", "row_norms"]
    tx = monitor(npo.normpre_l(1e-2, rank=2), every=2, rank=2, record=names)
    step = cases.quick_jit(tx.update)
    params = numbers(0)
    state = tx.init(params)
    assert monitored(state).step == -1
    seen = []
    for i in range(1, 5):
        updates, state = step(numbers(i), state, params)
        seen.append((monitored(state), params, updates))
        params = optax.apply_updates(params, updates)
    assert [int(one.step) for one, _, _ in seen] == [0, 0, 2, 2]
    _, _, (third, params, updates), (fourth, _, _) = seen
    record = third.record
    jax.tree.map(np.testing.assert_array_equal, record, fourth.record)
    assert sorted(record) == KERNELS
    gradients = [numbers(i)["blocks"]["up"]["kernel"] for i in (1, 2, 3)]
    momentum = gradients[2] + 0.95 * (gradients[1] + 0.95 * gradients[0])
    expected = diagnostics.measure(
        momentum,
        params["blocks"]["up"]["kernel"],
        MatrixDims(0, 1),
        names=names,
        gradient=gradients[2],
        update=updates["blocks"]["up"]["kernel"],
        rank=2,
    )
    # float32, in another order of summation; the decompositions carry a rounding to a
    # few times itself.
    cases.assert_close(record["blocks/up/kernel"], expected, atol=2e-5)


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
    kernel = numbers(0)["blocks"]["up"]["kernel"]
    found = record["blocks/up/kernel"]
    # (in, out): its rows are the columns of (out, in).
    largest = jnp.linalg.norm(kernel, axis=1).max()
    np.testing.assert_allclose(found["row_norms"].largest, [largest])
    alignment = float(found["alignment"][0])
    assert alignment == pytest.approx(1, abs=1e-6), "the update descends"

    options = {"signal": "gradient", "record": "row_norms"}
    tx = monitor(optax.sgd(0.1), matrix_dims=MatrixDims(1, 2), **options)
    found = first_record(tx, {"layers": jnp.ones((3, 2, 5))})
    mean = found["layers"]["row_norms"].mean
    np.testing.assert_allclose(mean, [2**0.5] * 3, rtol=1e-6)


def test_inside_a_chain_and_a_scan():
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        monitor(optax.sgd(0.1, 0.9), record=CHEAP, every=2),
    )
    params = numbers(0)

    def step(state, _):
        _, state = tx.update(params, state, params)
        return state, monitored(state).step

    _, seen = jax.lax.scan(step, tx.init(params), length=4)
    assert seen.tolist() == [0, 0, 2, 2]


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_on_a_mesh_it_is_the_record_of_one_device(axis_type):
    """A matrix that is sharded along both axes.

    The updates are sharded as the parameters.
    """
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(axis_type,) * 2)
    kernel = numbers(0)["blocks"]["up"]["kernel"]
    gradient = numbers(1)["blocks"]["up"]["kernel"]
    tx = monitor(optax.sgd(0.1, 0.9), record=["spectra", "update_rms"])

    def first_step(params, grads):
        updates, state = cases.quick_jit(tx.update)(grads, tx.init(params), params)
        return updates, jax.tree.map(np.asarray, monitored(state).record)

    params = {"a": kernel, "k": 2 * kernel}
    grads = {"a": gradient, "k": 3 * gradient}
    _, alone = first_step(params, grads)
    params, grads = cases.put((params, grads), mesh, "fsdp", "tensor")
    updates, sharded = first_step(params, grads)
    assert updates["k"].sharding.is_equivalent_to(params["k"].sharding, 2)
    # Eight singular values in float32.
    cases.assert_close(alone, sharded, atol=1e-5)
    expected = 3 * alone["a"]["update_rms"]
    np.testing.assert_allclose(alone["k"]["update_rms"], expected, rtol=1e-6)


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
    params = numbers(0)
    sgd = optax.sgd(0.1)
    with pytest.raises(
        ValueError, match=r"\['spectrum'\]; choose from spectra, mode_energies"
    ):
        monitor(sgd, record=["spectrum"])
    no_matrix = (
        r"'\*/bias' matches no matrix; choose from blocks/down/kernel, blocks/up/kernel"
    )
    with pytest.raises(ValueError, match=no_matrix):
        monitor(sgd, parameters=["*kernel", "*/bias"]).init(params)
    no_momentum = r"has no momentum .* for 'blocks/down/kernel'.*signal='gradient'"
    with pytest.raises(ValueError, match=no_momentum):
        monitor(sgd).init(params)
    tx = monitor(sgd, signal="gradient", record=CHEAP)
    state = tx.init(params)
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(params, state)
    with pytest.raises(ValueError, match="has 0 monitors"):
        monitored(sgd.init(params))
