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
    """Mean loss in nats per token, and in bits per byte of text.

    Bits per byte do not depend on the vocabulary.
    """

    loss: float
    bits_per_byte: float


def token_losses(
    graphdef: nnx.GraphDef, params: optax.Params, tokens_BxS: jax.Array
) -> jax.Array:
    """Cross-entropy (B, T) in nats, float32, of every next token; S = T + 1.

    It is 0 where a sequence is padded (-1).
    """
    inputs_BxT = jnp.maximum(tokens_BxS[:, :-1], 0)
    targets_BxT = tokens_BxS[:, 1:]
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
    """A function from parameters, placed as ``layout`` says, to their ``Score``.

    Args:
        graphdef: structure of the model.
        sequences_NxS: what is predicted; -1 is padding.
        bytes_per_token_V: bytes of text that each token stands for.
        layout: where the arrays are.
        batch_size: sequences per forward pass, at most.
    """

    def sequence_losses(params: optax.Params, tokens_BxS: jax.Array) -> jax.Array:
        return whole(token_losses(graphdef, params, tokens_BxS).sum(axis=1))

    losses_of = layout.bound(jax.jit(sequence_losses))
    count, length = sequences_NxS.shape
    devices = layout.mesh.size
    size = math.ceil(min(batch_size, count) / devices) * devices
    # The last batch is filled with sequences from the start, which do not count.
    batches = np.resize(sequences_NxS, (math.ceil(count / size), size, length))
    targets_NxT = sequences_NxS[:, 1:]
    targets = targets_NxT[targets_NxT >= 0]
    text_bytes = float(np.asarray(bytes_per_token_V)[targets].sum())

    def evaluate(params: optax.Params) -> Score:
        # All batches are started before the first is waited for.
        losses = [losses_of(params, layout.known(batch, BATCH)) for batch in batches]
        losses_N = np.concatenate([np.asarray(x, np.float64) for x in losses])[:count]
        total = losses_N.sum()
        return Score(total / len(targets), total / (text_bytes * np.log(2)))

    return evaluate
