# SPDX-License-Identifier: Apache-2.0
"""Tokens to logits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from examples.pretrain import configs, models
from examples.pretrain.config import ModelConfig
from examples.pretrain.evaluate import token_losses
from examples.pretrain.models import transformer as layers
from normpre_optax import explain
from tests import cases

SMALL = ModelConfig(layers=2, width=32, heads=4, mlp_width=48, context=16)
MODELS = {
    "gpt2": dataclasses.replace(SMALL, family="gpt2"),
    "gpt2 with biases": dataclasses.replace(
        SMALL,
        family="gpt2",
        bias=True,
        tied_head=False,
    ),
    "llama": SMALL,
    "qwen3": dataclasses.replace(
        SMALL,
        family="qwen3",
        kv_heads=2,
        head_width=16,
        tied_head=False,
        rotary_base=1e6,
    ),
}
TOKENS = jax.random.randint(jax.random.key(1), (3, 16), 0, 100)
all_models = pytest.mark.parametrize("config", MODELS.values(), ids=list(MODELS))


def build(config: ModelConfig = SMALL, dtype=jnp.float32, seed: int = 0) -> nnx.Module:
    return models.build(config, 100, dtype=jnp.dtype(dtype), seed=seed)


def parameters(model: nnx.Module):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


@nnx.jit
def logits_of(model: nnx.Module, tokens: jax.Array) -> jax.Array:
    return model(tokens)


@functools.cache
def loss_and_gradient(config: ModelConfig):
    graphdef, variables = nnx.split(build(config))
    tokens = jnp.concatenate([TOKENS, TOKENS[:, :1]], axis=1)

    def loss_of(params):
        return token_losses(graphdef, params, tokens).mean()

    compiled = jax.jit(jax.value_and_grad(loss_of))
    return jax.device_get(compiled(nnx.to_pure_dict(variables)))


@all_models
def test_logits_are_causal_and_those_of_the_seed(config):
    model = build(config)
    logits = logits_of(model, TOKENS)
    changed = logits_of(model, TOKENS.at[:, 10].add(1))
    assert logits.shape == (3, 16, 100)
    np.testing.assert_array_equal(logits[:, :10], changed[:, :10])
    assert (logits[:, 10] != changed[:, 10]).any()
    assert (logits[:, 15] != changed[:, 15]).any()
    assert (logits_of(build(config, seed=1), TOKENS) != logits).any()


@all_models
def test_logits_in_bfloat16(config):
    """The parameters stay in float32."""
    model = build(config)
    half = build(config, dtype=jnp.bfloat16)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(parameters(half))}
    assert dtypes == {jnp.dtype("float32")}
    jax.tree.map(np.testing.assert_array_equal, parameters(half), parameters(model))
    logits = logits_of(half, TOKENS)
    assert logits.dtype == jnp.bfloat16
    # Some ten roundings of 2^-9 = 0.002 each, relative to logits whose standard
    # deviation is 0.11 (see below).
    expected = logits_of(model, TOKENS)
    np.testing.assert_allclose(logits.astype(jnp.float32), expected, atol=0.01)


def test_rotary_positions_keep_the_dtype():
    heads = jnp.ones((1, 2, 2, 8), "bfloat16")
    assert layers.rotate(heads, 1e4).dtype == jnp.bfloat16


@all_models
def test_initial_logits_know_nothing(config):
    # The tied head knows the token it sees, so the targets are others.
    logits = logits_of(build(config), TOKENS)
    targets = (TOKENS + 37) % 100
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    # Logits have standard deviation 0.02 sqrt(32) = 0.11, the mean over 48 targets
    # 0.11 / sqrt(48) = 0.016: four of those, and 0.006 for the variance.
    assert abs(float(losses.mean()) - np.log(100)) < 0.07


def test_a_text_shorter_than_the_context():
    model = build()
    expected = logits_of(model, TOKENS)[:, :7]
    # The same sums in float32, in another order for another shape: a few of 6e-8 on
    # values below 1.
    np.testing.assert_allclose(expected, logits_of(model, TOKENS[:, :7]), atol=2e-6)


def test_a_text_beyond_the_learned_positions_is_refused():
    with pytest.raises((TypeError, ValueError), match="16"):
        logits_of(build(MODELS["gpt2"]), jnp.zeros((1, 17), jnp.int32))


def with_stacked_blocks(params: dict) -> dict:
    """The same parameters as those of a model that scans over its layers."""
    blocks = jax.tree.map(lambda *leaves: np.stack(leaves), *params["blocks"].values())
    return params | {"blocks": blocks}


SCAN = {"scan_layers": True}
REMAT = {"remat": True}


@cases.rows(
    "family form",
    ("llama", SCAN | REMAT),
    pytest.param("llama", SCAN, marks=pytest.mark.slow),
    pytest.param("llama", REMAT, marks=pytest.mark.slow),
    pytest.param("gpt2 with biases", SCAN | REMAT, marks=pytest.mark.slow),
    pytest.param("qwen3", SCAN | REMAT, marks=pytest.mark.slow),
)
def test_scan_and_remat_change_no_number(family, form):
    config = MODELS[family]
    other = dataclasses.replace(config, **form)
    start = jax.device_get(parameters(build(config)))
    other_start = jax.device_get(parameters(build(other)))
    loss, gradient = loss_and_gradient(config)
    other_loss, other_gradient = loss_and_gradient(other)
    if other.scan_layers:
        start = with_stacked_blocks(start)
        gradient = with_stacked_blocks(gradient)
    jax.tree.map(np.testing.assert_array_equal, start, other_start)
    # Rounding only: the compiler fuses the forms differently. Gradients are below 1,
    # losses near log(100) = 4.6.
    np.testing.assert_allclose(loss, other_loss, atol=2e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        gradient,
        other_gradient,
    )


@all_models
def test_the_optimizer_finds_the_matrices(config):
    per_layer = 7
    if config.family == "gpt2":
        per_layer = 4
    for scan_layers in (False, True):
        form = dataclasses.replace(config, scan_layers=scan_layers)
        shapes = models.shapes(form, 100)
        table, *_ = explain(shapes, every_layer=True).split("\n\n")
        _, *rows = table.splitlines()
        assert len(rows) == len(jax.tree.leaves(shapes))
        for row in rows:
            path, *rest = row.split()
            hidden = path.startswith("blocks/") and path.endswith("/kernel")
            assert ("matrix" in rest) == hidden, path
            assert ("adamw" in rest) == (not hidden), path
        assert f"{per_layer * config.layers} matrices" in explain(shapes)


@all_models
def test_the_shapes_are_those_of_the_model(config):
    real = parameters(build(config))
    assert jax.eval_shape(lambda: real) == models.shapes(config, 100)


# The two Qwen3 are as large as the published ones.
SIZES = {
    "first_run": 658_048,
    "nano": 168_448,
    "tiny": 37_024,
    "gpt2_2m": 1_906_080,
    "gpt2_10m": 10_080_320,
    "gpt2_small": 124_373_760,
    "gpt2_small_python": 124_373_760,
    "llama_130m": 134_105_856,
    "llama_350m": 367_969_280,
    "llama_1p3b": 1_339_082_752,
    "qwen3_0p6b": 596_049_920,
    "qwen3_1p7b": 1_720_574_976,
}


def test_named_configurations_have_the_size_that_the_page_states():
    assert SIZES.keys() == configs.CONFIGS.keys()
    for name, expected in SIZES.items():
        config = configs.load(name)
        # Traces one layer.
        stacked = dataclasses.replace(config.model, scan_layers=True)
        vocabulary = config.model.vocabulary or config.vocabulary
        shapes = models.shapes(stacked, vocabulary)
        size = sum(leaf.size for leaf in jax.tree.leaves(shapes))
        assert size == expected, name


def test_initial_spread():
    config = dataclasses.replace(MODELS["gpt2 with biases"], layers=8)
    params = parameters(build(config))
    block = params["blocks"][3]
    # Standard deviations of at least 512 draws: 1 / sqrt(2 * 512) = 3.1 %, four of
    # those.
    tolerance = 0.125
    stds = {
        "positions": params["positions"]["embedding"].std(),
        "tokens": params["tokens"]["embedding"].std(),
        "qkv": block["attention"]["qkv"]["kernel"].std(),
    }
    for name, std in stds.items():
        np.testing.assert_allclose(std, 0.02, rtol=tolerance, err_msg=name)
    # Of 8 layers, smaller by sqrt(2 * 8).
    out = block["attention"]["out"]["kernel"].std()
    down = block["mlp"]["down"]["kernel"].std()
    np.testing.assert_allclose(out, 0.02 / 4, rtol=tolerance)
    np.testing.assert_allclose(down, 0.02 / 4, rtol=tolerance)
    assert not block["mlp"]["up"]["bias"].any()


def test_initial_spread_of_other_settings():
    config = dataclasses.replace(MODELS["gpt2 with biases"], layers=8)
    wide = dataclasses.replace(config, hidden_std=0.1, scaled_residuals=False)
    params = parameters(build(config))
    other = parameters(build(wide))
    np.testing.assert_allclose(
        other["tokens"]["embedding"], params["tokens"]["embedding"]
    )
    ratios = {
        ("attention", "qkv"): 5,
        ("mlp", "up"): 5,
        ("attention", "out"): 20,
        ("mlp", "down"): 20,
    }
    for (branch, name), ratio in ratios.items():
        found = other["blocks"][3][branch][name]["kernel"]
        kernel = params["blocks"][3][branch][name]["kernel"]
        np.testing.assert_allclose(found, ratio * kernel, rtol=1e-5)


class Device:
    """The attributes of a device that are looked at."""

    def __init__(self, platform_version: str, compute_capability: str):
        self.client = self
        self.platform_version = platform_version
        self.compute_capability = compute_capability


@cases.rows(
    "device width dtype expected",
    (Device("cuda 12090", "9.0"), 128, "bfloat16", "cudnn"),
    (Device("cuda 12090", "10.3"), 64, "float16", "cudnn"),
    (Device("cuda 12090", "7.5"), 64, "bfloat16", "xla"),
    (Device("rocm 60300", "gfx942"), 64, "bfloat16", "xla"),
    (Device("cpu", ""), 64, "bfloat16", "xla"),
    (Device("cuda 12090", "8.0"), 64, "float32", "xla"),
    (Device("cuda 12090", "8.0"), 142, "bfloat16", "xla"),
    (Device("cuda 12090", "8.0"), 36, "bfloat16", "xla"),
)
def test_cudnn_is_used_where_it_runs(monkeypatch, device, width, dtype, expected):
    monkeypatch.setattr(jax, "local_devices", lambda: [device])

    def chosen(attention):
        config = dataclasses.replace(SMALL, head_width=width, attention=attention)
        return layers.attention_implementation(config, jnp.dtype(dtype))

    assert chosen("auto") == expected
    assert chosen("xla") == "xla"
