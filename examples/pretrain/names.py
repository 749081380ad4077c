# SPDX-License-Identifier: Apache-2.0
"""Names of optimizers with settings, such as "normpre_l,rank=8,learning_rate=1e-3"."""

import dataclasses
from typing import Any

from .config import Config, RunError

# Options of a run that a name of an optimizer may set, beside the settings of the
# optimizer itself.
IN_NAMES: dict[str, type] = {
    "learning_rate": float,
    "adam_learning_rate": float,
    "weight_decay": float,
    "hidden_std": float,
    "base_width": int,
}


def split_name(optimizer: str) -> tuple[str, dict[str, str]]:
    """The name and the settings of "normpre_l,rank=8".

    Raises:
        RunError: if a setting has another form, or is there twice.
    """
    name, *settings = (part.strip() for part in optimizer.split(","))
    found = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key and value:
            found[key] = value
    if len(found) < len(settings):
        raise RunError(
            f"--optimizer: write each setting once, as in {name},learning_rate=1e-3;"
            f" got {optimizer!r}"
        )
    return name, found


def join_name(name: str, settings: dict[str, str]) -> str:
    """What ``split_name`` splits."""
    return ",".join((name, *(f"{key}={value}" for key, value in settings.items())))


def is_relative(optimizer: str) -> bool:
    """Whether steps of hidden matrices have a size relative to the weights."""
    return optimizer.startswith("normpre_h") or "hyperball" in optimizer


def apply_name(config: Config) -> Config:
    """``config`` with the options that its optimizer's name sets.

    The name keeps the settings of the optimizer itself.

    Raises:
        RunError: if the value of such an option is no number.
    """
    name, settings = split_name(config.optimizer)
    options: dict[str, Any] = {}
    try:
        for key, number in IN_NAMES.items():
            if key in settings:
                options[key] = number(settings.pop(key))
    except ValueError as error:
        raise RunError(f"--optimizer {config.optimizer}: {error}") from error
    if "hidden_std" in options:
        std = options.pop("hidden_std")
        options["model"] = dataclasses.replace(config.model, hidden_std=std)
    return dataclasses.replace(config, optimizer=join_name(name, settings), **options)
