# SPDX-License-Identifier: Apache-2.0
"""Exported weights give the same logits in transformers' architectures.

They are written in NumPy here; CI has its own.
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
from examples.pretrain.models.hugging_face import save_hf, save_tokenizer
from examples.pretrain.prepare.tokenizer import end_of_text, find_tokenizer
from tests.examples.corpora import TEXTS
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
    shared = q.shape[1] // k.shape[1]
    k = np.repeat(k, shared, axis=1)
    v = np.repeat(v, shared, axis=1)
    scores = q @ k.swapaxes(2, 3) / q.shape[-1] ** 0.5
    past = np.tri(q.shape[2], dtype=bool)
    weights = np.exp(np.where(past, scores, -np.inf))
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
        return normalized * t(name + ".weight") + t(name + ".bias")

    def linear(x, name):
        return x @ t(name + ".weight") + t(name + ".bias")

    width = s["n_embd"] // s["n_head"]
    x = t("transformer.wte.weight")[TOKENS] + t("transformer.wpe.weight")
    for i in range(s["n_layer"]):
        h = f"transformer.h.{i}."
        qkv = linear(norm(x, h + "ln_1"), h + "attn.c_attn")
        q, k, v = np.split(qkv, 3, axis=-1)
        mixed = attention(heads(q, width), heads(k, width), heads(v, width))
        x = x + linear(mixed, h + "attn.c_proj")
        up = linear(norm(x, h + "ln_2"), h + "mlp.c_fc")
        gelu = up * (1 + np.asarray(erf(up / 2**0.5))) / 2
        x = x + linear(gelu, h + "mlp.c_proj")
    head = "lm_head"
    if s["tie_word_embeddings"]:
        head = "transformer.wte"
    return norm(x, "transformer.ln_f") @ t(head + ".weight").T


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
        return x / np.sqrt(mean_square + s["rms_norm_eps"]) * t(name + ".weight")

    def rotated(x, name):
        if s["model_type"] == "qwen3":
            x = norm(x, name)
        first, second = np.split(x, 2, axis=-1)
        return x * cos + np.concatenate([-second, first], axis=-1) * sin

    x = t("model.embed_tokens.weight")[TOKENS]
    for i in range(s["num_hidden_layers"]):
        h = f"model.layers.{i}."
        y = norm(x, h + "input_layernorm")
        q = heads(y @ t(h + "self_attn.q_proj.weight").T, width)
        k = heads(y @ t(h + "self_attn.k_proj.weight").T, width)
        v = heads(y @ t(h + "self_attn.v_proj.weight").T, width)
        q = rotated(q, h + "self_attn.q_norm")
        k = rotated(k, h + "self_attn.k_norm")
        mixed = attention(q, k, v)
        x = x + mixed @ t(h + "self_attn.o_proj.weight").T
        y = norm(x, h + "post_attention_layernorm")
        gate = y @ t(h + "mlp.gate_proj.weight").T
        silu = gate / (1 + np.exp(-gate))
        gated = silu * (y @ t(h + "mlp.up_proj.weight").T)
        x = x + gated @ t(h + "mlp.down_proj.weight").T
    head = "lm_head"
    if s["tie_word_embeddings"]:
        head = "model.embed_tokens"
    return norm(x, "model.norm") @ t(head + ".weight").T


def exported(config: ModelConfig, folder) -> np.ndarray:
    """Our logits of a model that is saved to ``folder``."""
    params = random_parameters(config)
    save_hf(folder, config, VOCABULARY, jax.tree.map(jnp.asarray, params))
    float32 = jnp.dtype("float32")
    model = nnx.eval_shape(
        lambda: models.build(config, VOCABULARY, dtype=float32, seed=0)
    )
    graphdef = nnx.graphdef(model)

    @jax.jit
    def logits_of(params):
        return nnx.merge(graphdef, params)(TOKENS)

    ours = np.asarray(logits_of(params))
    assert 0.5 < ours.std() < 5
    return ours


# Both sum in another order, we in float32: sums of 16 to 80 products, some ten of them
# one after the other in each of three blocks, on logits of up to 6. 6 * 2^-24 *
# sqrt(80) = 3e-6 for one such sum, ten times that for all of them; seen: 1.3e-5.
TOLERANCE = 3e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_exported_weights_give_the_same_logits(name, tmp_path):
    folder = tmp_path / "new" / "model"
    ours = exported(CONFIGS[name], folder)
    tensors = load_file(folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    used = set()

    def tensor(name):
        used.add(name)
        return tensors[name].astype(np.float64)

    logits_of = {"gpt2": gpt2, "llama": llama, "qwen3": llama}
    theirs = logits_of[settings["model_type"]](tensor, settings)
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)
    assert used == tensors.keys()
    assert {x.dtype for x in tensors.values()} == {np.dtype("float32")}


END = 7


def test_a_saved_model_has_the_end_of_a_text(tmp_path):
    config = CONFIGS["llama"]
    params = random_parameters(config)
    for end in (END, None):
        save_hf(tmp_path, config, VOCABULARY, params, end)
        for name in ("config.json", "generation_config.json"):
            settings = json.loads((tmp_path / name).read_text())
            assert settings["eos_token_id"] == end


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_tokenizer_is_one_of_theirs(name, kind, tmp_path, request):
    transformers = pytest.importorskip("transformers")
    path = request.getfixturevalue(kind)
    tokenizer = find_tokenizer(str(path))
    end = end_of_text(tokenizer)
    save_hf(tmp_path, CONFIGS[name], VOCABULARY, random_parameters(CONFIGS[name]), end)
    save_tokenizer(tmp_path, tokenizer, end)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == end
    for text in TEXTS[:20]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids
    settings = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert settings.eos_token_id == end


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
    tokens = torch.asarray(np.array(TOKENS, np.int64))
    with torch.no_grad():
        theirs = model.eval()(tokens).logits.numpy()
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)
