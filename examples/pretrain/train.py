# SPDX-License-Identifier: Apache-2.0
"""The schedule, the train step, and the loop around it."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

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
from .config import Config, Diverged, RunError
from .evaluate import EVALUATION_BATCH, Score, make_evaluate, predictions, token_losses
from .logs import Log, Progress
from .mesh import Layout, by_name, in_parts, make_layout
from .optimizers import make_optimizer, norms
from .prepare.token_files import byte_lengths
from .processes import Stopped

FINAL_FRACTION = 0.1


class TrainState(NamedTuple):
    """What an update changes: parameters (a plain nested dictionary) and the
    optimizer's state.
    """

    params: optax.Params
    opt_state: optax.OptState


class Metrics(NamedTuple):
    """Of a step, on the device: loss of its batch, and global norm of the gradient
    before clipping.
    """

    loss: jax.Array
    grad_norm: jax.Array


TrainStep = Callable[[TrainState, np.ndarray], tuple[TrainState, Metrics]]


def schedule(config: Config) -> Callable[[jax.typing.ArrayLike], jax.Array]:
    """Learning rate of update t = 0, 1, ...: linear to the peak at t = warmup, cosine
    to a tenth of it at the last.
    """
    warmup, last = warmup_steps(config), config.steps - 1

    def learning_rate(t: jax.typing.ArrayLike) -> jax.Array:
        rising = (jnp.asarray(t) + 1) / (warmup + 1)
        done = jnp.clip((jnp.asarray(t) - warmup) / max(last - warmup, 1), 0, 1)
        falling = FINAL_FRACTION + (1 - FINAL_FRACTION) * 0.5 * (
            1 + jnp.cos(jnp.pi * done)
        )
        return config.learning_rate * jnp.minimum(rising, falling)

    return learning_rate


def warmup_steps(config: Config) -> int:
    """Steps of warm-up: ``--warmup-steps`` if below ``--steps``, else a tenth."""
    return (
        config.warmup_steps
        if config.warmup_steps < config.steps
        else config.steps // 10
    )


def compute_dtype(config: Config) -> jnp.dtype:
    """Type of the model's arithmetic."""
    automatic = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(automatic if config.dtype == "auto" else config.dtype)


def micro_batches(config: Config) -> int:
    """Number of parts that a batch is computed in."""
    return config.batch_size // (config.micro_batch or config.batch_size)


def vocabulary_of(config: Config, dataset: data.Dataset) -> int:
    """Rows of the model's token table."""
    return config.model.vocabulary or dataset.manifest["vocabulary"]


def initialize(config: Config, dataset: data.Dataset) -> tuple[nnx.GraphDef, dict]:
    """The model's structure and its parameters, a plain nested dictionary; the same for
    every optimizer.

    Raises:
        RunError: if the vocabulary is smaller than the data's, or the parameters are
            larger than the memory.
    """
    vocabulary, largest = (
        vocabulary_of(config, dataset),
        dataset.manifest["largest_token"],
    )
    if vocabulary <= largest:
        raise RunError(
            f"--model.vocabulary {vocabulary} is too small: {dataset.folder} has tokens"
            f" up to {largest}"
        )
    one_layer = by_name(
        models.shapes(dataclasses.replace(config.model, layers=1), vocabulary)
    ).items()
    count = sum(
        x.size * (config.model.layers if name.startswith("blocks/") else 1)
        for name, x in one_layer
    )
    memory = (jax.local_devices()[0].memory_stats() or {}).get(
        "bytes_limit", psutil.virtual_memory().total
    )
    if 4 * count > memory:
        sizes = (
            f"{count:,} parameters ({4 * count / 1e9:,.0f} GB) do not fit into the"
            f" memory of {memory / 1e9:,.0f} GB"
        )
        raise RunError(f"{sizes}: choose a smaller --model.width or --model.layers")
    narrower = math.sqrt((config.base_width or config.model.width) / config.model.width)
    network = dataclasses.replace(
        config.model, hidden_std=config.model.hidden_std * narrower
    )
    model = models.build(
        network, vocabulary, dtype=compute_dtype(config), seed=config.seed
    )
    graphdef, variables = nnx.split(model)
    return graphdef, nnx.to_pure_dict(variables)


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

    def loss_and_grads(
        params: optax.Params, tokens_BxS: jax.Array
    ) -> tuple[jax.Array, optax.Updates]:
        count = predictions(tokens_BxS)
        if micro_batches == 1:
            return jax.value_and_grad(loss_of)(params, tokens_BxS, count)

        def add(total: Any, part_BxS: jax.Array) -> tuple[Any, None]:
            return (
                jax.tree.map(
                    jnp.add, total, jax.value_and_grad(loss_of)(params, part_BxS, count)
                ),
                None,
            )

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(add, zeros, in_parts(tokens_BxS, micro_batches))[0]

    return loss_and_grads


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformationExtraArgs,
    micro_batches: int = 1,
) -> TrainStep:
    """One update as a jitted function ``(state, tokens (B, T + 1)) -> (state,
    metrics)``; the old state is donated.
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
    """The score on the validation set, computed in batches no larger than those of
    training.
    """
    count, largest = config.validation_tokens, config.micro_batch or config.batch_size
    sequences = data.validation_sequences(
        dataset, context=config.model.context, count=count
    )
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
        host, hosts = self.layout.batch_part(config.batch_size)
        sizes = {"context": config.model.context, "batch_size": config.batch_size}
        self.batches = data.training_batches(
            dataset, **sizes, seed=config.seed, host=host, hosts=hosts
        )
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
        bound = self.layout.bound
        self.state = TrainState(params, bound(jax.jit(optimizer.init))(params))
        self.step = bound(
            make_train_step(self.graphdef, optimizer, micro_batches(config))
        )
        self.evaluate = evaluation(config, dataset, self.graphdef, self.layout)
        self.norms = bound(norms)
        self.start = 0
        self.stopping: int | None = None

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
        """Ask the loop to save and end after the current step, because of the signal
        ``number``.

        Of several processes one is enough; all of them end after the same step, the
        next or the one after it.
        """
        self.stopping = number

    def run(self, log: Log, checkpoints: Checkpoints, console: Console) -> Score:
        """Update until ``config.steps``, with logs, evaluations and checkpoints;
        returns the last score.

        Raises:
            Diverged: if the loss is NaN or infinite.
            Stopped: if ``stop`` was called, after saving.
        """
        config = self.config
        score = self.evaluate(self.state.params) if self.start == config.steps else None
        if self.start == 0:
            self._evaluate(0, log, console)
        progress, vote = Progress(console, config.steps), Vote()
        with progress.status:
            pending: list[Metrics] = []
            clock = time.perf_counter()
            for done in range(self.start + 1, config.steps + 1):
                self.state, metrics = self.step(
                    self.state, self.layout.batch(next(self.batches), config.batch_size)
                )
                pending.append(metrics)
                # Read once: a signal may come at any moment, and all processes must
                # save and end after the same step.
                stopping = vote(self.stopping)
                last = done == config.steps
                evaluates = last or done % config.evaluate_every == 0
                saves = (
                    last or stopping is not None or done % config.checkpoint_every == 0
                )
                # Several processes write after the same steps, so that all of them see
                # a divergence at once.
                writes = done % config.log_every == 0 or (alone() and progress.due())
                if evaluates or saves or writes:
                    clock = self._write(done, pending, clock, log, progress)
                    pending = []
                    before = time.perf_counter()
                    if evaluates:
                        score = self._evaluate(done, log, console)
                    if saves:
                        checkpoints.save(
                            done, self.batches.get_state(), **self.state._asdict()
                        )
                    clock += time.perf_counter() - before
                if stopping is not None and not last:
                    way_on = "the same command with --resume continues from there"
                    raise Stopped(
                        f"stopped after step {done:,}, saved; {way_on}", stopping
                    )
        assert score is not None
        self._check_finite(
            "validation loss", score.loss, config.steps
        )  # also of weights from a damaged checkpoint
        return score

    def _write(
        self,
        done: int,
        pending: list[Metrics],
        clock: float,
        log: Log,
        progress: Progress,
    ) -> float:
        """Log the steps up to ``done``, the first of which began at ``clock``; returns
        the time.
        """
        values = jax.device_get(pending)  # waits for the device
        now = time.perf_counter()
        seconds, tokens = (
            (now - clock) / len(values),
            self.config.batch_size * self.config.model.context,
        )
        first = done - len(values)
        rates = self.learning_rates[first:done]
        records: list[dict[str, Any]] = [
            {
                "step": step,
                **{name: float(value) for name, value in x._asdict().items()},
            }
            | {
                "learning_rate": float(rate),
                "tokens_per_second": round(tokens / seconds, 1),
            }
            for step, (x, rate) in enumerate(zip(values, rates, strict=True), first + 1)
        ]
        log.write(records)
        progress.update(done, float(np.mean([x.loss for x in values])), seconds, tokens)
        for record in records:
            self._check_finite("loss", record["loss"], record["step"])
            self._check_finite(
                "gradient norm", record["grad_norm"], record["step"]
            )  # before NaN weights are saved
        return now

    def _check_finite(self, name: str, loss: float, step: int) -> None:
        if not math.isfinite(loss):
            fix = (
                f"try a --learning-rate below {self.config.learning_rate:g}"
                if step
                else "check the initial weights"
            )
            raise Diverged(f"the {name} became {loss} at step {step}: {fix}")

    def _evaluate(self, done: int, log: Log, console: Console) -> Score:
        score = self.evaluate(self.state.params)
        row_norms = {
            name: float(value) for name, value in self.norms(self.state.params).items()
        }
        log.write(
            [
                {
                    "step": done,
                    "validation_loss": score.loss,
                    "bits_per_byte": score.bits_per_byte,
                    **row_norms,
                }
            ]
        )
        console.print(
            f"step {done:>6,}  validation loss {score.loss:.4f} "
            f" {score.bits_per_byte:.3f} bits per byte"
        )
        self._check_finite("validation loss", score.loss, done)
        return score
