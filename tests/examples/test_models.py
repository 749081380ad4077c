# SPDX-License-Identifier: Apache-2.0
"""Tokens to logits."""

import dataclasses
import functools
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from examples.pretrain import configs, models
from examples.pretrain.config import ModelConfig, RunError
from examples.pretrain.evaluate import token_losses
from examples.pretrain.models import layers
from normpre_optax import explain

SMALL = ModelConfig(layers=2, width=32, heads=4, mlp_width=48, context=16)
MODELS = {
    "gpt2": dataclasses.replace(SMALL, family="gpt2"),
    "gpt2 with biases": dataclasses.replace(SMALL, family="gpt2", bias=True, tied_head=False),
    "llama": SMALL,
    "llama untied": dataclasses.replace(SMALL, tied_head=False, scaled_residuals=False),
    "qwen3": dataclasses.replace(SMALL, family="qwen3", kv_heads=2, head_width=16),
    "qwen3 untied": dataclasses.replace(SMALL, family="qwen3", tied_head=False, rotary_base=1e6),
}
TOKENS = jax.random.randint(jax.random.key(1), (3, 16), 0, 100)
FAMILIES = {name: MODELS[name] for name in ("gpt2 with biases", "llama", "qwen3")}  # one each, where tests compile long
all_models = pytest.mark.parametrize("config", MODELS.values(), ids=list(MODELS))
all_families = pytest.mark.parametrize("config", FAMILIES.values(), ids=list(FAMILIES))


def build(config: ModelConfig = SMALL, dtype=jnp.float32, seed: int = 0) -> nnx.Module:
    return models.build(config, 100, dtype=jnp.dtype(dtype), seed=seed)


def parameters(model: nnx.Module):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


@nnx.jit
def logits_of(model: nnx.Module, tokens: jax.Array) -> jax.Array:
    return model(tokens)


def stacked(blocks):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *blocks.values())


@functools.cache
def loss_and_gradient(config: ModelConfig):
    graphdef, variables = nnx.split(build(config))
    tokens = jnp.concatenate([TOKENS, TOKENS[:, :1]], axis=1)
    loss = jax.jit(jax.value_and_grad(lambda params: token_losses(graphdef, params, tokens).mean()))
    return jax.device_get(loss(nnx.to_pure_dict(variables)))


@all_models
def test_a_token_sees_only_what_stands_before_it(config):
    model = build(config)
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


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("llama", {"scan_layers": True, "remat": True}),
        ("llama", {"scan_layers": True}),
        ("llama", {"remat": True}),
        *(
            pytest.param(family, {"scan_layers": True, "remat": True}, marks=pytest.mark.slow)
            for family in FAMILIES
            if family != "llama"
        ),
    ],
)
def test_scan_and_remat_change_no_number(family, form):
    config = FAMILIES[family]
    other = dataclasses.replace(config, **form)
    start, other_start = jax.device_get((parameters(build(config)), parameters(build(other))))
    (loss, gradient), (other_loss, other_gradient) = loss_and_gradient(config), loss_and_gradient(other)
    if other.scan_layers:
        start = start | {"blocks": stacked(start["blocks"])}
        gradient = gradient | {"blocks": stacked(gradient["blocks"])}
    jax.tree.map(np.testing.assert_array_equal, start, other_start)
    # Rounding only: the compiler fuses the forms differently. Gradients are below 1, losses near log(100) = 4.6.
    np.testing.assert_allclose(loss, other_loss, atol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradient, other_gradient)


@all_families
def test_every_parameter_has_a_gradient(config):
    loss, gradient = loss_and_gradient(config)
    assert np.isfinite(loss)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name.endswith("qkv/bias"):  # a constant added to every key moves all scores of a query alike: no effect
            leaf = np.delete(leaf, np.s_[config.width : 2 * config.width])
        if not name.startswith("tokens/"):  # not every token occurs
            assert (np.abs(leaf) > 1e-9).mean() > 0.99, name
        assert np.isfinite(leaf).all()
        assert np.abs(leaf).max() > 1e-6, name


@all_models
@pytest.mark.parametrize("scan_layers", [False, True])
def test_hidden_matrices_and_nothing_else_are_matrices_to_the_optimizer(config, scan_layers):
    shapes = models.shapes(dataclasses.replace(config, scan_layers=scan_layers), 100)
    rows = [line.split() for line in explain(shapes, every_layer=True).partition("\n\n")[0].splitlines()[1:]]
    assert len(rows) == len(jax.tree.leaves(shapes))
    for path, *rest in rows:
        hidden = path.startswith("blocks/") and path.endswith("/kernel")
        assert ("matrix" in rest, "adamw" in rest) == (hidden, not hidden), path
    each = 4 if config.family == "gpt2" else 7
    assert f"{each * config.layers} matrices" in explain(shapes).splitlines()[-2]


def count(config: ModelConfig, vocabulary: int) -> int:
    d, f = config.width, config.mlp_width
    k = config.head_width or d // config.heads
    inside, shared = config.heads * k, (config.kv_heads or config.heads) * k
    outside = vocabulary * d * (1 if config.tied_head else 2) + d  # tables and the last norm
    if config.family == "gpt2":
        biases = (4 * d + f + d) + 2 * d if config.bias else 0
        block = (4 * d * d + 2 * d * f) + 2 * d + biases
        outside += config.context * d + (d if config.bias else 0)
    else:
        block = (2 * d * inside + 2 * d * shared + 3 * d * f) + 2 * d
        block += 2 * k if config.family == "qwen3" else 0
    return config.layers * block + outside


# The two Qwen3 are as large as the published ones.
SIZES = {
    "first_run": 658_048,
    "gpt2_10m": 10_080_320,
    "gpt2_2m": 1_906_080,
    "gpt2_30m": 29_630_976,
    "gpt2_small": 124_373_760,
    "gpt2_small_python": 124_373_760,
    "llama_130m": 134_105_856,
    "llama_350m": 367_969_280,
    "llama_1p3b": 1_339_082_752,
    "nano": 168_448,
    "qwen3_0p6b": 596_049_920,
    "qwen3_1p7b": 1_720_574_976,
    "tiny": 37_024,
}
HIDDEN_MATRICES = {"gpt2_small": 48, "llama_130m": 84, "llama_350m": 168, "llama_1p3b": 168, "qwen3_0p6b": 196}


def size(shapes) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize("name", configs.NAMES)
def test_named_configurations_have_the_size_they_state(name):
    config = configs.load(name)
    vocabulary = config.model.vocabulary or config.data.vocabulary
    shapes = models.shapes(config.model, vocabulary)
    assert size(shapes) == count(config.model, vocabulary) == SIZES[name]
    if name in HIDDEN_MATRICES:
        assert f" {HIDDEN_MATRICES[name]} matrices" in explain(shapes).splitlines()[-2]
    text = importlib.import_module(f"{configs.__name__}.{name}").__doc__ or ""
    for stated in re.findall(r"([\d,.]+) M parameters", text):
        assert stated == f"{size(shapes) / 1e6:,.2f}"
    for stated in re.findall(r"([\d,]{5,}) parameters", text):
        assert stated == f"{size(shapes):,}"


@all_models
def test_the_shapes_are_those_of_the_model(config):
    shapes = models.shapes(config, 100)
    assert size(shapes) == count(config, 100)
    real = parameters(build(config))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), real) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)


def test_initial_spread():
    config = dataclasses.replace(MODELS["gpt2 with biases"], layers=8, width=64)
    params = parameters(build(config))
    block = params["blocks"][3]
    # Standard deviations of at least 1,024 draws: 1 / sqrt(2 * 1024) = 2.2 %, four of those.
    for table in (params["positions"]["embedding"], params["tokens"]["embedding"], block["attention"]["qkv"]["kernel"]):
        np.testing.assert_allclose(table.std(), 0.02, rtol=0.09)
    for branch, last in (("attention", "out"), ("mlp", "down")):
        np.testing.assert_allclose(block[branch][last]["kernel"].std(), 0.02 / 4, rtol=0.09)
    same = parameters(build(dataclasses.replace(config, scaled_residuals=False)))["blocks"][3]
    np.testing.assert_allclose(same["mlp"]["down"]["kernel"].std(), 0.02, rtol=0.09)
    longer = parameters(build(dataclasses.replace(config, hidden_std=0.1)))
    np.testing.assert_allclose(longer["tokens"]["embedding"], params["tokens"]["embedding"])
    for branch, kernels in longer["blocks"][3].items():
        for name in kernels if branch in {"attention", "mlp"} else ():
            np.testing.assert_allclose(kernels[name]["kernel"], 5 * block[branch][name]["kernel"], rtol=1e-5)
    assert not block["mlp"]["up"]["bias"].any()


def test_rotary_positions_see_distances_only():
    query, key = jax.random.normal(jax.random.key(2), (2, 1, 1, 2, 8))
    turned = [layers.rotate(jnp.broadcast_to(x, (1, 20, 2, 8)), 10_000.0) for x in (query, key)]
    scores = jnp.einsum("bthk,bshk->hts", *turned)
    # Angles of up to 19 rad carry 1e-6 of rounding, times |q| |k| of about 8, summed over 8 products.
    for distance in (0, 3, 11):
        along = jnp.diagonal(scores, offset=distance, axis1=1, axis2=2)
        np.testing.assert_allclose(along, jnp.broadcast_to(along[:, :1], along.shape), atol=1e-4)
    assert abs(scores[0, 0, 0] - scores[0, 0, 3]) > 1e-2
    np.testing.assert_allclose(jnp.linalg.norm(turned[0][0, 7]), jnp.linalg.norm(query), rtol=1e-6)
    assert layers.rotate(query.astype(jnp.bfloat16), 10_000.0).dtype == jnp.bfloat16


@all_families
def test_bfloat16_arithmetic_keeps_float32_parameters(config):
    model = build(config, dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype("float32")}
    logits = logits_of(model, TOKENS)
    assert logits.dtype == jnp.bfloat16
    # Some ten roundings of 2^-9 = 0.002 each, relative to logits whose standard deviation is 0.11 (see below).
    np.testing.assert_allclose(logits.astype(jnp.float32), logits_of(build(config), TOKENS), atol=0.01)
    scanned = build(dataclasses.replace(config, scan_layers=True), dtype=jnp.bfloat16)
    np.testing.assert_allclose(logits.astype(jnp.float32), logits_of(scanned, TOKENS).astype(jnp.float32), atol=0.01)


@all_models
def test_the_seed_makes_the_model(config):
    same, again, other = (parameters(build(config, seed=s)) for s in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, same, again)
    assert (same["tokens"]["embedding"] != other["tokens"]["embedding"]).any()


@all_models
def test_an_untrained_model_knows_nothing(config):
    # The tied head knows the token it sees, so the targets are others. Logits then have standard deviation
    # 0.02 sqrt(32) = 0.11, the mean over 48 targets 0.11 / sqrt(48) = 0.016: four of those, and 0.006 for the variance.
    targets = (TOKENS + 37) % 100
    loss = optax.softmax_cross_entropy_with_integer_labels(logits_of(build(config), TOKENS), targets).mean()
    assert abs(float(loss) - np.log(100)) < 0.07


def test_a_text_beyond_the_learned_positions_is_an_error():
    with pytest.raises((TypeError, ValueError), match="16"):
        logits_of(build(MODELS["gpt2"]), jnp.zeros((1, 17), jnp.int32))


def test_cudnn_is_taken_where_it_runs(monkeypatch):
    bfloat16 = jnp.dtype("bfloat16")

    def chosen(attention, dtype=bfloat16):
        return layers.attention_implementation(dataclasses.replace(SMALL, attention=attention), dtype)

    monkeypatch.setattr(layers, "cudnn_obstacle", lambda width, dtype: "it is not there")
    assert chosen("auto") == chosen("xla") == "xla"
    with pytest.raises(RunError, match=r"--model\.attention cudnn cannot run: it is not there"):
        chosen("cudnn")
    monkeypatch.setattr(layers, "cudnn_obstacle", lambda width, dtype: "")
    assert chosen("auto") == chosen("cudnn") == "cudnn"
    assert chosen("xla") == "xla"


class Device:
    """As much of a device as is looked at."""

    def __init__(self, platform_version: str, compute_capability: str):
        self.client, self.device_kind = self, "a device"
        self.platform_version, self.compute_capability = platform_version, compute_capability


@pytest.mark.parametrize(
    ("device", "width", "dtype", "obstacle"),
    [
        (Device("cuda 12090", "9.0"), 128, "bfloat16", ""),
        (Device("cuda 12090", "10.3"), 64, "float16", ""),
        (Device("cuda 12090", "7.5"), 64, "bfloat16", "NVIDIA GPU of compute capability 8.0 or higher, this is a devi"),
        (Device("rocm 60300", "gfx942"), 64, "bfloat16", "NVIDIA GPU"),
        (Device("cuda 12090", "8.0"), 64, "float32", "--dtype bfloat16, got float32"),
        (Device("cuda 12090", "8.0"), 136, "bfloat16", "got 136"),
        (Device("cuda 12090", "8.0"), 36, "bfloat16", "got 36"),
    ],
)
def test_what_keeps_cudnn_from_running(monkeypatch, device, width, dtype, obstacle):
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    found = layers.cudnn_obstacle(width, jnp.dtype(dtype))
    assert obstacle in found
    assert bool(obstacle) == bool(found)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what happens without a GPU")
@all_models
def test_cudnn_asked_for_on_a_cpu_is_refused_before_anything_is_built(config):
    with pytest.raises(RunError, match=r"cannot run: it needs an NVIDIA GPU .* this is cpu; auto takes XLA's then"):
        build(dataclasses.replace(config, attention="cudnn"), dtype=jnp.bfloat16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 2}, "--model.kv-heads is a field of qwen3, the model is llama"),
        ({"family": "gpt2", "head_width": 16}, "--model.head-width is a field of qwen3, the model is gpt2"),
        ({"bias": True}, "--model.bias is a field of gpt2, the model is llama"),
        ({"family": "qwen3", "kv_heads": 3}, "--model.kv-heads 3 must divide --model.heads 4"),
        ({"family": "qwen3", "head_width": 5}, "--model.head-width must be even, got 5"),
    ],
)
def test_what_a_family_lacks_is_refused(change, message):
    with pytest.raises(RunError, match=re.escape(message)):
        build(dataclasses.replace(SMALL, **change))
