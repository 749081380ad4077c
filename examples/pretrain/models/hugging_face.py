# SPDX-License-Identifier: Apache-2.0
"""Write a model as files that Hugging Face transformers loads.

    save_hf(Path("model"), config.model, vocabulary, trainer.state.params)
    transformers.AutoModelForCausalLM.from_pretrained("model")

Each of our modules has one there, so most of this is a table of names. The differences:
their linear layers store (out, in), except GPT-2's, which store (in, out) as ours do;
GPT-2 always has biases; a tied head is not stored.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from ..config import ModelConfig
from ..mesh import by_name
from ..prepare.tokenizer import write_tokenizer
from .transformer import head_width

Params = dict[str, Any]

LLAMA = {
    "tokens": "model.embed_tokens",
    "attention_norm": "model.layers.{}.input_layernorm",
    "attention/query": "model.layers.{}.self_attn.q_proj",
    "attention/key": "model.layers.{}.self_attn.k_proj",
    "attention/value": "model.layers.{}.self_attn.v_proj",
    "attention/out": "model.layers.{}.self_attn.o_proj",
    "attention/query_norm": "model.layers.{}.self_attn.q_norm",  # Qwen3 only
    "attention/key_norm": "model.layers.{}.self_attn.k_norm",  # Qwen3 only
    "mlp_norm": "model.layers.{}.post_attention_layernorm",
    "mlp/gate": "model.layers.{}.mlp.gate_proj",
    "mlp/up": "model.layers.{}.mlp.up_proj",
    "mlp/down": "model.layers.{}.mlp.down_proj",
    "final_norm": "model.norm",
    "head": "lm_head",
}
GPT2 = {
    "tokens": "transformer.wte",
    "positions": "transformer.wpe",
    "attention_norm": "transformer.h.{}.ln_1",
    "attention/qkv": "transformer.h.{}.attn.c_attn",
    "attention/out": "transformer.h.{}.attn.c_proj",
    "mlp_norm": "transformer.h.{}.ln_2",
    "mlp/up": "transformer.h.{}.mlp.c_fc",
    "mlp/down": "transformer.h.{}.mlp.c_proj",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}


def save_hf(
    folder: Path,
    config: ModelConfig,
    vocabulary: int,
    params: Params,
    end: int | None = None,
) -> None:
    """Write ``model.safetensors``, ``config.json`` and ``generation_config.json``.

    ``AutoModelForCausalLM.from_pretrained(folder)`` of transformers reads them.

    Args:
        folder: created where it does not exist.
        config: the model.
        vocabulary: rows of its token table.
        params: its parameters, nested as ``nnx.to_pure_dict`` returns them.
        end: the token that ends a document, where ``generate`` of transformers stops;
            None: it does not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "model.safetensors"
    save_file(to_hf(config, params), weights, metadata={"format": "pt"})
    write_settings(folder / "config.json", hf_config(config, vocabulary, end))
    # transformers takes the end from here.
    write_settings(folder / "generation_config.json", {"eos_token_id": end})
    # Else only their owner may read the weights.
    shutil.copymode(folder / "config.json", weights)


def save_tokenizer(folder: Path, tokenizer: Tokenizer, end: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` for transformers.

    ``AutoTokenizer.from_pretrained(folder)`` reads them, with ``end`` as the token that
    ends a document.
    """
    write_tokenizer(tokenizer, folder / "tokenizer.json")
    settings = {
        # Else it is that of the model's family, with another way to split text.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.id_to_token(end),
    }
    write_settings(folder / "tokenizer_config.json", settings)


def write_settings(file: Path, settings: dict[str, Any]) -> None:
    """Write a dictionary as JSON."""
    file.write_text(json.dumps(settings, indent=2) + "\n")


def to_hf(config: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """Float32 array of every parameter, by its name in transformers."""
    params = jax.device_get(params)
    if config.scan_layers:
        params = params | {"blocks": unstacked(params["blocks"], config.layers)}
    gpt2 = config.family == "gpt2"
    names = LLAMA
    if gpt2:
        names = GPT2
    tensors = {}
    for path, leaf in by_name(params).items():
        module, _, kind = path.rpartition("/")
        layer = ""
        if module.startswith("blocks/"):
            _, layer, module = module.split("/", 2)
        name = names[module].format(layer)
        if kind == "kernel" and (not gpt2 or module == "head"):
            leaf = leaf.T
        suffix = "weight"
        if kind == "bias":
            suffix = "bias"
        tensors[f"{name}.{suffix}"] = np.ascontiguousarray(leaf, np.float32)
        if gpt2 and not config.bias and module not in ("tokens", "positions", "head"):
            tensors[f"{name}.bias"] = np.zeros(leaf.shape[-1], np.float32)
    return tensors


def unstacked(blocks: Params, layers: int) -> dict[int, Params]:
    """Blocks whose parameters are stacked along a first axis, one by one."""

    def block(i: int) -> Params:
        return jax.tree.map(lambda leaf: leaf[i], blocks)

    return {i: block(i) for i in range(layers)}


def hf_config(config: ModelConfig, vocabulary: int, end: int | None) -> dict[str, Any]:
    """``config.json`` of the model. Of special tokens, it has the end of a document."""
    shared = {
        "model_type": config.family,
        "vocab_size": vocabulary,
        "tie_word_embeddings": config.tied_head,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": end,
    }
    if config.family == "gpt2":
        return shared | gpt2_config(config)
    return shared | llama_config(config)


def gpt2_config(config: ModelConfig) -> dict[str, Any]:
    """What ``config.json`` has of a GPT-2 only."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu",
        "n_inner": config.mlp_width,
        "n_positions": config.context,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "layer_norm_epsilon": config.norm_epsilon,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def llama_config(config: ModelConfig) -> dict[str, Any]:
    """What ``config.json`` has of a LLaMA or Qwen3 only."""
    architectures = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    return {
        "architectures": [architectures[config.family]],
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads or config.heads,
        "head_dim": head_width(config),
        "hidden_act": "silu",
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_epsilon,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
        "rope_theta": config.rotary_base,  # where transformers 4 reads it
    }
