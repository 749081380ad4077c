# SPDX-License-Identifier: Apache-2.0
"""The schedule, the train step, and the loop around it."""

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console

from . import data, models
from .checkpoint import Checkpoints
from .config import Config, RunError
from .evaluate import Score, make_evaluate, token_losses
from .logs import Bar, Log
from .optimizers import make_optimizer
from .prepare.tokenizer import byte_lengths

FINAL_FRACTION = 0.1


class TrainState(NamedTuple):
    """What an update changes: parameters (a plain nested dictionary) and the optimizer's state."""

    params: optax.Params
    opt_state: optax.OptState


class Metrics(NamedTuple):
    """What a step reports, on the device: loss of its batch, and global norm of the gradient before clipping."""

    loss: jax.Array
    grad_norm: jax.Array


TrainStep = Callable[[TrainState, np.ndarray], tuple[TrainState, Metrics]]


def schedule(config: Config) -> Callable[[jax.typing.ArrayLike], jax.Array]:
    """Learning rate of update t = 0, 1, ...: linear to the peak at t = warmup, cosine to a tenth of it at the last."""
    warmup, last = config.warmup_steps, config.steps - 1

    def learning_rate(t: jax.typing.ArrayLike) -> jax.Array:
        rising = (jnp.asarray(t) + 1) / (warmup + 1)
        done = jnp.clip((jnp.asarray(t) - warmup) / max(last - warmup, 1), 0, 1)
        falling = FINAL_FRACTION + (1 - FINAL_FRACTION) * 0.5 * (1 + jnp.cos(jnp.pi * done))
        return config.learning_rate * jnp.minimum(rising, falling)

    return learning_rate


def compute_dtype(config: Config) -> jnp.dtype:
    """Type of the model's arithmetic."""
    automatic = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(automatic if config.dtype == "auto" else config.dtype)


def make_train_step(graphdef: nnx.GraphDef, optimizer: optax.GradientTransformationExtraArgs) -> TrainStep:
    """One update as a jitted function ``(state, tokens (B, T + 1)) -> (state, metrics)``; the old state is given up."""

    def loss_of(params: optax.Params, tokens_BxS: jax.Array) -> jax.Array:
        return token_losses(graphdef, params, tokens_BxS).mean()

    def train_step(state: TrainState, tokens_BxS: jax.Array) -> tuple[TrainState, Metrics]:
        loss, grads = jax.value_and_grad(loss_of)(state.params, tokens_BxS)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state), Metrics(loss, optax.tree.norm(grads))

    return jax.jit(train_step, donate_argnums=0)


class Trainer:
    """A run ready to go: model, optimizer, data position, evaluation; ``start`` updates are behind it."""

    def __init__(self, config: Config, dataset: data.Dataset, checkpoints: Checkpoints):
        self.config, self.checkpoints = config, checkpoints
        self.batches = data.training_batches(
            dataset.train, context=config.model.context, batch_size=config.batch_size, seed=config.seed
        )
        sequences = data.validation_sequences(
            dataset.validation, context=config.model.context, count=config.data.validation_tokens
        )
        model = models.build(config.model, dataset.vocabulary, dtype=compute_dtype(config), seed=config.seed)
        self.graphdef, variables = nnx.split(model)
        params = nnx.to_pure_dict(variables)
        self.schedule = schedule(config)
        optimizer = make_optimizer(
            config.optimizer, self.schedule, weight_decay=config.weight_decay, clip_norm=config.clip_norm
        )
        self.state = TrainState(params, jax.jit(optimizer.init)(params))
        self.step = make_train_step(self.graphdef, optimizer)
        self.evaluate = make_evaluate(self.graphdef, sequences, byte_lengths(dataset.tokenizer))
        self.start = 0

    def resume(self) -> None:
        """Go to the newest checkpoint, where there is one."""
        latest = self.checkpoints.latest_step()
        if latest is not None:
            self.state, data_state = self.checkpoints.restore(latest, self.state)
            self.batches.set_state(data_state)
            self.start = latest

    def run(self, log: Log, console: Console) -> Score:
        """Update until ``config.steps``, logging, evaluating and saving on the way; returns the last score."""
        config = self.config
        if self.start == config.steps:
            return self.evaluate(self.state.params)
        if self.start == 0:
            self._evaluate(0, log, console)
        score = None
        with Bar(console, start=self.start, steps=config.steps) as bar:
            pending: list[Metrics] = []
            clock = time.perf_counter()
            for done in range(self.start + 1, config.steps + 1):
                self.state, metrics = self.step(self.state, next(self.batches))
                pending.append(metrics)
                last = done == config.steps
                evaluates = last or done % config.evaluate_every == 0
                saves = last or done % config.checkpoint_every == 0
                if evaluates or saves or done % config.log_every == 0:
                    clock = self._write(done, pending, clock, log, bar)
                    pending = []
                    before = time.perf_counter()
                    if evaluates:
                        score = self._evaluate(done, log, console)
                    if saves:
                        self.checkpoints.save(done, self.state, self.batches.get_state())
                    clock += time.perf_counter() - before
        assert score is not None
        return score

    def _write(self, done: int, pending: list[Metrics], clock: float, log: Log, bar: Bar) -> float:
        values = jax.device_get(pending)  # waits for the device
        now = time.perf_counter()
        tokens = len(pending) * self.config.batch_size * self.config.model.context
        speed = tokens / (now - clock)
        steps = range(done - len(pending) + 1, done + 1)
        rates = np.asarray(self.schedule(np.arange(steps.start - 1, steps.stop - 1)))
        log.write(
            [
                {
                    "step": step,
                    "loss": float(value.loss),
                    "grad_norm": float(value.grad_norm),
                    "learning_rate": float(rate),
                    "tokens_per_second": round(speed, 1),
                }
                for step, value, rate in zip(steps, values, rates, strict=True)
            ]
        )
        bar.update(done, float(np.mean([value.loss for value in values])), speed)
        for step, value in zip(steps, values, strict=True):
            if not np.isfinite(value.loss):
                raise RunError(
                    f"the loss became {value.loss} at step {step}: "
                    f"try a --learning-rate below {self.config.learning_rate:g}"
                )
        return now

    def _evaluate(self, done: int, log: Log, console: Console) -> Score:
        score = self.evaluate(self.state.params)
        log.write([{"step": done, "validation_loss": score.loss, "bits_per_byte": score.bits_per_byte}])
        console.print(f"step {done:>6,}  validation loss {score.loss:.4f}  {score.bits_per_byte:.3f} bits per byte")
        return score
