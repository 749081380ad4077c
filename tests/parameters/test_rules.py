# SPDX-License-Identifier: Apache-2.0
"""The default rule on names and shapes, the ways to override it, and its errors."""

import collections
import functools
import itertools
import re

import equinox as eqx
import flax.linen as nn
import flax.traverse_util
import hypothesis
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from hypothesis import strategies as st
from optax.contrib import MuonDimensionNumbers

from normpre_optax.learning_rates import _adamw_inputs
from normpre_optax.parameters import presets
from normpre_optax.parameters.dims import MatrixDims, matrix_shape
from normpre_optax.parameters.explain import explain
from normpre_optax.parameters.roles import row_norms_by_role
from normpre_optax.parameters.rules import (
    Assignment,
    ParamSpec,
    assign,
    decay_matrices_only,
    default_matrix_dims,
)
from normpre_optax.parameters.tree import leaf_paths, leaves
from normpre_optax.stages.metric import without_boxes
from tests import cases
from tests.parameters.tables import (
    FROM_HEADS,
    IN_OUT,
    OUT_IN,
    STACKED,
    TO_HEADS,
    NamedArray,
    array,
    chosen,
    dims_of,
    table,
    tree,
    with_layers,
)

READ = """
    mlp/out/kernel 64x32 0>1; layers/0/mlp/gate/kernel 8x32 0>1; layers/0/moe/experts/0/gate/kernel 8x32 0>1
    layers/0/position_wise_ffn/kernel 8x32 0>1; embedder/layers/0/mlp/kernel 8x32 0>1
    layers/0/mixer/embed_dim_up/kernel 8x32 0>1; conv_module/pointwise_1/kernel 8x16 0>1
    conv_block/conv_proj/kernel 8x16 0>1; h/0/mlp/c_proj/weight 3072x768 0>1
    layers/0/mlp/shared_expert/gate_proj/weight 32x8 1>0; layers/0/pos_ffn/w_1/weight 32x8 1>0
    h/1/mlp/c_proj/weight 768x3072 1>0; blocks/0/attn/v_proj/kernel 32x2x8 0>12; blocks/0/attn/wk 32x2x8 0>12
    attn/q 32x4x8 0>12; attn/key/kernel 4096x1x64 0>12; blocks/0/self_attention/o_proj/kernel 4x8x32 01>2
    blocks/0/attn/output/kernel 4x8x32 01>2; blocks 4x8x16 1>2; h/attn/c_attn/kernel 4x8x24 1>2
    ScanBlock_0/Dense_0/kernel 4x8x16 1>2; transformer/__layer_stack_no_per_layer/linear/w 4x8x16 1>2
    layers/moe/experts/0/up/kernel 4x8x16 1>2; layers/moe/expert_1/up/kernel 4x8x16 1>2
    h/attn/c_attn/weight 4x24x8 2>1; layernorm_qkv/weight 24x8 1>0; pre_logits/kernel 8x8 0>1; shared/up/weight 32x8 1>0
"""
ADAMW = """
    layers/b1 4x32; layers/bq 4x32; layers/attn_norm 4x32; layers/ln_1/weight 4x32; layers/gamma 4x32
    layers/0/attn/rel_bias/embedding 32x4; wte 100x8; tok_embeddings/weight 100x8; patch_embed/proj/kernel 4x4x3x8
    unembed/kernel 8x100; logits_dense/kernel 8x100; value_head/w 8x1; output/weight 100x8; params/out/kernel 8x100
    layers/0/block_sparse_moe/gate/weight 4x8; layers/0/mlp/shared_expert_gate/weight 1x8; layers/0/up/lora_a 8x2
    layers/0/up/lora/A 8x2; layers/0/up/lora/b/kernel 2x32; lora/layers/0/up/A 8x2; layers/0/lora_down/kernel 8x2
    layers/0/up/kernel_lora_b 2x32; layers/0/q_proj/lora_A/default/weight 2x8; W_U 8x100; W_E 100x8; E 100x8
    net/W_E 100x8; vocab_mixer/kernel 8x8; layers/0/mixer/A_log 32x4; layers/0/attn/lambda_q1 4x8; params/tok 100x8
    layers/0/mixer/conv1d/weight 32x1x4; layers/0/mixer/conv1d/kernel 4x1x32; layers/0/mixer/short_conv/kernel 4x32
    layers/0/att/time_mix_k 1x1x8; nothing 0x8; shared/weight 100x8; dense/lora_kernel_a 8x2; dense/lora_kernel_b 2x32
    score/weight 2x8; registers 4x8; soft_prompt 20x8; latents 64x8; layers/0/up/weight_g 32x1; up/per_channel 1x8
"""
REFUSED = """
    w 4x8x16; k 4x8x16; layers/layer_0/mlp/kernel 4x8x16; layers_0/mlp/kernel 4x8x16; out/kernel 4x8x32
    layers/0/attn/q_einsum/w 4x32x8; conv1/kernel 3x3x8x16; conv1/weight 16x8x3x3; conv_transpose/weight 8x16x3x3
    layers/Conv_0/kernel 3x8x16; layers/0/conv2_d/w 3x3x8x16; layers/0/moe/experts/up/kernel 4x8x32
    layers/experts/up/weight 3x4x32x8; layers/moe/wi 4x8x32; layers_0/MoeBlock_0/wi 4x8x32; attn/key/kernel 4097x1x64
    layers/attn/query/kernel 24x12x768x64
"""


def test_default_rule():
    entries = table(READ + ADAMW).items()
    found = {
        path: (default_matrix_dims(path, leaf), dims) for path, (leaf, dims) in entries
    }
    assert {path: both for path, both in found.items() if both[0] != both[1]} == {}


def shown(error, dims="inputs=..., outputs=..."):
    """The rule that an error shows, with these dims in place of the dots."""
    lines = [
        line[4:].replace("inputs=..., outputs=...", dims)
        for line in str(error).splitlines()
        if line[:2] == "  "
    ]
    scope = {"MatrixDims": MatrixDims, "default_matrix_dims": default_matrix_dims}
    exec("\n".join(lines), scope)
    return scope["rule"]


@pytest.mark.parametrize(
    ("path", "leaf"), [(path, leaf) for path, (leaf, _) in table(REFUSED).items()]
)
def test_uncovered_leaf_is_an_error_that_shows_the_rule_to_write(path, leaf):
    params, shape = tree({path: leaf}), leaf.shape
    message = re.escape(f"no rule covers parameter {path!r} of shape {shape}")
    with pytest.raises(ValueError, match=message):
        default_matrix_dims(path, leaf)
    with pytest.raises(ValueError, match=message) as caught:
        assign(params)
    with pytest.raises(
        TypeError, match="inputs must be an int or a tuple of ints, got Ellipsis"
    ):
        assign(params, shown(caught.value))
    rule = shown(caught.value, "-2, -1")
    assert chosen(params | {"up": array(3, 4)}, rule) == {
        path: MatrixDims(-2, -1),
        "up": IN_OUT,
    }


def test_one_error_names_all_that_is_uncovered_and_layers_once():
    layers = (
        "h/{0,1,2}: attn/query/kernel 12x768x64; attn/out/kernel 12x64x768; conv/kernel"
        " 3x8x8"
    )
    params = tree(f"cube 2x3x4; {layers}")
    with pytest.raises(ValueError, match="no rule covers") as caught:
        assign(params)
    assert re.findall(
        r"^no rule covers (.* of shape \([\d, ]+\).*)", str(caught.value), re.MULTILINE
    ) == [
        "parameter 'cube' of shape (2, 3, 4)",
        (
            "3 parameters 'h/{0..2}/attn/query/kernel' of shape (12, 768, 64): "
            "attention (d, heads, size) would be a 49152 x 12 matrix"
        ),
        (
            "3 parameters 'h/{0..2}/conv/kernel' of shape (3, 8, 8): a convolution can"
            " be flattened in several ways"
        ),
    ]
    found = chosen(params, shown(caught.value, "1, 2"))
    assert (
        found["h/2/attn/query/kernel"]
        == found["h/1/conv/kernel"]
        == found["cube"]
        == STACKED
    )
    assert found["h/1/attn/out/kernel"] == FROM_HEADS


# What only the tree around a leaf shows. Attention's d, heads and size are 32, 4 and 8.
CONTRADICTED = {
    "heads first, by the bias": "query/kernel 4x32x8; query/bias 4x8",
    "heads first, by its shape": "attn/wk 2x32x8; attn/wq 4x32x8; attn/wo 4x8x32",
    "bare arrays by head": (
        "attn/W_Q 4x32x8; attn/b_Q 4x8; attn/W_O 4x8x32; attn/b_O 32"
    ),
    "an output of another layout": (
        "attn/query/kernel 32x4x8; attn/out/kernel 32x4x8; attn/out/bias 32"
    ),
    "kernels as (out, in)": "mlp/up/kernel 32x8; mlp/up/bias 32",
    "a square kernel beside one as (out, in)": (
        "a/x/kernel 8x8; a/y/kernel 24x8; a/y/bias 24"
    ),
    "weights as (in, out)": "up/weight 8x32; up/bias 32",
    "GPT-2 whose bias and shape disagree": "mlp/c_fc/weight 32x8; mlp/c_fc/bias 8",
    "GPT-2 with nothing that decides": (
        "h/0/attn/c_proj/weight 8x8; h/0/attn/c_proj/bias 8"
    ),
    "stacked elsewhere, by a bias": "blocks/up/kernel 8x4x32; blocks/up/bias 32x4",
    "stacked elsewhere, by a norm": (
        "blocks/up/kernel 8x4x32; blocks/down/kernel 32x4x8; blocks/ln/scale 8x4"
    ),
    "stacked elsewhere, by sizes": "blocks/up/kernel 8x4x32; blocks/down/kernel 32x4x8",
    "stacked elsewhere, square": "blocks/up/kernel 8x4x8; blocks/up/bias 8x4",
    "attention stacked elsewhere": (
        "blocks/query/kernel 8x4x2x4; blocks/query/bias 2x4x4; blocks/out/bias 8x4"
    ),
    "experts beside layers": (
        "layers/MoeBlock_0: gate/kernel 8x3x4; wi_0 4x3x8x16; wo 4x3x16x8"
    ),
}


@pytest.mark.parametrize("name", CONTRADICTED)
def test_other_layouts_are_errors_never_a_wrong_reading(name):
    match = (
        "it looks stacked, but not on axis 0" if "stacked" in name else "no rule covers"
    )
    with pytest.raises(ValueError, match=match):
        assign(tree(CONTRADICTED[name]))


SEEN_TOGETHER = {
    "GPT-2 in both layouts": (
        """h/0: attn/c_attn/weight 768x2304 0>1; attn/c_proj/weight 768x768 0>1
        mlp/c_fc/weight 768x3072 0>1; mlp/c_proj/weight 3072x768 0>1
        n/0: attn/c_attn/weight 2304x768 1>0; attn/c_proj/weight 768x768 1>0
        mlp/c_fc/weight 3072x768 1>0; mlp/c_proj/weight 768x3072 1>0"""
    ),
    "GPT-2, stacked": (
        "h: attn/c_attn/weight 12x768x2304 1>2; attn/c_proj/weight 12x768x768 1>2;"
        " ln_1/weight 12x768"
    ),
    "cross attention of GPT-2": (
        "h/0/crossattention: c_attn/weight 768x1536 0>1; {q_attn,c_proj}/weight"
        " 768x768 0>1"
    ),
    "multi-query attention": (
        "attn/c_attn/weight 40x32 1>0; attn/c_proj/weight 32x32 1>0"
    ),
    "a stack by its norm": (
        "tower: q/kernel 4x8x8 1>2; up/kernel 4x8x32 1>2; mix 4x8; ln/scale 4x8"
    ),
    "a stack by its name": "blocks: q/kernel 4x8x8 1>2; up/kernel 4x8x32 1>2; mix 4x8",
    "a stack of stacks": "blocks/up/kernel 2x3x8x32 2>3; blocks/up/bias 2x3x32",
    "layers with names": (
        "layers/{first,last}: query/kernel 8x2x4 0>12; ln/scale 8; up 8x8 0>1"
    ),
    "cross attention": (
        "attn/query/kernel 32x4x8 0>12; attn/key/kernel 48x4x8 0>12; attn/out/kernel"
        " 4x6x32 01>2"
    ),
    "a router beside experts": "mlp/gate/kernel 8x4; mlp/experts/0/up/kernel 8x32 0>1",
    "a gate beside up": "mlp/gate/kernel 8x32 0>1; mlp/up/kernel 8x32 0>1",
    "both": "moe/gate/kernel 8x32 0>1; moe/up/kernel 8x32 0>1; moe/router/kernel 8x4",
    "attention at the top": (
        "{query,key,value}/kernel 8x2x4 0>12; out/kernel 2x4x8 01>2"
    ),
    "b is a bias only beside its w": "a 3x4 0>1; b 4x5 0>1",
    "b beside w": "linear/w 3x4x5 1>2; linear/b 3x5; attn/Wq 3x4x4 1>2; attn/bq 3x4",
    "bare arrays": (
        """layers: wqkv 3x16x48 1>2; bqkv 3x48; w1 3x16x64 1>2; b1 3x64; mix 3x16; g 3x16"""
    ),
    "Haliax without layers": "plain/weight mlp=32,embed=16 1>0",
    "norms by head": (
        "0/attn: query/kernel 8x2x4 0>12; q_norm/scale 2x4; out/kernel 2x4x8 01>2; up"
        " 8x8 0>1"
    ),
}


@pytest.mark.parametrize("name", SEEN_TOGETHER)
def test_leaves_are_read_together(name):
    assert chosen(tree(SEEN_TOGETHER[name])) == dims_of(SEEN_TOGETHER[name])


SIZES = st.sampled_from([2, 3, 4, 6, 8])


@hypothesis.settings(max_examples=200)
@hypothesis.given(
    st.tuples(*[SIZES] * 6), *[st.booleans()] * 3, st.sampled_from([0, 1])
)
def test_a_block_stacked_in_front_is_right_and_elsewhere_an_error(
    sizes, biases, by_head, norms, axis
):
    """Whatever sizes coincide, except square kernels everywhere, which look the same
    with the layers on axis 1.
    """
    d, heads, size, hidden, kv, layers = sizes
    hypothesis.assume(axis == 0 or d != hidden)
    q, k = (f"{n}x{size}" if by_head else n * size for n in (heads, kv))
    to_heads, from_heads = ("0>12", "01>2") if by_head else ("0>1", "0>1")
    text = f"""mlp/up/kernel {d}x{hidden} 0>1; mlp/down/kernel {hidden}x{d} 0>1; attn/query/kernel {d}x{q} {to_heads}
        attn/{{key,value}}/kernel {d}x{k} {to_heads}; attn/out/kernel {q}x{d} {from_heads}"""
    text += (
        f"; attn/query/bias {q}; attn/{{key,value}}/bias {k}; attn/out/bias {d};"
        f" mlp/up/bias {hidden}" * biases
    )
    text += f"; ln/scale {d}; attn/q_norm/scale {size}" * norms
    entries = {
        f"blocks/{path}": with_layers(x.shape, dims, layers, axis)
        for path, (x, dims) in table(text).items()
    }
    params = tree(
        {"ln_f/scale": array(d)}
        | {path: array(*shape) for path, (shape, _) in entries.items()}
    )
    if axis == 0:
        assert chosen(params) == {path: dims for path, (_, dims) in entries.items()} | {
            "ln_f/scale": None
        }
    else:
        with pytest.raises(ValueError, match="it looks stacked, but not on axis 0"):
            assign(params)


NAMED = """
    up/kernel 8x3x32 embed,layers,mlp 0>2; up/weight 32x3x8 mlp,layers,embed 2>0; up/kernel 8x32x3 embed,mlp,layers 0>1
    up/kernel 4x8x3x32 expert,embed,layers,mlp 1>3; q/kernel 8x3x2x4 embed,layers,heads,kv 0>23
    mix/kernel 8x3x2x4 embed,layers,q_heads,head_dim 0>23; mix/kernel 2x3x4x8 heads,layers,kv,embed 02>3
    attn/out/kernel 2x3x4x8 ?,layers,?,? 02>3; up/kernel 8x32 embed,mlp 0>1; up/kernel 8x32 ?,model 0>1
    mix 8x3 embed,layers; table 100x8 vocab,embed; table 8x100 embed,vocab
"""


def boxed(path, sizes, names):
    names = tuple(None if name == "?" else name for name in names.split(","))
    return tree({path: nn.Partitioned(array(*map(int, sizes.split("x"))), names=names)})


@pytest.mark.parametrize("entry", re.split(r"[;\n]", NAMED.strip()))
def test_names_of_axes(entry):
    path, sizes, names, *dims = entry.split()
    assert chosen(boxed(path, sizes, names)) == dims_of(" ".join([path, sizes, *dims]))


def test_names_of_axes_that_do_not_show_the_layers():
    with pytest.raises(
        ValueError,
        match=r"it looks stacked, but its axes are named \(embed, None, mlp\)",
    ):
        assign(boxed("layers/kernel", "8x3x32", "embed,?,mlp"))
    with pytest.raises(ValueError, match=r"its axes named \(embed, layers, a, b\)"):
        assign(boxed("kernel", "8x3x2x4", "embed,layers,a,b"))


# Names: the nearest one decides.

TRUNK = """
    layers_0/dense/kernel 8x8 0>1; mlp/{up,gate}/kernel 8x32 0>1; mlp/down/kernel 32x8 0>1; up_proj/weight 32x8 1>0
    attn/query/kernel 8x2x4 0>12; attn/out/kernel 2x4x8 01>2; blocks/3/head_mixer/up/kernel 8x8 0>1; out/kernel 8x100
"""


@pytest.mark.parametrize(
    "root", ["classifier", "head", "readout", "logits_net", "embedder", "pos_embedding"]
)
def test_a_name_above_a_block_or_a_layer_does_not_decide_about_it(root):
    entries = {f"{root}/{path}": entry for path, entry in table(TRUNK).items()}
    assert chosen(tree(entries)) == {path: dims for path, (_, dims) in entries.items()}


def test_a_norm_may_have_matrices():
    text = "layers/0/norm: scale 8; down 8x16 0>1; up 16x8 0>1; gate/kernel 8x16 0>1"
    assert chosen(tree(text)) == dims_of(text)


@cases.rows(
    "wrap",
    *((lambda x, key=key: {key: x},) for key in ("value", "raw", "0")),
    (lambda x: [x],),
)
def test_a_container_of_one_array_has_no_name(wrap):
    text = (
        "up_proj/weight 32x8 1>0; layers/0/down/kernel 32x8 0>1; attn/query/w 8x2x4"
        " 0>12; wte/weight 100x8"
    )
    params = jax.tree.map(lambda x: wrap(wrap(x)), tree(text))
    assert chosen(params) == dims_of(text)
    assert chosen(
        params, jax.tree.map(lambda x: wrap(wrap(OUT_IN)), tree(text))
    ) == dict.fromkeys(table(text), OUT_IN)
    # Under other names, a lone "value" is a container, but not in attention.
    text = (
        "embed/embedding/value 100x8; pos/raw_value 9x8; lm_head/value 8x100;"
        " attn/value 8x2x4 0>12"
    )
    assert chosen(tree(text)) == {
        **dict.fromkeys(("embed/embedding", "pos", "lm_head")),
        "attn/value": TO_HEADS,
    }
    one = {"query": [{"kernel": array(8, 2, 4)}], "key": {"kernel": array(8, 2, 4)}}
    assert set(chosen({"attn": one}).values()) == {TO_HEADS}  # a layer in a list of one


def test_tuple_keys_are_paths():
    text = (
        "up/kernel 8x32 0>1; up/bias 32; lm_head/kernel 8x100; h/0/attn/query/kernel"
        " 8x2x4 0>12"
    )
    flat = flax.traverse_util.flatten_dict(tree(text))
    assert all(isinstance(key, tuple) for key in flat)
    assert chosen(flat) == dims_of(text)


def test_dots_are_those_of_a_state_dict():
    """As the nested tree, and so are residual writers: GPT-2's (in, out) and LLaMA's
    (out, in).
    """
    gpt2 = """h/{0,1}: attn/c_attn/weight 8x24 0>1; attn/c_proj/weight 8x8 0>1; mlp/c_fc/weight 8x32 0>1
        mlp/c_proj/weight 32x8 0>1; ln_1/weight 8"""
    llama = (
        "layers/{0,1}: self_attn/o_proj/weight 8x8 1>0; mlp/down_proj/weight 8x32 1>0;"
        " mlp/up_proj/weight 32x8 1>0"
    )
    for text in (gpt2, llama):
        nested = tree(text)
        flat = {
            path.replace("/", "."): x
            for path, x in flax.traverse_util.flatten_dict(nested, sep="/").items()
        }
        assert chosen(flat) == chosen(nested) == dims_of(text)
        assert row_norms_by_role(assign(flat)) == row_norms_by_role(assign(nested))


UNNAMED = {
    "list": [array(100, 8), array(8, 32), array(32), array(8, 100)],
    "pairs": ((array(8, 32), array(32)), (array(32, 8), array(8))),
    "numbers": {"0": array(100, 8), "1": array(8, 32)},
    "lists of one": [[array(100, 8)], [array(8, 32)]],
}


@pytest.mark.parametrize("name", UNNAMED)
def test_several_arrays_without_names_are_an_error_that_shows_a_rule(name):
    with pytest.raises(
        ValueError, match="its path has no name, so it may be an embedding"
    ) as caught:
        assign(UNNAMED[name])
    found = chosen(UNNAMED[name], shown(caught.value, "0, 1"))
    shapes = [x.shape for x in jax.tree.leaves(UNNAMED[name])]
    assert list(found.values()) == [
        IN_OUT if len(shape) == 2 else None for shape in shapes
    ]
    assert list(chosen([array(8, 32)]).values()) == [IN_OUT]  # one kernel alone


def test_the_error_on_arrays_without_names_tells_them_apart():
    """An MLP and a head of one shape, its transpose, and pairs of arrays."""
    kernel, transposed = array(8, 32), array(32, 8)
    flat = [kernel, array(32), transposed, array(8), kernel, array(32), transposed]
    pairs = [(kernel, array(32)), (transposed, array(8)), (kernel, array(32))]
    for params in (flat, pairs, {str(i): x for i, x in enumerate(flat)}):
        with pytest.raises(ValueError, match="some parameters have no names") as caught:
            assign(params)
        text = str(caught.value)
        first = text.splitlines()[0]
        assert "{v.path: v.value for v in model.trainable_variables}" in first
        assert first.rpartition(": ")[2] in explain(params)
        matrices = [path for path, leaf in leaves(params).items() if leaf.ndim == 2]
        tests = re.findall("        if (.*):\n", text)
        assert sorted(tests) == sorted(f"path == {path!r}" for path in matrices)
        found = chosen(params, shown(caught.value, "0, 1"))
        assert [path for path, dims in found.items() if dims] == matrices


def test_the_error_on_many_arrays_without_names_shows_no_rule_for_them():
    many = {str(i): array(8, 32) for i in range(11)}
    with pytest.raises(ValueError, match=r"\{v\.path: v\.value for") as caught:
        assign(many)
    assert "def rule" not in str(caught.value)
    with pytest.raises(ValueError, match=r"\{v\.path: v\.value for") as caught:
        assign({**many, "cube": array(2, 3, 4)})
    tests = re.findall("        if (.*):\n", str(caught.value))
    assert tests == ["path == 'cube'"]


def test_names_of_keras():
    """Of a keras-hub backbone, and of a Sequential."""
    text = """
        token_and_position_embedding/{token,position}_embedding/embeddings 90x8; norm/{gamma,beta} 8
        embeddings_layer_norm/gamma 8; transformer_layer_{0,1}: self_attention_layer/{query,key,value}/bias 2x4
        self_attention_layer/{query,key,value}/kernel 8x2x4 0>12; self_attention_layer/attention_output/bias 8
        self_attention_layer/attention_output/kernel 2x4x8 01>2; self_attention_layer_norm/{gamma,beta} 8
        feedforward_intermediate_dense/kernel 8x32 0>1; feedforward_intermediate_dense/bias 32
        feedforward_output_dense/kernel 32x8 0>1; feedforward_output_dense/bias 8; feedforward_layer_norm/gamma 8
    """
    assert chosen(tree(text)) == dims_of(text)
    assert "note" not in explain(tree(text))
    text = "model/embedding/embeddings 90x8; model/dense{,_1,_3}/kernel 8x8 0>1"
    flat = {path: leaf for path, (leaf, _) in table(text).items()}
    assert chosen(flat) == dims_of(text)


def test_gemmas_einsums_may_be_scanned():
    text = (
        "attn: q_einsum/w 4x8x2; kv_einsum/w 2x1x8x2; attn_vec_einsum/w 4x2x8;"
        " mlp/gating_einsum/w 2x32x8"
    )
    scanned = jax.tree.map(lambda x: array(3, *x.shape), tree(text))
    for params, layers in ((tree(text), 1), (scanned, 3)):
        found = assign({"layers": params} if layers > 1 else params, presets.gemma)
        shapes = sorted(matrix_shape(spec.shape, spec.dims) for spec in found.values())
        assert shapes == sorted(
            (n * layers, *sides)
            for n, *sides in ((1, 8, 8), (2, 2, 8), (1, 8, 8), (2, 32, 8))
        )


def test_experts_beside_a_router_are_errors_that_recommend_the_preset():
    text = (
        "expert_mlp/w_down 4x32x8 1>2; mlp: router/kernel 8x4; gate_proj 4x8x32 1>2;"
        " down_proj 4x32x8 1>2"
    )
    with pytest.raises(
        ValueError, match=r"along any axis; presets\.experts_in_front reads"
    ):
        assign(tree(text))

    def front(dims):
        return dims and MatrixDims(-2, -1)

    assert chosen(tree(text), presets.experts_in_front) == {
        k: front(dims) for k, dims in dims_of(text).items()
    }


def test_fused_experts_in_the_other_order_are_an_error_of_the_preset():
    """Hugging Face's Mixtral and Qwen3-MoE store (expert, out, in), gpt-oss (expert,
    in, out), under the same names.
    """
    fused = (
        "mlp/router/weight 4x8; mlp/experts/gate_up_proj {}; mlp/experts/down_proj {}"
    )
    found = chosen(tree(fused.format("4x8x32", "4x16x8")), presets.experts_in_front)
    assert found == {"mlp/router/weight": None} | dict.fromkeys(
        found.keys() - {"mlp/router/weight"}, MatrixDims(-2, -1)
    )
    with pytest.raises(
        ValueError, match=r"'mlp/experts/gate_up_proj' .* are not \(expert, in, out\)"
    ):
        assign(tree(fused.format("4x32x8 1>2", "4x8x16 1>2")), presets.experts_in_front)


def test_the_preset_of_experts_reads_only_what_the_default_rule_does_not():
    """Routers and norms of stacked layers, and attention kernels beside a router."""
    text = """
        router/kernel 8x4; q_proj/kernel 8x2x4; k_proj/kernel 8x2x4; o_proj/kernel 2x4x8; norm/w 1x8
        mlp: router/kernel 8x4; norm/scale 8; gate_proj 4x8x32
    """
    scanned = {"layers": jax.tree.map(lambda x: array(3, *x.shape), tree(text))}
    for params, layers in ((tree(text), 0), (scanned, 1)):
        found = {
            path.removeprefix("layers/"): dims
            for path, dims in chosen(params, presets.experts_in_front).items()
        }
        matrices = {path: dims for path, dims in found.items() if dims}
        assert matrices == {
            **dict.fromkeys(
                ("q_proj/kernel", "k_proj/kernel"),
                MatrixDims(layers, (layers + 1, layers + 2)),
            ),
            "o_proj/kernel": MatrixDims((layers, layers + 1), layers + 2),
            "mlp/gate_proj": MatrixDims(-2, -1),
        }


# Paths and leaves.


class Module(eqx.Module):
    query: object
    value: object

    def __call__(self, x):
        raise AssertionError("a callable tree is a tree")


def test_paths_and_order_follow_jax():
    x = jnp.zeros(2)
    boxes = {"box": nn.Partitioned(x, names=("embed",)), "var": nnx.Param(x)}
    gaps = (
        None,
        optax.MaskedNode(),
        x,
        nn.Partitioned(optax.MaskedNode(), names=("embed",)),
    )
    params = {
        "b": [x, Module(1.0, {"k": x})],
        "a": NamedArray(x, ()),
        "out": gaps,
        **boxes,
    }
    paths = ["a", "b/0", "b/1/query", "b/1/value/k", "box", "out/2", "var"]
    found = assign(params)
    assert (
        leaf_paths(params)
        == list(found)
        == [spec.path for spec in found.values()]
        == paths
    )
    assert without_boxes(boxes) == {"box": x, "var": x}
    assert assign({}) == assign(optax.MaskedNode()) == Assignment()
    seen = []
    jax.eval_shape(
        lambda params: [seen.append(assign(params)), params][1], params
    )  # of tracers
    assert seen == [found]


def test_an_attribute_called_value_is_no_box():
    kernel = array(8, 2, 4)
    for query in (kernel, optax.MaskedNode()):
        found = chosen({"attn": Module(query, kernel)})
        assert found == {
            f"attn/{name}": TO_HEADS
            for name in (["query", "value"] if query is kernel else ["value"])
        }


@cases.rows(
    "params error message",
    (
        {"a/b": array(2, 3), "a": {"b": array(2, 3)}},
        ValueError,
        "two parameters have the path 'a/b'",
    ),
    ({"noise": jax.random.key(0)}, TypeError, "parameter 'noise' has dtype key<fry>"),
    (
        {"mask": jnp.ones((4, 8), bool)},
        TypeError,
        "parameter 'mask' has dtype bool: remove masks",
    ),
    (
        {"activation": jnp.tanh, "w": array(2, 3)},
        TypeError,
        "parameter 'activation' is .*not an array.*eqx.filter",
    ),
)
def test_wrong_leaves_are_errors(params, error, message):
    with pytest.raises(error, match=message):
        assign(params)


# Overrides.

CUBE = MatrixDims(inputs=1, outputs=0)
PARAMS = tree(
    TEXT := "cube 2x3x4 1>0; wte 100x8; blocks/{0,1}/up: kernel 8x32 0>1; bias 32"
)
WANT = dims_of(TEXT)
UP = {"up": {"bias": None, "kernel": IN_OUT}}
FULL = {
    "blocks": {"0": UP, "1": UP},
    "cube": MuonDimensionNumbers(reduction_axis=1, output_axis=0),
    "wte": None,
}


def rule(path, leaf, strict=True):
    return (
        MuonDimensionNumbers(1, 0)
        if path == "cube"
        else default_matrix_dims(path, leaf)
    )


OVERRIDES = {
    "rule": rule,
    "jax partial": jax.tree_util.Partial(rule),
    "callable": lambda params, flag=True: FULL,
    "tree_map": lambda p: (
        jax.tree.map(lambda x: {1: None, 2: IN_OUT, 3: CUBE}[x.ndim], p) | {"wte": None}
    ),
    "tree": FULL,
    "assignment": assign({**PARAMS, "more": array(3)}, FULL | {"more": None}),
}


@pytest.mark.parametrize("matrix_dims", OVERRIDES.values(), ids=OVERRIDES)
def test_overrides(matrix_dims):
    assert chosen(PARAMS, matrix_dims) == WANT


def test_trees_are_matched_by_names_and_may_be_prefixes():
    prefix = {"blocks": {"0": UP, "1": None}, "cube": CUBE, "wte": IN_OUT}
    assert chosen(PARAMS, prefix) == {**WANT, "blocks/1/up/kernel": None, "wte": IN_OUT}
    assert set(chosen(PARAMS, lambda params: None).values()) == {None}
    assert chosen({"a": array(2, 3), "b": [array(4, 5)]}, OUT_IN) == {
        "a": OUT_IN,
        "b/0": OUT_IN,
    }
    for dims in (IN_OUT, None):
        assert chosen(Module(array(2, 3), array(4, 5)), Module(dims, None)) == {
            "query": dims,
            "value": None,
        }
    masked = {**PARAMS, "cube": optax.MaskedNode(), "wte": None}
    assert chosen(masked, FULL) == {
        path: dims for path, dims in WANT.items() if path not in ("cube", "wte")
    }


def test_a_tree_fits_parameters_with_and_without_boxes():
    bare, dims = (
        {"blocks": {"up": array(8, 3, 32)}, "ln": array(8)},
        MatrixDims(inputs=0, outputs=2),
    )
    box = functools.partial(nn.Partitioned, names=(None, None, None))
    boxed = {"blocks": {"up": box(array(8, 3, 32))}, "ln": nnx.Param(jnp.zeros(8))}
    for params, entry in itertools.product((bare, boxed), (dims, box(dims))):
        assert chosen(params, {"blocks": {"up": entry}, "ln": None}) == {
            "blocks/up": dims,
            "ln": None,
        }


def test_rules_see_shape_dtype_and_axis_names():
    seen = {}

    def rule(path, leaf):
        seen[path] = (leaf.shape, leaf.ndim, leaf.size, leaf.dtype, leaf.names)

    assign(
        {
            "a": array(2, 3),
            "b": nn.Partitioned(array(4, dtype=jnp.bfloat16), names=("embed",)),
        },
        rule,
    )
    assert seen == {
        "a": ((2, 3), 2, 6, jnp.float32, None),
        "b": ((4,), 1, 4, jnp.bfloat16, ("embed",)),
    }


def test_a_complex_matrix_is_refused():
    with pytest.raises(
        TypeError, match="parameter 'up' is complex, a matrix must be real"
    ):
        assign({"up": array(4, 8, dtype=jnp.complex64)}, IN_OUT)


@cases.rows(
    "matrix_dims error message",
    (
        {**FULL, "cube": "matrix"},
        TypeError,
        "matrix_dims for parameter 'cube' must be MatrixDims",
    ),
    ("muon", TypeError, r"must be None, a rule \(path, leaf\), .*; got 'muon'"),
    (lambda *args: None, TypeError, "must be None, a rule"),
    (lambda path, leaf, more: None, TypeError, "of 3 arguments"),
    (
        {"blocks": FULL["blocks"], "cube": CUBE},
        ValueError,
        "does not match .* no entry for 'wte'",
    ),
    ({**FULL, "cubes": CUBE}, ValueError, "does not match .* an entry at 'cubes'"),
    (
        {**FULL, "cube": {"kernel": CUBE}},
        ValueError,
        "does not match .* an entry at 'cube/kernel'",
    ),
    (
        {**FULL, "cube": MatrixDims(1, 3)},
        ValueError,
        "parameter 'cube' of shape .* out of range",
    ),
    (
        lambda path, leaf: IN_OUT,
        ValueError,
        "parameter 'blocks/0/up/bias' of shape .* out of range",
    ),
    (lambda params: lambda path, leaf: None, TypeError, "must be MatrixDims"),
)
def test_wrong_overrides_name_the_parameter(matrix_dims, error, message):
    with pytest.raises(error, match=message):
        assign(PARAMS, matrix_dims)


def test_specs_have_the_reason_and_the_inputs_for_adamw():
    params = tree(
        "frozen/kernel 2x3; up 2x3; lm_head/weight 9x4; logits/kernel 4x9; b 3"
    )
    found = assign(
        params,
        lambda path, leaf: (
            None if "frozen" in path else default_matrix_dims(path, leaf)
        ),
    )
    assert found["up"] == ParamSpec("up", (2, 3), IN_OUT, "(in, out)")
    assert found["frozen/kernel"].reason == "given by matrix_dims"
    inputs = {
        path: _adamw_inputs(spec) for path, spec in found.items() if spec.dims is None
    }
    assert inputs == {
        "b": 1,
        "frozen/kernel": 2,
        "lm_head/weight": 4,
        "logits/kernel": 4,
    }


def test_decay_matrices_only():
    decayed = (
        "layers/mlp/kernel 3x4x8; block_0/attention/query/kernel 4x2x2;"
        " wte/embedding 9x4"
    )
    decayed += (  # no rule covers the last one
        "; wpe/embedding 5x4; head/kernel 4x9; odd 2x3x4"
    )
    others = (
        "; layers/mlp/bias 3x8; layers/norm/scale 3x4; block_0/attention/query/bias"
        " 2x2; ln_f/scale 4; t ()"
    )
    mask = decay_matrices_only(tree(decayed + others))
    assert {
        path
        for path, x in zip(leaf_paths(mask), jax.tree.leaves(mask), strict=True)
        if x
    } == set(table(decayed))


def test_assign_enters_few_functions_and_scales_with_the_tree():
    def calls_of(params):
        return collections.Counter(
            code for code, _ in cases.package_calls(lambda: assign(params))
        )

    calls = calls_of(tree("up/kernel 4x8; up/bias 8; down/kernel 8x4"))
    assert len(calls) <= 16, sorted(code.co_qualname for code in calls)
    assert len({code.co_filename for code in calls}) <= 4
    one = tree(SEEN_TOGETHER["GPT-2 in both layouts"])
    forty, twenty = (
        calls_of({f"h_{i}": one for i in range(count)}).total() for count in (40, 20)
    )
    assert forty <= 2.1 * twenty
