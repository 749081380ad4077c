# SPDX-License-Identifier: Apache-2.0
"""Named configurations, one file each; a file's docstring gives its command and the expected result."""

import argparse
import importlib
import pkgutil
from collections.abc import Sequence

import tyro

from ..config import Config, RunError

NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "paper"))


def load(name: str) -> Config:
    """The configuration of the file ``name``.

    Raises:
        RunError: where there is no such file.
    """
    if name not in NAMES:
        raise RunError(f"--config must be one of {', '.join(NAMES)}, got {name!r}")
    return importlib.import_module(f"{__name__}.{name}").config


def parse(arguments: Sequence[str]) -> Config:
    """The configuration that ``--config`` names, with every other flag put over it."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", nargs="?", default="first_run")
    named, _ = first.parse_known_args(arguments)
    return tyro.cli(
        Config,
        default=load(named.config),
        args=list(arguments),
        prog="python -m examples.pretrain",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
