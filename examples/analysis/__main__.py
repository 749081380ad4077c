# SPDX-License-Identifier: Apache-2.0
"""The command line: ``python -m examples.analysis COMMAND ...``, and one line where it cannot be done."""

import importlib
import sys
from collections.abc import Sequence

from examples.pretrain.config import RunError

COMMANDS = {
    "figures": "the paper's figures from the checkpoints and logs of runs",
    "comparison_report": "a comparison's tables, figures and report, drawn again from its comparison.json",
    "ablation_report": "an ablation's table and figure, drawn again from its data",
    "sweeps": "loss over the learning rate, of several comparisons: does a rate keep from size to size?",
    "walk": "lengths of rows and columns, held against those of a random walk",
    "plot_loss": "the loss curves of runs",
    "coordinates": "how far steps move models of several widths",
    "theorem": "the convergence theorem held against actual runs",
}


def usage() -> str:
    """The list of commands."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}} {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        ["usage: python -m examples.analysis COMMAND ...", "", *lines, "", "COMMAND --help shows a command's options."]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, or 1 for what the user can mend."""
    word, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["help"]
    if word in ("help", "--help", "-h"):
        print(usage())
        return 0
    if word not in COMMANDS:
        print(f"error: there is no command {word!r}: it must be one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 1
    try:
        return importlib.import_module(f"examples.analysis.{word}").main(rest) or 0
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
