# SPDX-License-Identifier: Apache-2.0
"""What an optimizer costs a training run: time of its steps, and memory.

    python -m examples.research.efficiency --config nano

The protocol is that of the paper's table of training efficiency. Each optimizer trains
the model for some steps that are not counted and then for those that are; the device is
synchronized before and after whatever is timed:

- the optimizer's latency: its update and the application of it alone, on the gradients'
  shapes;
- the whole step: batch to the device, forward, backward, clipping, update.

Evaluation, checkpoints and logging are off. On CPU the optimizers run in turns, step by
step, so that a disturbance affects all of them; elsewhere one after the other, so that
only one has its state in memory, as in the paper.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import tyro
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import BPE

from examples.pretrain import cluster, configs, data, mesh
from examples.pretrain.compare.command import split_names
from examples.pretrain.compare.study import Study
from examples.pretrain.config import Config, RunError, read_compare
from examples.pretrain.logs import environment, write_json
from examples.pretrain.optimizers import make_optimizer
from examples.pretrain.train import (
    TrainState,
    compute_dtype,
    initialize,
    make_train_step,
    micro_batches,
    schedule,
)
from examples.research import command
from examples.research import train as train  # adds the optimizers of ablations


@dataclass(frozen=True)
class Options:
    """Measure training steps by optimizer. Any flag of ``train`` may follow."""

    config: str = "first_run"  # Named configuration.
    # Optimizers, separated by commas; normpre_l,rank=8 is one with a setting of its
    # own.
    optimizers: str = "adamw,muon,mano,normpre_g,normpre_l"
    steps: int = 100  # Steps of each that are counted.
    output: Path = Path("efficiency.json")  # File for the result.
    rest: tyro.conf.Suppress[tuple[str, ...]] = ()  # Options of train.


@dataclass
class Timed:
    """One optimizer with a model of its own, and its times."""

    state: TrainState | None
    step: Callable
    update: Callable
    grads: optax.Updates
    memory: int
    layout: mesh.Layout
    step_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)

    def run(self, tokens: np.ndarray) -> None:
        """One training step, and one update alone (whose result is dropped)."""
        start = time.perf_counter()
        batch = self.layout.batch(tokens, len(tokens))
        self.state, metrics = self.step(self.state, batch)
        jax.block_until_ready((self.state, metrics))
        middle = time.perf_counter()
        jax.block_until_ready(self.update(self.grads, self.state))
        self.step_s.append(middle - start)
        self.update_s.append(time.perf_counter() - middle)


def corpus(config: Config, console: Console) -> data.Dataset:
    """The configuration's, or random tokens if it has not been prepared.

    Time does not depend on them.
    """
    folder = config.tokens
    vocabulary = config.model.vocabulary
    if folder is None or vocabulary is None or (folder / "manifest.json").exists():
        return data.open_corpus(config, console)
    console.print(f"There are no token files in {folder}: measuring on random tokens")
    count = 4 * config.batch_size * config.model.context + 1
    random = np.random.default_rng(0)
    tokens = random.integers(vocabulary, size=count, dtype=np.int32)
    manifest = {
        "vocabulary": vocabulary,
        "largest_token": vocabulary - 1,
        "layout": "packed",
    }
    return data.Dataset(
        Path("random tokens"), manifest, tokens, tokens, Tokenizer(BPE())
    )


def prepare(config: Config, dataset: data.Dataset, tokens: np.ndarray) -> Timed:
    """Model, optimizer and compiled step."""
    layout = mesh.make_layout(config.replicas, config.fsdp)
    graphdef, params = initialize(config, dataset)
    params = layout.parameters(params)
    tx = make_optimizer(config, schedule(config))
    state = TrainState(params, layout.bound(jax.jit(tx.init))(params))

    @jax.jit
    def update(grads: optax.Updates, state: TrainState) -> TrainState:
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state)

    step = make_train_step(graphdef, tx, micro_batches(config))
    lower = layout.bound(step.lower)  # pyright: ignore[reportFunctionMemberAccess]
    compiled = lower(state, layout.batch(tokens, config.batch_size)).compile()
    peak = 0
    if memory := compiled.memory_analysis():
        peak = memory.temp_size_in_bytes + memory.argument_size_in_bytes
    grads = jax.block_until_ready(jax.tree.map(lambda p: p / 2, params))
    return Timed(state, layout.bound(step), layout.bound(update), grads, peak, layout)


def measure(
    configs: dict[str, Config], dataset: data.Dataset, steps: int, *, in_turns: bool
) -> dict[str, Timed]:
    """Run ``steps`` steps of every optimizer.

    Args:
        configs: by the optimizer's name, in which alone they differ.
        dataset: of the tokens.
        steps: how many, with those that are not counted.
        in_turns: whether all optimizers take a step before one takes the next.
    """
    groups = [[name] for name in configs]
    if in_turns:
        groups = [[*configs]]
    found: dict[str, Timed] = {}
    for group in groups:
        config = configs[group[0]]
        shape = {"context": config.model.context, "batch_size": config.batch_size}
        batches = data.training_batches(dataset, **shape, seed=config.seed)
        tokens = next(batches)
        for name in group:
            found[name] = prepare(configs[name], dataset, tokens)
        for _ in range(steps):
            tokens = next(batches)
            for name in group:
                found[name].run(tokens)
        if not in_turns:  # the next one needs the memory
            last = found[group[0]]
            last.state = None
            last.grads = {}
    return found


def summary(config: Config, found: dict[str, Timed], warmup: int) -> dict[str, Any]:
    """Medians and means after ``warmup`` steps, and ratios to AdamW in the same turn.

    The paper has means.
    """
    tokens = config.batch_size * config.model.context
    rows = {}
    for name, timed in found.items():
        step_s = timed.step_s[warmup:]
        update_s = timed.update_s[warmup:]
        rows[name] = {
            "optimizer_ms": 1e3 * statistics.median(update_s),
            "optimizer_mean_ms": 1e3 * statistics.fmean(update_s),
            "step_ms": 1e3 * statistics.median(step_s),
            "step_mean_ms": 1e3 * statistics.fmean(step_s),
            "tokens_per_second": tokens / statistics.median(step_s),
            "peak_gib": timed.memory / 2**30,
        }
        if "adamw" in found:
            pairs = zip(step_s, found["adamw"].step_s[warmup:], strict=True)
            rows[name]["step_over_adamw"] = statistics.median(a / b for a, b in pairs)
    return rows


def of_study(
    study: Study, names: Sequence[str], steps: int, file: str
) -> dict[str, Any] | None:
    """Measure a study's optimizers in a process of its own; None if that fails."""
    path = study.folder / file
    if path.exists():
        measured = json.loads(path.read_text())
        if set(names) <= measured["rows"].keys():
            rows = {name: measured["rows"][name] for name in names}
            return {**measured, "rows": rows}
    study.console.print(f"Measuring {steps} steps of each optimizer")
    words = [sys.executable, "-m", "examples.research.efficiency"]
    words += ["--optimizers", ",".join(names), "--steps", str(steps)]
    words += ["--output", str(path), *study.config_flags]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        reason = str(done.returncode)
        if lines := (done.stderr or done.stdout).strip().splitlines():
            reason = lines[-1]
        study.console.print(f"efficiency could not be measured: {reason}")
        return None
    return json.loads(path.read_text())


def main(arguments: Sequence[str]) -> None:
    """The command line."""
    options = read_compare(arguments, Options, "examples.research.efficiency")
    config = configs.parse(options.rest)
    mesh.check(config)
    cluster.refuse_several(config, "efficiency")
    if options.steps < 1:
        raise RunError("--steps must be at least 1")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, soft_wrap=True)
    dataset = corpus(config, console)
    warmup = max(options.steps // 5, 1)
    how = "one optimizer after the other"
    in_turns = jax.default_backend() == "cpu"
    if in_turns:
        how = "optimizers in turns, step by step"
    each = {}
    for name in split_names(options.optimizers):
        each[name] = configs.parse([*options.rest, "--optimizer", name])
    found = measure(each, dataset, warmup + options.steps, in_turns=in_turns)
    rows = summary(config, found, warmup)
    result = {
        "rows": rows,
        "warmup": warmup,
        "steps": options.steps,
        "how": how,
        "text": str(dataset.folder),
        "dtype": str(compute_dtype(config)),
        "device": environment()["device"],
    }
    write_json(options.output, result)
    for name, row in rows.items():
        console.print(
            f"{name:<10} optimizer {row['optimizer_ms']:8.2f} ms   step"
            f" {row['step_ms']:8.1f} ms   {row['tokens_per_second']:10,.0f} tokens / s "
            f"  peak {row['peak_gib']:.3f} GiB"
        )


if __name__ == "__main__":
    sys.exit(command.run(main))
