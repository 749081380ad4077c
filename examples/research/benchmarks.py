# SPDX-License-Identifier: Apache-2.0
"""All benchmarks, one after the other: ``python -m examples.research.benchmarks``, about twenty minutes on two cores.

On a GPU (``pip install "jax[cuda12]"`` beside the examples) the same command measures the GPU, with products in
bfloat16 too and with the large models' real shapes.
"""

import dataclasses
import importlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import jax
import tyro
from rich.console import Console

from examples.research import accuracy, optimizer_step

SKETCHES_AND_PEERS = ("adamw", "optax_muon", "clean_muon", "muon", "normpre_g", "normpre_l")


@dataclasses.dataclass(frozen=True)
class Options:
    """Run every benchmark."""

    out: Path = Path("docs/results")
    """Folder for the reports."""
    tiny: bool = False
    """Small sizes and few repeats: to see that everything runs."""


def against_torch(options: Options, on_cpu: bool) -> list[tuple[Callable, object]]:
    """Train steps against PyTorch's, where torch is installed; it is no dependency of this project."""
    if importlib.util.find_spec("torch") is None:
        return []
    train_step = importlib.import_module("examples.research.train_step")
    config, batch_size = ("gpt2_10m", 8) if on_cpu else ("gpt2_small", 32)
    chosen = train_step.Options(config=config, batch_size=batch_size, out=options.out)
    if options.tiny:
        chosen = dataclasses.replace(chosen, config="gpt2_2m", batch_size=1, repeats=1, warmup=1, torch_compile="off")
    return [(train_step.main, chosen)]


def suite(options: Options, on_cpu: bool) -> list[tuple[Callable, object]]:
    """What is run, with which options."""
    out = options.out
    if options.tiny:
        return [
            (optimizer_step.main, optimizer_step.Options(model="tiny", repeats=1, out=out)),
            (accuracy.main, accuracy.Options(rows=48, columns=96, rank=4, oversample=2, out=out)),
            *against_torch(options, on_cpu),
        ]
    models = ["gpt2_small", "llama_1p3b_layer"] if on_cpu else ["gpt2_small", "llama_130m", "llama_1p3b", "qwen3_1p7b"]
    repeats = 5 if on_cpu else 20
    runs: list[tuple[Callable, object]] = []
    for model in models:
        for half in (False,) if on_cpu else (False, True):
            step = optimizer_step.Options(model=model, repeats=repeats, bfloat16=half, out=out)
            runs.append((optimizer_step.main, step))
    compiled = optimizer_step.Options(model="llama_1p3b", optimizers=SKETCHES_AND_PEERS, compile_only=True, out=out)
    runs.append((optimizer_step.main, compiled))
    return [*runs, (accuracy.main, accuracy.Options(out=out)), *against_torch(options, on_cpu)]


def main(options: Options) -> None:
    """Run them all."""
    console = Console(highlight=False)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # train_step shares a GPU with PyTorch
    device = jax.devices()[0]
    runs = suite(options, device.platform == "cpu")
    if not against_torch(options, device.platform == "cpu"):
        console.print("train_step is left out: it compares with PyTorch, and torch is not installed")
    for i, (run, with_options) in enumerate(runs):
        console.rule(f"{i + 1} of {len(runs)}: {run.__module__.rpartition('.')[2]} on {device.device_kind}")
        run(with_options)


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m examples.research.benchmarks"))
