# SPDX-License-Identifier: Apache-2.0
"""Let a model continue a text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tokenizers import Tokenizer

from .prepare.tokenizer import end_of_text


@functools.partial(jax.jit, static_argnums=0)
def draw(
    graphdef: nnx.GraphDef,
    params: optax.Params,
    window_T: jax.Array,
    filled: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
) -> jax.Array:
    """Draw one token per key, each given the ``filled`` tokens in the window and those drawn before."""

    def step(carry: tuple[jax.Array, jax.Array], key: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        window_T, filled = carry
        logits_V = nnx.merge(graphdef, params)(window_T[None])[0, filled - 1].astype(jnp.float32)
        drawn = jax.random.categorical(key, logits_V / jnp.maximum(temperature, 1e-6))
        token = jnp.where(temperature > 0, drawn, jnp.argmax(logits_V)).astype(jnp.int32)
        moved_T = jnp.where(filled == len(window_T), jnp.roll(window_T, -1), window_T)
        position = jnp.minimum(filled, len(window_T) - 1)
        return (moved_T.at[position].set(token), position + 1), token

    return jax.lax.scan(step, (window_T, jnp.asarray(filled, jnp.int32)), keys)[1]


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

    keys = jax.random.split(jax.random.key(seed), new_tokens)
    drawn = draw(graphdef, params, window, filled, keys, temperature)
    tokens = np.asarray(drawn).tolist()
    end = end_of_text(tokenizer)
    tokens = tokens[: tokens.index(end)] if end in tokens else tokens
    # Decoded with the prompt: alone, a word's leading space would be lost under SentencePiece.
    return prompt + tokenizer.decode([*start, *tokens])[len(tokenizer.decode(start)) :]
