# SPDX-License-Identifier: Apache-2.0
"""What an optimizer costs a training run: the protocol of the paper's table of training efficiency.

``python -m examples.benchmarks.end_to_end`` trains the model of ``examples.pretrain`` with every optimizer in turns,
one step of each after the other. After 20 steps that are not counted it takes 100, and reports medians of

- the optimizer's latency: its update and the application of it alone, the device synchronised before and after;
- the whole step: batch, forward, backward, clipping, update;
- tokens per second, and the peak of the memory that the compiled step needs.

Evaluation, checkpoints and logging are off. ``--config.model.width 768 ...`` sets the size.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import optax
import tyro
from flax import nnx
from rich.console import Console
from rich.progress import track

from examples.benchmarks import report
from examples.pretrain import data, models
from examples.pretrain.config import Config
from examples.pretrain.optimizers import OPTIMIZERS, make_optimizer
from examples.pretrain.prepare import python_source
from examples.pretrain.train import TrainState, compute_dtype, make_train_step, schedule


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure training steps, optimizer by optimizer."""

    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    """Which to measure; AdamW is what the others are compared with."""
    warmup: int = 20
    """Steps of each that are not counted."""
    steps: int = 100
    """Steps of each that are."""
    name: str = "first_run"
    """Name of the report."""
    config: Config = dataclasses.field(default_factory=Config)
    """Model, data and batch."""
    out: Path = Path("docs/results")
    """Folder for the reports."""


@dataclasses.dataclass
class Arm:
    """One optimizer with a model of its own."""

    state: TrainState
    step: Callable
    update: Callable
    grads: optax.Updates
    memory: int
    step_s: list[float] = dataclasses.field(default_factory=list)
    update_s: list[float] = dataclasses.field(default_factory=list)

    def run(self, tokens: np.ndarray) -> tuple[float, float]:
        """One training step, and one update alone (whose result is dropped); their seconds."""
        start = time.perf_counter()
        self.state, metrics = self.step(self.state, tokens)
        jax.block_until_ready((self.state, metrics))
        middle = time.perf_counter()
        jax.block_until_ready(self.update(self.grads, self.state))
        return middle - start, time.perf_counter() - middle


def prepare(name: str, config: Config, vocabulary: int, tokens: np.ndarray) -> Arm:
    """Model, optimizer and compiled step."""
    model = models.build(config.model, vocabulary, dtype=compute_dtype(config), seed=config.seed)
    graphdef, variables = nnx.split(model)
    params = nnx.to_pure_dict(variables)
    tx = make_optimizer(name, schedule(config), weight_decay=config.weight_decay, clip_norm=config.clip_norm)
    state = TrainState(params, jax.jit(tx.init)(params))

    @jax.jit
    def update(grads, state):
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return optax.apply_updates(state.params, updates), opt_state

    step = make_train_step(graphdef, tx)
    memory = step.lower(state, tokens).compile().memory_analysis()  # pyright: ignore[reportFunctionMemberAccess]
    peak = memory.temp_size_in_bytes + memory.argument_size_in_bytes if memory else 0
    grads = jax.tree.map(lambda p: p / 2, params)
    return Arm(state, step, update, jax.block_until_ready(grads), peak)


def measure(options: Options, console: Console) -> dict[str, Arm]:
    """All optimizers in turns."""
    config = options.config
    dataset = data.load(python_source.prepare(config.data, console.print))
    batches = data.training_batches(
        dataset.train, context=config.model.context, batch_size=config.batch_size, seed=config.seed
    )
    tokens = next(batches)
    arms = {name: prepare(name, config, dataset.vocabulary, tokens) for name in options.optimizers}
    for i in track(range(options.warmup + options.steps), console=console, description="training"):
        tokens = next(batches)
        for arm in arms.values():
            step_s, update_s = arm.run(tokens)
            if i >= options.warmup:
                arm.step_s.append(step_s)
                arm.update_s.append(update_s)
    return arms


def summary(options: Options, arms: dict[str, Arm]) -> dict:
    """Medians, and ratios to AdamW in the same turn."""
    config, rows = options.config, {}
    for name, arm in arms.items():
        step = statistics.median(arm.step_s)
        rows[name] = {
            "optimizer_ms": 1e3 * statistics.median(arm.update_s),
            "step_ms": 1e3 * step,
            "tokens_per_second": config.batch_size * config.model.context / step,
            "peak_mib": arm.memory / 2**20,
        }
        if "adamw" in arms:
            pairs = zip(arm.step_s, arms["adamw"].step_s, strict=True)
            rows[name]["step_over_adamw"] = statistics.median(a / b for a, b in pairs)
    command = f"python -m examples.benchmarks.end_to_end --name {options.name} --steps {options.steps}"
    return report.header(command, jax.devices()[0]) | {
        "model": dataclasses.asdict(config.model),
        "batch_size": config.batch_size,
        "dtype": str(compute_dtype(config)),
        "rows": rows,
    }


def markdown(result: dict) -> str:
    """The report as a table."""
    model = result["model"]
    lines = [
        f"`{result['command']}`, {result['date']}, {result['machine']['device']}, jax {result['versions']['jax']}; "
        f"{model['layers']} layers of width {model['width']}, {result['batch_size']} x {model['context']} tokens.",
        "",
        "| optimizer | optimizer, ms | whole step, ms | / AdamW | tokens / s | peak, MiB |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in result["rows"].items():
        ratio = f"{row['step_over_adamw']:.3f}" if "step_over_adamw" in row else ""
        lines.append(
            f"| {name} | {row['optimizer_ms']:.2f} | {row['step_ms']:.1f} | {ratio} | "
            f"{row['tokens_per_second']:,.0f} | {row['peak_mib']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main(options: Options) -> None:
    """Measure, print, write."""
    console = Console(highlight=False)
    result = summary(options, measure(options, console))
    report.write(options.out, f"end_to_end_{options.name}_{result['machine']['platform']}", result, markdown(result))
    console.print(markdown(result), soft_wrap=True)


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m examples.benchmarks.end_to_end"))
