# SPDX-License-Identifier: Apache-2.0
"""Model families: one short file each over the layers in ``layers``. A model maps tokens (B, T) to logits (B, T, V)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx

from ..config import ModelConfig, check_model
from .gpt2 import GPT2
from .llama import LLaMA
from .qwen3 import Qwen3

FAMILIES = {"gpt2": GPT2, "llama": LLaMA, "qwen3": Qwen3}


def build(config: ModelConfig, vocabulary: int, *, dtype: jnp.dtype, seed: int) -> nnx.Module:
    """A freshly initialised model with ``vocabulary`` rows in its table; the same for every optimizer at a seed.

    Raises:
        RunError: where the family cannot be built that way, or cuDNN is asked for and cannot run.
    """
    check_model(config)
    return FAMILIES[config.family](config, vocabulary, dtype=dtype, rngs=nnx.Rngs(seed))


def shapes(config: ModelConfig, vocabulary: int) -> dict[str, Any]:
    """The parameters of ``build`` as ``jax.ShapeDtypeStruct``s: nothing is allocated, whatever the size."""
    anywhere = dataclasses.replace(config, attention="xla")
    model = nnx.eval_shape(lambda: build(anywhere, vocabulary, dtype=jnp.dtype("float32"), seed=0))
    return nnx.to_pure_dict(nnx.state(model))
