# SPDX-License-Identifier: Apache-2.0
"""The default rule on the parameter trees of known models, as known frameworks lay them out.

Shapes only, from public configurations, with two layers. Every leaf has the reading that is right: the default rule
makes it or refuses, the rules of docs/parameters.md make all of them, and that page's table says which is which.
"""

import re
from pathlib import Path

import pytest

from normpre_optax.parameters.dims import MatrixDims, split_axes
from normpre_optax.parameters.leaves import module_depth, views
from normpre_optax.parameters.rules import default_choice, default_matrix_dims
from normpre_optax.parameters.uncovered import UncoveredError
from tests.parameters.tables import chosen, under
from tests.parameters.test_frameworks import NamedArray, array, named, nested

PAGE = (Path(__file__).parents[2] / "docs" / "parameters.md").read_text()
IN_OUT, OUT_IN = MatrixDims(inputs=0, outputs=1), MatrixDims(inputs=1, outputs=0)
TO_HEADS, FROM_HEADS = MatrixDims(inputs=0, outputs=(1, 2)), MatrixDims(inputs=(0, 1), outputs=2)


def dense(inputs, outputs, leaf, bias=False):
    """A linear layer: (out, in) for "weight", (in, out) for "kernel", and (out, in) again for "kernel, turned"."""
    turned = leaf != "kernel"
    table = {leaf.split(",")[0]: ((outputs, inputs), OUT_IN) if turned else ((inputs, outputs), IN_OUT)}
    return table | ({"bias": ((outputs,), None)} if bias else {})


def layers(table, path, count=2):
    return {f"{path.format(i)}/{name}": entry for i in range(count) for name, entry in table.items()}


def vectors(size, *paths):
    return dict.fromkeys(paths, ((size,), None))


def norms(size, leaf, *paths, bias=False):
    table = vectors(size, *(f"{path}/{leaf}" for path in paths))
    return table | (vectors(size, *(f"{path}/bias" for path in paths)) if bias else {})


def each(size, names, leaf, bias=False):
    """Linear layers by name: (inputs, outputs), of which -1 is the width."""
    table = {}
    for name, (inputs, outputs) in names.items():
        table |= under(name, dense(size if inputs < 0 else inputs, size if outputs < 0 else outputs, leaf, bias))
    return table


# GPT-2, 768 wide with 12 heads; ViT-B/16 and Whisper small likewise.


def gpt2(leaf):
    block = each(768, {"attn/c_attn": (-1, 2304), "attn/c_proj": (-1, -1)}, leaf, bias=True)
    block |= each(768, {"mlp/c_fc": (-1, 3072), "mlp/c_proj": (3072, -1)}, leaf, bias=True)
    scale = "weight" if leaf == "weight" else "scale"
    table = "weight" if leaf == "weight" else "embedding"
    block |= norms(768, scale, "ln_1", "ln_2", bias=True)
    ends = {f"transformer/wte/{table}": ((50257, 768), None), f"transformer/wpe/{table}": ((1024, 768), None)}
    return ends | norms(768, scale, "transformer/ln_f", bias=True) | layers(block, "transformer/h/{}")


def by_head(d, heads, size, kv=None, bias=False, names=("query", "key", "value", "out")):
    """Flax's attention."""
    table = {f"{names[3]}/kernel": ((heads, size, d), FROM_HEADS)}
    for name, count in zip(names, (heads, kv or heads, kv or heads), strict=False):
        table[f"{name}/kernel"] = (d, count, size), TO_HEADS
        table |= {f"{name}/bias": ((count, size), None)} if bias else {}
    return table | ({f"{names[3]}/bias": ((d,), None)} if bias else {})


def nnx_block(d):
    block = under("attn", by_head(d, 12, 64, bias=True)) | norms(d, "scale", "norm1", "norm2", bias=True)
    return block | each(d, {"mlp/linear1": (-1, 3072), "mlp/linear2": (3072, -1)}, "kernel", bias=True)


def nnx_gpt2():
    ends = {"tok_embed/embedding": ((50257, 768), None), "pos_embed/embedding": ((1024, 768), None)}
    return ends | norms(768, "scale", "norm", bias=True) | layers(nnx_block(768), "blocks/{}")


def nnx_vit():
    ends = {"patch_embed/kernel": ((16, 16, 3, 768), None), "patch_embed/bias": ((768,), None)}
    ends |= {"pos_embedding": ((1, 197, 768), None), "cls_token": ((1, 1, 768), None)}
    ends |= {"head/kernel": ((768, 1000), None), "head/bias": ((1000,), None)}
    return ends | norms(768, "scale", "norm", bias=True) | layers(nnx_block(768), "blocks/{}")


def vit(leaf):
    projections = dict.fromkeys(("attention/query", "attention/key", "attention/value", "output/dense"), (-1, -1))
    block = under("attention", each(768, projections, leaf, bias=True))
    block |= each(768, {"intermediate/dense": (-1, 3072), "output/dense": (3072, -1)}, leaf, bias=True)
    scale, patch = ("weight", (768, 3, 16, 16)) if leaf == "weight" else ("scale", (16, 16, 3, 768))
    block |= norms(768, scale, "layernorm_before", "layernorm_after", bias=True)
    ends = {f"patch_embeddings/projection/{leaf}": (patch, None), "patch_embeddings/projection/bias": ((768,), None)}
    ends |= {"cls_token": ((1, 1, 768), None), "position_embeddings": ((1, 197, 768), None)}
    table = under("vit/embeddings", ends) | norms(768, scale, "vit/layernorm", bias=True)
    table |= {f"classifier/{leaf}": ((1000, 768) if leaf == "weight" else (768, 1000), None)}
    return table | {"classifier/bias": ((1000,), None)} | layers(block, "vit/encoder/layer/{}")


def whisper(leaf):
    scale, table = ("weight", "weight") if leaf == "weight" else ("scale", "embedding")

    def attention(name):
        block = each(768, {f"{name}/{x}_proj": (-1, -1) for x in ("q", "k", "v", "out")}, leaf, bias=True)
        del block[f"{name}/k_proj/bias"]
        return block | norms(768, scale, f"{name}_layer_norm", bias=True)

    rest = each(768, {"fc1": (-1, 3072), "fc2": (3072, -1)}, leaf, bias=True)
    rest |= norms(768, scale, "final_layer_norm", bias=True) | attention("self_attn")
    encoder, decoder = {}, {f"embed_tokens/{table}": ((51865, 768), None)}
    for i, channels in enumerate((80, 768), 1):
        shape = (768, channels, 3) if leaf == "weight" else (3, channels, 768)
        taps = MatrixDims(inputs=(1, 2), outputs=0) if leaf == "weight" else MatrixDims(inputs=(0, 1), outputs=2)
        encoder |= {f"conv{i}/{leaf}": (shape, taps), f"conv{i}/bias": ((768,), None)}
    for side, length, block in ((encoder, 1500, rest), (decoder, 448, rest | attention("encoder_attn"))):
        side |= {f"embed_positions/{table}": ((length, 768), None), **norms(768, scale, "layer_norm", bias=True)}
        side |= layers(block, "layers/{}")
    return under("model/encoder", encoder) | under("model/decoder", decoder)


# LLaMA and its like by their Hugging Face names.


def gated(d, hidden, leaf, names=("gate_proj", "up_proj", "down_proj")):
    gate, up, down = names
    return each(d, {gate: (-1, hidden), up: (-1, hidden), down: (hidden, -1)}, leaf)


def projections(d, heads, kv, size, leaf, bias=False):
    sizes = {"q_proj": (-1, heads * size), "k_proj": (-1, kv * size), "v_proj": (-1, kv * size)}
    return under("self_attn", each(d, sizes | {"o_proj": (heads * size, -1)}, leaf, bias))


def llama(d, vocabulary, leaf, block, head=True):
    table = "weight" if leaf == "weight" else "embedding"
    ends = {f"model/embed_tokens/{table}": ((vocabulary, d), None), **norms(d, "weight", "model/norm")}
    ends |= {f"lm_head/{leaf}": ((vocabulary, d) if leaf == "weight" else (d, vocabulary), None)} if head else {}
    block = block | norms(d, "weight", "input_layernorm", "post_attention_layernorm")
    return ends | layers(block, "model/layers/{}")


def llama3(leaf):
    block = projections(4096, 32, 8, 128, leaf) | under("mlp", gated(4096, 14336, leaf))
    return llama(4096, 128256, leaf, block)


def qwen3():
    block = projections(4096, 32, 8, 128, "weight") | under("mlp", gated(4096, 12288, "weight"))
    return llama(4096, 151936, "weight", block | norms(128, "weight", "self_attn/q_norm", "self_attn/k_norm"))


def qwen3_moe():
    block = projections(2048, 32, 4, 128, "weight") | norms(128, "weight", "self_attn/q_norm", "self_attn/k_norm")
    block |= {"mlp/gate/weight": ((128, 2048), None)} | layers(gated(2048, 768, "weight"), "mlp/experts/{}")
    return llama(2048, 151936, "weight", block)


def gpt_oss():
    block = projections(2880, 64, 8, 64, "weight", bias=True) | vectors(64, "self_attn/sinks")
    front = MatrixDims(inputs=1, outputs=2)
    experts = {"gate_up_proj": ((32, 2880, 5760), front), "gate_up_proj_bias": ((32, 5760), None)}
    experts |= {"down_proj": ((32, 2880, 2880), front), "down_proj_bias": ((32, 2880), None)}
    block |= {"mlp/router/weight": ((32, 2880), None), "mlp/router/bias": ((32,), None)} | under("mlp/experts", experts)
    return llama(2880, 201088, "weight", block)


def gemma3():
    block = projections(2560, 8, 4, 256, "weight") | under("mlp", gated(2560, 10240, "weight"))
    block |= norms(2560, "weight", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    block |= norms(256, "weight", "self_attn/q_norm", "self_attn/k_norm")
    return llama(2560, 262208, "weight", block, head=False)


def gemma3_einsum():
    attention = {
        "q_einsum/w": ((8, 2560, 256), MatrixDims(inputs=1, outputs=(0, 2))),
        "kv_einsum/w": ((2, 4, 2560, 256), MatrixDims(inputs=2, outputs=(1, 3))),
        "attn_vec_einsum/w": ((8, 256, 2560), FROM_HEADS),
    }
    block = under("attn", attention | norms(256, "scale", "_query_norm", "_key_norm"))
    block |= {"mlp/gating_einsum/w": ((2, 10240, 2560), MatrixDims(inputs=2, outputs=1))}
    block |= {"mlp/linear/w": ((10240, 2560), IN_OUT)}
    block |= norms(2560, "scale", "pre_attention_norm", "post_attention_norm", "pre_ffw_norm", "post_ffw_norm")
    ends = {"embedder/input_embedding": ((262144, 2560), None), **norms(2560, "scale", "final_norm")}
    return under("transformer", ends | layers(block, "layer_{}"))


MLA = {"q_a_proj": (-1, 1536), "q_b_proj": (1536, 24576), "kv_a_proj_with_mqa": (-1, 576), "kv_b_proj": (512, 32768)}


def deepseek():
    block = under("self_attn", each(7168, MLA | {"o_proj": (16384, -1)}, "weight"))
    block |= norms(1536, "weight", "self_attn/q_a_layernorm") | norms(512, "weight", "self_attn/kv_a_layernorm")
    mixture = {"gate/weight": ((256, 7168), None), "gate/e_score_correction_bias": ((256,), None)}
    mixture |= layers(gated(7168, 2048, "weight"), "experts/{}") | under("shared_experts", gated(7168, 2048, "weight"))
    return llama(7168, 129280, "weight", block | under("mlp", mixture))


def mamba():
    sizes = {"in_proj": (-1, 3072), "x_proj": (1536, 80), "dt_proj": (48, 1536), "out_proj": (1536, -1)}
    mixer = each(768, sizes, "weight") | vectors(1536, "dt_proj/bias", "conv1d/bias", "D")
    mixer |= {"conv1d/weight": ((1536, 1, 4), None), "A_log": ((1536, 16), None)}
    ends = {"backbone/embeddings/weight": ((50280, 768), None), **norms(768, "weight", "backbone/norm_f")}
    block = under("mixer", mixer) | norms(768, "weight", "norm")
    return ends | layers(block, "backbone/layers/{}")


# MaxText: one layer by its number, or all scanned along axis 1.


def scanned(table, count=2):
    """The same with a layer axis at 1, or behind the expert axis, which is in front."""

    def entry(shape, dims):
        if dims is not None:
            _, outputs, inputs = split_axes(len(shape), dims)
            sides = [tuple(axis + (axis > 0) for axis in side) for side in (inputs, outputs)]
            dims = MatrixDims(*(side if side[1:] else side[0] for side in sides))
        return (*shape[:1], count, *shape[1:]), dims

    return {path: entry(*value) for path, value in table.items()}


def maxtext(d, vocabulary, block, scan):
    block = block | norms(d, "scale", "pre_self_attention_layer_norm", "post_self_attention_layer_norm")
    ends = {"token_embedder/embedding": ((vocabulary, d), None), "decoder/logits_dense/kernel": ((d, vocabulary), None)}
    ends |= norms(d, "scale", "decoder/decoder_norm")
    many = under("decoder/layers", scanned(block)) if scan else layers(block, "decoder/layers_{}")
    return under("params", ends | many)


def maxtext_llama3(scan):
    block = under("self_attention", by_head(4096, 32, 128, kv=8))
    return maxtext(4096, 128256, block | under("mlp", gated(4096, 14336, "kernel", ("wi_0", "wi_1", "wo"))), scan)


def maxtext_experts(d, hidden, count):
    front = MatrixDims(inputs=1, outputs=2)
    table = dict.fromkeys(("wi_0", "wi_1"), ((count, d, hidden), front))
    return table | {"wo": ((count, hidden, d), front), "gate/kernel": ((d, count), None)}


def maxtext_qwen3_moe(scan):
    block = under("self_attention", by_head(2048, 32, 128, kv=4) | norms(128, "scale", "query_norm", "key_norm"))
    return maxtext(2048, 151936, block | under("moe_block", maxtext_experts(2048, 768, 128)), scan)


def maxtext_deepseek(scan):
    attention = each(7168, {"wq_a": (-1, 1536), "wkv_a": (-1, 576)}, "kernel")
    attention |= {"wq_b/kernel": ((1536, 128, 192), TO_HEADS), "wkv_b/kernel": ((512, 128, 256), TO_HEADS)}
    attention |= {"out/kernel": ((128, 128, 7168), FROM_HEADS)}
    attention |= norms(1536, "scale", "q_norm") | norms(512, "scale", "kv_norm")
    shared = under("shared_experts", gated(7168, 2048, "kernel", ("wi_0", "wi_1", "wo")))
    mixture = under("DeepSeekMoeBlock_0", shared | under("MoeBlock_0", maxtext_experts(7168, 2048, 256)))
    return maxtext(7168, 129280, under("self_attention", attention) | mixture, scan)


# Levanter: every axis has a name, layers are stacked in front.


def levanter(table):
    """Leaves of (axes by name, dims), all of them boxed."""
    return {path: (named(**axes), dims) for path, (axes, dims) in table.items()}


def levanter_linear(inputs, outputs, bias=False):
    """Stacked; outputs in front of inputs, or behind them in GPT-2, whose layers have biases."""
    front, back = (inputs, outputs) if bias else (outputs, inputs)
    axes = {"layers": 2, **front, **back}
    sides = (tuple(list(axes).index(name) for name in side) for side in (inputs, outputs))
    dims = MatrixDims(*(side if side[1:] else side[0] for side in sides))
    table = {"weight": (axes, dims)}
    return table | ({"bias": ({"layers": 2, **outputs}, None)} if bias else {})


def levanter_gpt2():
    d, hidden, heads = {"embed": 768}, {"mlp": 3072}, {"heads": 12, "head_size": 64}
    block = under("attn/c_attn", levanter_linear(d, {"qkv": 3, **heads}, bias=True))
    block |= under("attn/c_proj", levanter_linear(heads, d, bias=True))
    block |= under("mlp/c_fc", levanter_linear(d, hidden, True)) | under("mlp/c_proj", levanter_linear(hidden, d, True))
    block |= {f"{ln}/{leaf}": ({"layers": 2, **d}, None) for ln in ("ln_1", "ln_2") for leaf in ("weight", "bias")}
    ends = {"embeddings/token_embeddings/weight": ({"vocab": 50257, **d}, None)}
    ends |= {"embeddings/position_embeddings/weight": ({"position": 1024, **d}, None)}
    ends |= {f"transformer/ln_f/{leaf}": (d, None) for leaf in ("weight", "bias")}
    return levanter(ends | under("transformer/blocks/stacked", block))


def levanter_llama3():
    d, hidden, kv = {"embed": 4096}, {"mlp": 14336}, {"kv_head": 8, "head_size": 128}
    block = under("self_attn/q_proj", levanter_linear(d, {"kv_head": 8, "q_heads_per_group": 4, "head_size": 128}))
    block |= under("self_attn/k_proj", levanter_linear(d, kv)) | under("self_attn/v_proj", levanter_linear(d, kv))
    block |= under("self_attn/o_proj", levanter_linear({"heads": 32, "head_size": 128}, d))
    block |= {f"mlp/{name}/weight": levanter_linear(d, hidden)["weight"] for name in ("gate_proj", "up_proj")}
    block |= under("mlp/down_proj", levanter_linear(hidden, d))
    block |= {f"{name}/weight": ({"layers": 2, **d}, None) for name in ("input_layernorm", "post_attention_layernorm")}
    ends = {"embeddings/token_embeddings/weight": ({"vocab": 128256, **d}, None), "transformer/norm/weight": (d, None)}
    ends |= {"lm_head/weight": ({"vocab": 128256, **d}, None)}
    return levanter(ends | under("transformer/layers/stacked", block))


# (model, names): its table, and the rule of docs/parameters.md that it needs.
MODELS = {
    ("GPT-2", "Flax NNX"): (nnx_gpt2(), ""),
    ("GPT-2", "Hugging Face, `weight`"): (gpt2("weight"), ""),
    ("GPT-2", "Hugging Face, Flax"): (gpt2("kernel, turned"), "kernels_out_in"),
    ("GPT-2", "Levanter"): (levanter_gpt2(), ""),
    ("LLaMA 3", "Hugging Face, `weight`"): (llama3("weight"), ""),
    ("LLaMA 3", "Hugging Face, Flax"): (llama3("kernel"), ""),
    ("LLaMA 3", "MaxText"): (maxtext_llama3(scan=False), ""),
    ("LLaMA 3", "MaxText, scanned"): (maxtext_llama3(scan=True), "maxtext"),
    ("LLaMA 3", "Levanter"): (levanter_llama3(), ""),
    ("Qwen3", "Hugging Face, `weight`"): (qwen3(), ""),
    ("Qwen3-MoE", "Hugging Face, `weight`"): (qwen3_moe(), ""),
    ("Qwen3-MoE", "MaxText"): (maxtext_qwen3_moe(scan=False), "maxtext"),
    ("Qwen3-MoE", "MaxText, scanned"): (maxtext_qwen3_moe(scan=True), "maxtext"),
    ("gpt-oss", "Hugging Face"): (gpt_oss(), "experts_in_front"),
    ("Gemma 3", "Hugging Face, `weight`"): (gemma3(), ""),
    ("Gemma 3", "Gemma's einsums"): (gemma3_einsum(), "gemma"),
    ("DeepSeek-V3", "Hugging Face, `weight`"): (deepseek(), ""),
    ("DeepSeek-V3", "MaxText"): (maxtext_deepseek(scan=False), "maxtext"),
    ("DeepSeek-V3", "MaxText, scanned"): (maxtext_deepseek(scan=True), "maxtext"),
    ("ViT", "Flax NNX"): (nnx_vit(), ""),
    ("ViT", "Hugging Face, `weight`"): (vit("weight"), ""),
    ("ViT", "Hugging Face, Flax"): (vit("kernel"), ""),
    ("Whisper", "Hugging Face, `weight`"): (whisper("weight"), "convolutions"),
    ("Whisper", "Hugging Face, Flax"): (whisper("kernel"), "convolutions"),
    ("Mamba", "Hugging Face, `weight`"): (mamba(), ""),
}


def tree(table):
    return nested({path: x if isinstance(x, NamedArray) else array(*x) for path, (x, _) in table.items()})


def rules():
    """The functions of the page's section on known layouts."""
    (code,) = re.findall(
        r"^```python\n(.*?def maxtext.*?)^```$", PAGE.partition("## Rules for known layouts")[2], re.S | re.M
    )
    scope = {"MatrixDims": MatrixDims, "default_matrix_dims": default_matrix_dims}
    exec(code, scope)
    return scope


def axes(ndim, dims):
    return dims and split_axes(ndim, dims)


@pytest.mark.parametrize(("model", "names"), MODELS)
def test_every_leaf_is_read_right_or_refused_and_the_pages_rule_reads_all(model, names):
    table, rule = MODELS[model, names]
    params, refused = tree(table), []
    for path, leaf in views(params).items():
        try:
            assert default_choice(path, leaf)[0] == table[path][1], path
        except UncoveredError:
            refused.append(path)
    assert bool(refused) == bool(rule)
    found, leaves = chosen(params, rules()[rule] if rule else None), views(params)
    assert {path: axes(leaves[path].ndim, dims) for path, dims in found.items()} == {
        path: axes(leaves[path].ndim, dims) for path, (_, dims) in table.items()
    }


def row(model, names):
    """A model's row in the page's table."""
    table, rule = MODELS[model, names]
    matrices, adamw, refused = set(), set(), set()
    for path, leaf in views(tree(table)).items():
        parts = path.split("/")
        depth = module_depth(parts)
        layer = parts[-2] if depth < len(parts) else "/".join(parts[-2:])
        try:
            dims, reason = default_choice(path, leaf)
        except UncoveredError:
            refused.add(layer)
        else:
            matrices |= {layer} if dims else set()
            adamw |= set() if dims else {re.sub(r" \(.*|, axes named.*|stacked ", "", reason)}
    cells = [", ".join(f"`{name}`" for name in sorted(matrices)), ", ".join(sorted(adamw))]
    cells.append(", ".join(f"`{name}`" for name in sorted(refused)) + f": `{rule}`" if rule else "")
    return f"| {model} | {names} | {cells[0]} | {cells[1]} | {cells[2]} |"


def test_the_page_has_the_table():
    section = PAGE.partition("## Models and what the default rule makes of them")[2].partition("\n## ")[0]
    shown = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert shown == [row(*key) for key in MODELS]
