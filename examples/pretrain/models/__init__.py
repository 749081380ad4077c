# SPDX-License-Identifier: Apache-2.0
"""Model families: one short file each over the layers in ``layers``. A model maps tokens (B, T) to logits (B, T, V)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx

from ..config import ModelConfig, RunError, flag
from .gpt2 import GPT2
from .layers import head_width
from .llama import LLaMA
from .qwen3 import Qwen3

FAMILIES = {"gpt2": GPT2, "llama": LLaMA, "qwen3": Qwen3}
OWN_FIELDS = {"kv_heads": "qwen3", "head_width": "qwen3", "bias": "gpt2"}


def build(config: ModelConfig, vocabulary: int, *, dtype: jnp.dtype, seed: int) -> nnx.Module:
    """A freshly initialised model with ``vocabulary`` rows in its table; the same for every optimizer at a seed.

    Raises:
        RunError: where the family cannot be built that way, or cuDNN is asked for and cannot run.
    """
    check(config)
    return FAMILIES[config.family](config, vocabulary, dtype=dtype, rngs=nnx.Rngs(seed))


def shapes(config: ModelConfig, vocabulary: int) -> dict[str, Any]:
    """The parameters of ``build`` as ``jax.ShapeDtypeStruct``s: nothing is allocated, whatever the size."""
    anywhere = dataclasses.replace(config, attention="xla")
    model = nnx.eval_shape(lambda: build(anywhere, vocabulary, dtype=jnp.dtype("float32"), seed=0))
    return nnx.to_pure_dict(nnx.state(model))


def check(config: ModelConfig) -> None:
    """Refuse what the family does not have.

    Raises:
        RunError: naming the flag.
    """
    for name, family in OWN_FIELDS.items():
        if getattr(config, name) and config.family != family:
            raise RunError(f"{flag('model.' + name)} is a field of {family}, the model is {config.family}")
    if config.heads % (config.kv_heads or config.heads):
        raise RunError(f"--model.kv-heads {config.kv_heads} must divide --model.heads {config.heads}")
    if config.family == "qwen3" and head_width(config) % 2:
        raise RunError(f"--model.head-width must be even, got {head_width(config)}")
