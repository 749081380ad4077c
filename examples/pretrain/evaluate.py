# SPDX-License-Identifier: Apache-2.0
"""Score a model on a fixed set of sequences."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

EVALUATION_BATCH = 32


@dataclass(frozen=True)
class Score:
    """Mean loss in nats per token, and the same in bits per byte of text, which vocabularies do not change."""

    loss: float
    bits_per_byte: float


def token_losses(graphdef: nnx.GraphDef, params: optax.Params, tokens_BxS: jax.Array) -> jax.Array:
    """Cross-entropy (B, T) in nats, float32, of every next token; S = T + 1."""
    logits_BxTxV = nnx.merge(graphdef, params)(tokens_BxS[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV, tokens_BxS[:, 1:])


def make_evaluate(
    graphdef: nnx.GraphDef, sequences_NxS: np.ndarray, bytes_per_token: list[int]
) -> Callable[[optax.Params], Score]:
    """A function from parameters to their ``Score`` on ``sequences``."""
    sequence_losses = jax.jit(lambda params, tokens_BxS: token_losses(graphdef, params, tokens_BxS).mean(axis=1))
    count, length = sequences_NxS.shape
    size = min(EVALUATION_BATCH, count)
    padded = np.concatenate([sequences_NxS, sequences_NxS[: -count % size]])
    batches = padded.reshape(-1, size, length)
    text_bytes = int(np.asarray(bytes_per_token)[sequences_NxS[:, 1:]].sum())

    def evaluate(params: optax.Params) -> Score:
        losses = [sequence_losses(params, batch) for batch in batches]
        total = np.concatenate([np.asarray(x, np.float64) for x in losses])[:count].sum() * (length - 1)
        return Score(total / (count * (length - 1)), total / (text_bytes * np.log(2)))

    return evaluate
