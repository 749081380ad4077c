# SPDX-License-Identifier: Apache-2.0
"""Tokens to logits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from examples.pretrain import models
from examples.pretrain.config import ModelConfig
from examples.pretrain.models import layers

SMALL = ModelConfig(layers=2, width=32, heads=4, mlp_width=48, context=16)
TOKENS = jax.random.randint(jax.random.key(1), (3, 16), 0, 100)


def build(config: ModelConfig = SMALL, dtype=jnp.float32, seed: int = 0) -> nnx.Module:
    return models.build(config, 100, dtype=jnp.dtype(dtype), seed=seed)


def logits_of(model: nnx.Module, tokens: jax.Array) -> jax.Array:
    return nnx.jit(lambda model, tokens: model(tokens))(model, tokens)


@pytest.mark.parametrize("family", sorted(models.FAMILIES))
def test_a_token_sees_only_what_stands_before_it(family):
    model = build(dataclasses.replace(SMALL, family=family))
    logits = logits_of(model, TOKENS)
    changed = logits_of(model, TOKENS.at[:, 10].add(1))
    assert logits.shape == (3, 16, 100)
    np.testing.assert_array_equal(logits[:, :10], changed[:, :10])
    assert (logits[:, 10] != changed[:, 10]).any()
    assert (logits[:, 15] != changed[:, 15]).any()


def test_a_shorter_text_gets_the_same_logits():
    model = build()
    # The same sums in float32, in another order for another shape: a few of 6e-8 on values below 1.
    np.testing.assert_allclose(logits_of(model, TOKENS)[:, :7], logits_of(model, TOKENS[:, :7]), atol=2e-6)


def test_llama_counts_its_parameters():
    depth, d, f, v = SMALL.layers, SMALL.width, SMALL.mlp_width, 100
    leaves = jax.tree.leaves(nnx.state(build(), nnx.Param))
    assert sum(leaf.size for leaf in leaves if leaf.ndim == 1) == (2 * depth + 1) * d
    assert sum(leaf.size for leaf in leaves if leaf.ndim == 2) == depth * (4 * d * d + 3 * d * f) + v * d


def test_rotary_positions_see_distances_only():
    query, key = jax.random.normal(jax.random.key(2), (2, 1, 1, 2, 8))
    turned = [layers.rotate(jnp.broadcast_to(x, (1, 20, 2, 8))) for x in (query, key)]
    scores = jnp.einsum("bthk,bshk->hts", *turned)
    # Angles of up to 19 rad carry 1e-6 of rounding, times |q| |k| of about 8, summed over 8 products.
    for distance in (0, 3, 11):
        along = jnp.diagonal(scores, offset=distance, axis1=1, axis2=2)
        np.testing.assert_allclose(along, jnp.broadcast_to(along[:, :1], along.shape), atol=1e-4)
    assert abs(scores[0, 0, 0] - scores[0, 0, 3]) > 1e-2
    np.testing.assert_allclose(jnp.linalg.norm(turned[0][0, 7]), jnp.linalg.norm(query), rtol=1e-6)
    assert layers.rotate(query.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_bfloat16_arithmetic_keeps_float32_parameters():
    model = build(dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype("float32")}
    logits = logits_of(model, TOKENS)
    assert logits.dtype == jnp.bfloat16
    # Some ten roundings of 2^-9 = 0.002 each, relative to logits whose standard deviation is 0.11 (see below).
    np.testing.assert_allclose(logits.astype(jnp.float32), logits_of(build(), TOKENS), atol=0.01)


def test_the_seed_makes_the_model():
    same, again, other = (nnx.to_pure_dict(nnx.state(build(seed=s), nnx.Param)) for s in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, same, again)
    assert (same["tokens"]["embedding"] != other["tokens"]["embedding"]).any()


def test_an_untrained_model_knows_nothing():
    # The tied head knows the token it sees, so the targets are others. Logits then have standard deviation
    # 0.02 sqrt(32) = 0.11, the mean over 48 targets 0.11 / sqrt(48) = 0.016: four of those, and 0.006 for the variance.
    loss = optax.softmax_cross_entropy_with_integer_labels(logits_of(build(), TOKENS), (TOKENS + 37) % 100).mean()
    assert abs(float(loss) - np.log(100)) < 0.07
