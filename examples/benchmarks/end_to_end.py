# SPDX-License-Identifier: Apache-2.0
"""What an optimizer costs a training run, as a report: ``python -m examples.benchmarks.end_to_end --config first_run``.

The measurement is that of ``python -m examples.pretrain efficiency``, the protocol of the paper's table of training
efficiency; see ``examples/pretrain/efficiency.py``.
"""

import dataclasses
from pathlib import Path

import jax
import tyro
from rich.console import Console

from examples.benchmarks import report
from examples.pretrain import configs, data, efficiency
from examples.pretrain.train import compute_dtype


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure training steps, optimizer by optimizer."""

    config: str = "first_run"
    """Named configuration of the training program."""
    optimizers: tuple[str, ...] = ("adamw", "muon", "mano", "normpre_g", "normpre_l")
    """Which to measure; AdamW is what the others are compared with."""
    warmup: int = 20
    """Steps of each that are not counted."""
    steps: int = 100
    """Steps of each that are."""
    out: Path = Path("docs/results")
    """Folder for the reports."""


def measure(options: Options, console: Console) -> dict:
    """The report's content."""
    config = configs.load(options.config)
    dataset = data.open_corpus(config.data, console.print)
    each = {name: dataclasses.replace(config, optimizer=name) for name in options.optimizers}
    in_turns = jax.default_backend() == "cpu"
    arms = efficiency.measure(each, dataset, warmup=options.warmup, steps=options.steps, in_turns=in_turns)
    command = f"python -m examples.benchmarks.end_to_end --config {options.config} --steps {options.steps}"
    return report.header(command, jax.devices()[0]) | {
        "model": dataclasses.asdict(config.model),
        "batch_size": config.batch_size,
        "dtype": str(compute_dtype(config)),
        "rows": efficiency.summary(config, arms),
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
            f"{row['tokens_per_second']:,.0f} | {row['peak_gib'] * 1024:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main(options: Options) -> None:
    """Measure, print, write."""
    console = Console(highlight=False)
    result = measure(options, console)
    report.write(options.out, f"end_to_end_{options.config}_{result['machine']['platform']}", result, markdown(result))
    console.print(markdown(result), soft_wrap=True)


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m examples.benchmarks.end_to_end"))
