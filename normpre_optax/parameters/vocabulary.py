# SPDX-License-Identifier: Apache-2.0
"""Names of parameters, layers and axes in common code bases, for the default rule."""

from __future__ import annotations

import functools
import re

# Last parts of a path.
WEIGHTS = {"kernel", "w", "weight", "weights"}
GENERIC = WEIGHTS | {
    "bias",
    "b",
    "scale",
    "embedding",
    "embeddings",
}  # the part before these names the layer
SHORT_BIAS = re.compile(r"(?i)(^|/)b(\d+|[qkvo]|_[^/]*)?$")
LAMBDA = re.compile(r"(?i)(^|[^a-z])lambdas?([^a-z/][^/]*)?$")
STATE_SPACE = re.compile(
    r"(?i)(^|/)(a_logs?|log_a|a_real|a_imag|log_a_real|log_dt|time_decay|time_first)$"
)
LORA = re.compile(
    r"(^|[/_])lora_?(kernel_|weight_)?([abAB]|up|down)(/[^/]*){0,2}$"
    r"|(?i:lora).*/[abAB](/[^/]*){0,2}$"
)
UNEMBEDDING = re.compile(r"(^|/)W_U$")  # of TransformerLens
TOKEN = re.compile(
    r"(?i)(^|[^a-z])(tok(ens?)?|cls|W_E)[^a-z/]*$"
    r"|^((params|transformer|model)/)?(shared/weight|E)$"
)
COUNTED_EXPERT = re.compile(r"(?i)expert[^/]*\d(/|$)|(expert|moe)[^/]*/\d+(/|$)")

# Names of layers, in lower case.
QUERIES = {
    f"{a}{b}"
    for a in ("query", "key", "value", "q", "k", "v")
    for b in ("", "_proj", "_projection")
}
QUERIES |= {f"{a}{b}" for a in ("w", "w_", "to_") for b in ("q", "k", "v")}
OUTPUTS = {
    "out",
    "output",
    "o",
    "o_proj",
    "out_proj",
    "output_proj",
    "proj",
    "c_proj",
    "to_out",
    "wo",
    "w_o",
}
OUTPUTS |= {
    "attn_vec_einsum",
    "attn_out",
    "attention_output",
    "out_projection",
    "proj_out",
    "w_out",
    "out_lin",
}
OUTPUTS |= {"to_add_out", "linear_proj", "resid_proj"}
SECOND_LAYERS = {
    "down",
    "down_proj",
    "linear2",
    "linear_2",
    "fc2",
    "w2",
    "w_2",
    "lin2",
    "fc_out",
    "dense_out",
}
SECOND_LAYERS |= {"dense_4h_to_h"}
# Layers of an MLP, from the width of the model and back to it. Numbers begin at one.
FIRST_LAYER = re.compile(
    r"(^|_)(up|gate|gating|intermediate|wi|c_fc|h_to_4h|(w|fc|dense|ffn)_in"
    r"|((w|fc|lin|linear|ff|ffn|mlp)_?|dense)(?P<number>1|13|3))(_|$)"
)
SECOND_LAYER = re.compile(
    r"(^|_)(down|wo|4h_to_h|(w|fc|dense|ffn)_out|(feed_?forward|ffn|mlp)_output"
    r"|((w|fc|lin|linear|ff|ffn|mlp)_?|dense)(?P<number>2))(_|$)"
)
READERS = {
    "q",
    "k",
    "v",
    "query",
    "qkv",
    "kv",
    "up",
    "gate",
}  # words of layers that never write
GPT2 = {
    "c_attn",
    "q_attn",
    "c_fc",
    "c_proj",
}  # (in, out) by Hugging Face's Conv1D, (out, in) by nanoGPT's Linear
LAST_LAYERS = {
    "out",
    "output",
    "out_proj",
    "output_proj",
    "output_projection",
    "output_layer",
    "proj_out",
}
WHOLE_MODELS = {
    "params",
    "model",
    "transformer",
    "decoder",
    "lm",
    "net",
    "backbone",
    "module",
}

# Words, as `words` splits them.
# Of projections in attention; q, k and v alone may be something else.
PROJECTIONS = {"wq", "wk", "wv", "wqk", "wkv", "wqkv", "qk", "kv", "qkv"}
PROJECTIONS |= {"query", "queries", "key", "keys", "value", "values"}
FUSED = {"qkv", "wqkv", "kv", "wkv"}
STACKS = {
    "layers",
    "blocks",
    "stack",
    "stacked",
    "scan",
    "scanned",
    "cells",
    "repeat",
    "repeats",
    "stages",
}
UNITS = {
    "layer",
    "block",
    "cell",
    "stage",
    "unit",
    "encoderblock",
    "decoderblock",
    "h",
    "l",
} | STACKS
ALWAYS_STACKS = {
    "scan",
    "stack",
}  # a number after these counts modules, not layers: ScanBlock_0
BIASES = {"bias", "biases"}
SCALES = {"scale", "scales", "gamma", "beta", "offset", "gain"}
NORMS = {
    "norm",
    "norms",
    "ln",
    "layernorm",
    "rmsnorm",
    "rms",
    "groupnorm",
    "batchnorm",
    "bn",
    "gn",
    "normalization",
}
ATTENTION = {"attn", "attention", "mha", "mhsa", "msa", "mqa", "gqa", "multihead", "sa"}
ATTENTION |= {"selfattn", "crossattn", "selfattention", "crossattention"}
FEED_FORWARD = {"mlp", "ffn", "feedforward", "fc", "up", "down", "gate"}
# Nearer than the name of an embedding, head or norm, these decide that a parameter is
# no part of it.
INNER = {"query", "key", "value", "mixer"} | FEED_FORWARD | ATTENTION
EMBEDDINGS = {
    "embed",
    "embeds",
    "embedder",
    "embedding",
    "embeddings",
    "emb",
    "embs",
    "wte",
}
EMBEDDINGS |= {"registers", "prompt", "prompts", "latents"}  # learned tokens
SIZES = {"dim", "dims", "size", "width"}  # embed_dim is a size, not an embedding
POSITIONS = {
    "wpe",
    "pos",
    "position",
    "positions",
    "positional",
    "posemb",
    "posembed",
    "relpos",
    "rope",
    "rotary",
}
NOT_POSITIONS = {
    "mlp",
    "ffn",
    "ff",
    "feedforward",
    "feed",
    "wise",
    "forward",
    "proj",
    "projection",
}
NOT_POSITIONS |= {"query", "key", "q", "k"}
HEADS = {
    "unembed",
    "unembedding",
    "unembedder",
    "logit",
    "logits",
    "lmhead",
    "classifier",
    "readout",
    "vocab",
}
HEADS |= {"head", "score"}
NOT_HEADS = {"multi", "attn", "attention", "per", "dim", "pre"}
PLAIN_AFTER = {
    "token",
    "tokens",
    "tok",
    "in",
    "out",
    "input",
    "output",
    "dense",
    "proj",
    "table",
    "positions",
    "layer",
}
PLAIN_AFTER |= EMBEDDINGS
ROUTERS = {"router", "routers", "routing"}
GATES = {"gate", "gating", "wg", "switch"}
# Beside "gate", these say nothing more: w_gate, gate/dense/kernel.
PLAIN = {"w", "kernel", "weight", "dense", "linear", "proj", "projection", "layer"}
EXPERTS = {"expert", "experts", "moe"}
DENSE = {"point", "pointwise", "pw", "proj", "projection", "dense", "linear", "qkv"}

# Words in the names of axes.
LAYER_AXES = {
    "layer",
    "layers",
    "block",
    "blocks",
    "stack",
    "scan",
    "stage",
    "stages",
    "pipe",
    "pipeline",
}
EXPERT_AXES = {"expert", "experts", "exp"}
LAYER_AXES |= EXPERT_AXES
HEAD_AXES = {"heads", "kv", "head", "dim", "size", "q", "qkv", "per", "group"}


@functools.cache
def words(part: str) -> tuple[str, ...]:
    """Split a path, or a part of one, into lower-case words, at anything but letters
    and in camel case.

    Example:
        >>> from normpre_optax.parameters.vocabulary import words
        >>> words("RMSNorm_0"), words("token_embedder"), words("ln1")
        (('rms', 'norm'), ('token', 'embedder'), ('ln',))
    """
    return tuple(
        word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", part)
    )
