# SPDX-License-Identifier: Apache-2.0
"""The command line: what is asked for, and one line where it cannot be done."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from . import cluster, commands, compare, configs, mesh, optimizers, run
from .config import RunError, check
from .prepare import command as prepare
from .processes import Stopped

USAGE = """\
usage: python -m examples.pretrain [COMMAND] ...

  train      train a model (also without the word; --config names one of {configs})
  prepare    turn a corpus into token files
  compare    train with several optimizers, learning rates and seeds; tables, figures, report
  evaluate   score a run's model
  generate   let a run's model write
  export     write a run's model as safetensors in the format of Hugging Face transformers

COMMAND --help shows a command's options.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status: 0, 1 for what the user can mend, 128 + n after signal n."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    word = arguments.pop(0) if arguments and not arguments[0].startswith("-") else "train"
    actions: dict[str, Callable[[list[str]], Any]] = {
        "train": train,
        "prepare": prepare.main,
        "compare": compare.main,
        "evaluate": commands.evaluate,
        "generate": commands.generate,
        "export": commands.export,
    }
    try:
        if word == "help":
            print(USAGE.format(configs=", ".join(configs.NAMES)), end="")
            return 0
        if word not in actions:
            raise RunError(f"there is no command {word!r}: it must be one of {', '.join(actions)}, help")
        actions[word](arguments)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # a full disk, a folder that may not be written, a file where a folder should be
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return 128 + stopped.signal_number
    except KeyboardInterrupt:
        print("stopped; the same command with --resume goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def train(arguments: Sequence[str]) -> None:
    """Train a model."""
    config = configs.parse(arguments)
    check(config)
    optimizers.check(config)
    mesh.check(config)
    cluster.check(config)
    with cluster.joined(config):
        console = Console(markup=False, highlight=False, soft_wrap=True, quiet=not cluster.first())
        run.train(config, cluster.from_the_first(lambda: run.stored(config)), console)
