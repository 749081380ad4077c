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
from typing import Any, NamedTuple

import tyro

from . import configs
from .config import Evaluate, Export, Generate, RunError, read_compare
from .processes import Stopped


class Command(NamedTuple):
    """A command: what it does, how its arguments are read, and where it is."""

    what: str
    read: Callable[[Sequence[str]], Any]
    module: str
    function: str = "main"


def options_of(kind: type) -> Callable[[Sequence[str]], Any]:
    """A function that reads the options ``kind``."""
    program = f"python -m examples.pretrain {kind.__name__.lower()}"
    return lambda arguments: tyro.cli(kind, args=list(arguments), prog=program)


COMMANDS = {
    "train": Command("train a model (also without the word)", configs.parse, "run"),
    "prepare": Command("turn a corpus into token files", list, "prepare.command"),
    "compare": Command(
        "train with several optimizers, learning rates and seeds",
        read_compare,
        "compare.command",
    ),
    "evaluate": Command(
        "score a run's model", options_of(Evaluate), "commands", "evaluate"
    ),
    "generate": Command(
        "continue a text with a run's model",
        options_of(Generate),
        "commands",
        "generate",
    ),
    "export": Command(
        "write a run's model as safetensors for transformers",
        options_of(Export),
        "commands",
        "export",
    ),
}
OUT_OF_MEMORY = (
    "error: out of memory: choose a smaller --micro-batch or model, or split it over"
    " devices with --fsdp"
)


def usage() -> str:
    """The commands, one a line."""
    lines = [f"  {name:<12}{command.what}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: python -m examples.pretrain [COMMAND] ...",
            "",
            *lines,
            "",
            "`python -m examples.pretrain COMMAND --help` lists the options of a"
            " command.",
            f"Configurations of train and compare: {', '.join(configs.CONFIGS)}.",
        ]
    )


def exit_status(run: Callable[[], Any], stopped: str = "stopped") -> int:
    """Run something, and return the exit status of the program.

    An error that the user can fix, or ``stopped`` at Ctrl-C, is one line.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # not in a notebook
        # Names of files may be no text.
        sys.stdout.reconfigure(errors="backslashreplace")
    status = 1
    try:
        try:
            run()
        finally:
            print(end="", flush=True)
        return 0
    except BrokenPipeError:  # what reads the output has read enough
        # The interpreter flushes standard output once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (RunError, OSError) as error:
        # OSError: a full disk, a folder without write permission.
        line = f"error: {error}"
    except (MemoryError, RuntimeError, ValueError) as error:
        if not is_out_of_memory(error):
            raise
        line = OUT_OF_MEMORY
    except Stopped as signal:
        line = str(signal)
        status = 128 + signal.signal_number
    except KeyboardInterrupt:
        line = stopped
        status = 130
    # Names of files may have line ends.
    print(line.replace("\n", "\\n"), file=sys.stderr)
    return status


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out: JAX says so with a RuntimeError or a ValueError."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def run_command(word: str, arguments: Sequence[str]) -> None:
    """Run the command that ``word`` names.

    Raises:
        RunError: if there is none.
    """
    if word not in COMMANDS:
        raise RunError(
            f"there is no command {word!r}: it must be one of"
            f" {', '.join(COMMANDS)}, help"
        )
    command = COMMANDS[word]
    options = command.read(arguments)
    module = importlib.import_module(f".{command.module}", __package__)
    getattr(module, command.function)(options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program, and return its exit status.

    It is 0, 1 for what the user can fix, and 128 + n after signal n.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    words = list(arguments)
    if words in (["help"], ["--help"], ["-h"]):
        return exit_status(lambda: print(usage()))
    word = "train"
    if words and not words[0].startswith("-"):
        word = words.pop(0)
    stopped = "stopped"
    if word == "train":
        stopped += "; the same command with --resume continues from the last checkpoint"
    return exit_status(lambda: run_command(word, words), stopped)
