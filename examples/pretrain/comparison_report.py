# SPDX-License-Identifier: Apache-2.0
"""Tables, figures and a Markdown report of a comparison: ``python -m examples.pretrain.comparison_report DIR``.

``DIR`` has the ``comparison.json`` that ``python -m examples.pretrain compare`` wrote; everything else in it is drawn
again from that file.
"""

import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from .plot_loss import LINE_STYLES, draw_losses, frame, over_steps, save

# Label and colour of every optimizer. Those of the paper are distinguishable with every common colour blindness (Okabe
# and Ito); the others have the rest of that palette and of Paul Tol's.
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
OTHER = ("", "#BBBBBB")
SHORT = {
    "norm control hyperball": "Hyperball",
    "tangent none": "no tangent",
    "hidden std": "std",
    "learning rate": "lr",
    "weight decay": "decay",
}
MARKERS = "os^Dv"
TUNED = {"adam_ratio": "AdamW group's lr ratio", "weight_decay": "weight decay"}


def write(folder: Path, content: dict[str, Any]) -> str:
    """Write ``comparison.json``, the figures (PNG) and ``README.md`` into ``folder``; returns the table of losses."""
    (folder / "comparison.json").write_text(json.dumps(content) + "\n")
    shown = ""
    for name, paint in FIGURES.items():
        figure = Figure(figsize=(6.0, 3.6), layout="constrained")
        if paint(figure.add_subplot(), content):
            frame(figure.axes[0], legend="below")
            save(figure, folder / name)
            shown += f"\n![{name.replace('_', ' ')}]({name}.png)\n\n{paint.__doc__}\n"
    (folder / "README.md").write_text(markdown(content) + shown)
    return losses_table(content)


def label(name: str) -> str:
    """A short one: ``normpre_l:matrix.rank=8:matrix.tangent=none`` is ``NormPre-L, rank 8, no tangent``."""
    base, *settings = name.split(":")
    parts = (NAMES[base][0] if base in NAMES else base, *settings)
    text = ", ".join(setting.removeprefix("matrix.").removeprefix("model.") for setting in parts)
    text = text.replace("_", " ").replace("=", " ")
    return functools.reduce(lambda shorter, pair: shorter.replace(*pair), SHORT.items(), text)


def optimizers(content: dict[str, Any]) -> list[str]:
    """Variants in the order of ``NAMES``; those of one optimizer side by side, the one without settings first."""
    present = dict.fromkeys(arm["optimizer"] for arm in content["arms"])
    order = [*NAMES, *sorted({name.partition(":")[0] for name in present} - NAMES.keys())]
    return sorted(present, key=lambda name: (order.index(name.partition(":")[0]), ":" in name))


def style(name: str, content: dict[str, Any]) -> dict[str, Any]:
    """Label, colour, line and marker; line and marker distinguish variants of one colour."""
    base = name.partition(":")[0]
    place = [other for other in optimizers(content) if other.partition(":")[0] == base].index(name)
    line, marker = LINE_STYLES[place % len(LINE_STYLES)], MARKERS[place // len(LINE_STYLES) % len(MARKERS)]
    colour = NAMES.get(base, OTHER)[1]
    return {"label": label(name), "color": colour, "linestyle": line, "marker": marker, "markersize": 4}


def first_seed(content: dict[str, Any]) -> int:
    """The seed with which all settings were chosen."""
    return min(arm["seed"] for arm in content["arms"])


def swept(content: dict[str, Any], optimizer: str) -> list[dict[str, Any]]:
    """Arms of the first seed that differ in the learning rate only."""
    arms = (arm for arm in content["arms"] if arm["optimizer"] == optimizer and arm["seed"] == first_seed(content))
    return [arm for arm in arms if not any(name in arm for name in TUNED)]


def best_arms(content: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Arms (seeds) of each variant at the settings that are best with the first seed; variants that finished only."""
    found = {}
    for name in optimizers(content):
        arms = [arm for arm in content["arms"] if arm["optimizer"] == name and arm["status"] == "finished"]
        first = [arm for arm in arms if arm["seed"] == first_seed(content)]
        if first:
            best = settings(min(first, key=lambda arm: arm["best_validation_loss"]))
            found[name] = [arm for arm in arms if settings(arm) == best]
    return found


def settings(arm: dict[str, Any], names: Sequence[str] = ("learning_rate", *TUNED)) -> list[str]:
    """As text; empty for the configuration's."""
    return [f"{arm[name]:g}" if arm.get(name) is not None else "" for name in names]


def tuned_settings(content: dict[str, Any]) -> list[str]:
    """Settings beside the learning rate that were tuned."""
    return [name for name in TUNED if any(arm.get(name) is not None for arm in content["arms"])]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "".join(f"| {' | '.join(row)} |\n" for row in (heads, ["---"] * len(heads), *rows))


def losses_table(content: dict[str, Any]) -> str:
    """Best validation loss at the best settings: mean and sample standard deviation over seeds; the lowest is bold.

    With the norms of the hidden matrices' rows and columns at the end, of the first seed.
    """
    losses = {name: [arm["best_validation_loss"] for arm in arms] for name, arms in best_arms(content).items()}
    tuned, least, rows = tuned_settings(content), min(map(np.mean, losses.values()), default=0.0), []
    for name, arms in best_arms(content).items():
        rates, mean = {arm["learning_rate"] for arm in swept(content, name)}, f"{np.mean(losses[name]):.4f}"
        best, norms, several = arms[0]["learning_rate"], arms[0].get("norms", {}), len(rates) > 1
        end = (
            " (smallest)" if several and best == min(rates) else " (largest)" if several and best == max(rates) else ""
        )
        deviation = f"{np.std(losses[name], ddof=1):.4f}" if len(arms) > 1 else ""
        shown = f"**{mean}**" if np.mean(losses[name]) == least else mean
        ends = [f"{norms[x]:.2f}" if x in norms else "" for x in ("row_norm", "column_norm")]
        rows.append([label(name), f"{best:g}{end}", *settings(arms[0], tuned), shown, deviation, str(len(arms)), *ends])
    heads = ["optimizer", "learning rate", *(TUNED[x] for x in tuned), "validation loss", "deviation", "seeds"]
    return table([*heads, "row norm", "column norm"], rows)


def differences_table(content: dict[str, Any]) -> str:
    """By how much the best variant is ahead: mean over common seeds, and its standard error; empty for one seed."""
    arms = best_arms(content).items()
    losses = {name: {arm["seed"]: arm["best_validation_loss"] for arm in found} for name, found in arms}
    best = min(losses, key=lambda name: np.mean([*losses[name].values()]), default="")
    rows = []
    for name in losses:
        ahead = [losses[name][seed] - losses[best][seed] for seed in losses[name].keys() & losses[best].keys()]
        if name != best and len(ahead) > 1:
            rows.append([label(name), f"{np.mean(ahead):.3f} ± {np.std(ahead, ddof=1) / len(ahead) ** 0.5:.3f}"])
    return table(["optimizer", f"{label(best)} is ahead by"], rows) if rows else ""


def runs_table(content: dict[str, Any]) -> str:
    """Best validation loss of every run, by learning rate."""
    rates, tuned = sorted({arm["learning_rate"] for arm in content["arms"]}), tuned_settings(content)
    rows: dict[tuple[str, ...], dict[float, str]] = {}
    for arm in sorted(content["arms"], key=lambda arm: optimizers(content).index(arm["optimizer"])):
        shown = f"{arm['best_validation_loss']:.4f}" if arm["status"] == "finished" else arm["status"]
        row = rows.setdefault((label(arm["optimizer"]), *settings(arm, tuned), str(arm["seed"])), {})
        row[arm["learning_rate"]] = shown
    heads = ["optimizer", *(TUNED[x] for x in tuned), "seed", *(f"{rate:g}" for rate in rates)]
    return table(heads, [[*key, *(row.get(rate, "") for rate in rates)] for key, row in rows.items()])


def markdown(content: dict[str, Any]) -> str:
    """The report, without figures."""
    config, machine, versions = content["config"], content["machine"], content["versions"]
    tokens = config["steps"] * config["batch_size"] * config["model.context"]
    parts = {
        f"# Comparison: {content['settings']}": f"`{content['command']}`, {content['date']}. "
        f"{content['parameters']:,} parameters ({config['model.family']}, {config['model.layers']} layers, width "
        f"{config['model.width']}), {config['steps']:,} steps of {config['batch_size']} x {config['model.context']} "
        f"tokens ({tokens:,}) of {content['text']['source']}. {machine['kind']}, {machine['cores']} core(s) a run, "
        f"Python {versions['python']}, jax {versions['jax']}.\n",
        "## Validation loss": "Best validation loss in nats per token at each optimizer's best settings: mean and "
        "sample standard deviation over seeds; mean norms of the hidden matrices' rows and columns at the end, first "
        "seed. If the best learning rate is the smallest or largest tried, the optimum may lie beyond. Empty settings "
        "are the configuration's.\n\n" + losses_table(content),
        "## Differences over common seeds, mean ± standard error": differences_table(content),
        "## Every run, by learning rate": runs_table(content),
        "## Labels": "".join(f"- {label(name)}: `{name}`\n" for name in optimizers(content) if ":" in name),
    }
    return "\n".join(f"{heading}\n\n{part}" for heading, part in parts.items() if part)


def paint_losses(axes: Axes, content: dict[str, Any]) -> bool:
    """Validation loss at the best settings, mean and range of seeds, without the first tenth; thin: training loss."""
    for name, arms in best_arms(content).items():
        if not all(arm.get("validation") and arm.get("train") for arm in arms):
            return False
        look, scores = style(name, content), np.array([arm["validation"] for arm in arms])
        steps, train = np.array([arm["train"] for arm in arms]).mean(0).T
        smoothed = np.convolve(np.pad(train, 2, mode="edge"), np.full(5, 0.2), mode="valid")
        shown = draw_losses(axes, (steps, smoothed), scores.mean(0).T, look)
        steps, losses = scores[0, -shown:, 0], scores[:, -shown:, 1]
        axes.fill_between(steps, losses.min(0), losses.max(0), color=look["color"], alpha=0.2, linewidth=0)
    return bool(best_arms(content))


def paint_learning_rates(axes: Axes, content: dict[str, Any]) -> bool:
    """Best validation loss at the first seed, nothing else tuned. The axis ends not far above every best."""
    optima, worst, rates = [], 0.0, sorted({arm["learning_rate"] for arm in content["arms"]})
    for name in optimizers(content):
        arms = sorted(swept(content, name), key=lambda arm: arm["learning_rate"])
        points = np.array([(x["learning_rate"], x["best_validation_loss"]) for x in arms if x["status"] == "finished"])
        if len(points):
            axes.plot(*points.T, **style(name, content))
            optima, worst = [*optima, points[:, 1].min()], max(worst, points[:, 1].max())
    if not optima or len(rates) < 2:
        return False
    span = max(max(optima) - min(optima), 0.05)
    axes.set_ylim(min(optima) - 0.05 * span, min(worst + 0.05 * span, max(optima) + 0.3 * span))
    axes.set(xscale="log", xlabel="peak learning rate", ylabel="validation loss (nats per token)")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.xaxis.set_minor_formatter(NullFormatter())
    return True


def paint_rows(axes: Axes, content: dict[str, Any]) -> bool:
    """Mean row norm of the hidden matrices at the best settings, first seed."""
    for name, arms in best_arms(content).items():
        if not arms[0].get("row_norm"):
            return False
        steps, norms, _ = zip(*arms[0]["row_norm"], strict=True)
        axes.plot(steps, norms, **style(name, content))
    over_steps(axes)
    axes.set_ylabel("mean row norm of hidden matrices")
    return bool(best_arms(content))


FIGURES = {"losses": paint_losses, "learning_rates": paint_learning_rates, "rows": paint_rows}


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    folder = Path(*arguments)
    try:
        content = json.loads((folder / "comparison.json").read_text())
    except (OSError, ValueError) as error:
        print(f"error: no comparison.json to read in {folder}: {error}", file=sys.stderr)
        return 1
    print(write(folder, content))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
