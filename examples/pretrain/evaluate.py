# SPDX-License-Identifier: Apache-2.0
"""Score a model on a fixed set of sequences."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from .mesh import BATCH, Layout, whole

EVALUATION_BATCH = 32


class Score(NamedTuple):
    """Mean loss in nats per token, and in bits per byte of text, which does not depend
    on the vocabulary.
    """

    loss: float
    bits_per_byte: float


def token_losses(
    graphdef: nnx.GraphDef, params: optax.Params, tokens_BxS: jax.Array
) -> jax.Array:
    """Cross-entropy (B, T) in nats, float32, of every next token; S = T + 1; 0 where a
    sequence is padded (-1).
    """
    inputs_BxT, targets_BxT = jnp.maximum(tokens_BxS[:, :-1], 0), tokens_BxS[:, 1:]
    logits_BxTxV = nnx.merge(graphdef, params)(inputs_BxT).astype(jnp.float32)
    losses_BxT = optax.softmax_cross_entropy_with_integer_labels(
        logits_BxTxV, jnp.maximum(targets_BxT, 0)
    )
    return jnp.where(targets_BxT >= 0, losses_BxT, 0)


def predictions(tokens_BxS: jax.Array) -> jax.Array:
    """How many tokens of a batch are predicted, float32, at least 1."""
    return jnp.maximum((tokens_BxS[:, 1:] >= 0).sum(), 1).astype(jnp.float32)


def make_evaluate(
    graphdef: nnx.GraphDef,
    sequences_NxS: np.ndarray,
    bytes_per_token_V: np.ndarray,
    layout: Layout,
    batch_size: int = EVALUATION_BATCH,
) -> Callable[[optax.Params], Score]:
    """A function from parameters, placed as ``layout`` says, to their ``Score`` on
    ``sequences``.
    """
    losses_of = jax.jit(
        lambda params, tokens_BxS: whole(
            token_losses(graphdef, params, tokens_BxS).sum(axis=1)
        )
    )
    count, length = sequences_NxS.shape
    size = math.ceil(min(batch_size, count) / layout.mesh.size) * layout.mesh.size
    batches = np.resize(
        sequences_NxS, (math.ceil(count / size), size, length)
    )  # repeats from the start at the end
    targets = sequences_NxS[:, 1:][sequences_NxS[:, 1:] >= 0]
    text_bytes = float(np.asarray(bytes_per_token_V)[targets].sum())

    def evaluate(params: optax.Params) -> Score:
        losses = [
            layout.bound(losses_of)(params, layout.known(batch, BATCH))
            for batch in batches
        ]
        total = np.concatenate([np.asarray(x, np.float64) for x in losses])[
            :count
        ].sum()
        return Score(total / len(targets), total / (text_bytes * np.log(2)))

    return evaluate
