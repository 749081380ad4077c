# SPDX-License-Identifier: Apache-2.0
"""The language models: GPT-2, LLaMA and Qwen3.

They map tokens (B, T) to logits (B, T, V).
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx

from ..config import ModelConfig
from .transformer import Transformer


def build(
    config: ModelConfig, vocabulary: int, *, dtype: jnp.dtype, seed: int
) -> nnx.Module:
    """An initialized model with ``vocabulary`` rows in its table.

    It is the same for every optimizer at a seed.
    """
    return Transformer(config, vocabulary, dtype=dtype, rngs=nnx.Rngs(seed))


def shapes(config: ModelConfig, vocabulary: int) -> dict[str, Any]:
    """The parameters of ``build`` as ``jax.ShapeDtypeStruct``s, without allocation."""
    anywhere = dataclasses.replace(config, attention="xla")
    model = nnx.eval_shape(
        lambda: build(anywhere, vocabulary, dtype=jnp.dtype("float32"), seed=0)
    )
    return nnx.to_pure_dict(nnx.state(model))
