# SPDX-License-Identifier: Apache-2.0
"""The blocks of docs/frameworks.md: in the real library where it is installed, else in a stand-in for it."""

import dataclasses
import importlib.util
import re
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tests.parameters.tables import tree
from tests.parameters.test_models import entries_of

PAGE = (Path(__file__).parents[1] / "docs" / "frameworks.md").read_text()


def run_block(framework, **scope):
    """Execute the one block of a framework; returns its names."""
    section = PAGE.partition(f"## {framework}\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```$", section, re.S | re.M)
    exec(code, scope)
    return scope


def stand_in(monkeypatch, name, **content):
    """Install a module of this name, and the packages above it, where the library is missing."""
    top, *rest = name.split(".")
    if importlib.util.find_spec(top):
        return
    for module in (".".join([top, *rest[:end]]) for end in range(len(rest) + 1)):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    vars(sys.modules[name]).update(content)


def test_haiku():
    scope = run_block("Haiku")
    params, state = scope["params"], scope["state"]
    losses = []
    for _ in range(20):
        params, state, loss = scope["step"](params, state)
        losses.append(loss)
    assert losses[-1] < losses[0] / 2


def test_maxtext():
    """On LLaMA 3 with layers scanned along axis 1."""
    scope = run_block("MaxText")
    config = types.SimpleNamespace(learning_rate=6e-4, adam_b1=0.9, adam_b2=0.95, adam_eps=1e-8, adam_weight_decay=0.1)
    tx = scope["normpre_h"](config, optax.constant_schedule(6e-4))
    params = tree(entries_of("LLaMA 3", "MaxText, scanned", "maxtext"))
    updates = jax.eval_shape(lambda params: tx.update(params, tx.init(params), params)[0], params)
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
        return optax.cosine_decay_schedule(override_lr or self.learning_rate, num_train_steps)

    def build_weight_decay_mask(self):
        return lambda params: jax.tree.map(lambda leaf: True, params)


def test_levanter(monkeypatch):
    stand_in(monkeypatch, "levanter.optim", OptimizerConfig=OptimizerConfig)
    scope = run_block("Levanter", __name__=__name__)
    tx = scope["NormPreHConfig"](adam_learning_rate=0.005).build(100)
    for model in ("GPT-2", "LLaMA 3"):
        params = tree(entries_of(model, "Levanter", ""))
        updates, state = jax.eval_shape(lambda params: tx.update(params, tx.init(params), params), params)
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        assert set(state.hyperparams) == {"learning_rate", "adam_learning_rate"}


class PeftTrainer:
    """The start of tunix's class."""

    def __init__(self, model, optimizer, training_config):
        self.model, self.config = model, training_config
        self.optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)


def test_tunix(monkeypatch):
    config = dataclasses.make_dataclass("TrainingConfig", ["eval_every_n_steps", "max_steps"])
    stand_in(monkeypatch, "tunix.sft.peft_trainer", PeftTrainer=PeftTrainer, TrainingConfig=config)
    scope = run_block("tunix")
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    trainer = scope["trainer_of"](model, steps=10)
    before = model.kernel[...]
    for _ in range(2):  # the first step of the warm-up has a learning rate of zero
        trainer.optimizer.update(model, nnx.state(model, nnx.Param))
    assert abs(before - model.kernel[...]).max() > 0
    assert trainer.optimizer.opt_state.hyperparams["learning_rate"][...] > 0  # where tunix looks for it
