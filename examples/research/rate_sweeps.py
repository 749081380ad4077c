# SPDX-License-Identifier: Apache-2.0
"""Sweep learning rates of Hyperball in many settings.

``python -m examples.research.rate_sweeps --optimizer normpre_h``. In every setting, an
optimizer trains with three learning rates that are factors of two apart, with two seeds
that decide nothing else. A stopped program resumes. ``rate_law`` fits a law to the
results.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from examples.pretrain.config import RunError
from examples.research import command, decide

FACTORS = (0.5, 1.0, 2.0)  # of the middle learning rate
NANO_HEAD_WIDTH = 16


@dataclass(frozen=True)
class Setting:
    """Where the best learning rate is measured, a variation of nano."""

    steps: int
    sequences: int  # a step, of 64 tokens
    middle: float  # of three learning rates
    width: int = 64
    layers: int = 3
    held_out: bool = False  # from the fit, to test it
    seeds: str = "91-92"

    @property
    def name(self) -> str:
        """The name of its folder."""
        return (
            f"steps{self.steps}-sequences{self.sequences}-width{self.width}"
            f"-layers{self.layers}"
        )

    @property
    def flags(self) -> list[str]:
        """The options of the training program."""
        values = {
            "config": "nano",
            "steps": self.steps,
            "warmup-steps": self.steps // 15,
            "batch-size": self.sequences,
            "model.layers": self.layers,
            "model.width": self.width,
            "model.heads": self.width // NANO_HEAD_WIDTH,
            "model.mlp-width": 4 * self.width,
        }
        return [word for key, x in values.items() for word in (f"--{key}", str(x))]


# From the fewest operations to the most.
SETTINGS = (
    Setting(375, 64, 4.4e-2),
    Setting(375, 256, 5.2e-2),
    Setting(6_000, 16, 8.5e-3),
    Setting(1_500, 16, 1.6e-2, layers=12, held_out=True),
    Setting(750, 64, 2.5e-2, width=128),
    Setting(375, 64, 3.2e-2, width=256),
    Setting(3_000, 64, 1.4e-2, held_out=True),
    Setting(12_000, 16, 6e-3, held_out=True),
    Setting(200, 1_024, 8e-2, held_out=True),
    Setting(24_000, 16, 4.2e-3, held_out=True, seeds="91-91"),
)


@dataclass(frozen=True)
class Options:
    """Sweep learning rates in many settings."""

    optimizer: str = "normpre_h"  # With settings, such as muon,norm_control=hyperball.
    adam_learning_rate: float = 1.6e-2  # Of the AdamW group.
    only: tuple[str, ...] = ()  # Names of settings; all without them.
    jobs: int = 1  # Runs side by side.
    runs_folder: Path = Path("runs/rates")  # Where the folders of settings are made.


def sweep(setting: Setting, options: Options) -> None:
    """Train in a setting with three learning rates, and write its report."""
    base = f"{options.optimizer},adam_learning_rate={options.adam_learning_rate:g}"
    arms = [f"{base},learning_rate={setting.middle * x:g}" for x in FACTORS]
    decide.main(
        [
            *("--optimizers", ";".join(arms)),
            *("--seeds", setting.seeds),
            *("--jobs", str(options.jobs)),
            *("--name", f"{options.optimizer}-{setting.name}"),
            *("--runs-folder", str(options.runs_folder)),
            "--no-steps-saved",
            *setting.flags,
        ]
    )


def main(arguments: Sequence[str]) -> None:
    """The command line."""
    program = "python -m examples.research.rate_sweeps"
    options = tyro.cli(Options, prog=program, args=arguments)
    unknown = set(options.only) - {setting.name for setting in SETTINGS}
    if unknown:
        names = ", ".join(setting.name for setting in SETTINGS)
        raise RunError(f"--only {', '.join(sorted(unknown))}: settings are {names}")
    for setting in SETTINGS:
        if not options.only or setting.name in options.only:
            sweep(setting, options)


if __name__ == "__main__":
    sys.exit(command.run(main))
