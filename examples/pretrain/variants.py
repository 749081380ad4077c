# SPDX-License-Identifier: Apache-2.0
"""Optimizers as ``compare`` names them: ``muon``, ``normpre_l:matrix.rank=8``."""

import dataclasses
import io
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

from . import configs
from .config import MatrixConfig, RunError, check, flag
from .optimizers import OPTIMIZERS, has_setting

# Settings beside those of ``MatrixConfig`` that a comparison may set for one optimizer alone.
OWN = ("weight_decay", "adam_learning_rate", "base_width", "model.hidden_std")
MATRIX = tuple(option.name for option in dataclasses.fields(MatrixConfig))


class Variant(NamedTuple):
    """An optimizer, and settings like ``matrix.rank=8`` of its own."""

    optimizer: str
    settings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ":".join((self.optimizer, *self.settings))

    @property
    def flags(self) -> list[str]:
        """Those of ``train``."""
        settings = [setting.partition("=") for setting in self.settings]
        return ["--optimizer", self.optimizer, *(x for name, _, value in settings for x in (flag(name), value) if x)]


def read_variants(text: str, config_flags: Sequence[str]) -> list[Variant]:
    """The meaning of ``muon,normpre_l:matrix.rank=8:matrix.oversample=4``; ``config_flags`` are those of every run.

    Raises:
        RunError: naming the flag and what it may be.
    """
    variants = [_read(part, config_flags) for part in filter(None, map(str.strip, text.split(",")))]
    if not variants:
        raise RunError("--optimizers must name at least one")
    for variant in variants:
        if variants.count(variant) > 1:
            raise RunError(f"--optimizers: {variant} is there twice")
    return variants


def _read(text: str, config_flags: Sequence[str]) -> Variant:
    optimizer, *settings = (part.strip() for part in text.split(":"))
    if optimizer not in OPTIMIZERS:
        raise RunError(f"--optimizers must be of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    for setting in settings:
        name = setting.partition("=")[0].replace("-", "_")
        if setting.endswith("=") or (not name.startswith("matrix.") and name not in OWN):
            raise RunError(f"--optimizers: settings of one are written {optimizer}:matrix.rank=8, got {text!r}")
        own = name.removeprefix("matrix.")
        if name not in OWN and own not in MATRIX:
            raise RunError(f"--optimizers: there is no setting {name}; matrix. has {', '.join(MATRIX)}")
        if name not in OWN and not has_setting(optimizer, own):
            raise RunError(f"--optimizers: {optimizer} has no {name}, got {text!r}")
    variant = Variant(optimizer, tuple(settings))
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            config = configs.parse([*config_flags, *variant.flags])
    except SystemExit as error:  # the parser's own box, about a command line that nobody wrote
        raise RunError(f"--optimizers: {text!r} has a value that its setting does not take") from error
    check(config)
    return variant
