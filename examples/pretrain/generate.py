# SPDX-License-Identifier: Apache-2.0
"""Let a model continue a text."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tokenizers import Tokenizer

from .prepare.tokenizer import end_of_text


def generate(
    graphdef: nnx.GraphDef,
    params: optax.Params,
    tokenizer: Tokenizer,
    prompt: str,
    context: int,
    new_tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """``prompt`` and its continuation by at most ``new_tokens`` tokens; stops at the end of a file."""
    start = tokenizer.encode(prompt, add_special_tokens=False).ids or [end_of_text(tokenizer)]
    # The model reads a window of fixed length: one compilation, filled from the left, moved on once it is full.
    window = np.zeros(context, np.int32)
    filled = min(len(start), context)
    window[:filled] = start[-filled:]

    def step(carry: tuple[jax.Array, jax.Array], key: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        window_T, filled = carry
        logits_V = nnx.merge(graphdef, params)(window_T[None])[0, filled - 1].astype(jnp.float32)
        drawn = jax.random.categorical(key, logits_V / jnp.maximum(temperature, 1e-6))
        token = jnp.where(temperature > 0, drawn, jnp.argmax(logits_V)).astype(jnp.int32)
        moved_T = jnp.where(filled == context, jnp.roll(window_T, -1), window_T)
        position = jnp.minimum(filled, context - 1)
        return (moved_T.at[position].set(token), position + 1), token

    keys = jax.random.split(jax.random.key(seed), new_tokens)
    _, drawn = jax.jit(lambda carry, keys: jax.lax.scan(step, carry, keys))((window, jnp.int32(filled)), keys)
    tokens = np.asarray(drawn).tolist()
    end = end_of_text(tokenizer)
    tokens = tokens[: tokens.index(end)] if end in tokens else tokens
    # Decoded with the prompt: alone, a word's leading space would be lost under SentencePiece.
    return prompt + tokenizer.decode([*start, *tokens])[len(tokenizer.decode(start)) :]
