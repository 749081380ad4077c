# SPDX-License-Identifier: Apache-2.0
"""Momentum in eight bits: its error, and how it is sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import normpre_optax as npo
from examples.research.monitor import monitor
from examples.research.quantized import Quantized, quantize_momentum
from tests import cases


def kept(x: np.ndarray, block_size: int) -> np.ndarray:
    """A momentum after one step in the state, in float64."""
    tx = quantize_momentum(optax.trace(1.0), block_size=block_size)
    _, state = tx.update(jnp.asarray(x), tx.init(jnp.asarray(x)))
    out, _ = tx.update(jnp.zeros(x.shape), state)
    return np.asarray(out, np.float64)


@given(st.integers(0, 99), st.sampled_from([(3, 8), (2, 3, 8), (5, 6)]), st.floats(-30, 30))
def test_it_is_within_half_a_step(seed, shape, size):
    random = np.random.default_rng(seed)
    x = np.float32(10.0**size * random.standard_normal(shape) * random.integers(0, 2, shape))
    blocks = x.reshape(*shape[:-1], -1, 4 if shape[-1] % 4 == 0 else shape[-1])
    half = np.repeat(np.abs(blocks).max(-1) / 254, blocks.shape[-1], axis=-1).reshape(shape)
    assert (np.abs(kept(x, 4) - x) <= 1.0001 * half).all()  # the scale itself is rounded to float32
    assert (kept(x, 4)[x == 0] == 0).all()


def test_nan_and_infinity_stay_visible():
    for bad in (np.nan, np.inf):
        x = np.ones((2, 8), np.float32)
        x[0, 1] = bad
        out = kept(x, 4)
        assert not np.isfinite(out[0, :4]).any()
        np.testing.assert_array_equal(out[1], x[1])


def test_vectors_and_moments_of_adam_are_left_alone():
    params = {"kernel": jnp.ones((8, 16)), "bias": jnp.ones(16), "embedding": jnp.ones((9, 8))}
    is_quantized = lambda x: isinstance(x, Quantized)  # noqa: E731
    shapes = [
        [x.values.shape for x in filter(is_quantized, jax.tree.leaves(state, is_leaf=is_quantized))]
        for state in (quantize_momentum(tx).init(params) for tx in (npo.muon(0.1), optax.sgd(0.1, momentum=0.9)))
    ]
    assert shapes == [[(8, 16)], [(9, 8), (8, 16)]]
    with pytest.raises(ValueError, match="has no momentum from"):
        quantize_momentum(optax.adamw(0.1)).init(params)


def test_a_step_is_nearly_the_same():
    """An error of a block's 254th in the momentum is one of about a hundredth in a singular vector."""
    params, grads = ({"kernel": jnp.asarray(cases.gaussian((64, 96), seed), jnp.float32)} for seed in (0, 1))
    found = []
    for tx in (npo.muon(0.1, weight_decay=0.0), quantize_momentum(npo.muon(0.1, weight_decay=0.0))):
        state = tx.init(params)
        for _ in range(3):
            updates, state = cases.updater(tx)(grads, state, params)
        found.append(updates["kernel"])
    assert 0 < np.linalg.norm(found[1] - found[0]) / np.linalg.norm(found[0]) < 0.03


def test_it_stands_inside_and_around_others():
    params = {"kernel": jnp.ones((8, 16)), "bias": jnp.ones(16)}
    for tx in (
        quantize_momentum(monitor(npo.muon(0.1), record=["row_norms"])),
        optax.MultiSteps(quantize_momentum(npo.muon(0.1)), 2).gradient_transformation(),
        quantize_momentum(optax.MultiSteps(npo.muon(0.1), 2).gradient_transformation()),
        optax.chain(optax.clip(1.0), quantize_momentum(npo.normpre_h(0.1, 0.1))),
    ):
        state = tx.init(params)
        _, after = jax.eval_shape(tx.update, params, state, params)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), after)


KINDS = [quantize_momentum(optax.trace(0.9), block_size=block_size) for block_size in (2, 16, 5)]


@jax.jit
def update_all_kinds(x, states):
    return [tx.update(x, state) for tx, state in zip(KINDS, states, strict=True)]


@cases.rows(
    "axis_type spec",
    (AxisType.Explicit, ("fsdp", None)),
    (AxisType.Explicit, (None, "fsdp")),
    (AxisType.Auto, (None, "fsdp")),
)
def test_on_a_mesh_it_is_the_same_and_stays_where_it_is(axis_type, spec):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(axis_type,))
    here = jnp.asarray(cases.gaussian((16, 32)), jnp.float32)
    there = jax.device_put(here, NamedSharding(mesh, PartitionSpec(*spec)))
    expected, found = (update_all_kinds(x, [tx.init(x) for tx in KINDS]) for x in (here, there))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    for _, state in found:
        assert state.trace.values.sharding.is_equivalent_to(there.sharding, 2)


def test_state_may_wait_in_the_hosts_memory():
    """The program of docs/scaling.md, compared with state on the device."""
    params = {"up": {"kernel": jnp.asarray(cases.gaussian((16, 32)), jnp.float32), "bias": jnp.zeros(32)}}
    tx = quantize_momentum(npo.normpre_g(1e-3))
    on_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    on_host = on_device.with_memory_kind("pinned_host")

    @jax.jit
    def step(grads, state, params):
        updates, state = tx.update(grads, jax.device_put(state, on_device), params)
        return updates, jax.device_put(state, on_host)

    stays = tx.init(params)
    waits = jax.device_put(stays, on_host)
    for _ in range(2):
        expected, stays = jax.jit(tx.update)(params, stays, params)
        found, waits = step(params, waits, params)
        jax.tree.map(np.testing.assert_array_equal, (found, waits), (expected, stays))
    assert {x.sharding.memory_kind for x in jax.tree.leaves(waits)} == {"pinned_host"}
