# SPDX-License-Identifier: Apache-2.0
"""The command line: the commands, and one line for every error that the user can fix.

A command's module is imported once its options are read, so that help and typing errors
do not wait for JAX.
"""

import importlib
import io
import os
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
    "compare": (
        "train with several optimizers, learning rates and seeds",
        read_compare,
        "compare.command",
        "main",
    ),
    "evaluate": ("score a run's model", options_of(Evaluate), "commands", "evaluate"),
    "generate": (
        "continue a text with a run's model",
        options_of(Generate),
        "commands",
        "generate",
    ),
    "export": (
        "write a run's model as safetensors for transformers",
        options_of(Export),
        "commands",
        "export",
    ),
}


def usage() -> str:
    """The commands, one a line."""
    lines = "\n".join(f"  {name:<12}{what}" for name, (what, *_) in COMMANDS.items())
    help_of = (
        "`python -m examples.pretrain COMMAND --help` lists the options of a command."
    )
    named = f"Configurations of train and compare: {', '.join(configs.CONFIGS)}."
    return (
        "usage: python -m examples.pretrain [COMMAND]"
        f" ...\n\n{lines}\n\n{help_of}\n{named}"
    )


def exit_status(run: Callable[[], Any], stopped: str = "stopped") -> int:
    """Run something; an error that the user can fix, or ``stopped`` at Ctrl-C, is one
    line.
    """
    status = 1
    if isinstance(sys.stdout, io.TextIOWrapper):  # not in a notebook
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # names of files may not be text
    try:
        try:
            run()
        finally:
            print(end="", flush=True)
        return 0
    except BrokenPipeError:  # what reads the output has read enough
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # the interpreter flushes it once more
        return 1
    except (
        RunError,
        OSError,
    ) as error:  # OSError: a full disk, a folder without write permission
        line = f"error: {error}"
    except (MemoryError, RuntimeError, ValueError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(
            error
        ):  # JAX's, of both types
            raise
        line = (
            "error: out of memory: choose a smaller --micro-batch or model, or split it"
            " over devices with --fsdp"
        )
    except Stopped as signal:
        line, status = str(signal), 128 + signal.signal_number
    except KeyboardInterrupt:
        line, status = stopped, 130
    print(line, file=sys.stderr)
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status: 0, 1 for what the user can fix, 128 + n
    after signal n.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments in (["help"], ["--help"], ["-h"]):
        return exit_status(lambda: print(usage()))
    word = (
        arguments.pop(0) if arguments and not arguments[0].startswith("-") else "train"
    )

    def run() -> None:
        if word not in COMMANDS:
            raise RunError(
                f"there is no command {word!r}: it must be one of"
                f" {', '.join(COMMANDS)}, help"
            )
        _, read, module, function = COMMANDS[word]
        options = read(arguments)
        getattr(importlib.import_module(f".{module}", __package__), function)(options)

    resume = "; the same command with --resume continues from the last checkpoint" * (
        word == "train"
    )
    return exit_status(run, f"stopped{resume}")
