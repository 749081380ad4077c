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
    tx = quantize_momentum(npo.muon(0.1))
    state = tx.init(params)
    found = [x for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Quantized)) if isinstance(x, Quantized)]
    assert [x.values.shape for x in found] == [(8, 16)]
    sgd = quantize_momentum(optax.sgd(0.1, momentum=0.9)).init(params)[0].trace
    assert sgd["bias"].dtype == jnp.float32
    assert sgd["embedding"].values.dtype == jnp.int8
    np.testing.assert_array_equal(state.inner_states["adamw"].inner_state[0].mu["embedding"], jnp.zeros((9, 8)))


@pytest.mark.parametrize("make", [npo.normpre_g, npo.muon])
def test_a_step_is_nearly_the_same(make):
    """An error of a block's 254th in the momentum is one of about a hundredth in a singular vector."""
    params, grads = ({"kernel": jnp.asarray(cases.gaussian((64, 96), seed), jnp.float32)} for seed in (0, 1))
    plain, tx = make(0.1, weight_decay=0.0), quantize_momentum(make(0.1, weight_decay=0.0))
    states = plain.init(params), tx.init(params)
    for _ in range(3):
        (expected, one), (found, two) = (
            cases.updater(t)(grads, s, params) for t, s in zip((plain, tx), states, strict=True)
        )
        states = one, two
    error = np.linalg.norm(found["kernel"] - expected["kernel"]) / np.linalg.norm(expected["kernel"])
    assert 0 < error < 0.03


def test_it_stands_inside_and_around_others():
    params = {"kernel": jnp.ones((8, 16)), "bias": jnp.ones(16)}
    for tx in (
        quantize_momentum(monitor(npo.muon(0.1), record=["row_norms"])),
        optax.MultiSteps(quantize_momentum(npo.muon(0.1)), 2).gradient_transformation(),
        quantize_momentum(optax.MultiSteps(npo.muon(0.1), 2).gradient_transformation()),
        optax.chain(optax.clip(1.0), quantize_momentum(npo.normpre_l(0.1, norm_control="hyperball"))),
    ):
        state = tx.init(params)
        _, after = jax.eval_shape(tx.update, params, state, params)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), after)


KINDS = [quantize_momentum(optax.trace(0.9), block_size=block_size) for block_size in (2, 16, 5)]


@jax.jit
def update_all_kinds(x, states):
    return [tx.update(x, state) for tx, state in zip(KINDS, states, strict=True)]


@pytest.mark.parametrize(
    ("axis_type", "spec"),
    [
        (AxisType.Explicit, ("fsdp", None)),
        (AxisType.Auto, (None, "fsdp")),
        pytest.param(AxisType.Explicit, (None, "fsdp"), marks=pytest.mark.thorough),
        pytest.param(AxisType.Auto, ("fsdp", None), marks=pytest.mark.thorough),
    ],
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


def test_an_optimizer_without_momentum_is_refused():
    with pytest.raises(ValueError, match="has no momentum from"):
        quantize_momentum(npo.swan(0.1)).init({"kernel": jnp.ones((4, 8))})
