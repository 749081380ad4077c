# SPDX-License-Identifier: Apache-2.0
"""The blocks of docs/frameworks.md.

They run in the real library where it is installed, else in a stand-in for it.
"""

import dataclasses
import importlib.util
import re
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType

import normpre_optax as npo
from tests import cases
from tests.parameters.tables import tree
from tests.parameters.test_models import entries_of

PAGE = (Path(__file__).parents[1] / "docs" / "frameworks.md").read_text()


def run_block(framework, **scope):
    """Execute the one block of a framework; returns its names."""
    _, _, after = PAGE.partition(f"## {framework}\n")
    section, _, _ = after.partition("\n## ")
    (code,) = re.findall(r"^```python\n(.*?)^```$", section, re.S | re.M)
    exec(code, scope)
    return scope


def stand_in(monkeypatch, name, **content):
    """Install a module of this name where the library is missing.

    And the packages above it.
    """
    parts = name.split(".")
    if importlib.util.find_spec(parts[0]):
        return
    for depth in range(1, len(parts) + 1):
        module = ".".join(parts[:depth])
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    vars(sys.modules[name]).update(content)


def shapes_of_an_update(tx, params):
    """The updates and the state of a first step, as shapes."""

    def first_step(params):
        return tx.update(params, tx.init(params), params)

    return jax.eval_shape(first_step, params)


def test_haiku():
    scope = run_block("Haiku")
    params, state = scope["params"], scope["state"]
    losses = []
    for _ in range(20):
        params, state, loss = scope["step"](params, state)
        losses.append(loss)
    assert losses[-1] < losses[0] / 2


@pytest.fixture
def keras(monkeypatch):
    """Keras on JAX; CI has it."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    return pytest.importorskip("keras")


def keras_model(keras, length=8):
    """A small GPT of Keras' own layers."""
    tokens = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(32, 16, name="token_embedding")(tokens)
    for _ in range(2):
        normed = keras.layers.LayerNormalization()(x)
        # A bias of keys has no gradient but rounding, and AdamW steps in its signs.
        attention = keras.layers.MultiHeadAttention(2, 8, use_bias=False)
        x = x + attention(normed, normed, use_causal_mask=True)
        hidden = keras.layers.Dense(64, "gelu")(keras.layers.LayerNormalization()(x))
        x = x + keras.layers.Dense(16)(hidden)
    logits = keras.layers.Dense(32, use_bias=False, name="lm_head")(x)
    return keras.Model(tokens, logits)


def test_keras(keras, tmp_path):
    """``fit`` computes what optax does, and the state is saved and loaded."""
    scope = run_block("Keras")
    keras.utils.set_random_seed(0)
    model = keras_model(keras)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    tokens = np.random.default_rng(0).integers(0, 32, (16, 9))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    variables = model.trainable_variables
    params = {v.path: jnp.array(v.value) for v in variables}
    others = [v.value for v in model.non_trainable_variables]
    tx = npo.normpre_h(1.6e-2, adam_learning_rate=1e-3)
    state = tx.init(params)

    def loss_of(params):
        # A dict of jax is sorted by its keys.
        values = [params[v.path] for v in variables]
        logits, _ = model.stateless_call(values, others, inputs)
        return loss(targets, logits)

    for _ in range(3):
        updates, state = tx.update(jax.grad(loss_of)(params), state, params)
        params = optax.apply_updates(params, updates)

    model.compile(optimizer=scope["optimizer"], loss=loss)
    model.fit(inputs, targets, batch_size=16, epochs=3, shuffle=False, verbose=0)
    for v in variables:
        np.testing.assert_allclose(v.value, params[v.path], rtol=1e-3, atol=1e-4)

    file = tmp_path / "model.weights.h5"
    model.save_weights(file)
    other = keras_model(keras)
    other.compile(optimizer=scope["OptaxOptimizer"](tx), loss=loss)
    other.optimizer.build(other.trainable_variables)
    other.load_weights(file)
    pairs = zip(model.optimizer.variables, other.optimizer.variables, strict=True)
    for saved, loaded in pairs:
        np.testing.assert_array_equal(saved.value, loaded.value)


def test_keras_restores_the_state_under_other_automatic_names(keras, tmp_path):
    """From dense_9 to dense_10, the order of the names is not that of the layers."""
    scope = run_block("Keras")
    inputs = np.random.default_rng(0).standard_normal((16, 8)).astype("float32")

    def model_of(names):
        layers = [keras.layers.Dense(8, name=name) for name in names]
        model = keras.Sequential([keras.Input((8,)), *layers])
        adamw = optax.adamw(1e-2)
        model.compile(optimizer=scope["OptaxOptimizer"](adamw), loss="mse")
        model.optimizer.build(model.trainable_variables)
        return model

    def fit(model):
        model.fit(inputs, inputs, batch_size=16, epochs=2, shuffle=False, verbose=0)
        return [v.numpy() for v in model.trainable_variables]

    first = model_of(["dense_8", "dense_9"])
    fit(first)
    file = tmp_path / "model.weights.h5"
    first.save_weights(file)
    second = model_of(["dense_9", "dense_10"])
    second.load_weights(file)
    for ours, theirs in zip(fit(second), fit(first), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_keras_applies_constraints(keras):
    scope = run_block("Keras")
    constraint = keras.constraints.MaxNorm(0.1)
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(8, kernel_constraint=constraint)]
    )
    model.compile(optimizer=scope["OptaxOptimizer"](optax.sgd(1.0)), loss="mse")
    x = np.ones((4, 8), "float32")
    model.fit(x, x, verbose=0)
    kernel = model.trainable_variables[0].numpy()
    assert np.linalg.norm(kernel, axis=0).max() < 0.1001


def test_keras_groups(keras):
    """Attention's outputs and second layers are found; the head is not a matrix."""
    params = {v.path: v.value for v in keras_model(keras).trainable_variables}
    text = npo.explain(params)
    assert re.search(r"lm_head/kernel +\(16, 32\) +adamw", text)
    assert re.search(r"0.5 for \S*attention_output/kernel", text)
    assert "residual stream" not in text


@pytest.mark.parametrize("stack", ["", "2x"])
def test_penzai(stack):
    """On the names and shapes of its transformers, with one layer or stacked ones."""
    layer = f"""
        attention/{{key,value}}/weights {stack}32x2x8
        mlp/out_linear/weights {stack}96x32
        attention/query/weights {stack}32x2x2x8; mlp/value_linear/weights {stack}32x96
        attention/output/weights {stack}2x2x8x32
        pre_ffw_norm/scale/weights {stack}32"""
    blocks = "blocks" if stack else "block_{0,1}"
    outside = f"t/embedder/embeddings 64x32; t/lm_head/weights 32x64; t/{blocks}:"
    params = tree(f"{outside} {layer}")
    tx = run_block("Penzai")["tx"]
    shapes_of_an_update(tx, params)
    text = npo.explain(params, run_block("Penzai")["rule"])
    assert re.search(r"0\.5 for t/\S+/attention/output/weights", text)
    assert "ERROR" not in text


def test_maxtext():
    """On LLaMA 3 with layers scanned along axis 1."""
    scope = run_block("MaxText")
    config = types.SimpleNamespace(
        learning_rate=6e-4,
        adam_b1=0.9,
        adam_b2=0.95,
        adam_eps=1e-8,
        adam_weight_decay=0.1,
    )
    config.learning_rate_schedule_steps = 1500
    tx = scope["normpre_h"](config, optax.constant_schedule(6e-4))
    params = tree(entries_of("LLaMA 3", "MaxText, scanned", "maxtext"))
    updates, _ = shapes_of_an_update(tx, params)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """What Levanter's class of that name provides."""

    learning_rate: float = 6e-4
    weight_decay: float = 0.1

    @staticmethod
    def register_subclass(name):
        return lambda cls: cls

    def lr_scheduler(self, num_train_steps, override_lr=None):
        peak = override_lr or self.learning_rate
        return optax.cosine_decay_schedule(peak, num_train_steps)

    def build_weight_decay_mask(self):
        return lambda params: jax.tree.map(lambda leaf: True, params)


def test_levanter(monkeypatch):
    stand_in(monkeypatch, "levanter.optim", OptimizerConfig=OptimizerConfig)
    scope = run_block("Levanter", __name__=__name__)
    tx = scope["NormPreHConfig"](adam_learning_rate=0.005).build(100)
    for model in ("GPT-2", "LLaMA 3"):
        params = tree(entries_of(model, "Levanter", ""))
        updates, state = shapes_of_an_update(tx, params)
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        assert set(state.hyperparams) == {"learning_rate", "adam_learning_rate"}


class PeftTrainer:
    """The start of tunix's class."""

    def __init__(self, model, optimizer, training_config):
        self.model = model
        self.config = training_config
        self.optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)


def test_tunix(monkeypatch):
    fields = ["eval_every_n_steps", "max_steps"]
    config = dataclasses.make_dataclass("TrainingConfig", fields)
    content = {"PeftTrainer": PeftTrainer, "TrainingConfig": config}
    stand_in(monkeypatch, "tunix.sft.peft_trainer", **content)
    scope = run_block("tunix")
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    trainer = scope["trainer_of"](model, steps=10)
    before = model.kernel[...]
    for _ in range(2):  # the first step of the warm-up has a learning rate of zero
        trainer.optimizer.update(model, nnx.state(model, nnx.Param))
    assert abs(before - model.kernel[...]).max() > 0
    # Where tunix looks for the learning rate.
    assert trainer.optimizer.opt_state.hyperparams["learning_rate"][...] > 0


class Model(nnx.Module):
    """Two kernels and their biases.

    On a mesh, one kernel is sharded along its outputs, one along its inputs.
    """

    def __init__(self, rngs):
        columns = rows = nnx.initializers.normal()
        if not jax.sharding.get_abstract_mesh().empty:
            columns = nnx.with_partitioning(columns, (None, "x"))
            rows = nnx.with_partitioning(rows, ("x", None))
        self.up = nnx.Linear(4, 8, kernel_init=columns, rngs=rngs)
        self.down = nnx.Linear(8, 4, kernel_init=rows, rngs=rngs)

    def __call__(self, x):
        return self.down(self.up(x))


def create(name):
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, cases.make(name, 0.01), wrt=nnx.Param)


def step(model, optimizer):
    """Update the model; returns its first kernel."""

    def loss(model):
        return jnp.sum(model(jnp.ones((2, 4))) ** 2)

    optimizer.update(model, nnx.grad(loss)(model))
    return model.up.kernel[...]


def mesh_of_two(kind):
    """Two devices along the axis x, of this type."""
    devices = jax.devices()[:2]
    return jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=devices)


def kernels_of(state):
    return [x for x in jax.tree.leaves(state) if x.shape in ((4, 8), (8, 4))]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", cases.FACTORIES)
def test_nnx_shapes_of_a_sharded_optimizer(name, kind):
    """As ``nnx.jit`` creates it.

    There is no Variable without an array, which ``nnx.eval_shape`` cannot shard.
    """

    def is_variable(x):
        return isinstance(x, nnx.Variable)

    def describe(state):
        arrays = nnx.to_pure_dict(state)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)

    with jax.set_mesh(mesh_of_two(kind)):
        shapes = nnx.state(nnx.eval_shape(lambda: create(name)))
        variables = jax.tree.leaves(shapes, is_leaf=is_variable)
        assert all(jax.tree.leaves(x) for x in variables)
        made = nnx.state(nnx.jit(lambda: create(name))())
        assert describe(shapes) == describe(made)
        of_optimizer = kernels_of(shapes[1])
        assert all("x" in x.sharding.spec for x in of_optimizer)
        # SWAN has no momentum, and so no state of a kernel's shape.
        assert bool(of_optimizer) == (not name.startswith("swan"))


def test_nnx_creates_a_masked_optimizer_in_jit():
    """Where Flax's ``nnx.eval_shape`` fails.

    What optax masks before this package sees it is a Variable without an array.
    """

    def mask(params):
        return jax.tree.map(lambda x: x.ndim == 2, params)

    def create_masked():
        model = Model(nnx.Rngs(0))
        tx = optax.masked(cases.make("normpre_g", 0.01), mask)
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    with jax.set_mesh(mesh_of_two(AxisType.Auto)):
        model, optimizer = nnx.jit(create_masked)()
        kernels = kernels_of(nnx.state(optimizer))
        assert [tuple(x.sharding.spec) for x in kernels] == [("x",), (None, "x")]
        nnx.jit(step)(model, optimizer)


@pytest.mark.parametrize("name", cases.REPRESENTATIVES)
def test_nnx_restored_from_a_pure_dict(name, tmp_path):
    """Orbax without a target gives None in masked places."""
    model, optimizer = create(name)
    step(model, optimizer)
    saved = nnx.to_pure_dict(nnx.state((model, optimizer)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state")
    again = create(name)
    state = nnx.state(again)
    nnx.replace_by_pure_dict(state, restored)
    nnx.update(again, state)
    for _ in range(2):
        np.testing.assert_array_equal(step(*again), step(model, optimizer))
