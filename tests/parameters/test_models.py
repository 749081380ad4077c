# SPDX-License-Identifier: Apache-2.0
"""The default rule on the parameter trees of known models, as known frameworks store
them.

Only shapes, from public configurations, with two layers. The table has the right axes
of every leaf: the default rule returns them or raises, and the presets return all of
them. docs/parameters.md and its report list the results.
"""

import re
from pathlib import Path

import pytest

from normpre_optax.parameters import presets
from normpre_optax.parameters.dims import MatrixDims, split_axes
from normpre_optax.parameters.rules import UncoveredError, assign, default_reading
from normpre_optax.parameters.tree import layer_depth, leaves
from tests.parameters.tables import array, chosen, table, tree, with_layers

DOCS = Path(__file__).parents[2] / "docs"


def flax(entries):
    """Hugging Face's Flax parameters of those called `weight`: other names, and the
    axes in reverse order.
    """
    found = {}
    for path, (leaf, dims) in entries.items():
        above, _, last = path.rpartition("/")
        if len(leaf.shape) == 1:
            last = (
                last.replace("weight", "scale") if f"{above}/bias" in entries else last
            )
        elif last == "weight" and re.search("/(wte|wpe|embed_[a-z]+)$", above):
            last = "embedding"
        elif last == "weight":
            n = len(leaf.shape)
            sides = [
                [n - 1 - axis for axis in reversed(side)]
                for side in (dims and split_axes(n, dims)[:0:-1]) or ()
            ]
            last, leaf, dims = (
                "kernel",
                array(*leaf.shape[::-1]),
                MatrixDims(*sides) if dims else None,
            )
        found[f"{above}/{last}"] = leaf, dims
    return found


def scanned(entries):
    """MaxText's scanned parameters: the two layers stacked along axis 1."""
    found = {}
    for path, (leaf, dims) in entries.items():
        if "layers_0" in path:
            shape, dims = with_layers(leaf.shape, dims, 2, 1)
            found[path.replace("layers_0", "layers")] = array(*shape), dims
        elif "layers_1" not in path:
            found[path] = leaf, dims
    return found


def sized(text, vocabulary, width, query=0, kv=0, hidden=0):
    """Sizes instead of the letters V, D, Q, K and M."""
    for letter, size in zip(
        "VDQKM", (vocabulary, width, query, kv, hidden), strict=True
    ):
        text = text.replace(letter, str(size))
    return text


NNX = """
    norm/{scale,bias} 768; blocks/{0,1}: {norm1,norm2}/{scale,bias} 768; {attn/out,mlp/linear2}/bias 768
    attn/{query,key,value}/kernel 768x12x64 0>12; attn/{query,key,value}/bias 12x64; attn/out/kernel 12x64x768 01>2
    mlp/linear1/kernel 768x3072 0>1; mlp/linear1/bias 3072; mlp/linear2/kernel 3072x768 0>1"""
HEAD = "lm_head/weight VxD"
WEIGHTS = """
    model/embed_tokens/weight VxD; model/norm/weight D
    model/layers/{0,1}: {input,post_attention}_layernorm/weight D; self_attn/q_proj/weight QxD 1>0
    self_attn/{k,v}_proj/weight KxD 1>0; self_attn/o_proj/weight DxQ 1>0;"""
MLP = "mlp/{gate,up}_proj/weight MxD 1>0; mlp/down_proj/weight DxM 1>0;"
EXPERTS = MLP.replace("mlp", "mlp/experts/{0,1}")
MAXTEXT = """
    params/token_embedder/embedding VxD; params/decoder/logits_dense/kernel DxV; params/decoder/decoder_norm/scale D
    params/decoder/{layers_0,layers_1}: {pre,post}_self_attention_layer_norm/scale D;"""
# (model, names, the preset that it needs): every leaf with its sizes, and the axes
# inputs>outputs of its matrices; or how they follow from the model's other row.
MODELS = {
    (
        "GPT-2",
        "Flax NNX",
        "",
    ): ("tok_embed/embedding 50257x768; pos_embed/embedding 1024x768" + NNX),
    (
        "GPT-2",
        "Hugging Face, `weight`",
        "",
    ): (
        """
        transformer/wte/weight 50257x768; transformer/wpe/weight 1024x768; transformer/ln_f/{weight,bias} 768
        transformer/h/{0,1}: {attn,mlp}/c_proj/bias 768; {ln_1,ln_2}/{weight,bias} 768
        attn/c_attn/weight 768x2304 0>1; attn/c_attn/bias 2304; attn/c_proj/weight 768x768 0>1
        mlp/c_fc/weight 768x3072 0>1; mlp/c_fc/bias 3072; mlp/c_proj/weight 3072x768 0>1"""
    ),
    (
        "GPT-2",
        "nanoGPT",
        "",
    ): (
        """
        transformer: wte/weight 50257x768; wpe/weight 1024x768; ln_f/weight 768; h/{0,1}/{ln_1,ln_2}/weight 768
        h/{0,1}/attn/c_attn/weight 2304x768 1>0; h/{0,1}/attn/c_proj/weight 768x768 1>0
        h/{0,1}/mlp/c_fc/weight 3072x768 1>0; h/{0,1}/mlp/c_proj/weight 768x3072 1>0"""
    ),
    (
        "GPT-2",
        "Levanter",
        "",
    ): (
        """
        embeddings/token_embeddings/weight vocab=50257,embed=768
        embeddings/position_embeddings/weight position=1024,embed=768; transformer/ln_f/{weight,bias} embed=768
        transformer/blocks/stacked: attn/c_attn/weight layers=2,embed=768,qkv=3,heads=12,head_size=64 1>234
        attn/c_attn/bias layers=2,qkv=3,heads=12,head_size=64
        attn/c_proj/weight layers=2,heads=12,head_size=64,embed=768 12>3; {attn,mlp}/c_proj/bias layers=2,embed=768
        {ln_1,ln_2}/{weight,bias} layers=2,embed=768; mlp/c_fc/weight layers=2,embed=768,mlp=3072 1>2
        mlp/c_fc/bias layers=2,mlp=3072; mlp/c_proj/weight layers=2,mlp=3072,embed=768 1>2"""
    ),
    ("LLaMA 3", "Hugging Face, `weight`", ""): sized(
        HEAD + WEIGHTS + MLP, 128256, 4096, 4096, 1024, 14336
    ),
    ("LLaMA 3", "Hugging Face, Flax", ""): flax,
    ("LLaMA 3", "MaxText", ""): sized(MAXTEXT, 128256, 4096)
    + """
        self_attention/query/kernel 4096x32x128 0>12; self_attention/{key,value}/kernel 4096x8x128 0>12
        self_attention/out/kernel 32x128x4096 01>2; mlp/{wi_0,wi_1}/kernel 4096x14336 0>1
        mlp/wo/kernel 14336x4096 0>1""",
    ("LLaMA 3", "MaxText, scanned", "maxtext"): scanned,
    (
        "LLaMA 3",
        "Levanter",
        "",
    ): (
        """
        {embeddings/token_embeddings,lm_head}/weight vocab=128256,embed=4096; transformer/norm/weight embed=4096
        transformer/layers/stacked: {input,post_attention}_layernorm/weight layers=2,embed=4096
        self_attn/q_proj/weight layers=2,kv_head=8,q_heads_per_group=4,head_size=128,embed=4096 4>123
        self_attn/{k,v}_proj/weight layers=2,kv_head=8,head_size=128,embed=4096 3>12
        self_attn/o_proj/weight layers=2,embed=4096,heads=32,head_size=128 23>1
        mlp/{gate,up}_proj/weight layers=2,mlp=14336,embed=4096 2>1
        mlp/down_proj/weight layers=2,embed=4096,mlp=14336 2>1"""
    ),
    ("Qwen3", "Hugging Face, `weight`", ""): (
        sized(HEAD + WEIGHTS + MLP, 151936, 4096, 4096, 1024, 12288)
        + "self_attn/{q,k}_norm/weight 128"
    ),
    ("Qwen3-MoE", "Hugging Face, `weight`", ""): (
        sized(HEAD + WEIGHTS + EXPERTS, 151936, 2048, 4096, 512, 768)
        + "self_attn/{q,k}_norm/weight 128; mlp/gate/weight 128x2048"
    ),
    ("Qwen3-MoE", "MaxText", "maxtext"): (
        sized(MAXTEXT, 151936, 2048)
        + """
        self_attention/query/kernel 2048x32x128 0>12; self_attention/{key,value}/kernel 2048x4x128 0>12
        self_attention/out/kernel 32x128x2048 01>2; self_attention/{query,key}_norm/scale 128
        moe_block/{wi_0,wi_1} 128x2048x768 1>2; moe_block/wo 128x768x2048 1>2; moe_block/gate/kernel 2048x128"""
    ),
    ("Qwen3-MoE", "MaxText, scanned", "maxtext"): scanned,
    ("gpt-oss", "Hugging Face", "experts_in_front"): (
        sized(HEAD + WEIGHTS, 201088, 2880, 4096, 512)
        + """
        self_attn/o_proj/bias 2880; self_attn/q_proj/bias 4096; self_attn/{k,v}_proj/bias 512; self_attn/sinks 64
        mlp/router/weight 32x2880; mlp/router/bias 32; mlp/experts/gate_up_proj 32x2880x5760 1>2
        mlp/experts/gate_up_proj_bias 32x5760; mlp/experts/down_proj 32x2880x2880 1>2
        mlp/experts/down_proj_bias 32x2880"""
    ),
    ("Gemma 3", "Hugging Face, `weight`", ""): (
        sized(WEIGHTS + MLP, 262208, 2560, 2048, 1024, 10240)
        + "{pre,post}_feedforward_layernorm/weight 2560;"
        " self_attn/{q,k}_norm/weight 256"
    ),
    (
        "Gemma 3",
        "Gemma's einsums",
        "gemma",
    ): (
        """
        transformer/embedder/input_embedding 262144x2560; transformer/final_norm/scale 2560
        transformer/{layer_0,layer_1}: {pre_attention,post_attention,pre_ffw,post_ffw}_norm/scale 2560
        attn/q_einsum/w 8x2560x256 1>02; attn/kv_einsum/w 2x4x2560x256 2>13; attn/attn_vec_einsum/w 8x256x2560 01>2
        attn/{_query,_key}_norm/scale 256; mlp/gating_einsum/w 2x10240x2560 2>1; mlp/linear/w 10240x2560 0>1"""
    ),
    (
        "DeepSeek-V3",
        "Hugging Face, `weight`",
        "",
    ): (
        """
        {model/embed_tokens,lm_head}/weight 129280x7168; model/norm/weight 7168; model/layers/{0,1}:
        {input,post_attention}_layernorm/weight 7168; self_attn/q_a_proj/weight 1536x7168 1>0
        self_attn/q_b_proj/weight 24576x1536 1>0; self_attn/kv_a_proj_with_mqa/weight 576x7168 1>0
        self_attn/kv_b_proj/weight 32768x512 1>0; self_attn/o_proj/weight 7168x16384 1>0
        self_attn/q_a_layernorm/weight 1536; self_attn/kv_a_layernorm/weight 512; mlp/gate/weight 256x7168
        mlp/gate/e_score_correction_bias 256; mlp/{experts/0,experts/1,shared_experts}/down_proj/weight 7168x2048 1>0
        mlp/{experts/0,experts/1,shared_experts}/{gate,up}_proj/weight 2048x7168 1>0"""
    ),
    ("DeepSeek-V3", "MaxText", "maxtext"): (
        sized(MAXTEXT, 129280, 7168)
        + """
        self_attention/wq_a/kernel 7168x1536 0>1; self_attention/wkv_a/kernel 7168x576 0>1
        self_attention/wq_b/kernel 1536x128x192 0>12; self_attention/wkv_b/kernel 512x128x256 0>12
        self_attention/out/kernel 128x128x7168 01>2; self_attention/q_norm/scale 1536; self_attention/kv_norm/scale 512
        DeepSeekMoeBlock_0/shared_experts/{wi_0,wi_1}/kernel 7168x2048 0>1
        DeepSeekMoeBlock_0/shared_experts/wo/kernel 2048x7168 0>1
        DeepSeekMoeBlock_0/MoeBlock_0/{wi_0,wi_1} 256x7168x2048 1>2
        DeepSeekMoeBlock_0/MoeBlock_0/wo 256x2048x7168 1>2; DeepSeekMoeBlock_0/MoeBlock_0/gate/kernel 7168x256"""
    ),
    ("DeepSeek-V3", "MaxText, scanned", "maxtext"): scanned,
    ("ViT", "Flax NNX", ""): """
        patch_embed/kernel 16x16x3x768; patch_embed/bias 768; pos_embedding 1x197x768; cls_token 1x1x768
        head/kernel 768x1000; head/bias 1000"""
    + NNX,
    (
        "ViT",
        "Hugging Face, `weight`",
        "",
    ): (
        """
        vit/layernorm/{weight,bias} 768; classifier/weight 1000x768; classifier/bias 1000; vit/embeddings:
        patch_embeddings/projection/weight 768x3x16x16; patch_embeddings/projection/bias 768; cls_token 1x1x768
        position_embeddings 1x197x768; vit/encoder/layer/{0,1}: {layernorm_before,layernorm_after}/{weight,bias} 768
        attention/attention/{query,key,value}/weight 768x768 1>0; attention/attention/{query,key,value}/bias 768
        {attention/output,output}/dense/bias 768; attention/output/dense/weight 768x768 1>0
        intermediate/dense/weight 3072x768 1>0; intermediate/dense/bias 3072; output/dense/weight 768x3072 1>0"""
    ),
    ("ViT", "Hugging Face, Flax", ""): flax,
    (
        "Whisper",
        "Hugging Face, `weight`",
        "convolutions",
    ): (
        """
        model/encoder/conv1/weight 768x80x3 12>0; model/encoder/conv2/weight 768x768x3 12>0
        model/encoder/{conv1,conv2}/bias 768; model/{encoder,decoder}/layer_norm/{weight,bias} 768
        model/encoder/embed_positions/weight 1500x768; model/decoder/embed_positions/weight 448x768
        model/decoder/embed_tokens/weight 51865x768; model/decoder/layers/{0,1}:
        encoder_attn_layer_norm/{weight,bias} 768; encoder_attn/{q,k,v,out}_proj/weight 768x768 1>0
        encoder_attn/{q,v,out}_proj/bias 768; model/{encoder,decoder}/layers/{0,1}: fc2/bias 768
        {final,self_attn}_layer_norm/{weight,bias} 768; self_attn/{q,k,v,out}_proj/weight 768x768 1>0
        self_attn/{q,v,out}_proj/bias 768
        fc1/weight 3072x768 1>0; fc1/bias 3072; fc2/weight 768x3072 1>0"""
    ),
    ("Whisper", "Hugging Face, Flax", "convolutions"): flax,
    (
        "Mamba",
        "Hugging Face, `weight`",
        "",
    ): (
        """
        backbone/embeddings/weight 50280x768; backbone/norm_f/weight 768; backbone/layers/{0,1}/norm/weight 768
        backbone/layers/{0,1}/mixer: in_proj/weight 3072x768 1>0; x_proj/weight 80x1536 1>0
        dt_proj/weight 1536x48 1>0; out_proj/weight 768x1536 1>0; {dt_proj,conv1d}/bias 1536; D 1536
        conv1d/weight 1536x1x4; A_log 1536x16"""
    ),
}


def entries_of(model, names, preset):
    entries = MODELS[model, names, preset]
    if isinstance(entries, str):
        return table(entries)
    source = "MaxText" if entries is scanned else "Hugging Face, `weight`"
    return entries(
        entries_of(*next(key for key in MODELS if key[:2] == (model, source)))
    )


@pytest.mark.parametrize("key", MODELS, ids="-".join)
def test_every_leaf_is_read_right_or_refused_and_its_preset_reads_all(key):
    expected, preset, refused = entries_of(*key), key[-1], 0
    params = tree(expected)
    found = leaves(params)
    for path, leaf in found.items():
        try:
            assert default_reading(path, leaf)[0] == expected[path][1], path
        except UncoveredError:
            refused += 1
    assert bool(refused) == bool(preset)
    if refused:
        with pytest.raises(ValueError, match="no rule covers"):
            assign(params)

    def axes(dims):  # presets count some from the end
        return {
            path: dims[path] and split_axes(leaf.ndim, dims[path])
            for path, leaf in found.items()
        }

    dims = chosen(params, getattr(presets, preset) if preset else None)
    assert axes(dims) == axes({path: dims for path, (_, dims) in expected.items()})


def row(model, names, preset):
    """The row of a model in the report."""
    matrices, adamw, refused = set(), set(), set()
    for path, leaf in leaves(tree(entries_of(model, names, preset))).items():
        parts = path.split("/")
        layer = parts[-2] if layer_depth(parts) < len(parts) else "/".join(parts[-2:])
        try:
            dims, reason = default_reading(path, leaf)
        except UncoveredError:
            refused.add(layer)
        else:
            matrices |= {layer} if dims else set()
            adamw |= (
                set()
                if dims
                else {re.sub(r" \(.*|, axes named.*|stacked ", "", reason)}
            )
    cells = [
        ", ".join(f"`{name}`" for name in sorted(matrices)),
        ", ".join(sorted(adamw)),
    ]
    cells.append(
        ", ".join(f"`{name}`" for name in sorted(refused)) + f": `{preset}`"
        if preset
        else ""
    )
    return f"| {model} | {names} | {cells[0]} | {cells[1]} | {cells[2]} |"


def summary(model):
    """The row of a model on the page: where the default rule covers it, and where a
    preset does.
    """
    cells = [[], []]
    for name, names, preset in MODELS:
        if name == model:
            cells[bool(preset)].append(f"{names}: `{preset}`" if preset else names)
    return f"| {model} | {'; '.join(cells[0])} | {'; '.join(cells[1])} |"


def rows_of(text):
    return [line for line in text.splitlines() if line.startswith("|")][2:]


def test_the_page_and_its_report_have_the_tables_and_the_presets_exist():
    page = (DOCS / "parameters.md").read_text()
    section = page.partition("## Known models")[2].partition("\n## ")[0]
    assert rows_of(section) == [
        summary(model) for model in dict.fromkeys(model for model, *_ in MODELS)
    ]
    assert rows_of((DOCS / "results" / "known_models.md").read_text()) == [
        row(*key) for key in MODELS
    ]
    listed = re.findall(
        r"^- `(\w+)`",
        page.partition("## Presets")[2].partition("\n## ")[0],
        re.MULTILINE,
    )
    assert sorted(listed) == ["convolutions", "experts_in_front", "gemma", "maxtext"]
    assert all(callable(getattr(presets, name)) for name in listed)
