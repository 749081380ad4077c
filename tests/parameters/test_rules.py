# SPDX-License-Identifier: Apache-2.0
"""The default rule on names and shapes, the ways to override it, its errors and its reasons."""

import functools
import re
from typing import NamedTuple

import equinox as eqx
import flax.linen as nn
import hypothesis
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from hypothesis import strategies as st
from optax.contrib import MuonDimensionNumbers

from normpre_optax.parameters.dims import MatrixDims
from normpre_optax.parameters.rules import Choice, default_matrix_dims, no_gains_or_biases, resolve
from tests.parameters.tables import chosen

IN_OUT, OUT_IN = MatrixDims(inputs=0, outputs=1), MatrixDims(inputs=1, outputs=0)
STACKED = MatrixDims(inputs=1, outputs=2)
TO_HEADS, FROM_HEADS = MatrixDims(inputs=0, outputs=(1, 2)), MatrixDims(inputs=(0, 1), outputs=2)


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def tree(**leaves):
    """Builds a nested dict from "a/b" names."""
    nested = {}
    for path, leaf in leaves.items():
        *above, last = path.split("/")
        functools.reduce(lambda node, part: node.setdefault(part, {}), above, nested)[last] = leaf
    return nested


MATRICES = [
    ("", (3, 4), IN_OUT),
    ("w", (3, 4), IN_OUT),
    ("mlp/fc1/kernel", (8, 32), IN_OUT),
    ("mlp/fc1/weight", (32, 8), OUT_IN),
    ("attn/in_proj_weight", (24, 8), OUT_IN),
    ("blocks/0/attn/query/kernel", (32, 4, 8), TO_HEADS),
    ("blocks/0/attn/v_proj/kernel", (32, 2, 8), TO_HEADS),
    ("blocks/0/attn/wk", (32, 2, 8), TO_HEADS),
    ("query/kernel", (32, 4, 8), TO_HEADS),
    ("attn/q", (32, 4, 8), TO_HEADS),
    ("blocks/0/attn/out/kernel", (4, 8, 32), FROM_HEADS),
    ("MultiHeadDotProductAttention_0/out/kernel", (4, 8, 32), FROM_HEADS),
    ("blocks/0/self_attention/o_proj/kernel", (4, 8, 32), FROM_HEADS),
    ("blocks/0/attn/output/kernel", (4, 8, 32), FROM_HEADS),
    ("b", (3, 4), IN_OUT),
    ("blocks", (4, 8, 16), STACKED),
    ("layers/mlp/kernel", (4, 8, 16), STACKED),
    ("layers/mlp/weight", (4, 16, 8), MatrixDims(inputs=2, outputs=1)),
    ("h/attn/c_attn/kernel", (4, 8, 24), STACKED),
    ("ScanBlock_0/Dense_0/kernel", (4, 8, 16), STACKED),
    ("transformer/__layer_stack_no_per_layer/linear/w", (4, 8, 16), STACKED),
    ("layers/attn/q_proj/kernel", (4, 8, 8), STACKED),
    ("layers/moe/experts/0/up/kernel", (4, 8, 16), STACKED),
    ("layers/moe/expert_1/up/kernel", (4, 8, 16), STACKED),
    ("layers/attn/query/kernel", (4, 32, 4, 8), MatrixDims(inputs=1, outputs=(2, 3))),
    ("layers/attn/out/kernel", (4, 4, 8, 32), MatrixDims(inputs=(1, 2), outputs=3)),
    # Neither output heads ...
    ("blocks/0/attn/out/kernel", (32, 32), IN_OUT),
    ("blocks/0/attn/out_proj/weight", (32, 32), OUT_IN),
    ("blocks/0/attention/output/dense/kernel", (32, 32), IN_OUT),
    ("blocks/0/mlp/output/kernel", (64, 32), IN_OUT),
    ("mlp/out/kernel", (64, 32), IN_OUT),
    ("encoder/layer/0/output/dense/kernel", (64, 32), IN_OUT),
    ("multi_head_attention/query/w", (32, 32), IN_OUT),
    ("MultiHeadDotProductAttention_0/value/kernel", (32, 32), IN_OUT),
    ("blocks/0/sa/heads/3/query/weight", (8, 32), OUT_IN),
    # ... nor routers ...
    ("layers/0/mlp/gate/kernel", (8, 32), IN_OUT),
    ("layers/0/mlp/gate_proj/kernel", (8, 32), IN_OUT),
    ("layers/0/moe/experts/0/gate/kernel", (8, 32), IN_OUT),
    ("layers/0/mlp/shared_expert/gate_proj/weight", (32, 8), OUT_IN),
    ("layers/0/mlp/gating_einsum/w", (8, 32), IN_OUT),
    # ... nor embeddings, positions, norms or biases.
    ("layers/0/position_wise_ffn/kernel", (8, 32), IN_OUT),
    ("layers/0/pos_ffn/w_1/weight", (32, 8), OUT_IN),
    ("embedder/layers/0/mlp/kernel", (8, 32), IN_OUT),
    ("layers/0/norm1/linear/kernel", (8, 48), IN_OUT),
    ("layers/0/mixer/embed_dim_up/kernel", (8, 32), IN_OUT),
    ("layers/0/attn/k_rope_proj/kernel", (8, 4), IN_OUT),
    ("layers/0/mixer/dt_proj/weight", (32, 4), OUT_IN),
    ("conv_module/pointwise_1/kernel", (8, 16), IN_OUT),
    ("conv_block/conv_proj/kernel", (8, 16), IN_OUT),
]

ADAMW = [
    ("mlp/fc1/bias", (32,)),
    ("layers/mlp/fc1/bias", (4, 32)),
    ("layers/attn/query/bias", (4, 4, 8)),
    ("layers/b1", (4, 32)),
    ("layers/bq", (4, 32)),
    ("mlp/linear/b", (4, 32)),
    ("layers/ln/scale", (4, 32)),
    ("layers/attn_norm", (4, 32)),
    ("layers/ln_1/weight", (4, 32)),
    ("layers/gamma", (4, 32)),
    ("layer_norm/offset", (4, 32)),
    ("RMSNorm_0/scale", (4, 32)),
    ("layers/0/attn/rel_bias/embedding", (32, 4)),
    ("wte/embedding", (100, 8)),
    ("wte/weight", (100, 8)),
    ("wte", (100, 8)),
    ("embed_tokens/kernel", (100, 8)),
    ("tok_embeddings/weight", (100, 8)),
    ("token_embedder/embedding", (100, 8)),
    ("Embed_0/embedding", (100, 8)),
    ("embed/embeddings", (100, 8)),
    ("embedder/input_embedding", (100, 8)),
    ("patch_embed/proj/kernel", (4, 4, 3, 8)),
    ("cls_token", (1, 1, 8)),
    ("wpe/embedding", (64, 8)),
    ("pos_embed", (1, 64, 8)),
    ("posembed_input/pos_embedding", (1, 64, 8)),
    ("position_embeddings/weight", (64, 8)),
    ("lm_head/kernel", (8, 100)),
    ("lm_head/weight", (100, 8)),
    ("head/kernel", (8, 100)),
    ("unembed/kernel", (8, 100)),
    ("logits_dense/kernel", (8, 100)),
    ("value_head/w", (8, 1)),
    ("output/weight", (100, 8)),
    ("params/out/kernel", (8, 100)),
    ("layers/0/router/kernel", (8, 4)),
    ("layers/router/kernel", (3, 8, 4)),
    ("layers/0/block_sparse_moe/gate/weight", (4, 8)),
    ("layers/0/mlp/shared_expert_gate/weight", (1, 8)),
    ("layers/0/up/lora_a", (8, 2)),
    ("layers/0/up/lora/A", (8, 2)),
    ("layers/0/up/lora/b/kernel", (2, 32)),
    ("lora/layers/0/up/A", (8, 2)),
    ("layers/0/lora_down/kernel", (8, 2)),
    ("layers/0/up/kernel_lora_b", (2, 32)),
    ("layers/0/q_proj/lora_A/default/weight", (2, 8)),
    ("W_U", (8, 100)),
    ("W_E", (100, 8)),
    ("vocab_mixer/kernel", (8, 8)),
    ("policy_head/dense_0/kernel", (8, 8)),
    ("layers/0/mixer/A_log", (32, 4)),
    ("layers/0/attn/lambda_q1", (4, 8)),
    ("layers/0/mixer/conv1d/weight", (32, 1, 4)),
    ("layers/0/mixer/conv1d/kernel", (4, 1, 32)),
    ("layers/0/mixer/short_conv/kernel", (4, 32)),
    ("layers/0/att/time_mix_k", (1, 1, 8)),
    ("layers/0/temperature", ()),
    ("layers/0/mix", (8,)),
    ("nothing", (0, 8)),
]

FRONT = MatrixDims(inputs=(0, 1, 2), outputs=3)
UNCOVERED = [
    ("mlp/kernel", (4, 8, 16), None),
    ("w", (4, 8, 16), None),
    ("k", (4, 8, 16), None),
    ("layers/0/mlp/kernel", (4, 8, 16), None),
    ("layers/layer_0/mlp/kernel", (4, 8, 16), None),
    ("layers_0/mlp/kernel", (4, 8, 16), None),
    ("Block_0/Dense_0/kernel", (4, 8, 16), None),
    ("out/kernel", (4, 8, 32), None),
    ("layers/0/attn/query/weight", (4, 8, 32), None),
    ("layers/0/attn/q_einsum/w", (4, 32, 8), None),
    ("layers/0/attn/qkv/kernel", (32, 3, 4, 8), None),
    ("layers/0/mlp/gating_einsum/w", (2, 8, 32), None),
    ("conv1/kernel", (3, 3, 8, 16), FRONT),
    ("conv1/weight", (16, 8, 3, 3), MatrixDims(inputs=(1, 2, 3), outputs=0)),
    ("conv_transpose/weight", (8, 16, 3, 3), None),
    ("layers/Conv_0/kernel", (3, 8, 16), None),
    ("layers/0/conv2_d/w", (3, 3, 8, 16), FRONT),
    ("layers/0/moe/experts/up/kernel", (4, 8, 32), STACKED),
    ("layers/experts/up/weight", (3, 4, 32, 8), MatrixDims(inputs=3, outputs=2)),
    ("layers/moe/wi", (4, 8, 32), STACKED),
    ("layers_0/MoeBlock_0/wi", (4, 8, 32), STACKED),
]


def shown(error):
    """The rule that an error shows."""
    lines = [line[4:] for line in str(error).splitlines() if line.startswith("    ")]
    scope = {"MatrixDims": MatrixDims, "default_matrix_dims": default_matrix_dims}
    exec("\n".join(lines), scope)
    return scope["rule"]


@pytest.mark.parametrize(("path", "shape", "dims"), MATRICES)
def test_default_rule_reads_matrices(path, shape, dims):
    assert default_matrix_dims(path, array(*shape)) == dims


@pytest.mark.parametrize(("path", "shape"), ADAMW)
def test_default_rule_leaves_the_rest_to_adamw(path, shape):
    assert default_matrix_dims(path, array(*shape)) is None


@pytest.mark.parametrize(("path", "shape", "dims"), UNCOVERED)
def test_uncovered_leaf_is_an_error_that_shows_the_line_to_write(path, shape, dims):
    """With the axes where names tell them, and else with dots, which are no axes."""
    params = tree(**{path: array(*shape)})
    with pytest.raises(ValueError, match=r"no rule covers") as caught:
        default_matrix_dims(path, array(*shape))
    assert repr(path) in str(caught.value)
    assert str(shape) in str(caught.value)
    with pytest.raises(ValueError, match=re.escape(f"no rule covers parameter {path!r} of shape {shape}")) as caught:
        resolve(params)
    rule = shown(caught.value)
    if dims is None:
        with pytest.raises(TypeError, match="inputs must be an axis"):
            resolve(params, rule)
    else:
        assert chosen(params | {"up": array(3, 4)}, rule) == {path: dims, "up": IN_OUT}


def placed(table):
    """A tree of a table from path to (shape, dims), and the dims in its order."""
    params = tree(**{path: array(*shape) for path, (shape, _) in table.items()})
    return params, {path: table[path][1] for path in resolve(params, lambda path, leaf: None)}


# What neighbours and biases show to be no layout of Flax: an error, and the rule that it shows is right.
HEADS_FIRST = MatrixDims(inputs=1, outputs=(0, 2))
MISREAD = {
    "heads first, by the output": {
        "attn/query/kernel": ((4, 32, 8), HEADS_FIRST),
        "attn/key/kernel": ((2, 32, 8), HEADS_FIRST),
        "attn/out/kernel": ((4, 8, 32), FROM_HEADS),
    },
    "heads first, by the bias": {"query/kernel": ((4, 32, 8), HEADS_FIRST), "query/bias": ((4, 8), None)},
    "heads first in short": {f"attn/w{x}": ((4, 32, 8), HEADS_FIRST) for x in "qkv"}
    | {"attn/wo": ((4, 8, 32), FROM_HEADS)},
    "heads first, by an output of two axes": {f"attn/w{x}": ((4, 32, 8), HEADS_FIRST) for x in "qk"}
    | {"attn/wo": ((32, 32), IN_OUT)},
    "bare matrices by head": {
        **{f"blocks/0/attn/W_{x}": ((4, 32, 8), HEADS_FIRST) for x in "QKV"},
        **{f"blocks/0/attn/b_{x}": ((4, 8), None) for x in "QKV"},
        "blocks/0/attn/W_O": ((4, 8, 32), FROM_HEADS),
        "blocks/0/attn/b_O": ((32,), None),
    },
    "heads first in a stack": {
        **{f"blocks/attn/{x}/kernel": ((3, 4, 32, 8), MatrixDims(inputs=2, outputs=(1, 3))) for x in "qkv"},
        "blocks/attn/o/kernel": ((3, 4, 8, 32), MatrixDims(inputs=(1, 2), outputs=3)),
        "blocks/ln/scale": ((3, 32), None),
    },
    "an output of another layout": {
        "attn/query/kernel": ((32, 4, 8), TO_HEADS),
        "attn/query/bias": ((4, 8), None),
        "attn/out/kernel": ((32, 4, 8), MatrixDims(inputs=(1, 2), outputs=0)),
        "attn/out/bias": ((32,), None),
    },
    "a latent": {
        "attn/wq_b/kernel": ((12, 4, 8), TO_HEADS),
        "attn/out/kernel": ((4, 8, 32), FROM_HEADS),
    },
    "kernels as (out, in)": {
        "mlp/c_fc/kernel": ((32, 8), OUT_IN),
        "mlp/c_fc/bias": ((32,), None),
        "mlp/c_proj/kernel": ((8, 32), OUT_IN),
        "mlp/c_proj/bias": ((8,), None),
    },
    "weights as (in, out)": {"up/weight": ((8, 32), IN_OUT), "up/bias": ((32,), None)},
    "layers on axis 1": {
        "decoder/layers/mlp/wi_0/kernel": ((8, 3, 16), MatrixDims(inputs=0, outputs=2)),
        "decoder/layers/mlp/wi_1/kernel": ((8, 3, 16), MatrixDims(inputs=0, outputs=2)),
        "decoder/layers/mlp/wo/kernel": ((16, 3, 8), MatrixDims(inputs=0, outputs=2)),
        "decoder/layers/self_attention/query/kernel": ((8, 3, 2, 5), MatrixDims(inputs=0, outputs=(2, 3))),
        "decoder/layers/self_attention/key/kernel": ((8, 3, 1, 5), MatrixDims(inputs=0, outputs=(2, 3))),
        "decoder/layers/self_attention/out/kernel": ((2, 3, 5, 8), MatrixDims(inputs=(0, 2), outputs=3)),
        "decoder/layers/norm/scale": ((8, 3), None),
    },
    "experts beside layers": {
        "layers/MoeBlock_0/gate/kernel": ((8, 3, 4), None),
        "layers/MoeBlock_0/wi_0": ((4, 3, 8, 16), STACKED_TWICE := MatrixDims(inputs=2, outputs=3)),
        "layers/MoeBlock_0/wo": ((4, 3, 16, 8), STACKED_TWICE),
    },
    "experts behind their inputs": {
        "moe/wi": ((8, 4, 16), MatrixDims(inputs=0, outputs=2)),
        "moe/wo": ((16, 4, 8), MatrixDims(inputs=0, outputs=2)),
    },
    "a convolution in torch's layout": {
        "conv1/weight": ((16, 8, 3, 3), MatrixDims(inputs=(1, 2, 3), outputs=0)),
        "conv1/bias": ((16,), None),
    },
}


@pytest.mark.parametrize("name", MISREAD)
def test_other_layouts_are_errors_that_show_the_right_rule(name):
    params, want = placed(MISREAD[name])
    with pytest.raises(ValueError, match="no rule covers") as caught:
        resolve(params)
    assert chosen(params, shown(caught.value)) == want


def test_one_error_names_all_that_is_uncovered_and_layers_once():
    layer = {"attn/query/kernel": array(4, 32, 8), "attn/out/kernel": array(4, 8, 32), "conv/kernel": array(3, 8, 8)}
    params = tree(**{f"h/{i}/{path}": leaf for i in range(12) for path, leaf in layer.items()}, cube=array(2, 3, 4))
    with pytest.raises(ValueError, match="no rule covers") as caught:
        resolve(params)
    assert re.findall(r"^no rule covers (.* of shape \([\d, ]+\))", str(caught.value), re.MULTILINE) == [
        "parameter 'cube' of shape (2, 3, 4)",
        "12 parameters 'h/{0..11}/attn/query/kernel' of shape (4, 32, 8)",
        "12 parameters 'h/{0..11}/conv/kernel' of shape (3, 8, 8)",
    ]
    found = chosen({"h": params["h"]}, shown(caught.value))
    assert found["h/11/attn/query/kernel"] == HEADS_FIRST
    assert found["h/7/conv/kernel"] == MatrixDims(inputs=(0, 1), outputs=2)


def test_what_stands_elsewhere_in_the_tree_suggests_nothing():
    params = tree(**{"blocks/mlp/up/kernel": array(8, 3, 16), "blocks/mlp/down/kernel": array(16, 3, 8)})
    params |= tree(**{"norm/scale": array(8, 3), "w": array(2, 3, 4)})
    with pytest.raises(ValueError, match=r"path == 'w':\n +return MatrixDims\(inputs=\.\.\., outputs=\.\.\.\)"):
        resolve(params)


def test_cross_attention_and_heads_of_two_sizes_are_no_contradiction():
    """Keys from an encoder of another width; values, and so the output, with another head size; another width out."""
    for query, key, out in [((32, 4, 8), (48, 4, 8), (4, 8, 32)), ((32, 4, 8),) * 2 + ((4, 6, 32),)]:
        params = tree(**{"attn/query/kernel": array(*query), "attn/key/kernel": array(*key)})
        params["attn"]["out"] = {"kernel": array(*out)}
        assert chosen(params) == {
            "attn/key/kernel": TO_HEADS,
            "attn/out/kernel": FROM_HEADS,
            "attn/query/kernel": TO_HEADS,
        }


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_, jnp.complex64])
def test_only_real_floating_point_is_a_matrix(dtype):
    assert default_matrix_dims("w", array(3, 4, dtype=dtype)) is None
    assert default_matrix_dims("w", array(3, 4, 5, dtype=dtype)) is None
    assert default_matrix_dims("w", array(3, 4, dtype=jnp.bfloat16)) == IN_OUT


# What only the tree around a leaf can tell.


def test_stacked_layers_are_not_labelled_backwards():
    """The 2-D rule takes the (L, d) bias of a stack for a matrix and leaves its (L, in, out) kernel to Adam."""
    params = tree(**{"tower/fc/kernel": array(4, 8, 32), "tower/fc/bias": array(4, 32), "tower/fc/mix": array(4, 32)})
    assert chosen(params) == {"tower/fc/bias": None, "tower/fc/kernel": STACKED, "tower/fc/mix": None}
    alone = tree(**{"tower/fc/mix": array(4, 32)})
    assert chosen(alone) == {"tower/fc/mix": IN_OUT}


def test_stack_without_biases_is_known_by_its_norms_or_its_name():
    kernels = {"attn/q/kernel": array(4, 8, 8), "mlp/up/kernel": array(4, 8, 32), "mix": array(4, 8)}
    normed = tree(**{f"tower/{path}": leaf for path, leaf in kernels.items()}, **{"tower/ln/scale": array(4, 8)})
    named = tree(**{f"blocks/{path}": leaf for path, leaf in kernels.items()})
    want = {"attn/q/kernel": STACKED, "mlp/up/kernel": STACKED, "mix": None}
    assert chosen(normed) == {f"tower/{path}": want[path] for path in sorted(want)} | {"tower/ln/scale": None}
    assert chosen(named) == {f"blocks/{path}": want[path] for path in sorted(want)}


def test_stack_of_stacks():
    params = tree(**{"blocks/up/kernel": array(2, 3, 8, 32), "blocks/up/bias": array(2, 3, 32)})
    assert chosen(params) == {"blocks/up/bias": None, "blocks/up/kernel": MatrixDims(inputs=2, outputs=3)}


def test_layers_that_are_no_stack_are_read_one_by_one():
    layer = {
        "attn/query/kernel": array(8, 2, 4),
        "attn/out/kernel": array(2, 4, 8),
        "ln/scale": array(8),
        "up": array(8, 8),
    }
    want = {"attn/out/kernel": FROM_HEADS, "attn/query/kernel": TO_HEADS, "ln/scale": None, "up": IN_OUT}
    params = tree(**{f"layers/{name}/{path}": leaf for name in ("first", "last") for path, leaf in layer.items()})
    assert chosen(params) == {f"layers/{name}/{path}": want[path] for name in ("first", "last") for path in want}


@pytest.mark.parametrize(
    "stack",
    [
        {"up/kernel": array(8, 4, 32), "up/bias": array(32, 4)},
        {"up/kernel": array(8, 4, 32), "down/kernel": array(32, 4, 8), "ln/scale": array(8, 4)},
        {"up/kernel": array(8, 4, 32), "down/kernel": array(32, 4, 8)},
        {"up/kernel": array(8, 4, 8), "up/bias": array(8, 4)},
        {"attn/query/kernel": array(8, 4, 2, 4), "attn/query/bias": array(2, 4, 4), "attn/out/bias": array(8, 4)},
    ],
)
def test_layer_axis_elsewhere_is_an_error_never_a_wrong_reading(stack):
    params = tree(**{f"blocks/{path}": leaf for path, leaf in stack.items()})
    with pytest.raises(ValueError, match="it looks stacked, but not in front"):
        resolve(params)


def block(d, heads, size, hidden, kv, biases, by_head, norms):
    """A transformer block: path -> (shape, dims)."""
    table = {"attn/out/kernel": ((heads, size, d), FROM_HEADS) if by_head else ((heads * size, d), IN_OUT)}
    for name, count in (("query", heads), ("key", kv), ("value", kv)):
        shape = (count, size) if by_head else (count * size,)
        table[f"attn/{name}/kernel"] = (d, *shape), TO_HEADS if by_head else IN_OUT
        table |= {f"attn/{name}/bias": (shape, None)} if biases else {}
    table |= {"mlp/up/kernel": ((d, hidden), IN_OUT), "mlp/down/kernel": ((hidden, d), IN_OUT)}
    table |= {"mlp/up/bias": ((hidden,), None), "attn/out/bias": ((d,), None)} if biases else {}
    table |= {"ln/scale": ((d,), None), "attn/q_norm/scale": ((size,), None)} if norms else {}
    return table


def with_layers(shape, dims, layers, axis):
    """The same with a layer axis put in at `axis`."""

    def moved(axes):
        return tuple(a + (a >= axis) for a in axes) if isinstance(axes, tuple) else axes + (axes >= axis)

    return (*shape[:axis], layers, *shape[axis:]), dims and MatrixDims(moved(dims.inputs), moved(dims.outputs))


SIZES = st.sampled_from([2, 3, 4, 6, 8])


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(st.tuples(*[SIZES] * 5), SIZES, st.booleans(), st.booleans(), st.booleans(), st.sampled_from([0, 1]))
def test_a_block_stacked_in_front_is_right_and_elsewhere_an_error(sizes, layers, biases, by_head, norms, axis):
    """Whatever sizes coincide; but for square kernels everywhere, which look the same with the layers on axis 1."""
    d, _, _, hidden, _ = sizes
    hypothesis.assume(axis == 0 or d != hidden)
    table = {path: with_layers(*entry, layers, axis) for path, entry in block(*sizes, biases, by_head, norms).items()}
    params = {
        "ln_f": {"scale": array(d)},
        "blocks": tree(**{path: array(*shape) for path, (shape, _) in table.items()}),
    }
    if axis == 0:
        assert chosen(params) == {f"blocks/{path}": table[path][1] for path in sorted(table)} | {"ln_f/scale": None}
    else:
        with pytest.raises(ValueError, match="it looks stacked, but not in front"):
            resolve(params)


def test_gate_is_a_router_beside_experts_and_half_a_mlp_beside_up():
    mixture = tree(**{"mlp/gate/kernel": array(8, 4), "mlp/experts/0/up/kernel": array(8, 32)})
    gated = tree(**{"mlp/gate/kernel": array(8, 32), "mlp/up/kernel": array(8, 32)})
    fused = tree(**{"moe/gate/kernel": array(8, 32), "moe/up/kernel": array(8, 32), "moe/router/kernel": array(8, 4)})
    assert chosen(mixture) == {"mlp/experts/0/up/kernel": IN_OUT, "mlp/gate/kernel": None}
    assert chosen(gated) == {"mlp/gate/kernel": IN_OUT, "mlp/up/kernel": IN_OUT}
    assert chosen(fused) == {"moe/gate/kernel": IN_OUT, "moe/router/kernel": None, "moe/up/kernel": IN_OUT}


def test_attention_is_known_by_query_key_and_value_beside_it():
    params = tree(**{f"mixer/{name}/kernel": array(8, 2, 4) for name in ("query", "key", "value")})
    params["mixer"]["out"] = {"kernel": array(2, 4, 8)}
    assert chosen(params)["mixer/out/kernel"] == FROM_HEADS
    assert chosen(params["mixer"])["out/kernel"] == FROM_HEADS


def test_b_is_a_bias_only_beside_its_w():
    matrices = {"a": array(3, 4), "b": array(4, 5)}
    assert chosen(matrices) == {"a": IN_OUT, "b": IN_OUT}
    stacked = {"linear": {"w": array(3, 4, 5), "b": array(3, 5)}, "attn": {"Wq": array(3, 4, 4), "bq": array(3, 4)}}
    assert chosen(stacked) == {"attn/Wq": STACKED, "attn/bq": None, "linear/b": None, "linear/w": STACKED}


def test_per_head_norms_do_not_look_like_a_stack():
    attention = {
        "attn/query/kernel": array(8, 2, 4),
        "attn/q_norm/scale": array(2, 4),
        "attn/out/kernel": array(2, 4, 8),
    }
    params = tree(
        **{f"blocks/0/{path}": leaf for path, leaf in attention.items()}, **{"blocks/0/up/kernel": array(8, 8)}
    )
    assert chosen(params) == {
        "blocks/0/attn/out/kernel": FROM_HEADS,
        "blocks/0/attn/q_norm/scale": None,
        "blocks/0/attn/query/kernel": TO_HEADS,
        "blocks/0/up/kernel": IN_OUT,
    }
    stacked = jax.tree.map(lambda leaf: array(3, *leaf.shape), params["blocks"]["0"])
    assert chosen({"tower": stacked}) == {
        "tower/attn/out/kernel": MatrixDims(inputs=(1, 2), outputs=3),
        "tower/attn/q_norm/scale": None,
        "tower/attn/query/kernel": MatrixDims(inputs=1, outputs=(2, 3)),
        "tower/up/kernel": STACKED,
    }


# Axes named by Linen boxes.


@pytest.mark.parametrize(
    ("path", "shape", "names", "dims"),
    [
        ("up/kernel", (8, 3, 32), ("embed", "layers", "mlp"), MatrixDims(inputs=0, outputs=2)),
        ("up/weight", (32, 3, 8), ("mlp", "layers", "embed"), MatrixDims(inputs=2, outputs=0)),
        ("up/kernel", (8, 32, 3), ("embed", "mlp", "layers"), IN_OUT),
        ("up/kernel", (4, 8, 3, 32), ("expert", "embed", "layers", "mlp"), MatrixDims(inputs=1, outputs=3)),
        ("q/kernel", (8, 3, 2, 4), ("embed", "layers", "heads", "kv"), MatrixDims(inputs=0, outputs=(2, 3))),
        ("mix/kernel", (8, 3, 2, 4), ("embed", "layers", "q_heads", "head_dim"), MatrixDims(inputs=0, outputs=(2, 3))),
        ("mix/kernel", (2, 3, 4, 8), ("heads", "layers", "kv", "embed"), MatrixDims(inputs=(0, 2), outputs=3)),
        ("attn/out/kernel", (2, 3, 4, 8), (None, "layers", None, None), MatrixDims(inputs=(0, 2), outputs=3)),
        ("mix", (8, 3), ("embed", "layers"), None),
        ("table", (100, 8), ("vocab", "embed"), None),
        ("table", (8, 100), ("embed", "vocab"), None),
        ("up/kernel", (8, 32), ("embed", "mlp"), IN_OUT),
        ("up/kernel", (8, 32), (None, "model"), IN_OUT),
    ],
)
def test_names_of_boxed_axes_tell_the_layer_axis(path, shape, names, dims):
    params = tree(**{path: nn.Partitioned(array(*shape), names=names)})
    assert chosen(params) == {path: dims}


def test_named_axes_without_a_layer_axis_do_not_pass_for_a_stack():
    params = {"layers": {"kernel": nn.Partitioned(array(8, 3, 32), names=("embed", None, "mlp"))}}
    with pytest.raises(ValueError, match=r"it looks stacked, but its axes are named \(embed, None, mlp\)"):
        resolve(params)
    with pytest.raises(ValueError, match=r"its axes are named \(embed, layers, a, b\)"):
        resolve({"kernel": nn.Partitioned(array(8, 3, 2, 4), names=("embed", "layers", "a", "b"))})


# Paths.


class Pair(NamedTuple):
    left: jax.Array
    right: jax.Array


@jax.tree_util.register_pytree_node_class
class Bag:
    def __init__(self, *items):
        self.items = items

    def tree_flatten(self):
        return self.items, None

    @classmethod
    def tree_unflatten(cls, _, items):
        return cls(*items)


class Projections(eqx.Module):
    query: jax.Array
    value: jax.Array


def test_paths_and_order_follow_jax():
    x = jnp.zeros(2)
    params = {
        "b": [x, Pair(x, {"k": x})],
        "a": Bag(x, x),
        "box": nn.Partitioned(x, names=("embed",)),
        "var": nnx.Param(x),
        "out": (None, optax.MaskedNode(), x),
    }
    found = resolve(params)
    assert list(found) == ["a/0", "a/1", "b/0", "b/1/left", "b/1/right/k", "box", "out/2", "var"]
    assert [choice.path for choice in found.values()] == list(found)


def test_an_attribute_called_value_is_no_box():
    params = {"attn": Projections(array(8, 2, 4), array(8, 2, 4))}
    assert chosen(params) == {"attn/query": TO_HEADS, "attn/value": TO_HEADS}
    masked = {"attn": Projections(optax.MaskedNode(), array(8, 2, 4))}  # pyright: ignore[reportArgumentType]
    assert chosen(masked) == {"attn/value": TO_HEADS}


def test_boxes_emptied_by_a_mask_are_no_leaves():
    params = {"a": nn.Partitioned(optax.MaskedNode(), names=("embed",)), "b": nnx.Param(jnp.zeros((2, 3)))}
    assert chosen(params) == {"b": IN_OUT}


def test_two_leaves_with_one_path_are_an_error():
    with pytest.raises(ValueError, match="two parameters have the path 'a/b'"):
        resolve({"a/b": array(2, 3), "a": {"b": array(2, 3)}})


def test_a_leaf_that_is_no_array_is_an_error():
    with pytest.raises(TypeError, match=r"parameter 'noise' is of key<fry>, no numbers"):
        resolve({"noise": jax.random.key(0)})
    with pytest.raises(TypeError, match=r"parameter 'activation' is .* no array.*eqx.filter"):
        resolve({"activation": jnp.tanh, "w": array(2, 3)})


def test_tracers_and_abstract_leaves_will_do():
    params = {"w": jnp.zeros((3, 4)), "b": jnp.zeros(4), "s": 1.0}
    want = {"b": None, "s": None, "w": IN_OUT}
    seen = []
    jax.jit(lambda p: seen.append(chosen(p)))(params)
    assert seen == [want]
    assert chosen(jax.eval_shape(lambda p: p, params)) == want


# Overrides.

PARAMS = {
    "blocks": {
        "0": {"up": {"bias": array(32), "kernel": array(8, 32)}},
        "1": {"up": {"bias": array(32), "kernel": array(8, 32)}},
    },
    "cube": array(2, 3, 4),
    "wte": array(100, 8),
}
CUBE = MatrixDims(inputs=1, outputs=0)
WANT = {
    "blocks/0/up/bias": None,
    "blocks/0/up/kernel": IN_OUT,
    "blocks/1/up/bias": None,
    "blocks/1/up/kernel": IN_OUT,
    "cube": CUBE,
    "wte": None,
}
FULL = {
    "blocks": {i: {"up": {"bias": None, "kernel": IN_OUT}} for i in ("0", "1")},
    "cube": MuonDimensionNumbers(reduction_axis=1, output_axis=0),
    "wte": None,
}


class Rule:
    def __call__(self, path, leaf):
        return CUBE if path == "cube" else default_matrix_dims(path, leaf)

    def method(self, path, leaf, strict=True):
        return self(path, leaf)


@pytest.mark.parametrize(
    "matrix_dims",
    [
        lambda path, leaf: CUBE if path == "cube" else default_matrix_dims(path, leaf),
        lambda path, leaf: MuonDimensionNumbers(1, 0) if leaf.ndim == 3 else default_matrix_dims(path, leaf),
        Rule(),
        Rule().method,
        functools.partial(lambda cube, path, leaf: cube if path == "cube" else default_matrix_dims(path, leaf), CUBE),
        jax.tree_util.Partial(Rule()),
        lambda params: FULL,
        lambda params, flag=True: jax.tree.map(lambda x: {1: None, 2: IN_OUT, 3: CUBE}[x.ndim], params) | {"wte": None},
        FULL,
    ],
    ids=["rule", "muon numbers", "object", "method", "partial", "jax partial", "callable", "tree_map", "tree"],
)
def test_overrides(matrix_dims):
    assert chosen(PARAMS, matrix_dims) == WANT


def test_a_prefix_tree_covers_what_stands_below():
    up = {"bias": None, "kernel": IN_OUT}
    assert chosen(PARAMS, {"blocks": {"0": {"up": up}, "1": None}, "cube": CUBE, "wte": IN_OUT}) == {
        **WANT,
        "blocks/1/up/kernel": None,
        "wte": IN_OUT,
    }
    assert set(chosen(PARAMS, lambda params: None).values()) == {None}
    assert chosen({"a": array(2, 3), "b": [array(4, 5)]}, OUT_IN) == {"a": OUT_IN, "b/0": OUT_IN}


class Callable(eqx.Module):
    weight: object
    scale: object

    def __call__(self, x):
        raise AssertionError("a tree is tested for before a callable")


def test_a_tree_is_tested_for_before_a_callable():
    params = Callable(array(2, 3), array(4, 5))
    assert chosen(params, Callable(IN_OUT, None)) == {"weight": IN_OUT, "scale": None}
    assert chosen(params, Callable(None, None)) == {"weight": None, "scale": None}


def test_a_tree_fits_boxed_and_bare_parameters_alike():
    bare = {"blocks": {"up": array(8, 3, 32)}, "ln": array(8)}
    boxed = {"blocks": {"up": nn.Partitioned(array(8, 3, 32), names=(None, None, None))}, "ln": nnx.Param(jnp.zeros(8))}
    dims = MatrixDims(inputs=0, outputs=2)
    by_tree = {"blocks": {"up": dims}, "ln": None}
    boxed_tree = {"blocks": {"up": nn.Partitioned(dims, names=(None, None, None))}, "ln": None}
    for params in (bare, boxed):
        for matrix_dims in (by_tree, boxed_tree):
            assert chosen(params, matrix_dims) == {"blocks/up": dims, "ln": None}


def test_a_tree_may_speak_of_parameters_that_are_masked_out():
    masked = {**PARAMS, "cube": optax.MaskedNode(), "wte": None}
    want = {path: dims for path, dims in WANT.items() if path not in ("cube", "wte")}
    assert chosen(masked, FULL) == want


def test_rules_see_shape_dtype_and_axis_names():
    seen = {}

    def rule(path, leaf):
        seen[path] = (leaf.shape, leaf.ndim, leaf.size, leaf.dtype, leaf.names)

    resolve({"a": array(2, 3), "b": nn.Partitioned(array(4, dtype=jnp.bfloat16), names=("embed",))}, rule)
    assert seen == {"a": ((2, 3), 2, 6, jnp.float32, None), "b": ((4,), 1, 4, jnp.bfloat16, ("embed",))}


@pytest.mark.parametrize(
    ("matrix_dims", "error", "message"),
    [
        ({**FULL, "cube": "matrix"}, TypeError, "matrix_dims for parameter 'cube': expected MatrixDims"),
        (lambda path, leaf: "matrix", TypeError, "matrix_dims for parameter 'blocks/0/up/bias': expected MatrixDims"),
        ("muon", TypeError, "matrix_dims='muon' is neither None, a rule"),
        (lambda: None, TypeError, "takes 0"),
        (lambda path, leaf, more: None, TypeError, "takes 3"),
        (lambda *args: None, TypeError, "takes 0"),
        ({"blocks": FULL["blocks"], "cube": CUBE}, ValueError, "no prefix .* it has no entry for 'wte'"),
        ({**FULL, "cubes": CUBE}, ValueError, "no prefix .* it has an entry at 'cubes'"),
        ({**FULL, "cube": {"kernel": CUBE}}, ValueError, "no prefix .* it has an entry at 'cube/kernel'"),
        ({**FULL, "cube": MatrixDims(1, 3)}, ValueError, "parameter 'cube' of shape .* out of range"),
        (lambda path, leaf: IN_OUT, ValueError, "parameter 'blocks/0/up/bias' of shape .* out of range"),
        (lambda params: lambda path, leaf: None, TypeError, "expected MatrixDims"),
    ],
)
def test_wrong_overrides_name_the_parameter(matrix_dims, error, message):
    with pytest.raises(error, match=message):
        resolve(PARAMS, matrix_dims)


# Ready-to-paste rules.


def test_rule_for_convolutions():
    def rule(path, leaf):
        if "conv" in path.lower() and leaf.ndim == 4:  # (height, width, in, out)
            return MatrixDims(inputs=(0, 1, 2), outputs=3)
        return default_matrix_dims(path, leaf)

    params = {"Conv_0": {"kernel": array(3, 3, 8, 16), "bias": array(16)}, "Dense_0": {"kernel": array(16, 32)}}
    assert chosen(params, rule) == {
        "Conv_0/bias": None,
        "Conv_0/kernel": MatrixDims(inputs=(0, 1, 2), outputs=3),
        "Dense_0/kernel": IN_OUT,
    }


def test_rule_for_experts():
    def rule(path, leaf):
        if "experts" in path and leaf.ndim >= 3 and "bias" not in path:  # (..., expert, in, out)
            return MatrixDims(inputs=-2, outputs=-1)
        return default_matrix_dims(path, leaf)

    experts = {"up": array(3, 4, 8, 32), "bias": array(3, 4, 32)}
    params = {"layers": {"moe": {"experts": experts, "router": {"kernel": array(3, 8, 4)}}}}
    assert chosen(params, rule) == {
        "layers/moe/experts/bias": None,
        "layers/moe/experts/up": MatrixDims(inputs=-2, outputs=-1),
        "layers/moe/router/kernel": None,
    }


def test_rule_for_lora_pairs():
    """Both factors are AdamW's by default; this gives them, and a stack of them, to the matrix optimizer."""
    params = {"up": {"kernel": array(8, 32), "lora_a": array(8, 2), "lora_b": array(2, 32)}}
    assert chosen(params) == {"up/kernel": IN_OUT, "up/lora_a": None, "up/lora_b": None}
    assert {choice.reason for choice in resolve(params).values() if choice.dims is None} == {"LoRA"}
    params["more"] = {"lora_a": array(5, 8, 2), "lora_b": array(5, 2, 32)}  # (adapter, in, rank), (adapter, rank, out)
    last_two = MatrixDims(inputs=-2, outputs=-1)
    found = chosen(params, lambda path, leaf: last_two if "lora" in path else default_matrix_dims(path, leaf))
    assert found == {
        **{f"{name}/lora_{x}": last_two for name in ("more", "up") for x in "ab"},
        "up/kernel": IN_OUT,
    }


# Reasons.


def test_reasons_tell_the_users_choices_from_the_default():
    def rule(path, leaf):
        return None if path == "frozen" else default_matrix_dims(path, leaf)

    reasons = {
        path: choice.reason for path, choice in resolve({"frozen": array(2, 3), "up": array(2, 3)}, rule).items()
    }
    assert reasons == {"frozen": "given by matrix_dims", "up": "(in, out)"}
    assert resolve({"up": array(2, 3)})["up"] == Choice("up", (2, 3), IN_OUT, "(in, out)")


def test_gains_and_biases_are_known_in_stacks_and_whatever_they_are_called():
    params = {
        "layers": {
            "mlp": {"kernel": jnp.zeros((3, 4, 8)), "bias": jnp.zeros((3, 8))},
            "norm": {"scale": jnp.zeros((3, 4))},
        },
        "block_0": {"attention": {"query": {"kernel": jnp.zeros((4, 2, 2)), "bias": jnp.zeros((2, 2))}}},
        "ln_f": {"scale": jnp.zeros(4)},
        "wte": {"embedding": jnp.zeros((9, 4))},
        "wpe": {"embedding": jnp.zeros((5, 4))},
        "head": {"kernel": jnp.zeros((4, 9))},
        "odd": jnp.zeros((2, 3, 4)),  # no rule covers it, and it has three axes
        "temperature": jnp.zeros(()),
    }
    found = no_gains_or_biases(params)
    decays = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, x in jax.tree_util.tree_leaves_with_path(found)
        if x
    }
    assert decays == {
        *("layers/mlp/kernel", "block_0/attention/query/kernel", "wte/embedding", "wpe/embedding", "head/kernel", "odd")
    }
