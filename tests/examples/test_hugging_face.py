# SPDX-License-Identifier: Apache-2.0
"""Exported weights give the same logits in transformers' architectures: written in
NumPy here, its own in CI.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.scipy.special import erf
from safetensors.numpy import load_file

from examples.pretrain import models
from examples.pretrain.config import ModelConfig
from examples.pretrain.models.hugging_face import save_hf
from tests.examples.test_models import MODELS, TOKENS

VOCABULARY = 100
# Some with stacked layers, and each with an epsilon that has an effect.
FORMS = {
    "gpt2": (False, 1e-5),
    "gpt2 with biases": (True, 1e-4),
    "llama": (False, 1e-3),
    "qwen3": (True, 1e-6),
}
CONFIGS = {
    name: dataclasses.replace(MODELS[name], scan_layers=scan, norm_epsilon=epsilon)
    for name, (scan, epsilon) in FORMS.items()
}


def random_parameters(config: ModelConfig):
    """Parameters far from the initial ones.

    No bias is zero, no scale one, and attention prefers some tokens.
    """
    rng = np.random.default_rng(1)

    def draw(path, shape):
        noise = rng.normal(size=shape.shape)
        if jax.tree_util.keystr(path).endswith("['scale']"):
            return (1 + 0.3 * noise).astype(np.float32)
        return (0.2 * noise).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, models.shapes(config, VOCABULARY))


def attention(q, k, v):
    """Causal attention of (B, H, T, D), heads of keys and values repeated."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = q @ k.swapaxes(2, 3) / q.shape[-1] ** 0.5
    weights = np.exp(np.where(np.tri(q.shape[2], dtype=bool), scores, -np.inf))
    mixed = weights / weights.sum(-1, keepdims=True) @ v
    return mixed.swapaxes(1, 2).reshape(*TOKENS.shape, -1)


def heads(x, width):
    return x.reshape(*TOKENS.shape, -1, width).swapaxes(1, 2)


def gpt2(t, s):
    """GPT-2's logits in float64: transformers' ``modeling_gpt2.py``."""

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        variance = (x**2).mean(-1, keepdims=True)
        normalized = x / np.sqrt(variance + s["layer_norm_epsilon"])
        return normalized * t(name, 0) + t(name, 1)

    def linear(x, name):
        return x @ t(name, 0) + t(name, 1)

    x = t("transformer.wte", 0)[TOKENS] + t("transformer.wpe", 0)
    for i in range(s["n_layer"]):
        h = f"transformer.h.{i}."
        qkv = np.split(linear(norm(x, h + "ln_1"), h + "attn.c_attn"), 3, axis=-1)
        mixed = attention(*(heads(y, s["n_embd"] // s["n_head"]) for y in qkv))
        x = x + linear(mixed, h + "attn.c_proj")
        up = linear(norm(x, h + "ln_2"), h + "mlp.c_fc")
        gelu = up * (1 + np.asarray(erf(up / 2**0.5))) / 2
        x = x + linear(gelu, h + "mlp.c_proj")
    head = "lm_head"
    if s["tie_word_embeddings"]:
        head = "transformer.wte"
    return norm(x, "transformer.ln_f") @ t(head, 0).T


def llama(t, s):
    """LLaMA's and Qwen3's logits in float64.

    As in transformers' ``modeling_llama.py`` and ``modeling_qwen3.py``.
    """
    width = s["head_dim"]
    base = s["rope_parameters"]["rope_theta"]
    frequencies = base ** -(np.arange(0, width, 2) / width)
    angles = np.tile(np.arange(TOKENS.shape[1])[:, None] * frequencies, 2)
    cos = np.cos(angles)
    sin = np.sin(angles)

    def norm(x, name):
        mean_square = (x**2).mean(-1, keepdims=True)
        return x / np.sqrt(mean_square + s["rms_norm_eps"]) * t(name, 0)

    def rotated(x, name):
        if s["model_type"] == "qwen3":
            x = norm(x, name)
        first, second = np.split(x, 2, axis=-1)
        return x * cos + np.concatenate([-second, first], axis=-1) * sin

    x = t("model.embed_tokens", 0)[TOKENS]
    for i in range(s["num_hidden_layers"]):
        h = f"model.layers.{i}."
        y = norm(x, h + "input_layernorm")
        q, k, v = (
            heads(y @ t(f"{h}self_attn.{part}_proj", 0).T, width) for part in "qkv"
        )
        mixed = attention(
            rotated(q, h + "self_attn.q_norm"), rotated(k, h + "self_attn.k_norm"), v
        )
        x = x + mixed @ t(h + "self_attn.o_proj", 0).T
        y = norm(x, h + "post_attention_layernorm")
        gate = y @ t(h + "mlp.gate_proj", 0).T
        gated = gate / (1 + np.exp(-gate)) * (y @ t(h + "mlp.up_proj", 0).T)
        x = x + gated @ t(h + "mlp.down_proj", 0).T
    head = "lm_head"
    if s["tie_word_embeddings"]:
        head = "model.embed_tokens"
    return norm(x, "model.norm") @ t(head, 0).T


def exported(config: ModelConfig, folder) -> np.ndarray:
    """Our logits of a model that is saved to ``folder``."""
    params = random_parameters(config)
    save_hf(folder, config, VOCABULARY, jax.tree.map(jnp.asarray, params))
    build = nnx.eval_shape(
        lambda: models.build(config, VOCABULARY, dtype=jnp.dtype("float32"), seed=0)
    )
    ours = np.asarray(
        jax.jit(lambda params: nnx.merge(nnx.graphdef(build), params)(TOKENS))(params)
    )
    assert 0.5 < ours.std() < 5
    return ours


# Both sum in another order, we in float32: sums of 16 to 80 products, some ten of them
# one after the other in each of three blocks, on logits of up to 6. 6 * 2^-24 *
# sqrt(80) = 3e-6 for one such sum, ten times that for all of them; seen: 1.3e-5.
TOLERANCE = 3e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_exported_weights_give_the_same_logits(name, tmp_path):
    ours = exported(CONFIGS[name], tmp_path / "new" / "model")
    tensors = load_file(tmp_path / "new" / "model" / "model.safetensors")
    settings = json.loads((tmp_path / "new" / "model" / "config.json").read_text())
    used = set()

    def tensor(module, bias):
        kinds = ("weight", "bias")
        name = f"{module}.{kinds[bias]}"
        used.add(name)
        return tensors[name].astype(np.float64)

    logits_of = {"gpt2": gpt2, "llama": llama, "qwen3": llama}
    theirs = logits_of[settings["model_type"]](tensor, settings)
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)
    assert used == tensors.keys()
    assert {x.dtype for x in tensors.values()} == {np.dtype("float32")}


@pytest.mark.parity
@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_model_is_one_of_theirs(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    ours = exported(CONFIGS[name], tmp_path)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(report.values()), report
    with torch.no_grad():
        theirs = model.eval()(torch.asarray(np.array(TOKENS, np.int64))).logits.numpy()
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)
