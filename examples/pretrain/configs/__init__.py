# SPDX-License-Identifier: Apache-2.0
"""Named configurations, one file each; a file's docstring gives its command and the expected result."""

import argparse
import dataclasses
import importlib
import pkgutil
from collections.abc import Sequence

from ..config import Common, Config, RunError, read_options

NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "paper"))


def load(name: str) -> Config:
    """The configuration of the file ``name``.

    Raises:
        RunError: if there is no such file.
    """
    if name not in NAMES:
        raise RunError(f"--config must be one of {', '.join(NAMES)}, got {name!r}")
    return importlib.import_module(f"{__name__}.{name}").config


def parse(arguments: Sequence[str]) -> Config:
    """The configuration that ``--config`` names, with every other option put over it."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", nargs="?", default="first_run")
    config = load(first.parse_known_args(arguments)[0].config)
    shown = Common(**{option.name: getattr(config, option.name) for option in dataclasses.fields(Common)})
    if "--help-all" in arguments:
        arguments, shown = ["--help"], None
    return read_options(Config, arguments, "train", config, shown)
