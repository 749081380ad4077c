# SPDX-License-Identifier: Apache-2.0
"""Weights in transformers' names: the same logits there, and the same numbers back."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from examples.pretrain import models
from examples.pretrain.config import ModelConfig, RunError
from examples.pretrain.models.hugging_face import from_hf, save_hf, to_hf

VOCABULARY = 96
BASE = ModelConfig(layers=3, width=48, heads=4, mlp_width=80, context=24)
GPT2 = dataclasses.replace(BASE, family="gpt2", norm_epsilon=1e-5)
QWEN3 = dataclasses.replace(BASE, family="qwen3", kv_heads=2, head_width=16, rotary_base=1e6)
CONFIGS = {
    "gpt2": GPT2,
    "gpt2 with biases": dataclasses.replace(GPT2, bias=True, scan_layers=True),
    "gpt2 untied": dataclasses.replace(GPT2, bias=True, tied_head=False),
    "llama": BASE,
    "llama untied": dataclasses.replace(BASE, tied_head=False, norm_epsilon=1e-3, scan_layers=True),
    "qwen3": dataclasses.replace(QWEN3, scan_layers=True),
    "qwen3 untied": dataclasses.replace(QWEN3, tied_head=False, kv_heads=1, head_width=24),
}
TOKENS = np.random.default_rng(0).integers(VOCABULARY, size=(3, 24))
all_configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))


@functools.cache
def random_parameters(config: ModelConfig):
    """Parameters far from where training starts: no bias is zero, no scale one, and attention prefers some tokens."""
    rng = np.random.default_rng(1)

    def draw(path, shape):
        noise = rng.normal(size=shape.shape)
        scale = jax.tree_util.keystr(path).endswith("['scale']")
        return (1 + 0.3 * noise if scale else 0.2 * noise).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, models.shapes(config, VOCABULARY))


def our_logits(config: ModelConfig, params) -> np.ndarray:
    graphdef = nnx.graphdef(
        nnx.eval_shape(lambda: models.build(config, VOCABULARY, dtype=jnp.dtype("float32"), seed=0))
    )
    return np.asarray(jax.jit(lambda params: nnx.merge(graphdef, params)(TOKENS))(params))


def their_logits(model) -> np.ndarray:
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return model.eval()(torch.asarray(TOKENS)).logits.numpy()


def their_model(settings: dict):
    transformers = pytest.importorskip("transformers")
    settings = dict(settings)
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    return transformers.AutoModelForCausalLM.from_config(config)


def assert_same_logits(ours: np.ndarray, theirs: np.ndarray):
    # Both sum in float32, in another order: sums of 16 to 80 products, some ten of them one after the other in each of
    # three blocks, on logits of up to 6. 6 * 2^-24 * sqrt(80) = 3e-6 for one such sum, ten times that for all of them;
    # seen: 1.3e-5.
    assert 0.5 < ours.std() < 5
    np.testing.assert_allclose(ours, theirs, atol=3e-5)


@pytest.mark.parity
@all_configs
def test_our_weights_give_the_same_logits_there(config):
    torch = pytest.importorskip("torch")
    params = random_parameters(config)
    tensors, settings = to_hf(config, VOCABULARY, params)
    model = their_model(settings)
    absent, unknown = model.load_state_dict({k: torch.asarray(x) for k, x in tensors.items()}, strict=False)
    assert not unknown
    assert set(absent) <= ({"lm_head.weight"} if config.tied_head else set())
    assert_same_logits(our_logits(config, params), their_logits(model))


@pytest.mark.parity
@all_configs
def test_their_weights_give_the_same_logits_here(config):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = their_model(to_hf(config, VOCABULARY, random_parameters(config))[1])
    for name, parameter in model.named_parameters():
        scale = re.search(r"(norm|ln_.)\.weight$", name)
        absent = name.endswith(".bias") and not config.bias
        torch.nn.init.normal_(parameter, 1.0 if scale else 0.0, 0.0 if absent else 0.2)
    params = from_hf(config, {name: x.numpy() for name, x in model.state_dict().items()})
    assert_same_logits(our_logits(config, params), their_logits(model))


@pytest.mark.parity
@all_configs
def test_a_saved_model_is_one_of_theirs(config, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    params = random_parameters(config)
    save_hf(tmp_path / "new" / "model", config, VOCABULARY, params)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "new" / "model", output_loading_info=True
    )
    assert not any(report.values()), report
    assert_same_logits(our_logits(config, params), their_logits(model))


@all_configs
def test_there_and_back_is_the_identity(config):
    params = random_parameters(config)
    tensors, settings = to_hf(config, VOCABULARY, params)
    assert all(x.dtype == np.float32 and x.flags.c_contiguous for x in tensors.values())
    assert json.loads(json.dumps(settings)) == settings
    back = from_hf(config, tensors)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    other = dataclasses.replace(config, scan_layers=not config.scan_layers)
    again, _ = to_hf(other, VOCABULARY, from_hf(other, tensors))
    assert list(again) == list(tensors)
    jax.tree.map(np.testing.assert_array_equal, again, tensors)


def test_a_file_on_disk_has_the_same_numbers(tmp_path):
    config = CONFIGS["qwen3"]
    params = random_parameters(config)
    save_hf(tmp_path, config, VOCABULARY, jax.tree.map(jnp.asarray, params))
    jax.tree.map(np.testing.assert_array_equal, from_hf(config, load_file(tmp_path / "model.safetensors")), params)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}
    assert (settings["num_key_value_heads"], settings["head_dim"]) == (2, 16)


def test_half_precision_becomes_float32():
    tensors, _ = to_hf(BASE, VOCABULARY, random_parameters(BASE))
    half = {name: x.astype(jnp.bfloat16) for name, x in tensors.items()}
    params = from_hf(BASE, half)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}
    np.testing.assert_array_equal(params["tokens"]["embedding"], half["model.embed_tokens.weight"].astype(np.float32))


def test_published_gpt2_files_are_read():
    """They have no prefix, store the causal masks, and some store the tied head."""
    config = CONFIGS["gpt2 with biases"]
    tensors, _ = to_hf(config, VOCABULARY, random_parameters(config))
    old = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    old |= {f"h.{i}.attn.bias": np.tri(24)[None, None] for i in range(3)}
    old |= {"lm_head.weight": old["wte.weight"].copy()}
    jax.tree.map(np.testing.assert_array_equal, from_hf(config, old), random_parameters(config))


def without(tensors, name):
    return {key: x for key, x in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("weights", "change", "message"),
    [
        ("gpt2 with biases", {"bias": False}, "bias is not zero: add --model.bias"),
        ("llama untied", {"tied_head": True}, "lm_head.weight is not the token table: add --model.no-tied-head"),
        ("llama", {"tied_head": False}, "no tensor lm_head.weight; a tied head is not stored: add --model.tied-head"),
        ("llama", {"layers": 4}, "the weights have no tensor model.layers.3."),
        ("llama", {"layers": 2}, "the model has no place for the tensor model.layers.2."),
        ("llama", {"mlp_width": 64}, "mlp.down_proj.weight has the shape (48, 80) where the model has (48, 64)"),
        ("gpt2", {"mlp_width": 64}, "mlp.c_proj.weight has the shape (80, 48) where the model has (64, 48)"),
        ("gpt2", {"context": 32}, "transformer.wpe.weight has the shape (24, 48) where the model has (32, 48)"),
        ("qwen3", {"vocabulary": 128}, "embed_tokens.weight has the shape (96, 48) where the model has (128, 48)"),
        ("qwen3", {"kv_heads": 4}, "self_attn.k_proj.weight has the shape (32, 48) where the model has (64, 48)"),
        ("qwen3", {"family": "gpt2", "kv_heads": None, "head_width": None}, "no tensor transformer.wte.weight"),
    ],
)
def test_weights_of_another_model_are_refused(weights, change, message):
    config = dataclasses.replace(CONFIGS[weights], scan_layers=False)
    tensors, _ = to_hf(config, VOCABULARY, random_parameters(config))
    with pytest.raises(RunError, match=re.escape(message)):
        from_hf(dataclasses.replace(config, **change), tensors)


def test_parameters_of_another_model_are_refused():
    params = random_parameters(BASE)
    with pytest.raises(RunError, match=r"tokens/embedding has the shape \(96, 48\) where the model has \(95, 48\)"):
        to_hf(BASE, 95, params)
    with pytest.raises(RunError, match=r"does not have: head/kernel"):
        to_hf(BASE, VOCABULARY, random_parameters(dataclasses.replace(BASE, tied_head=False)))
    with pytest.raises(RunError, match=r"the weights have no tensor model.norm.weight"):
        from_hf(BASE, without(to_hf(BASE, VOCABULARY, params)[0], "model.norm.weight"))
