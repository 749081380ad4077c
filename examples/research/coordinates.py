# SPDX-License-Identifier: Apache-2.0
"""A coordinate check: does a rate that was tuned on a narrow model move a wide one as much?

    python -m examples.research.coordinates --out docs/results/coordinates

Models of several widths, everything else being equal, take the same few steps on the same text. What is compared is how
far each step has moved the residual stream where the blocks end, in root mean square over its entries: with rates that
transfer, as far at every width.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from rich.console import Console

from examples.pretrain import configs, data
from examples.pretrain.comparison_report import LINE_STYLES, NAMES, frame, save
from examples.pretrain.config import Config, check
from examples.pretrain.logs import environment, write_json
from examples.pretrain.models.layers import apply_blocks
from examples.pretrain.optimizers import make_optimizer
from examples.pretrain.train import TrainState, initialise, make_train_step
from examples.research import command

HEAD_WIDTH = 16
HYPERBALL = ["--matrix.norm-control", "hyperball", "--model.hidden-std", "0.1"]
# Name and flags: rates as they are, and as ``--base-width`` makes them.
VARIANTS: dict[str, tuple[str, list[str], bool]] = {
    "AdamW": ("adamw", [], False),
    "AdamW, rates by width": ("adamw", [], True),
    "MuonEq": ("muoneq", [], False),
    "MuonEq, rates by width": ("muoneq", [], True),
    "MuonEq, Hyperball": ("muoneq", HYPERBALL, True),
}


@dataclass(frozen=True)
class Options:
    """Measure how far a few steps move models of several widths."""

    config: str = "nano"
    """Named configuration, of the family gpt2; its width is the one that rates were tuned on."""
    widths: Annotated[tuple[int, ...], tyro.conf.arg(metavar="WIDTH ...")] = (64, 128, 256, 512)
    """Widths of the residual stream; heads of 16, the MLP four times as wide."""
    learning_rate: float = 1.6e-2
    """Peak rate at the configuration's width, held."""
    steps: int = 8
    """Steps to take."""
    out: Path = Path("docs/results/coordinates")
    """Folder for the report."""


def moves(config: Config, dataset: data.Dataset) -> list[float]:
    """RMS change of the residual stream since the first weights, after every step."""
    graphdef, params = initialise(config, dataset)
    optimizer = make_optimizer(config, lambda t: jnp.float32(config.learning_rate))
    step = make_train_step(graphdef, optimizer)
    batches = data.training_batches(
        dataset, context=config.model.context, batch_size=config.batch_size, seed=config.seed
    )
    seen = jnp.asarray(next(batches)[:, :-1])

    @jax.jit
    def stream(params: Any) -> jax.Array:
        model: Any = nnx.merge(graphdef, params)
        x_BxTxD = model.tokens(seen) + model.positions.table()[: seen.shape[1]]
        return apply_blocks(model.blocks, x_BxTxD, config.model)

    start = stream(params)
    state, found = TrainState(params, optimizer.init(params)), []
    for _ in range(config.steps):
        state, _ = step(state, next(batches))
        found.append(float(jnp.sqrt(jnp.mean((stream(state.params) - start) ** 2))))
    return found


def draw(content: dict[str, Any]) -> Figure:
    """Change after the first steps and the last over the width, a panel for every variant."""
    figure = Figure(figsize=(3.0 * len(content["moves"]), 2.8), layout="constrained")
    panels = np.atleast_1d(np.asarray(figure.subplots(1, len(content["moves"]), sharey=True)))
    for axes, (name, by_width) in zip(panels, content["moves"].items(), strict=True):
        widths = [int(width) for width in by_width]
        color, last = NAMES[VARIANTS[name][0]][1], len(by_width[str(widths[0])]) - 1
        for line, step in zip(LINE_STYLES, (0, min(1, last), min(3, last), last), strict=True):
            y = [values[step] for values in by_width.values()]
            axes.plot(widths, y, color=color, linestyle=line, marker="o", markersize=3, label=f"step {step + 1}")
        axes.set(xscale="log", yscale="log", xlabel="width", title=name)
        axes.set_xticks(widths, [str(width) for width in widths])
        axes.xaxis.set_minor_locator(NullLocator())
        frame(axes)
        if axes is not panels[-1]:
            axes.get_legend().remove()
    panels[0].set_ylabel("RMS change of the residual stream")
    return figure


def table(content: dict[str, Any]) -> str:
    """Change after the last step by width, and how it goes with the width."""
    widths = next(iter(content["moves"].values()))
    lines = [f"| | {' | '.join(widths)} | exponent |", "|---" * (len(widths) + 2) + "|"]
    for name, by_width in content["moves"].items():
        last = [values[-1] for values in by_width.values()]
        slope = np.polyfit(np.log([float(width) for width in widths]), np.log(last), 1)[0]
        lines.append(f"| {name} | {' | '.join(f'{x:.3f}' for x in last)} | {round(float(slope), 2) + 0.0:+.2f} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> None:
    """The command line."""
    options = tyro.cli(Options, args=list(arguments), prog="python -m examples.research.coordinates")
    console, begun = Console(highlight=False, soft_wrap=True), time.strftime("%Y-%m-%d")
    named = configs.load(options.config)
    dataset, base = data.open_corpus(named.data, console.print), named.model.width
    found: dict[str, dict[str, list[float]]] = {}
    for name, (optimizer, flags, transferred) in VARIANTS.items():
        for width in options.widths:
            shape = ["--model.width", str(width), "--model.heads", str(width // HEAD_WIDTH)]
            shape += ["--model.mlp-width", str(4 * width), *(["--base-width", str(base)] if transferred else [])]
            own = ["--optimizer", optimizer, "--learning-rate", str(options.learning_rate), *flags, *shape]
            length = ["--steps", str(options.steps), "--warmup-steps", "0", "--weight-decay", "0"]
            config = configs.parse(["--config", options.config, *own, *length])
            check(config)
            found.setdefault(name, {})[str(width)] = moves(config, dataset)
            console.print(f"{name}, width {width}: {found[name][str(width)][-1]:.3f}")
    options.out.mkdir(parents=True, exist_ok=True)
    line = " ".join(["python -m examples.research.coordinates", *arguments])
    content = {**environment(), "command": line, "date": begun, "rate": options.learning_rate, "moves": found}
    write_json(options.out / "coordinates.json", content)
    save(draw(content), options.out / "coordinates")
    text = (
        "# Coordinate check\n\n"
        f"`{line}`, {begun}. RMS change of the residual stream where the blocks end, after {options.steps} steps at "
        f"{options.learning_rate:g} of {options.config}'s model made wider (heads of {HEAD_WIDTH}, MLP four times the "
        "width), same text. The last column is the exponent of the width in it: 0 where a rate transfers.\n\n"
        f"{table(content)}\n![Change of the residual stream over the width](coordinates.png)\n"
    )
    (options.out / "README.md").write_text(text)
    console.print(table(content))


if __name__ == "__main__":
    sys.exit(command.run(main))
