# SPDX-License-Identifier: Apache-2.0
"""Refuse options that cannot be, before anything is computed or written."""

import math
import sys
from collections.abc import Mapping
from pathlib import Path

from .config import Config, ModelConfig, RunError
from .flat import flag, to_dict

HUGE = sys.float_info.max
TINY = sys.float_info.min
MOST = 2**31 - 1
BELOW_ONE = math.nextafter(1, 0)
# Least and greatest value; other integers are in 1..MOST.
RANGES: dict[str, tuple[float, float]] = {
    "weight_decay": (0, HUGE),
    "temperature": (0, HUGE),
    "learning_rate": (TINY, HUGE),
    "adam_learning_rate": (TINY, HUGE),
    "clip_norm": (TINY, HUGE),
    "model.rotary_base": (TINY, HUGE),
    "model.norm_epsilon": (TINY, HUGE),
    "model.hidden_std": (TINY, HUGE),
    "adam_b1": (0, BELOW_ONE),
    "adam_b2": (0, BELOW_ONE),
    "process": (0, MOST),
    "warmup_steps": (0, MOST),
    "seed": (0, MOST),
    "model.layers": (1, 10_000),
    "seeds": (1, 10_000),
    "jobs": (1, 10_000),
    "steps": (1, 10**8),
    "sample_tokens": (0, 65_536),
    "vocabulary": (257, 65_536),  # 257: the bytes and a separator
    "validation_percent": (1e-3, 50),
}
# Options of the model that only one family has.
FAMILY_OF = {"kv_heads": "qwen3", "head_width": "qwen3", "bias": "gpt2"}


def check_ranges(flat: Mapping[str, object]) -> None:
    """Refuse numbers outside ``RANGES``.

    Raises:
        RunError: naming the flag and what it may be.
    """
    for key, value in flat.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        default = (-math.inf, math.inf)
        if isinstance(value, int):
            default = (1, MOST)
        low, high = RANGES.get(key, default)
        if not low <= value <= high:
            allowed = allowed_values(value, low, high)
            raise RunError(f"{flag(key)} must be {allowed}, got {value}")


def allowed_values(value: float, low: float, high: float) -> str:
    """What a number must be that may not be ``value``, in words."""
    if low == TINY:
        return "a positive number"
    if high == BELOW_ONE:
        return f"at least {low:g} and below 1"
    if high == HUGE or value < low == 1:
        return f"at least {low:g}"
    return f"in {low:g}..{high:.10g}"


def check(config: Config) -> None:
    """Refuse what cannot run.

    Raises:
        RunError: naming the flag and what it may be.
    """
    check_ranges(to_dict(config))
    check_model(config.model)
    context = config.model.context
    if config.micro_batch and config.batch_size % config.micro_batch:
        raise RunError(
            f"--micro-batch {config.micro_batch} must divide --batch-size"
            f" {config.batch_size}"
        )
    if config.validation_tokens < context:
        raise RunError(
            f"--validation-tokens {config.validation_tokens} must hold one sequence:"
            f" --model.context is {context}"
        )
    name = config.run_name
    if Path(name).name != name or name in {".", ".."}:
        raise RunError(f"--name must be a plain folder name, got {name!r}")
    if config.resume and config.overwrite:
        raise RunError(
            "--resume and --overwrite exclude each other: continue the run, or"
            " replace it"
        )


def check_model(model: ModelConfig) -> None:
    """Refuse fields that the family does not have, and heads that do not fit.

    Raises:
        RunError: naming the flag and what it may be.
    """
    for name, family in FAMILY_OF.items():
        if getattr(model, name) and model.family != family:
            raise RunError(
                f"{flag('model.' + name)} is an option of {family}, but the model is"
                f" {model.family}"
            )
    if model.head_width is None:
        check_heads(model)
    elif model.head_width % 2:
        raise RunError(f"--model.head-width must be even, got {model.head_width}")
    if model.kv_heads and model.heads % model.kv_heads:
        raise RunError(
            f"--model.kv-heads {model.kv_heads} must divide --model.heads {model.heads}"
        )


def check_heads(model: ModelConfig) -> None:
    """Refuse heads that do not divide the width."""
    multiple, parts = 2, "even"  # rotary positions rotate pairs of dimensions
    if model.family == "gpt2":
        multiple, parts = 1, "equal"
    if model.width % (model.heads * multiple):
        raise RunError(
            f"--model.heads {model.heads} must divide --model.width {model.width} into"
            f" {parts} parts"
        )
