# SPDX-License-Identifier: Apache-2.0
"""Model families: one short file each over the layers in ``layers``. A model maps tokens (B, T) to logits (B, T, V)."""

import jax.numpy as jnp
from flax import nnx

from ..config import ModelConfig
from .llama import LLaMA

FAMILIES = {"llama": LLaMA}


def build(config: ModelConfig, vocabulary: int, *, dtype: jnp.dtype, seed: int) -> nnx.Module:
    """A freshly initialised model; the same for every optimizer at the same seed."""
    return FAMILIES[config.family](config, vocabulary, dtype=dtype, rngs=nnx.Rngs(seed))
