# SPDX-License-Identifier: Apache-2.0
"""What an optimizer costs a training run, by the protocol of the paper's table of training efficiency.

Each optimizer trains the model for some steps that are not counted and then for those that are; the device is
synchronised before and after whatever is timed:

- the optimizer's latency: its update and the application of it alone, on the gradients' shapes;
- the whole step: batch to the device, forward, backward, clipping, update.

Evaluation, checkpoints and logging are off. On CPU the optimizers take turns, step by step, so that a disturbance hits
all of them; elsewhere one follows the other, so that only one has its state in memory, as in the paper.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import tyro
from rich.console import Console

from . import cluster, configs, data, mesh
from .config import Config, RunError, check
from .logs import environment, write_json
from .optimizers import make_optimizer
from .train import TrainState, compute_dtype, initialise, make_train_step, micro_batches, schedule
from .variants import read_variants


@dataclass(frozen=True)
class Options:
    """Measure training steps, optimizer by optimizer. Any flag of ``train`` may follow."""

    config: str = "first_run"
    """Named configuration."""
    optimizers: str = "adamw,muon,mano,normpre_g,normpre_l"
    """Optimizers, separated by commas; normpre_l:matrix.rank=8 is one with a setting of its own."""
    steps: int = 100
    """Steps of each that are counted."""
    output: Path = Path("efficiency.json")
    """File for the result."""


@dataclass
class Arm:
    """One optimizer with a model of its own."""

    state: TrainState
    step: Callable
    update: Callable
    grads: optax.Updates
    memory: int
    layout: mesh.Layout = mesh.ONE_DEVICE
    step_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)

    def run(self, tokens: np.ndarray, *, counted: bool) -> None:
        """One training step, and one update alone (whose result is dropped)."""
        start = time.perf_counter()
        self.state, metrics = self.step(self.state, self.layout.batch(tokens, len(tokens)))
        jax.block_until_ready((self.state, metrics))
        middle = time.perf_counter()
        jax.block_until_ready(self.update(self.grads, self.state))
        if counted:
            self.step_s.append(middle - start)
            self.update_s.append(time.perf_counter() - middle)


def corpus(config: Config, console: Console) -> data.Dataset:
    """The configuration's, and random tokens where it has not been prepared: time does not depend on them."""
    folder, vocabulary = config.data.tokens, config.model.vocabulary
    if folder is None or vocabulary is None or (folder / "manifest.json").exists():
        return data.open_corpus(config.data, console.print)
    console.print(f"There are no token files in {folder}: measuring on random tokens")
    return data.random_corpus(vocabulary, 4 * config.batch_size * config.model.context + 1)


def prepare(config: Config, dataset: data.Dataset, tokens: np.ndarray) -> Arm:
    """Model, optimizer and compiled step."""
    layout = mesh.make_layout(config)
    graphdef, params = initialise(config, dataset)
    params = layout.parameters(params)
    tx = make_optimizer(config, schedule(config))
    state = TrainState(params, layout.bound(jax.jit(tx.init))(params))

    @jax.jit
    def update(grads: optax.Updates, state: TrainState) -> TrainState:
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state)

    step = make_train_step(graphdef, tx, micro_batches(config))
    tokens = layout.batch(tokens, config.batch_size)
    lower = step.lower  # pyright: ignore[reportFunctionMemberAccess]
    memory = layout.bound(lower)(state, tokens).compile().memory_analysis()
    peak = memory.temp_size_in_bytes + memory.argument_size_in_bytes if memory else 0
    grads = jax.tree.map(lambda p: p / 2, params)
    return Arm(state, layout.bound(step), layout.bound(update), jax.block_until_ready(grads), peak, layout)


def measure(
    configs: dict[str, Config], dataset: data.Dataset, *, warmup: int, steps: int, in_turns: bool
) -> dict[str, Arm]:
    """The arms of ``configs``, which differ in their optimizer only; without their states where they ran alone."""

    def batches(config: Config) -> Iterator[np.ndarray]:
        return data.training_batches(
            dataset, context=config.model.context, batch_size=config.batch_size, seed=config.seed
        )

    if in_turns:
        source = batches(next(iter(configs.values())))
        tokens = next(source)
        arms = {name: prepare(config, dataset, tokens) for name, config in configs.items()}
        for i in range(warmup + steps):
            tokens = next(source)
            for arm in arms.values():
                arm.run(tokens, counted=i >= warmup)
        return arms
    arms = {}
    for name, config in configs.items():
        source = batches(config)
        arm = prepare(config, dataset, next(source))
        for i in range(warmup + steps):
            arm.run(next(source), counted=i >= warmup)
        arms[name] = dataclasses.replace(arm, state=None, grads=None)
    return arms


def summary(config: Config, arms: dict[str, Arm]) -> dict[str, Any]:
    """Medians (and means, as in the paper) by optimizer, and ratios to AdamW in the same turn."""
    rows = {}
    for name, arm in arms.items():
        step = statistics.median(arm.step_s)
        rows[name] = {
            "optimizer_ms": 1e3 * statistics.median(arm.update_s),
            "optimizer_mean_ms": 1e3 * statistics.fmean(arm.update_s),
            "step_ms": 1e3 * step,
            "step_mean_ms": 1e3 * statistics.fmean(arm.step_s),
            "tokens_per_second": config.batch_size * config.model.context / step,
            "peak_gib": arm.memory / 2**30,
        }
        if "adamw" in arms:
            pairs = zip(arm.step_s, arms["adamw"].step_s, strict=True)
            rows[name]["step_over_adamw"] = statistics.median(a / b for a, b in pairs)
    return rows


def main(arguments: Sequence[str]) -> None:
    """``python -m examples.pretrain efficiency --config nano``."""
    options, overrides = tyro.cli(
        Options, args=list(arguments), return_unknown_args=True, prog="python -m examples.pretrain efficiency"
    )
    flags = ["--config", options.config, *overrides]
    config = configs.parse(flags)
    check(config)
    mesh.check(config)
    cluster.refuse_several(config, "efficiency")
    variants = read_variants(options.optimizers, flags)
    if options.steps < 1:
        raise RunError("--steps must be at least 1")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, soft_wrap=True)
    dataset = corpus(config, console)
    in_turns = jax.default_backend() == "cpu"
    warmup = max(options.steps // 5, 1)
    each = {str(variant): configs.parse([*flags, *variant.flags]) for variant in variants}
    arms = measure(each, dataset, warmup=warmup, steps=options.steps, in_turns=in_turns)
    result = {
        "rows": summary(config, arms),
        "warmup": warmup,
        "steps": options.steps,
        "how": "optimizers in turns, step by step" if in_turns else "one optimizer after the other",
        "text": str(dataset.folder),
        "dtype": str(compute_dtype(config)),
        "device": environment()["device"],
    }
    write_json(options.output, result)
    for name, row in result["rows"].items():
        console.print(f"{name:<10} optimizer {row['optimizer_ms']:8.2f} ms   step {row['step_ms']:8.1f} ms")
