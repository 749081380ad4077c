# SPDX-License-Identifier: Apache-2.0
"""A coordinate check: does a rate that was tuned on a narrow model move a wide one as much?

    python -m examples.research.coordinates --out docs/results/coordinates

Models of several widths, everything else being equal, take the same few steps on the same text. What is compared is how
far each step has moved the residual stream where the blocks end, in root mean square over its entries: with rates that
transfer, as far at every width.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from rich.console import Console

from examples.pretrain import configs, data
from examples.pretrain.compare import LINE_STYLES, NAMES, frame
from examples.pretrain.config import Config, is_relative
from examples.pretrain.models.transformer import apply_blocks
from examples.pretrain.optimizers import make_optimizer
from examples.pretrain.train import TrainState, initialize, make_train_step
from examples.research import command, report

HEAD_WIDTH = 16
# Optimizer, and whether learning rates are multiplied as by ``--base-width``.
VARIANTS = {
    "AdamW": ("adamw", False),
    "AdamW, rates by width": ("adamw", True),
    "MuonEq": ("muoneq", False),
    "MuonEq, rates by width": ("muoneq", True),
    "NormPre-H": ("normpre_h", False),
}


@dataclass(frozen=True)
class Options:
    """Measure how far a few steps move models of several widths."""

    config: str = "nano"  # Named configuration, of the family gpt2; its width is the one that rates were tuned on.
    # Widths of the residual stream; heads of 16, the MLP four times as wide.
    widths: Annotated[tuple[int, ...], tyro.conf.arg(metavar="WIDTH ...")] = (64, 128, 256, 512)
    learning_rate: float = 1.6e-2  # Peak rate at the configuration's width, held.
    steps: int = 8  # Steps to take.
    out: Path = Path("docs/results/coordinates")  # Folder for the report.


def moves(config: Config, dataset: data.Dataset) -> list[float]:
    """RMS change of the residual stream since the first weights, after every step."""
    graphdef, params = initialize(config, dataset)
    if is_relative(config.optimizer):  # whose first update sets norms
        still = make_optimizer(config, lambda t: jnp.float32(0))
        params = optax.apply_updates(params, still.update(params, still.init(params), params)[0])
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
    figure, panels = report.panels(len(content["moves"]), 3.0 * len(content["moves"]), 2.8, sharey=True)
    for axes, (name, by_width) in zip(panels, content["moves"].items(), strict=True):
        widths = [int(width) for width in by_width]
        color, last = NAMES[VARIANTS[name][0].partition(",")[0]][1], len(by_width[str(widths[0])]) - 1
        for line, step in zip(LINE_STYLES, (0, min(1, last), min(3, last), last), strict=True):
            y = [values[step] for values in by_width.values()]
            axes.plot(widths, y, color=color, linestyle=line, marker="o", markersize=3, label=f"step {step + 1}")
        axes.set(xscale="log", yscale="log", xlabel="width", title=name)
        axes.set_xticks(widths, [str(width) for width in widths])
        axes.xaxis.set_minor_locator(NullLocator())
        frame(axes)
    report.legend_at_end(panels)
    panels[0].set_ylabel("RMS change of the residual stream")
    return figure


def table(content: dict[str, Any]) -> str:
    """Change after the last step by width, and how it goes with the width."""
    widths = next(iter(content["moves"].values()))
    lines = []
    for name, by_width in content["moves"].items():
        last = [values[-1] for values in by_width.values()]
        slope = np.polyfit(np.log([float(width) for width in widths]), np.log(last), 1)[0]
        lines.append([name, *(f"{x:.3f}" for x in last), f"{round(float(slope), 2) + 0.0:+.2f}"])
    return report.markdown_table(["", *widths, "exponent"], lines)


def main(arguments: Sequence[str]) -> None:
    """Measure all variants at all widths, and write."""
    options = tyro.cli(Options, args=list(arguments), prog="python -m examples.research.coordinates")
    console = Console(highlight=False, soft_wrap=True)
    named = configs.load(options.config)
    dataset = data.open_corpus(named, console)
    found: dict[str, dict[str, list[float]]] = {}
    for name, (optimizer, transferred) in VARIANTS.items():
        for width in options.widths:
            own = f"--model.width {width} --model.heads {width // HEAD_WIDTH} --model.mlp-width {4 * width}"
            own += f" --optimizer {optimizer} --learning-rate {options.learning_rate} --steps {options.steps}"
            own += " --warmup-steps 0 --weight-decay 0"
            own += f" --base-width {named.model.width}" if transferred else ""
            config = configs.parse(["--config", options.config, *own.split()])
            found.setdefault(name, {})[str(width)] = moves(config, dataset)
            console.print(f"{name}, width {width}: {found[name][str(width)][-1]:.3f}")
    content = report.header(report.command("coordinates", options), jax.devices()[0])
    content |= {"rate": options.learning_rate, "moves": found}
    text = (
        "# Coordinate check\n\n"
        f"`{content['command']}`, {content['date']}. RMS change of the residual stream after the blocks, after "
        f"{options.steps} steps at learning rate {options.learning_rate:g}. The model is {options.config}'s with other "
        f"widths (heads of {HEAD_WIDTH}, MLP four times the width), on the same text. The last column is the exponent "
        "of the width: 0 where a learning rate transfers.\n\n"
        f"{table(content)}\n![Change of the residual stream over the width](coordinates.png)\n"
    )
    report.write(options.out, "coordinates", content, text, draw(content), page_name="README.md")
    console.print(table(content))


if __name__ == "__main__":
    sys.exit(command.run(main))
