# SPDX-License-Identifier: Apache-2.0
"""Weights in the names and layouts of Hugging Face transformers, and back.

    save_hf(Path("model"), config.model, vocabulary, trainer.state.params)
    transformers.AutoModelForCausalLM.from_pretrained("model")

Every module of ours has a counterpart there, so a table of module names is most of it. What differs: their linear
layers hold (out, in), save for GPT-2's, which hold (in, out) as ours do; GPT-2 has biases always; a tied head is not
stored. Rotary halves, the order of a fused query-key-value matrix and the weights of norms are the same.
"""

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from ..config import ModelConfig, RunError
from . import shapes
from .layers import head_width

Params = dict[str, Any]

LLAMA = {
    "tokens": "model.embed_tokens",
    "attention_norm": "model.layers.{}.input_layernorm",
    "attention/query": "model.layers.{}.self_attn.q_proj",
    "attention/key": "model.layers.{}.self_attn.k_proj",
    "attention/value": "model.layers.{}.self_attn.v_proj",
    "attention/out": "model.layers.{}.self_attn.o_proj",
    "mlp_norm": "model.layers.{}.post_attention_layernorm",
    "mlp/gate": "model.layers.{}.mlp.gate_proj",
    "mlp/up": "model.layers.{}.mlp.up_proj",
    "mlp/down": "model.layers.{}.mlp.down_proj",
    "final_norm": "model.norm",
    "head": "lm_head",
}
QWEN3 = LLAMA | {
    "attention/query_norm": "model.layers.{}.self_attn.q_norm",
    "attention/key_norm": "model.layers.{}.self_attn.k_norm",
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
MODULES = {"gpt2": GPT2, "llama": LLAMA, "qwen3": QWEN3}
HEAD = "lm_head.weight"
# Causal masks and rotary frequencies that older files store.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def to_hf(config: ModelConfig, vocabulary: int, params: Params) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Weights as transformers names them, and the configuration that belongs to them.

    Args:
        config: the model.
        vocabulary: rows of its token table.
        params: its parameters, nested as ``nnx.to_pure_dict`` gives them, with or without ``scan_layers``.

    Returns:
        Name -> float32 array, and the contents of ``config.json``.

    Raises:
        RunError: where ``params`` are not of that model.
    """
    ours = dict(flat(list_of_blocks(config, jax.device_get(params))))
    tensors = {}
    for path, shape in expected(config, vocabulary, always_bias=True).items():
        leaf = ours.pop(path) if path in ours or not path.endswith("/bias") else np.zeros(shape, np.float32)
        check_shape(path, leaf.shape, shape)
        leaf = np.asarray(leaf, np.float32)
        tensors[hf_name(config, path)] = np.ascontiguousarray(leaf.T if is_turned(config, path) else leaf)
    if ours:
        raise RunError(f"parameters that a {config.family} of this configuration does not have: {', '.join(ours)}")
    return tensors, hf_config(config, vocabulary)


def from_hf(config: ModelConfig, state_dict: Mapping[str, np.ndarray]) -> Params:
    """Parameters from weights that transformers names.

    Tensors tell sizes only: number of heads, epsilon and rotary base of ``config`` must be those of the weights.

    Args:
        config: the model.
        state_dict: name -> array, as ``safetensors.numpy.load_file`` reads it; any float type.

    Returns:
        Parameters as float32 NumPy arrays, nested as ``nnx.to_pure_dict`` gives them, stacked if ``scan_layers``.

    Raises:
        RunError: naming the tensor that is missing, has another shape, or has no place in the model.
    """
    theirs = {with_prefix(config, name): x for name, x in state_dict.items() if not name.endswith(BUFFERS)}
    table = hf_name(config, "tokens/embedding")
    rows = config.vocabulary or len(present(theirs, table))
    leaves = {}
    for path, shape in expected(config, rows).items():
        name = hf_name(config, path)
        x, transpose = np.asarray(present(theirs, name)), is_turned(config, path)
        check_shape(name, x.shape, shape[::-1] if transpose else shape)
        leaves[path] = np.array(x.T if transpose else x, np.float32, order="C")
    used = {hf_name(config, path) for path in leaves}
    check_rest(config, {name: x for name, x in theirs.items() if name not in used}, theirs[table])
    return nested(config, leaves)


def save_hf(folder: Path, config: ModelConfig, vocabulary: int, params: Params) -> None:
    """Write ``model.safetensors`` and ``config.json``, which ``AutoModelForCausalLM.from_pretrained(folder)`` reads.

    Args:
        folder: made where it does not exist.
        config: the model.
        vocabulary: rows of its token table.
        params: its parameters.

    Raises:
        RunError: as ``to_hf``.
    """
    tensors, settings = to_hf(config, vocabulary, params)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # else its owner alone may read it


def hf_config(config: ModelConfig, vocabulary: int) -> dict[str, Any]:
    """``config.json`` of the model; special tokens are the tokenizer's and stay unset."""
    shared = {
        "model_type": config.family,
        "vocab_size": vocabulary,
        "tie_word_embeddings": config.tied_head,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if config.family == "gpt2":
        return shared | {
            "architectures": ["GPT2LMHeadModel"],
            "n_positions": config.context,
            "n_embd": config.width,
            "n_layer": config.layers,
            "n_head": config.heads,
            "n_inner": config.mlp_width,
            "activation_function": "gelu",
            "layer_norm_epsilon": config.norm_epsilon,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }
    return shared | {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[config.family]],
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads or config.heads,
        "head_dim": head_width(config),
        "hidden_act": "silu",
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
        "rope_theta": config.rotary_base,  # where transformers 4 reads it
        "attention_bias": False,
    }


def hf_name(config: ModelConfig, path: str) -> str:
    """Their name of our parameter: blocks/3/mlp/up/kernel is model.layers.3.mlp.up_proj.weight."""
    module, _, leaf = path.rpartition("/")
    layer = ""
    if module.startswith("blocks/"):
        _, layer, module = module.split("/", 2)
    return MODULES[config.family][module].format(layer) + (".bias" if leaf == "bias" else ".weight")


def is_turned(config: ModelConfig, path: str) -> bool:
    """Whether they hold our parameter transposed: kernels, but of GPT-2 only the head's."""
    return path.endswith("/kernel") and (config.family != "gpt2" or path == "head/kernel")


def expected(config: ModelConfig, vocabulary: int, *, always_bias: bool = False) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by path, the blocks as a list."""
    bias = config.bias or (always_bias and config.family == "gpt2")
    listed = dataclasses.replace(config, scan_layers=False, bias=bias)
    return {path: leaf.shape for path, leaf in flat(shapes(listed, vocabulary))}


def flat(tree: Params, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("blocks/0/mlp/up/kernel", leaf) of every leaf."""
    for key, node in tree.items():
        if isinstance(node, dict):
            yield from flat(node, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", node


def list_of_blocks(config: ModelConfig, params: Params) -> Params:
    """``params`` with blocks numbered, whether they are a stack or not."""
    if not config.scan_layers:
        return params
    blocks = {i: jax.tree.map(lambda x, i=i: x[i], params["blocks"]) for i in range(config.layers)}
    return params | {"blocks": blocks}


def nested(config: ModelConfig, leaves: dict[str, np.ndarray]) -> Params:
    """The tree of ``leaves`` by path, blocks as ``config.scan_layers`` has them."""
    params: Params = {}
    for path, leaf in leaves.items():
        *modules, last = (int(part) if part.isdigit() else part for part in path.split("/"))
        node: dict[Any, Any] = params
        for module in modules:
            node = node.setdefault(module, {})
        node[last] = leaf
    if config.scan_layers:
        params["blocks"] = jax.tree.map(lambda *x: np.stack(x), *params["blocks"].values())
    return params


def with_prefix(config: ModelConfig, name: str) -> str:
    """The full name of a tensor; files of a GPT-2 without its head leave "transformer." out."""
    bare = config.family == "gpt2" and not name.startswith(("transformer.", "lm_head."))
    return f"transformer.{name}" if bare else name


def present(tensors: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """The tensor of that name.

    Raises:
        RunError: where there is none.
    """
    if name not in tensors:
        hint = "; a tied head is not stored: add --model.tied-head" if name == HEAD else ""
        raise RunError(f"the weights have no tensor {name}{hint}")
    return tensors[name]


def check_shape(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Refuse an array of another shape.

    Raises:
        RunError: naming it.
    """
    if tuple(shape) != tuple(wanted):
        raise RunError(f"{name} has the shape {tuple(shape)} where the model has {tuple(wanted)}")


def check_rest(config: ModelConfig, rest: Mapping[str, np.ndarray], table_VxD: np.ndarray) -> None:
    """Refuse tensors that were not used, unless the model computes the same without them.

    Raises:
        RunError: naming them.
    """
    for name, x in rest.items():
        if name == HEAD and config.tied_head:
            if not np.array_equal(x, table_VxD):
                raise RunError(f"{name} is not the token table: add --model.no-tied-head")
        elif name.endswith(".bias") and config.family == "gpt2" and not config.bias:
            if np.any(x):
                raise RunError(f"{name} is not zero: add --model.bias")
        else:
            raise RunError(f"the model has no place for the tensor {name} {tuple(x.shape)}")
