# SPDX-License-Identifier: Apache-2.0
"""What a parameter is for, told by names: which are AdamW's, which are attention's, experts' and convolutions'."""

from __future__ import annotations

import itertools
import re

from normpre_optax.parameters.leaves import (
    QUERIES,
    Leaf,
    block_depth,
    is_norm,
    is_short_bias,
    module_depth,
    words,
)

OUTPUTS = {"out", "output", "o", "o_proj", "out_proj", "output_proj", "proj", "c_proj", "to_out", "wo", "w_o"}
OUTPUTS |= {"attn_vec_einsum"}
_ATTENTION = {"attn", "attention", "mha", "mhsa", "msa", "mqa", "gqa", "multihead", "sa"}
_ATTENTION |= {"selfattn", "crossattn", "selfattention", "crossattention"}
_MLP = {"mlp", "ffn", "ff", "feedforward", "feed"}
_SCALES = {"scale", "scales", "gamma", "beta", "offset", "gain", "lambda", "lambdas"}
_RATES = {"a_log", "a_logs", "log_a", "a_real", "a_imag", "log_a_real", "log_dt", "time_decay", "time_first"}
_EMBEDDINGS = {"embed", "embeds", "embedder", "embedding", "embeddings", "emb", "embs", "wte"}
_POSITIONS = {"wpe", "pos", "position", "positions", "positional", "posemb", "posembed", "relpos", "rope", "rotary"}
_NOT_POSITIONS = _MLP | {"wise", "forward", "proj", "projection", "query", "key", "q", "k"}
_HEADS = {"unembed", "unembedding", "unembedder", "logit", "logits", "lmhead", "classifier", "readout", "vocab"}
_WHOLE_MODELS = {"params", "model", "transformer", "decoder", "lm", "net", "backbone", "module"}
_NOT_HEADS = {"multi", "attn", "attention", "per", "dim"}
_LAST = {"out", "output", "out_proj", "output_proj", "output_projection", "output_layer", "proj_out"}
_SIZES = {"dim", "dims", "size", "width"}  # after an embedding's name they make a number of it: embed_dim
_AFTER = {"token", "tokens", "tok", "in", "out", "input", "output", "dense", "proj", "table", "positions", "layer"}
_ROUTERS = {"router", "routers", "routing"}
_GATES = {"gate", "gating"}
_EXPERTS = {"expert", "experts", "moe"}
_DENSE = {"point", "pointwise", "pw", "proj", "projection", "dense", "linear"}
_LORA = re.compile(r"(?:.*_)?lora_?([abAB]|up|down)")


def _is_lora(parts: list[str]) -> bool:
    """Whether it is one of a pair: "lora_a", "lora_up", or "A" somewhere under "lora"."""
    inside = any("lora" in words(part) for part in parts)
    return any(_LORA.fullmatch(part) or (inside and part in {*"abAB"}) for part in parts[-3:])


def adamw_role(parts: list[str], leaf: Leaf) -> str:
    """What a parameter that AdamW should have is for, or "".

    Where a name says it less than plainly, the word that decided stands behind it in quotes.

    Example:
        >>> import numpy as np
        >>> table = Leaf((8, 8), np.dtype("float32"))
        >>> adamw_role(["lm_head", "kernel"], table), adamw_role(["policy_head", "dense_0", "kernel"], table)
        ('output head', "output head ('head' in 'policy_head')")
    """
    module = parts[-2] if len(parts) > 1 else ""
    last = words(parts[-1])
    near = {*last, *words(module), *words(leaf.holder)}
    if near & {"bias", "biases"} or is_short_bias(parts, leaf):
        return "bias"
    if _SCALES.intersection(last) or is_norm(parts[-1], module, leaf.holder):
        return "norm or scale"
    if parts[-1].lower() in _RATES:
        return "rates of a state space"
    if _is_lora(parts):
        return "LoRA"
    if any(_POSITIONS & found and not found & _NOT_POSITIONS for found in map(word_set, parts[-2:])):
        return "positional table"
    return _head(parts, leaf) or _embedding(parts, leaf) or ("router" if _is_router(parts, leaf) else "")


def word_set(part: str) -> set[str]:
    """The words of a part of a path, lower-case."""
    return set(words(part))


def _told(role: str, parts: list[str], part: str, word: str) -> str:
    """The role; with the word that decided where that is not the last of the layer's or the parameter's own name."""
    found = words(part)
    after = found[found.index(word) + 1 :]
    own = part in parts[module_depth(parts) - 1 :] or part not in parts
    return role if own and _AFTER.issuperset(after) else f"{role} ({word!r} in {part!r})"


def _embedding(parts: list[str], leaf: Leaf) -> str:
    if parts[-1] == "W_E" or any("vocab" in str(name) for name in leaf.names or ()):
        return "embedding"
    if words(parts[-1])[-1:] in (("token",), ("tokens",), ("cls",)):
        return "embedding"
    for part in reversed([leaf.holder, *parts[block_depth(parts) :]]):
        found = words(part)
        for word, after in itertools.pairwise((*found, "")):
            if word in _EMBEDDINGS and after not in _SIZES:
                return _told("embedding", parts, part, word)
    return ""


def _head(parts: list[str], leaf: Leaf) -> str:
    if in_attention(parts, leaf):
        return ""
    if parts[-1] == "W_U":
        return "output head"
    for part in reversed(parts):
        found = word_set(part)
        heads = _HEADS if found & _NOT_HEADS else _HEADS | {"head"}
        if found & heads:
            return _told("output head", parts, part, next(word for word in words(part) if word in heads))
    layer, above = parts[module_depth(parts) - 1], parts[: module_depth(parts) - 1]
    return "output head" if leaf.ndim == 2 and layer.lower() in _LAST and _WHOLE_MODELS.issuperset(above) else ""


def in_attention(parts: list[str], leaf: Leaf) -> bool:
    """Whether a parameter belongs to an attention: by a name above it, or by query, key and value beside it."""
    above = parts[: module_depth(parts) - 1]
    return any(word_set(part) & _ATTENTION for part in above) or len(QUERIES & {s.lower() for s in leaf.siblings}) > 1


def _is_router(parts: list[str], leaf: Leaf) -> bool:
    """A part named router; or a gate that is beside the experts or directly in the mixture, and not beside `up`."""
    depth = module_depth(parts)
    layer, above = word_set(parts[depth - 1]), word_set(parts[depth - 2]) if depth > 1 else set()
    if (layer | above) & _ROUTERS:
        return True
    beside = set().union(*map(word_set, leaf.siblings))
    if not layer & _GATES or beside & {"up", "down"}:
        return False
    return bool(layer & _EXPERTS) or (layer <= _GATES and ("moe" in above or bool(beside & _EXPERTS)))


def is_weight(parts: list[str]) -> bool:
    """Whether a parameter is called a weight, and so is stored as (out, in)."""
    return "weight" in words(parts[-1])


def is_query(parts: list[str], leaf: Leaf) -> bool:
    """Whether a parameter is named as attention's query, key or value."""
    layer = parts[module_depth(parts) - 1].lower()
    return layer in QUERIES and (len(layer) > 1 or in_attention(parts, leaf))


def is_output(parts: list[str], leaf: Leaf) -> bool:
    """Whether a parameter is named as attention's output projection."""
    return parts[module_depth(parts) - 1].lower() in OUTPUTS and in_attention(parts, leaf)


def is_convolution(parts: list[str]) -> bool:
    """Whether a parameter stands in a convolution, by a name along its path."""
    return any("conv" in words(part) for part in parts)


def in_stacked_experts(parts: list[str]) -> bool:
    """Whether a parameter may hold several experts: names of experts on its path, and no number behind any."""
    experts = [(part, "".join(parts[i + 1 : i + 2])) for i, part in enumerate(parts) if _EXPERTS & word_set(part)]
    counted = (after.isdigit() or (part[-1:].isdigit() and "moe" not in words(part)) for part, after in experts)
    return bool(experts) and not any(counted)


def is_depthwise(parts: list[str], leaf: Leaf) -> bool:
    """Whether a parameter is a convolution with one input channel a filter.

    Two axes, taps and channels, under a name that speaks of a convolution and of no dense layer; or an axis of input
    channels of size 1: the last but one, or for a ``weight`` the second.
    """
    layer = set().union(*map(word_set, parts[module_depth(parts) - 1 :]))
    if "conv" not in layer:
        return False
    layers = leaf.layers or 0
    if leaf.ndim == 2:
        return not layer & _DENSE
    return leaf.ndim - layers > 2 and leaf.shape[layers + 1 if is_weight(parts) else -2] == 1
