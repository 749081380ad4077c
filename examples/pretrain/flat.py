# SPDX-License-Identifier: Apache-2.0
"""Configurations as they are stored: ``{"steps": 800, "model.layers": 4, ...}``."""

import dataclasses
import typing
from pathlib import Path
from typing import Any, TypeVar

from .config import Config, ModelConfig

Flat = dict[str, Any]
Kind = TypeVar("Kind", Config, ModelConfig)

# Fields that may differ between a run and its continuation: they change no loss beyond
# rounding. Of the text the tokens themselves are compared.
FREE_ON_RESUME = {
    "config",
    "name",
    "runs_folder",
    "resume",
    "overwrite",
    "tokens",
    "installed_packages",
    "fsdp",
    "replicas",
    "coordinator",
    "processes",
    "process",
    "micro_batch",
    "model.remat",
    "evaluate_every",
    "log_every",
    "checkpoint_every",
    "keep_checkpoints",
}


def flag(key: str) -> str:
    """The command-line flag of a flat key."""
    return "--" + key.replace("_", "-")


def to_dict(config: Config) -> Flat:
    """The configuration, flattened and ready for JSON."""
    flat = dataclasses.asdict(config)
    model = flat.pop("model")
    flat |= {f"model.{key}": value for key, value in model.items()}
    for key, value in flat.items():
        if isinstance(value, Path):
            flat[key] = str(value)
    return flat


def from_dict(flat: Flat) -> Config:
    """The configuration that ``to_dict`` flattened.

    Fields that ``flat`` does not mention have their defaults.
    """
    model = ModelConfig(**fields_of(ModelConfig, flat, "model."))
    return Config(**fields_of(Config, flat), model=model)


def fields_of(kind: type[Kind], flat: Flat, prefix: str = "") -> dict[str, Any]:
    """The fields of a dataclass that ``flat`` has behind ``prefix``."""
    found = {}
    for name, hint in typing.get_type_hints(kind).items():
        if prefix + name in flat:
            value = flat[prefix + name]
            if "Path" in str(hint) and value is not None:
                value = Path(value)
            found[name] = value
    return found


def differences(stored: Flat, config: Config) -> list[str]:
    """What keeps ``config`` from continuing a run, one phrase per field.

    ``stored`` is the flat configuration of the run. A field that is newer than the run
    had its default's effect.
    """
    was = to_dict(Config()) | stored
    now = to_dict(config)
    return [
        f"{flag(key)} was {was[key]!r}, is {now.get(key)!r}"
        for key in was
        if key not in FREE_ON_RESUME and was[key] != now.get(key)
    ]
