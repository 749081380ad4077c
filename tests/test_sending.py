# SPDX-License-Identifier: Apache-2.0
"""Optimizers can be sent to another process: cloudpickle, as Ray and submitit use it.

One process pickles everything, and another one, which has not imported this package,
loads it and computes the next update.
"""

import functools
import pickle
import subprocess
import sys
import warnings

import cloudpickle
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import normpre_optax as npo
from tests import cases

PARAMS = {
    "embed": {"embedding": jnp.ones((32, 8))},
    "layers": [{"up": jnp.eye(8, 16), "down": jnp.eye(16, 8)}],
    "norm": {"scale": jnp.ones(8)},
}
GRADIENTS = jax.tree.map(lambda w: w + 0.5, PARAMS)

# Run in the other process. It has no modules of the tests: they would not be there.
LOAD = """
import pickle, sys
import jax, numpy as np

sent = pickle.load(open(sys.argv[1], "rb"))
received = {name: pickle.loads(data) for name, data in sent.items()}
found = {name: jax.tree.map(np.asarray, thing()) for name, thing in received.items()}
pickle.dump(found, open(sys.argv[2], "wb"))
"""


def rule(path, leaf):
    """Leaves one matrix to AdamW."""
    if path.endswith("up"):
        return None
    return npo.default_matrix_dims(path, leaf)


def ones(params):
    """A tree of one number per parameter, as options are."""
    return jax.tree.map(lambda _: 1.0, params)


def is_wide(params):
    """A tree of bools."""
    return jax.tree.map(lambda w: w.ndim > 1, params)


def by_rows(matrix_dims):
    """A direction of stages."""
    return npo.direction(
        optax.trace(0.9), npo.normalize_rows(), matrix_dims=matrix_dims
    )


def on_one_device(params):
    """Shardings that hold a device."""
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    return jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), params)


normpre_h = functools.partial(npo.normpre_h, 0.02, adam_learning_rate=1e-3)
inject = functools.partial(
    optax.inject_hyperparams, static_args=npo.static_args(npo.normpre_h)
)
OPTIMIZERS = {
    **{name: functools.partial(cases.make, name) for name in cases.REPRESENTATIVES},
    "a rule": functools.partial(normpre_h, matrix_dims=rule),
    "a preset": functools.partial(normpre_h, matrix_dims=npo.presets.maxtext),
    "shardings": functools.partial(normpre_h, shardings=on_one_device(PARAMS)),
    "functions": functools.partial(
        npo.muon, 0.02, weight_decay_mask=is_wide, learning_rate_multipliers=ones
    ),
    "arrays": functools.partial(normpre_h, row_norms=jax.tree.map(jnp.mean, PARAMS)),
    "schedules": functools.partial(
        npo.normpre_h,
        optax.warmup_cosine_decay_schedule(0.0, 0.02, 10, 100),
        adam_learning_rate=optax.linear_schedule(1e-3, 0.0, 100),
    ),
    "a direction": functools.partial(npo.with_adamw, by_rows, 0.02),
    "injected": lambda: inject(npo.normpre_h)(0.02, adam_learning_rate=1e-3),
    "in a chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), normpre_h()),
}
DIRECTIONS = {found.direction.__name__: found.direction for found in npo.REGISTRY}
OTHERS = {
    **{name: functools.partial(cases.make, name) for name in cases.FACTORIES},
    **DIRECTIONS,
    "hyperball": functools.partial(npo.hyperball, 0.02),
}


def next_update(tx, state, jit=False):
    """What the other process computes."""
    update = tx.update
    if jit:
        update = jax.jit(update)
    return update(GRADIENTS, state, PARAMS)[0]


def train_step(tx):
    """A compiled step of a training script."""

    @jax.jit
    def step(params, state):
        updates, state = tx.update(GRADIENTS, state, params)
        return optax.apply_updates(params, updates), state

    return step


def apply_gradients(train_state):
    """A step of Flax Linen."""
    return train_state.apply_gradients(grads=GRADIENTS).params


class Model(nnx.Module):
    """Two layers."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(32, 8, rngs=rngs)
        self.dense = nnx.Linear(8, 8, rngs=rngs)


@nnx.jit
def nnx_step(model, optimizer):
    """A compiled step of Flax NNX."""
    optimizer.update(model, nnx.state(model, nnx.Param))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def things():
    """Functions to send, by name: each computes the next update."""
    found = {}
    for name, make in OPTIMIZERS.items():
        tx = make()
        state = tx.init(PARAMS)
        next_update(tx, state)  # what an optimizer keeps of an update is sent, too
        found[name] = functools.partial(next_update, tx, state)
    found["jitted"] = functools.partial(found["shardings"], jit=True)

    tx = normpre_h()
    state = tx.init(PARAMS)
    step = train_step(tx)
    step(PARAMS, state)
    found["a train step"] = functools.partial(step, PARAMS, state)

    created = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    found["a TrainState"] = functools.partial(apply_gradients, created)

    model = Model()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    nnx_step(model, optimizer)
    found["an nnx.Optimizer"] = functools.partial(nnx_step, model, optimizer)
    return found


def test_what_is_sent_computes_the_same_in_another_process(tmp_path):
    sent, back = tmp_path / "sent", tmp_path / "back"
    with warnings.catch_warnings(action="ignore"):
        here = things()
        # By value, as a notebook sends its functions.
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        cloudpickle.register_pickle_by_value(cases)
        try:
            data = {name: cloudpickle.dumps(thing) for name, thing in here.items()}
        finally:
            cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
            cloudpickle.unregister_pickle_by_value(cases)
        expected = {name: thing() for name, thing in here.items()}
    sent.write_bytes(pickle.dumps(data))
    subprocess.run([sys.executable, "-W", "ignore", "-c", LOAD, sent, back], check=True)
    found = pickle.loads(back.read_bytes())
    for name in expected:
        cases.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_every_optimizer_and_direction_can_be_pickled(name):
    """Of its update, only the shapes are compared: nothing is compiled."""
    params = PARAMS["layers"]
    tx = OTHERS[name]()
    expected = jax.eval_shape(tx.update, params, tx.init(params), params)
    received = pickle.loads(cloudpickle.dumps(tx))
    state = received.init(params)
    assert jax.eval_shape(received.update, params, state, params) == expected
