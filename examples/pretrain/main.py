# SPDX-License-Identifier: Apache-2.0
"""The command line: the commands, and one line for every error that the user can fix.

A command's module is imported once its options are read, so that help and typing errors do not wait for JAX.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from . import configs
from .config import Evaluate, Export, Generate, RunError, read_compare
from .processes import Stopped


def options_of(kind: type) -> Callable[[Sequence[str]], Any]:
    """A function that reads the options ``kind``."""
    program = f"python -m examples.pretrain {kind.__name__.lower()}"
    return lambda arguments: tyro.cli(kind, args=list(arguments), prog=program)


# Name: what it does, how its arguments are read, where it is.
COMMANDS: dict[str, tuple[str, Callable[[Sequence[str]], Any], str, str]] = {
    "train": ("train a model (also without the word)", configs.parse, "run", "main"),
    "prepare": ("turn a corpus into token files", list, "prepare.command", "main"),
    "compare": ("train with several optimizers, learning rates and seeds", read_compare, "compare", "main"),
    "evaluate": ("score a run's model", options_of(Evaluate), "commands", "evaluate"),
    "generate": ("continue a text with a run's model", options_of(Generate), "commands", "generate"),
    "export": ("write a run's model as safetensors for transformers", options_of(Export), "commands", "export"),
}


def usage() -> str:
    """The commands, one a line."""
    lines = "\n".join(f"  {name:<12}{what}" for name, (what, *_) in COMMANDS.items())
    help_of = "`python -m examples.pretrain COMMAND --help` lists the options of a command."
    named = f"Configurations of train and compare: {', '.join(configs.CONFIGS)}."
    return f"usage: python -m examples.pretrain [COMMAND] ...\n\n{lines}\n\n{help_of}\n{named}"


def exit_status(run: Callable[[], Any], stopped: str = "stopped") -> int:
    """Run something; an error that the user can fix, or ``stopped`` at Ctrl-C, is one line."""
    try:
        run()
    except (RunError, OSError) as error:  # OSError: a full disk, a folder without write permission
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Stopped as signal:
        print(signal, file=sys.stderr)
        return 128 + signal.signal_number
    except KeyboardInterrupt:
        print(stopped, file=sys.stderr)
        return 130
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status: 0, 1 for what the user can fix, 128 + n after signal n."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments in (["help"], ["--help"], ["-h"]):
        print(usage())
        return 0
    word = arguments.pop(0) if arguments and not arguments[0].startswith("-") else "train"

    def run() -> None:
        if word not in COMMANDS:
            raise RunError(f"there is no command {word!r}: it must be one of {', '.join(COMMANDS)}, help")
        _, read, module, function = COMMANDS[word]
        options = read(arguments)
        getattr(importlib.import_module(f".{module}", __package__), function)(options)

    resume = "; the same command with --resume continues from the last checkpoint" * (word == "train")
    return exit_status(run, f"stopped{resume}")
