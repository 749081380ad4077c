# SPDX-License-Identifier: Apache-2.0
"""The schedule, the train step, and the loop around it."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
from flax import nnx
from rich.console import Console

from . import data, models
from .checkpoint import Checkpoints, difference, leaves_of
from .cluster import Vote, alone
from .config import Config, Diverged, ModelConfig, RunError
from .evaluate import EVALUATION_BATCH, Score, make_evaluate, predictions, token_losses
from .logs import Log, Progress
from .mesh import Layout, by_name, in_parts, make_layout
from .optimizers import make_optimizer, norms
from .prepare.tokenizer import byte_lengths
from .processes import Stopped

FINAL_FRACTION = 0.1
RESUME = "the same command with --resume continues from there"


class TrainState(NamedTuple):
    """What an update changes: parameters and the optimizer's state.

    The parameters are a plain nested dictionary.
    """

    params: optax.Params
    opt_state: optax.OptState


class Metrics(NamedTuple):
    """Of a step, on the device.

    The loss of its batch, and the global norm of the gradient before clipping.
    """

    loss: jax.Array
    grad_norm: jax.Array


class Due(NamedTuple):
    """What happens between two updates."""

    write: bool
    evaluate: bool
    save: bool


TrainStep = Callable[[TrainState, np.ndarray], tuple[TrainState, Metrics]]


def schedule(config: Config) -> Callable[[jax.typing.ArrayLike], jax.Array]:
    """Learning rate of update t = 0, 1, ...

    It is linear to the peak at t = warmup, then a cosine to a tenth of it at the last.
    """
    warmup = warmup_steps(config)
    last = config.steps - 1

    def learning_rate(t: jax.typing.ArrayLike) -> jax.Array:
        rising = (jnp.asarray(t) + 1) / (warmup + 1)
        done = jnp.clip((jnp.asarray(t) - warmup) / max(last - warmup, 1), 0, 1)
        cosine = 1 + jnp.cos(jnp.pi * done)
        falling = FINAL_FRACTION + (1 - FINAL_FRACTION) * 0.5 * cosine
        return config.learning_rate * jnp.minimum(rising, falling)

    return learning_rate


def warmup_steps(config: Config) -> int:
    """Steps of warm-up: ``--warmup-steps`` if below ``--steps``, else a tenth."""
    if config.warmup_steps < config.steps:
        return config.warmup_steps
    return config.steps // 10


def compute_dtype(config: Config) -> jnp.dtype:
    """Type of the model's arithmetic."""
    if config.dtype != "auto":
        return jnp.dtype(config.dtype)
    if jax.default_backend() == "cpu":
        return jnp.dtype("float32")
    return jnp.dtype("bfloat16")


def micro_batches(config: Config) -> int:
    """Number of parts that a batch is computed in."""
    return config.batch_size // (config.micro_batch or config.batch_size)


def vocabulary_of(config: Config, dataset: data.Dataset) -> int:
    """Rows of the model's token table."""
    return config.model.vocabulary or dataset.manifest["vocabulary"]


def initialize(config: Config, dataset: data.Dataset) -> tuple[nnx.GraphDef, dict]:
    """The model's structure and its parameters, a plain nested dictionary.

    They are the same for every optimizer.

    Raises:
        RunError: if the vocabulary is smaller than the data's, or the parameters are
            larger than the memory.
    """
    vocabulary = vocabulary_of(config, dataset)
    largest = dataset.manifest["largest_token"]
    if vocabulary <= largest:
        raise RunError(
            f"--model.vocabulary {vocabulary} is too small: {dataset.folder} has tokens"
            f" up to {largest}"
        )
    check_memory(config.model, vocabulary)
    wider = (config.base_width or config.model.width) / config.model.width
    std = config.model.hidden_std * math.sqrt(wider)
    network = dataclasses.replace(config.model, hidden_std=std)
    model = models.build(
        network, vocabulary, dtype=compute_dtype(config), seed=config.seed
    )
    graphdef, variables = nnx.split(model)
    return graphdef, nnx.to_pure_dict(variables)


def check_memory(model: ModelConfig, vocabulary: int) -> None:
    """Refuse a model whose float32 parameters do not fit into memory.

    Raises:
        RunError: naming their size.
    """
    count = count_parameters(model, vocabulary)
    stats = jax.local_devices()[0].memory_stats() or {}
    memory = stats.get("bytes_limit", psutil.virtual_memory().total)
    if 4 * count > memory:
        raise RunError(
            f"{count:,} parameters ({4 * count / 1e9:,.0f} GB) do not fit into the"
            f" memory of {memory / 1e9:,.0f} GB: choose a smaller --model.width or"
            " --model.layers"
        )


def count_parameters(model: ModelConfig, vocabulary: int) -> int:
    """Number of parameters; of a model of any depth in the time of one layer."""
    one_layer = dataclasses.replace(model, layers=1)
    count = 0
    for name, leaf in by_name(models.shapes(one_layer, vocabulary)).items():
        copies = 1
        if name.startswith("blocks/"):
            copies = model.layers
        count += copies * leaf.size
    return count


def loss_and_gradients(
    graphdef: nnx.GraphDef, micro_batches: int = 1
) -> Callable[[optax.Params, jax.Array], tuple[jax.Array, optax.Updates]]:
    """A function ``(parameters, tokens (B, T + 1)) -> (loss, gradients)``.

    The loss is the mean over all predictions of the batch, for every number of
    ``micro_batches``.
    """

    def loss_of(
        params: optax.Params, tokens_BxS: jax.Array, count: jax.Array
    ) -> jax.Array:
        return token_losses(graphdef, params, tokens_BxS).sum() / count

    of_part = jax.value_and_grad(loss_of)

    def loss_and_grads(
        params: optax.Params, tokens_BxS: jax.Array
    ) -> tuple[jax.Array, optax.Updates]:
        # The sum of the parts' losses, each divided by the count of the batch, is its
        # mean, however the padding is spread over the parts.
        count = predictions(tokens_BxS)
        if micro_batches == 1:
            return of_part(params, tokens_BxS, count)

        def add(total: Any, part_BxS: jax.Array) -> tuple[Any, None]:
            found = of_part(params, part_BxS, count)
            return jax.tree.map(jnp.add, total, found), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        parts = in_parts(tokens_BxS, micro_batches)
        total, _ = jax.lax.scan(add, zeros, parts)
        return total

    return loss_and_grads


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformationExtraArgs,
    micro_batches: int = 1,
) -> TrainStep:
    """One update as a jitted function, which donates the old state.

    It has the arguments ``(state, tokens (B, T + 1))``, and returns the new state and
    the metrics.
    """
    loss_and_grads = loss_and_gradients(graphdef, micro_batches)

    def train_step(
        state: TrainState, tokens_BxS: jax.Array
    ) -> tuple[TrainState, Metrics]:
        loss, grads = loss_and_grads(state.params, tokens_BxS)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state), Metrics(loss, optax.tree.norm(grads))

    return jax.jit(train_step, donate_argnums=0)


def evaluation(
    config: Config, dataset: data.Dataset, graphdef: nnx.GraphDef, layout: Layout
) -> Callable[[optax.Params], Score]:
    """The score on the validation set, as a function of the parameters.

    It is computed in batches no larger than those of training.
    """
    sequences = data.validation_sequences(
        dataset, context=config.model.context, count=config.validation_tokens
    )
    largest = config.micro_batch or config.batch_size
    return make_evaluate(
        graphdef,
        sequences,
        byte_lengths(dataset.tokenizer),
        layout,
        min(EVALUATION_BATCH, largest),
    )


class Trainer:
    """A run: model, optimizer, data, evaluation; ``start`` updates are done.

    ``weights`` replace the initial ones.
    """

    def __init__(
        self, config: Config, dataset: data.Dataset, weights: optax.Params | None = None
    ):
        self.config = config
        self.layout = make_layout(config.replicas, config.fsdp)
        self.batches = self._batches(dataset)
        self.graphdef, params = initialize(config, dataset)
        if weights is not None:
            if different := difference(leaves_of(weights), leaves_of(params)):
                raise RunError(f"--init-from is of another model: {different}")
            params = weights
        params = self.layout.parameters(params)
        learning_rate = schedule(config)
        # All at once: a vectorized cosine can differ in the last bit from that of a
        # part.
        self.learning_rates = np.asarray(learning_rate(np.arange(config.steps)))
        optimizer = make_optimizer(config, learning_rate)
        step = make_train_step(self.graphdef, optimizer, micro_batches(config))
        bound = self.layout.bound
        self.state = TrainState(params, bound(jax.jit(optimizer.init))(params))
        self.step = bound(step)
        self.evaluate = evaluation(config, dataset, self.graphdef, self.layout)
        self.norms = bound(norms)
        self.start = 0
        self.stopping: int | None = None

    def _batches(self, dataset: data.Dataset) -> grain.DatasetIterator:
        """The part of every batch that this process reads."""
        host, hosts = self.layout.batch_part(self.config.batch_size)
        return data.training_batches(
            dataset,
            context=self.config.model.context,
            batch_size=self.config.batch_size,
            seed=self.config.seed,
            host=host,
            hosts=hosts,
        )

    def resume(self, checkpoints: Checkpoints, step: int) -> None:
        """Go to the checkpoint of ``step``.

        Raises:
            RunError: as ``Checkpoints.restore``.
        """
        found, data_state = checkpoints.restore(step, **self.state._asdict())
        self.state = TrainState(**found)
        self.batches.set_state(data_state)
        self.start = step

    def stop(self, number: int) -> None:
        """Ask the loop to save and end after the current step.

        Of several processes one is enough; all of them end after the same step, the
        next or the one after it. ``number`` is that of the signal that asks for it.
        """
        self.stopping = number

    def run(self, log: Log, checkpoints: Checkpoints, console: Console) -> Score:
        """Update until ``config.steps``; returns the last score.

        With logs, evaluations and checkpoints.

        Raises:
            Diverged: if the loss is NaN or infinite.
            Stopped: if ``stop`` was called, after saving.
        """
        config = self.config
        score = None
        if self.start == config.steps:
            score = self.evaluate(self.state.params)
        if self.start == 0:
            self._evaluate(0, log, console)
        progress = Progress(console, config.steps)
        vote = Vote()
        with progress.status:
            pending: list[Metrics] = []
            clock = time.perf_counter()
            for done in range(self.start + 1, config.steps + 1):
                pending.append(self._update())
                # Read once: a signal may come at any moment, and all processes must
                # save and end after the same step.
                stopping = vote(self.stopping)
                due = self._due(done, stopping, progress)
                if any(due):
                    clock = self._write(done, pending, clock, log, progress)
                    pending = []
                    before = time.perf_counter()
                    if due.evaluate:
                        score = self._evaluate(done, log, console)
                    if due.save:
                        self._save(done, checkpoints)
                    # The time of a step is without what happens between steps.
                    clock += time.perf_counter() - before
                if stopping is not None and done < config.steps:
                    raise Stopped(
                        f"stopped after step {done:,}, saved; {RESUME}", stopping
                    )
        assert score is not None
        # Also of weights from a damaged checkpoint.
        self._check_finite("validation loss", score.loss, config.steps)
        return score

    def _update(self) -> Metrics:
        """Start an update with the next batch; it does not wait for the device."""
        batch = self.layout.batch(next(self.batches), self.config.batch_size)
        self.state, metrics = self.step(self.state, batch)
        return metrics

    def _due(self, done: int, stopping: int | None, progress: Progress) -> Due:
        """What is due after ``done`` updates."""
        config = self.config
        last = done == config.steps
        # Several processes write after the same steps, so that all of them see a
        # divergence at once.
        slow = alone() and progress.due()
        return Due(
            write=done % config.log_every == 0 or slow,
            evaluate=last or done % config.evaluate_every == 0,
            save=last or stopping is not None or done % config.checkpoint_every == 0,
        )

    def _save(self, done: int, checkpoints: Checkpoints) -> None:
        """Start to write a checkpoint."""
        position = self.batches.get_state()
        checkpoints.save(done, position, **self.state._asdict())

    def _write(
        self,
        done: int,
        pending: list[Metrics],
        clock: float,
        log: Log,
        progress: Progress,
    ) -> float:
        """Log the steps up to ``done``, and return the time.

        The first of them began at ``clock``.
        """
        values = jax.device_get(pending)  # waits for the device
        now = time.perf_counter()
        seconds = (now - clock) / len(values)
        tokens = self.config.batch_size * self.config.model.context
        first = done - len(values)
        rates = self.learning_rates[first:done]
        records: list[dict[str, Any]] = []
        for metrics, rate in zip(values, rates, strict=True):
            record = {
                "step": first + len(records) + 1,
                "loss": float(metrics.loss),
                "grad_norm": float(metrics.grad_norm),
                "learning_rate": float(rate),
                "tokens_per_second": round(tokens / seconds, 1),
            }
            records.append(record)
        log.write(records)
        mean_loss = float(np.mean([metrics.loss for metrics in values]))
        progress.update(done, mean_loss, seconds, tokens)
        # Before NaN weights are saved.
        for record in records:
            self._check_finite("loss", record["loss"], record["step"])
            self._check_finite("gradient norm", record["grad_norm"], record["step"])
        return now

    def _check_finite(self, name: str, value: float, step: int) -> None:
        """Raise ``Diverged`` if a value is NaN or infinite."""
        if math.isfinite(value):
            return
        fix = "check the initial weights"
        if step:
            fix = f"try a --learning-rate below {self.config.learning_rate:g}"
        raise Diverged(f"the {name} became {value} at step {step}: {fix}")

    def _evaluate(self, done: int, log: Log, console: Console) -> Score:
        """Score the parameters after ``done`` updates, with their norms in the log."""
        score = self.evaluate(self.state.params)
        found = self.norms(self.state.params)
        record = {
            "step": done,
            "validation_loss": score.loss,
            "bits_per_byte": score.bits_per_byte,
        }
        record |= {name: float(norm) for name, norm in found.items()}
        log.write([record])
        console.print(
            f"step {done:>6,}  validation loss {score.loss:.4f} "
            f" {score.bits_per_byte:.3f} bits per byte"
        )
        self._check_finite("validation loss", score.loss, done)
        return score
