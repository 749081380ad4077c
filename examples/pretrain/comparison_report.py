# SPDX-License-Identifier: Apache-2.0
"""Tables, figures and a Markdown report of a matched comparison: ``python -m examples.pretrain.comparison_report DIR``.

``DIR`` is a folder with the ``comparison.json`` that ``python -m examples.pretrain compare`` wrote; everything else in
it is drawn again from that file.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

# Name and colour of every optimizer. Those of the paper are distinguishable with every common colour blindness (Okabe,
# Ito); the rest of that palette and Paul Tol's are shared out among the others.
NAMES = {
    "adamw": ("AdamW", "#000000"),
    "muon": ("Muon", "#0072B2"),
    "mano": ("MANO", "#E69F00"),
    "rmnp": ("RMNP", "#56B4E9"),
    "muoneq": ("MuonEq", "#332288"),
    "muon_plus": ("Muon+", "#44AA99"),
    "normuon": ("NorMuon", "#CC79A7"),
    "adamuon": ("AdaMuon", "#882255"),
    "moga": ("MOGA", "#999933"),
    "swan": ("SWAN", "#777777"),
    "normpre_g": ("NormPre-G", "#D55E00"),
    "normpre_l": ("NormPre-L", "#009E73"),
}
OURS = frozenset({"normpre_g", "normpre_l"})
LINE_STYLES = ("-", "--", ":", "-.")
FIGURES = ("losses", "learning_rates", "rows")
CAPTIONS = {
    "losses": "Validation loss at the best settings, mean over seeds; band: from the lowest to the highest; "
    "thin: training loss. The first tenth of the steps is left out.",
    "learning_rates": "Best validation loss at the first seed, AdamW's rate and weight decay as configured.",
    "rows": "Mean length of a hidden matrix's row (the weights of one output), at the best settings, first seed.",
}
TUNED = {"adam_ratio": "AdamW's rate / the matrices'", "weight_decay": "weight decay"}
NONE = dict.fromkeys(TUNED)
SHOWN_FROM_SHARE = 0.1


def write(folder: Path, content: dict[str, Any]) -> str:
    """Write ``comparison.json``, the figures (PNG) and ``README.md`` into ``folder``; returns table 1."""
    (folder / "comparison.json").write_text(json.dumps(content) + "\n")
    drawn = draw(folder, content)
    table = losses_table(content)
    (folder / "README.md").write_text(markdown(content, table, drawn))
    return table


def draw(folder: Path, content: dict[str, Any]) -> list[str]:
    """The figures that the data allows; returns their names."""
    drawn = []
    for name, paint in zip(FIGURES, (draw_losses, draw_learning_rates, draw_rows), strict=True):
        figure = Figure(figsize=(6.0, 3.4), layout="constrained")
        if paint(figure.add_subplot(), content):
            save(figure, folder / name)
            drawn.append(name)
    return drawn


def save(figure: Figure, file: Path) -> None:
    """The figure as ``file.png``, which is the same whenever it is drawn."""
    figure.savefig(file.with_name(f"{file.name}.png"), dpi=200, pil_kwargs={"optimize": True})


def optimizers(content: dict[str, Any]) -> list[str]:
    """In the order of ``NAMES``; those with settings of their own after the plain one, as they were given."""
    present = dict.fromkeys(arm["optimizer"] for arm in content["arms"])
    return [name for base in NAMES for name in sorted(present, key=lambda n: n != base) if _base(name) == base]


def label(name: str) -> str:
    """What ``normpre_l:matrix.rank=8`` is called: ``NormPre-L, rank 8``."""
    base, *settings = name.split(":")
    told = (setting.removeprefix("matrix.").removeprefix("model.") for setting in settings)
    told = (setting.replace("=", " ").replace("_", " ") for setting in told)
    return ", ".join((NAMES[base][0], *told))


def style(name: str, content: dict[str, Any]) -> dict[str, Any]:
    """Label, colour and line of an optimizer; a line style tells those that share a colour apart."""
    alike = [other for other in optimizers(content) if _base(other) == _base(name)]
    line = LINE_STYLES[alike.index(name) % len(LINE_STYLES)]
    return {"label": label(name), "color": NAMES[_base(name)][1], "linestyle": line}


def _base(name: str) -> str:
    return name.partition(":")[0]


def arms_of(content: dict[str, Any], optimizer: str, *, at_best: bool = False) -> list[dict[str, Any]]:
    """Finished arms of an optimizer, all or those at its best settings."""
    found = [arm for arm in content["arms"] if arm["optimizer"] == optimizer and arm["status"] == "finished"]
    if not at_best:
        return found
    best = {"learning_rate": content["best"][optimizer], **content.get("tuned", {}).get(optimizer, {})}
    return [arm for arm in found if {name: arm.get(name) for name in ("learning_rate", *TUNED)} == NONE | best]


def first_seed(content: dict[str, Any]) -> int:
    """The one under which learning rates, AdamW's rate and weight decay were chosen."""
    return min(arm["seed"] for arm in content["arms"])


def swept(content: dict[str, Any], optimizer: str) -> list[dict[str, Any]]:
    """Arms of an optimizer that differ in the learning rate alone, of the first seed."""
    arms = (arm for arm in content["arms"] if arm["optimizer"] == optimizer and arm["seed"] == first_seed(content))
    return [arm for arm in arms if not any(name in arm for name in TUNED)]


def best_losses(content: dict[str, Any]) -> dict[str, np.ndarray]:
    """For every optimizer that finished, the best validation losses of its seeds."""
    found = {name: arms_of(content, name, at_best=True) for name in optimizers(content) if name in content["best"]}
    return {name: np.array([arm["best_validation_loss"] for arm in arms]) for name, arms in found.items()}


def losses_table(content: dict[str, Any]) -> str:
    """Table 1: best validation loss, mean and sample standard deviation over seeds.

    The best baseline is underlined, ours is bold where it is better than that.
    """
    losses = best_losses(content)
    baselines = [values.mean() for name, values in losses.items() if _base(name) not in OURS]
    rival = min(baselines) if baselines else np.inf
    tuned = [name for name in TUNED if any(name in arm for arm in content["arms"])]
    heads = ["optimizer", "learning rate", *(TUNED[name] for name in tuned), "validation loss", "deviation", "seeds"]
    lines = [f"| {' | '.join([*heads, *(['runs'] if tuned else [])])} |", "|---" * (len(heads) + bool(tuned)) + "|"]
    for name in optimizers(content):
        if name not in losses:
            lines.append(
                f"| {label(name)} |"
                + " |" * len(tuned)
                + " | none of its runs came to an end | | |"
                + " |" * bool(tuned)
            )
            continue
        values = losses[name]
        mean, shown = values.mean(), f"{values.mean():.4f}"
        if _base(name) not in OURS and mean == rival:
            shown = f"<u>{shown}</u>"
        elif _base(name) in OURS and mean < rival < np.inf:
            shown = f"**{shown}**"
        deviation = f"{values.std(ddof=1):.4f}" if len(values) > 1 else ""
        chosen = content.get("tuned", {}).get(name, {})
        settings = [f"{content['best'][name]:g}", *(f"{_setting(chosen, x, content):g}" for x in tuned)]
        runs = [str(sum(arm["optimizer"] == name for arm in content["arms"]))] if tuned else []
        lines.append(f"| {' | '.join([label(name), *settings, shown, deviation, str(len(values)), *runs])} |")
    return "\n".join(lines) + "\n"


def _setting(chosen: dict[str, Any], name: str, content: dict[str, Any]) -> float:
    """One of an arm's settings, or of the best ones: the configuration's where it was not tuned."""
    if name in chosen:
        return chosen[name]
    config = content["config"]
    if name == "weight_decay":
        return config[name]
    own = config.get("adam_learning_rate")
    return 1.0 if own is None else own / config["learning_rate"]


def tuning_table(content: dict[str, Any]) -> str:
    """Validation loss at the first seed by what was tuned after the learning rate, one after the other."""
    lines = ["| optimizer | tried | value | validation loss |", "|---|---|---|---|"]
    for name in optimizers(content):
        arms = (arm for arm in content["arms"] if arm["optimizer"] == name and arm["seed"] == first_seed(content))
        for arm in arms:
            tried = [x for x in TUNED if x in arm]
            if tried:
                loss = f"{arm['best_validation_loss']:.4f}" if arm["status"] == "finished" else arm["status"]
                lines.append(f"| {label(name)} | {TUNED[tried[-1]]} | {arm[tried[-1]]:g} | {loss} |")
    return "\n".join(lines) + "\n"


def sweep_table(content: dict[str, Any]) -> str:
    """Best validation loss at the first seed by learning rate."""
    arms = [arm for name in optimizers(content) for arm in swept(content, name)]
    rates = sorted({arm["learning_rate"] for arm in arms})
    lines = [
        "| optimizer | " + " | ".join(f"{rate:g}" for rate in rates) + " |",
        "|---|" + "---|" * len(rates),
    ]
    cells = {(arm["optimizer"], arm["learning_rate"]): arm for arm in arms}
    for name in optimizers(content):
        row = []
        for rate in rates:
            arm = cells.get((name, rate))
            finished = arm is not None and arm["status"] == "finished"
            row.append(f"{arm['best_validation_loss']:.4f}" if finished else (arm["status"] if arm else ""))  # pyright: ignore[reportOptionalSubscript]
        lines.append(f"| {label(name)} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def efficiency_table(content: dict[str, Any]) -> str:
    """Table 2: time and memory of a step."""
    lines = [
        "| optimizer | optimizer, ms | whole step, ms | thousand tokens / s | peak memory, GiB |",
        "|---|---|---|---|---|",
    ]
    for name, row in content["efficiency"]["rows"].items():
        lines.append(
            f"| {label(name)} | {row['optimizer_ms']:.2f} ({row['optimizer_mean_ms']:.2f}) | "
            f"{row['step_ms']:.1f} ({row['step_mean_ms']:.1f}) | "
            f"{row['tokens_per_second'] / 1e3:.2f} | {row['peak_gib']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def remarks(content: dict[str, Any]) -> list[str]:
    """What a reader must know before believing the tables."""
    found = []
    for name, rate in content["best"].items():
        arms = [arm for arm in content["arms"] if arm["optimizer"] == name]
        chosen = {"learning_rate": rate, **content.get("tuned", {}).get(name, {})}
        for field, text in {"learning_rate": "learning rate", **TUNED}.items():
            if not any(field in arm for arm in arms):
                continue
            tried = sorted({_setting(arm, field, content) for arm in arms})
            best = _setting(chosen, field, content)
            if len(tried) > 1 and best and best in (tried[0], tried[-1]):
                end = "smallest" if best == tried[0] else "largest"
                found.append(f"{label(name)} is best at the {end} {text} tried: its optimum may lie beyond.")
    for arm in content["arms"]:
        if arm["status"] != "finished":
            reason = arm.get("diverged") or arm.get("reason")
            where = f"{label(arm['optimizer'])} at {arm['learning_rate']:g}, seed {arm['seed']}"
            found.append(f"{where} {arm['status']}: {reason}.")
    spikes = sum(len(arm.get("events", ())) for arm in content["arms"])
    if spikes:
        found.append(f"{spikes} loss spike(s) are marked in the data.")
    return found


def markdown(content: dict[str, Any], table: str, drawn: Sequence[str]) -> str:
    """The report."""
    config, machine, versions = content["config"], content["machine"], content["versions"]
    tokens = config["steps"] * config["batch_size"] * config["model.context"]
    parts = [
        f"# Comparison: {content['settings']}\n",
        f"`{content['command']}`, {content['date']}. {content['parameters']:,} parameters "
        f"({config['model.family']}, {config['model.layers']} layers, width {config['model.width']}), "
        f"{config['steps']:,} steps of {config['batch_size']} x {config['model.context']} tokens "
        f"({tokens / 1e6:,.1f} M) of {content['text']['source']}. {machine['kind']}, {machine['cores']} core(s) a run, "
        f"Python {versions['python']}, jax {versions['jax']}.\n",
        "## Validation loss\n",
        "Best validation loss in nats per token at each optimizer's best settings, mean over seeds and sample "
        "standard deviation. Underlined: the best baseline; bold: ours where better.\n",
        table,
        "".join(f"- {remark}\n" for remark in remarks(content)),
    ]
    if len({arm["learning_rate"] for arm in content["arms"]}) > 1:
        parts += [f"## By learning rate, seed {first_seed(content)}\n", sweep_table(content)]
    if any(content.get("tuned", {}).values()):
        parts += ["## What was tuned after it, each at the best of what stands before\n", tuning_table(content)]
    parts += [f"![{name.replace('_', ' ')}]({name}.png)\n\n{CAPTIONS[name]}\n" for name in drawn]
    if content["efficiency"]:
        measured = content["efficiency"]
        parts += [
            "## Time and memory\n",
            f"Medians (means) over {measured['steps']} steps after {measured['warmup']}, {measured['how']}, the device "
            "synchronised around the optimizer and around the step; peak memory as the compiled step states it.\n",
            efficiency_table(content),
        ]
    return "\n".join(parts)


def frame(axes: Axes) -> None:
    """Few lines, and a legend beside them, without a box."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def draw_losses(axes: Axes, content: dict[str, Any]) -> bool:
    """Validation losses at the best learning rate: mean over seeds, the range behind; training loss fainter."""
    shown = []
    for name in optimizers(content):
        arms = arms_of(content, name, at_best=True) if name in content["best"] else []
        if not arms:
            continue
        look = style(name, content)
        steps = np.array([step for step, _ in arms[0]["validation"]])
        losses = np.array([[loss for _, loss in arm["validation"]] for arm in arms])
        after = steps >= SHOWN_FROM_SHARE * steps[-1]
        mean = losses.mean(axis=0)[after]
        train = np.array([arm["train"] for arm in arms]).mean(axis=0)
        train = train[train[:, 0] >= SHOWN_FROM_SHARE * steps[-1]]
        axes.plot(train[:, 0], train[:, 1], color=look["color"], alpha=0.3, linewidth=0.7)
        axes.plot(steps[after], mean, marker="o", markersize=3, linewidth=1.3, zorder=3, **look)
        if len(arms) > 1:
            low, high = losses.min(axis=0)[after], losses.max(axis=0)[after]
            axes.fill_between(steps[after], low, high, color=look["color"], alpha=0.2, linewidth=0)
        shown += [*mean]
    if not shown:
        return False
    margin = 0.08 * (max(shown) - min(shown)) or 0.1
    axes.set_ylim(min(shown) - margin, max(shown) + margin)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    frame(axes)
    return True


def draw_learning_rates(axes: Axes, content: dict[str, Any]) -> bool:
    """Best validation loss at the first seed over the learning rate."""
    rates = sorted({arm["learning_rate"] for arm in content["arms"]})
    if len(rates) < 2:
        return False
    for name in optimizers(content):
        finished = [arm for arm in swept(content, name) if arm["status"] == "finished"]
        points = sorted((arm["learning_rate"], arm["best_validation_loss"]) for arm in finished)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, **style(name, content))
    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("peak learning rate")
    axes.set_ylabel("validation loss (nats per token)")
    frame(axes)
    return True


def draw_rows(axes: Axes, content: dict[str, Any]) -> bool:
    """Mean norm of the hidden matrices' rows along training, at the best learning rate, first seed."""
    for name in optimizers(content):
        arms = arms_of(content, name, at_best=True) if name in content["best"] else []
        if arms:
            steps, norms, _ = zip(*arms[0]["row_norm"], strict=True)
            axes.plot(steps, norms, marker="o", markersize=3, **style(name, content))
    axes.axhline(1, color="0.6", linewidth=0.8, linestyle="--")
    axes.set_xlabel("step")
    axes.set_ylabel("mean row norm of hidden matrices")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    frame(axes)
    return bool(content["best"])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.pretrain.comparison_report", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder with a comparison.json")
    chosen = parser.parse_args(arguments)
    try:
        content = json.loads((chosen.folder / "comparison.json").read_text())
    except (OSError, ValueError) as error:
        print(f"error: no comparison.json to read in {chosen.folder}: {error}", file=sys.stderr)
        return 1
    print(write(chosen.folder, content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
