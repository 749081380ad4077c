# SPDX-License-Identifier: Apache-2.0
"""Experts and what is beside them: routers called "gate", attention, the order of axes;
and MLPs that are stored in the other order.
"""

import itertools
import re

import flax.linen as nn
import jax.numpy as jnp
import pytest

from normpre_optax import explain, normpre_h
from normpre_optax.parameters import presets
from normpre_optax.parameters.dims import MatrixDims
from normpre_optax.parameters.experts import is_stack_of_experts
from normpre_optax.parameters.rules import assign, default_matrix_dims
from normpre_optax.parameters.tree import leaves
from tests import cases
from tests.parameters.tables import IN_OUT, array, chosen, tree

FRONT = MatrixDims(inputs=-2, outputs=-1)
SHAPES = "norm/scale 8; embed/embedding 90x8; "


def kinds_of(text):
    """The kind of each parameter, of which the preset of experts reads all."""
    found = assign(tree(text), presets.experts_in_front)
    return {path: spec.kind for path, spec in found.items()}


# Routers. The width is 8, there are 4 experts, and their hidden layer has 32.


@cases.rows(
    "gate",
    ("gate/kernel 8x4",),
    ("gate/weight 4x8",),
    ("gate 8x4",),
    ("gating/kernel 8x4",),
    ("wg 8x4",),
    ("gate/dense/kernel 8x4",),
    ("gate/wg/weight 4x8",),
)
@cases.rows(
    "experts",
    ("up 4x8x32; down 4x32x8",),
    ("up_proj/kernel 4x8x32; down_proj/kernel 4x32x8",),
    ("gate_up_proj 4x8x64; down_proj 4x32x8",),
    ("w1 4x8x32; w3 4x8x32; w2 4x32x8",),
    ("experts/up/kernel 4x8x32; experts/down/kernel 4x32x8",),
    ("{expert_0,expert_1,expert_2,expert_3}/up/kernel 8x32",),
    ("{0,1,2,3}/up/kernel 8x32; {0,1,2,3}/gate/kernel 8x32",),
)
@pytest.mark.parametrize("module", ["moe", "feed_forward", "layers_0/mlp"])
def test_a_gate_beside_experts_is_a_router(gate, experts, module):
    entries = [x.strip() for x in f"{gate}; {experts}".split(";")]
    kinds = kinds_of(SHAPES + "; ".join(f"{module}/{x}" for x in entries))
    name = f"{module}/{gate.split()[0]}"
    assert kinds.pop(name) == "router"
    assert "router" not in kinds.values()
    assert set(kinds.values()) == {"norm", "embedding", "matrix"}


@cases.rows(
    "text",
    ("moe: gate/kernel 3x8x4; up 3x4x8x32; down 3x4x32x8",),
    # MaxText's order, (expert, layer, in, out), and others that a user reads by a rule.
    ("moe: gate/kernel 8x3x4; up 4x3x8x32; down 4x3x32x8",),
    ("ffn: gate/kernel 8x4; up 8x4x32; down 32x4x8",),
    ("ffn: gate/kernel 8x4; up 4x32x8; down 4x8x32",),
    ("ffn: w_gate 8x4; w_up 8x32x4; w_down 32x8x4",),
    # A dense MLP beside the experts.
    ("moe: gate/kernel 8x4; up/kernel 8x32; down/kernel 32x8; experts/up 4x8x32",),
    ("mlp: shared_expert_gate/kernel 8x2; shared_expert_up/kernel 8x32",),
)
def test_a_router_is_one_whatever_axes_the_experts_have(text):
    found = leaves(tree(f"norm/scale 8; {text}"))
    (name,) = (path for path in found if "gate" in path)
    assert default_matrix_dims(name, found[name]) is None


@cases.rows(
    "text",
    ("mlp: gate/kernel 8x32; up/kernel 8x32; down/kernel 32x8",),
    ("mlp: gate/kernel 8x32; down/kernel 32x8",),
    ("moe: gate/kernel 8x32; up/kernel 8x32; router/kernel 8x4",),
    ("moe: gate/kernel 8x32; up/kernel 8x32; down/kernel 32x8; experts/up 4x8x32",),
    ("moe/experts/{0,1}: gate/kernel 8x32; up/kernel 8x32",),
    ("moe/shared: gate/kernel 8x32; up/kernel 8x32; down/kernel 32x8",),
    # A gate of attention, by head.
    ("attn: gate/kernel 8x2; query/kernel 8x2x4; {key,value}/kernel 8x2x4",),
    ("mixer: gate/kernel 8x16; conv/kernel 4x8x16",),
    ("mlp: gate/kernel 8x32; wi/kernel 8x32; wo/kernel 32x8",),
)
def test_a_gate_of_an_mlp_or_of_attention_stays_a_matrix(text):
    found = leaves(tree(f"norm/scale 8; {text}"))
    gates = [path for path in found if "/gate/" in path]
    for path in gates:
        assert default_matrix_dims(path, found[path]) == IN_OUT
    assert gates


def test_stacked_gates_of_experts_are_matrices():
    text = "moe: router/kernel 8x4; gate 4x8x32; up 4x8x32; down 4x32x8"
    kinds = kinds_of(SHAPES + text)
    assert kinds["moe/gate"] == "matrix"
    assert kinds["moe/router/kernel"] == "router"


# Attention.

ATTENTION = {
    "fused key and value": "wq/kernel 8x2x4; wkv/kernel 8x2x8; wo/kernel 2x4x8",
    "projections": "q_proj/kernel 8x2x4; kv_proj/kernel 8x2x8; o_proj/kernel 2x4x8",
    "all fused": "qkv/kernel 8x6x4; out/kernel 2x4x8",
    "bare": "wqkv 8x6x4; wo 2x4x8",
    "by head first": "to_q 2x8x4; to_kv 2x8x8; to_out 2x4x8",
    "latents": "q_b_proj/kernel 5x2x4; kv_b_proj/kernel 5x2x8; o_proj/kernel 2x4x8",
    "einsums": "q_einsum/w 2x8x4; kv_einsum/w 2x8x4; attn_vec_einsum/w 2x4x8",
}


@pytest.mark.parametrize("name", ATTENTION)
@cases.rows("where", ("layers_0",), ("MoeBlock_0",), ("layers_0/moe_block",))
@cases.rows(
    "router",
    ("router/kernel 8x4; w1 4x8x32; w2 4x32x8",),
    ("moe/router/kernel 8x4; moe/w1 4x8x32; moe/w2 4x32x8",),
    ("moe/gate/kernel 8x4; moe/w1 4x8x32; moe/w2 4x32x8",),
)
def test_attention_beside_a_router_is_never_a_stack_of_experts(name, where, router):
    entries = f"{ATTENTION[name]}; {router}".split("; ")
    found = leaves(tree("norm/scale 8; " + "; ".join(f"{where}/{x}" for x in entries)))
    for path, leaf in found.items():
        if leaf.ndim < 3:
            continue
        is_expert = path.rpartition("/")[2] in ("w1", "w2")
        assert is_stack_of_experts(path, leaf) == is_expert, path
        if is_expert:
            with pytest.raises(ValueError, match="experts_in_front"):
                default_matrix_dims(path, leaf)
            continue
        for rule in (default_matrix_dims, presets.experts_in_front):
            dims, error = read_by(rule, path, leaf)
            assert "experts_in_front" not in error
            assert dims != FRONT  # one matrix per head


def read_by(rule, path, leaf):
    try:
        return rule(path, leaf), ""
    except ValueError as error:
        return None, str(error)


def test_what_is_in_attention_of_a_block_with_experts():
    text = "layers_0/MoeBlock_0/attention: query/kernel 8x2x4; out/kernel 2x4x8"
    assert set(kinds_of(text).values()) == {"matrix"}
    assert chosen(tree(text), presets.experts_in_front) == chosen(tree(text))
    # Experts that are attention, and others with a "v": as DBRX has them.
    for path in ("experts/wq", "attention/experts/wq", "ffn/experts/mlp/v1"):
        assert is_stack_of_experts(path, array(4, 8, 8)), path
    near = leaves(tree("ffn: router/w 8x4; w1 4x8x32; v1 4x8x32; w2 4x32x8"))
    assert is_stack_of_experts("ffn/v1", near["ffn/v1"])


def test_a_convolution_beside_a_router_is_no_stack_of_experts():
    params = tree("layers_0: router/kernel 8x4; conv/kernel 3x8x8; w1 4x8x32")
    with pytest.raises(ValueError, match=r"conv/kernel.*a convolution can be flat"):
        assign(params, presets.experts_in_front)


# The order of axes. d, f and E are 8, 32 and 4.

PAIRS = {
    "gate, up and down": ("{gate,up}_proj", "down_proj", "8x32", "32x8"),
    "fused": ("gate_up_proj", "down_proj", "8x64", "32x8"),
    "numbers": ("{w1,w3}", "w2", "8x32", "32x8"),
    "kernels": ("{wi_0,wi_1}/kernel", "wo/kernel", "8x32", "32x8"),
    "linear": ("linear1/weight", "linear2/weight", "8x32", "32x8"),
    "named weights": ("mlp1_weight", "mlp2_weight", "8x64", "32x8"),
}


def experts(name, order, layers=()):
    """An entry for each layer of experts, with axes in this order."""
    first, second, *sizes = PAIRS[name]
    entries = []
    for names, size in zip((first, second), sizes, strict=True):
        axes = dict(zip("io", size.split("x"), strict=True), e="4")
        shape = "x".join([*map(str, layers), *(axes[letter] for letter in order)])
        entries.append(f"moe/experts/{names} {shape}")
    return "; ".join(entries)


def tree_of(name, order, layers=(), widths="norm/scale 8; embed/embedding 90x8"):
    prefix = "layers/" if layers else "layers_0/"
    entries = [f"{prefix}{x}" for x in experts(name, order, layers).split("; ")]
    entries.append(f"{prefix}moe/router/kernel {'x'.join(map(str, (*layers, 8, 4)))}")
    entries.append(f"{prefix}norm/scale {'x'.join(map(str, (*layers, 8)))}")
    return tree("; ".join([widths, *entries]))


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("layers", [(), (3,), (2, 3)])
def test_experts_in_front_are_read_in_one_order_only(name, layers):
    found = chosen(tree_of(name, "eio", layers), presets.experts_in_front)
    matrices = [dims for path, dims in found.items() if "experts" in path]
    assert {*matrices} == {FRONT}
    params = tree_of(name, "eoi", layers)
    message = (
        r"parameter |'layers(_0)?/moe/experts/.*' of shape \(.*\) and 'layers.*' of"
        r" shape \(.*\): these experts are not \(expert, in, out\) but \(expert, out,"
        r" in\); return MatrixDims\(inputs=-1, outputs=-2\)"
    )
    for rule in (None, presets.experts_in_front, presets.gemma, presets.convolutions):
        with pytest.raises(ValueError, match=message) as caught:
            assign(params, rule)
        assert "presets.experts_in_front reads" not in str(caught.value)

    def rule(path, leaf):
        if "/experts/" in path:
            return MatrixDims(inputs=-1, outputs=-2)
        return presets.experts_in_front(path, leaf)

    assert "ERROR" not in explain(params, rule)
    assert not NOTE.search(explain(params, rule))


@pytest.mark.parametrize("layers", [(), (3,)])
def test_maxtexts_experts_are_read_in_one_order_only(layers):
    shapes = {"wi_0": (8, 32), "wi_1": (8, 32), "wo": (32, 8)}

    def params(order):
        block = {"gate": {"kernel": array(8, *layers, 4)}}
        for name, shape in shapes.items():
            block[name] = array(4, *layers, *shape[::order])
        norm = {"scale": array(8, *layers)}
        return {"layers": {"MoeBlock_0": block, "norm": norm}, "norm": array(8)}

    found = chosen(params(1), presets.maxtext)
    assert found["layers/MoeBlock_0/wo"] == FRONT
    with pytest.raises(
        ValueError, match=r"presets\.maxtext: .*wi_0' of shape .* \(expert, out, in\)"
    ):
        assign(params(-1), presets.maxtext)


@pytest.mark.parametrize("name", ["fused", "named weights"])
def test_a_fused_pair_shows_its_order_without_a_width(name):
    """Also where the hidden layer is as wide as the model, or half as wide."""
    for d, f in itertools.product((8, 16, 32), (8, 16, 32)):
        first, second, *_ = PAIRS[name]
        params = {f"experts/{first}": (d, 2 * f), f"experts/{second}": (f, d)}
        right = {path: array(4, *shape) for path, shape in params.items()}
        wrong = {path: array(4, *shape[::-1]) for path, shape in params.items()}
        assert {*chosen(right, presets.experts_in_front).values()} == {FRONT}
        with pytest.raises(ValueError, match=r"but \(expert, out, in\)"):
            assign(wrong, presets.experts_in_front)


@cases.rows(
    "text",
    # Nothing shows the width, or both sides are as wide.
    ("experts: up 4x32x8; down 4x8x32",),
    ("norm/scale 8; inner_norm/scale 32; experts: up 4x32x8; down 4x8x32",),
    ("norm/scale 8; experts: up 4x8x8; down 4x8x8",),
    # Names that are of no layer of an MLP.
    ("norm/scale 8; experts: alpha 4x32x8; beta 4x8x32",),
)
def test_an_order_that_nothing_shows_is_no_error(text):
    assert FRONT in chosen(tree(text), presets.experts_in_front).values()


@cases.rows(
    "text",
    ("norm/scale 8; experts/up 4x32x8",),
    ("norm/scale 8; experts/down 4x8x32",),
    ("embed/embedding 90x8; experts/up 4x32x8; experts/down 4x8x32",),
    ("moe/router/kernel 8x4; moe/up 4x32x8; moe/down 4x8x32",),
    ("moe/gate/weight 4x8; moe/up 4x32x8; moe/down 4x8x32",),
)
def test_each_width_shows_the_order(text):
    with pytest.raises(ValueError, match=r"but \(expert, out, in\)"):
        assign(tree(text), presets.experts_in_front)


def test_experts_behind_the_inputs_are_an_error():
    params = tree_of("gate, up and down", "ieo")
    with pytest.raises(ValueError, match=r"not \(expert, in, out\); axis 0 is as long"):
        assign(params, presets.experts_in_front)


def test_names_of_axes_do_not_hide_the_order():
    """Those of experts are read in the order of kernels, or of a weight."""

    def params(kernel, sizes):
        names = ("expert", "a", "b")
        layer = nn.Partitioned(array(4, *sizes), names=names)
        return {"norm": array(8), "moe": {"up": {kernel: layer}}}

    assert chosen(params("kernel", (8, 32)))["moe/up/kernel"] == MatrixDims(1, 2)
    assert chosen(params("weight", (32, 8)))["moe/up/weight"] == MatrixDims(2, 1)
    with pytest.raises(ValueError, match=r"but \(expert, out, in\).*inputs=-1, outp"):
        assign(params("kernel", (32, 8)))
    with pytest.raises(ValueError, match=r"but \(expert, in, out\).*inputs=-2, outp"):
        assign(params("weight", (8, 32)))
    # The preset reads (expert, in, out).
    found = chosen(params("weight", (8, 32)), presets.experts_in_front)
    assert found["moe/up/weight"] == FRONT


# MLPs whose weights are (in, out), or whose kernels are (out, in).

NOTE = re.compile(r"note: the name of (.*) is that of the first layer of an MLP.*")


@cases.rows(
    "text names rule",
    ("ffn: linear1/weight 8x32; linear2/weight 32x8", "'ffn/linear1/weight'", "-2 -1"),
    ("linear1/weight 8x32; linear2/weight 32x8", "'linear1/weight'", "-2 -1"),
    (
        "ffn: linear1_0/weight 8x32; linear1_1/weight 8x32; linear2/weight 32x8",
        "'ffn/linear1_{0,1}/weight'",
        "-2 -1",
    ),
    (
        "repeat/layer/ffn: linear1/weight 3x8x32; linear2/weight 3x32x8; norm 3x8",
        "'repeat/layer/ffn/linear1/weight'",
        "-2 -1",
    ),
    ("layer_0: up/weight 8x32; down/weight 32x8", "'layer_0/up/weight'", "-2 -1"),
    ("layer_0: fc1/kernel 32x8; fc2/kernel 8x32", "'layer_0/fc1/kernel'", "-1 -2"),
    (
        "layer_0/feedforward_intermediate_dense/kernel 32x8;"
        " layer_0/feedforward_output_dense/kernel 8x32",
        "'layer_0/feedforward_intermediate_dense/kernel'",
        "-1 -2",
    ),
    (
        "layer_0/moe/experts/{0,1}: w1/weight 8x4; w2/weight 4x8",
        "'layer_0/moe/experts/{0,1}/w1/weight'",
        "-2 -1",
    ),
    ("mlp: wi/weight 8x32", "'mlp/wi/weight'", "-2 -1"),
)
def test_an_mlp_in_the_other_order_has_a_note(text, names, rule):
    notes = explain(tree(SHAPES + text)).splitlines()
    (match,) = filter(None, map(NOTE.fullmatch, notes))
    assert match[1] == names
    inputs, outputs = rule.split()
    assert f"MatrixDims(inputs={inputs}, outputs={outputs})" in match[0]

    def given(path, leaf):
        if re.search("embed|norm", path):
            return default_matrix_dims(path, leaf)
        return MatrixDims(int(inputs), int(outputs))

    assert not NOTE.search(explain(tree(SHAPES + text), given))


@cases.rows(
    "text",
    ("ffn: linear1/weight 32x8; linear2/weight 8x32",),
    ("mlp: up/kernel 8x32; gate/kernel 8x32; down/kernel 32x8",),
    ("mlp: linear1/weight 8x8; linear2/weight 8x8",),
    # Adapters, latents of attention, connectors, layers counted from zero.
    ("layer_0/adapter: down/kernel 8x2; up/kernel 2x8",),
    ("layer_0/mlp: down/kernel 8x2; up/kernel 2x8",),
    ("layer_0/attn: kv_down/kernel 8x2; kv_up/kernel 2x8",),
    ("connector: fc1/kernel 32x8; fc2/kernel 8x8",),
    ("layer_0/fc1/kernel 32x8",),
    ("mlp: linear/w 8x32; linear_1/w 32x8",),
    ("mlp: linear_0/w 8x32; linear_1/w 32x8; linear_2/w 8x32",),
    # A bias agrees.
    ("mlp: linear1/weight 8x32; linear1/bias 8; linear2/weight 32x8",),
)
def test_an_mlp_in_order_has_no_note(text):
    assert not NOTE.search(explain(tree(SHAPES + text)))


@cases.rows(
    "text",
    ("fc1/weight 32x90; fc2/weight 10x32; norm 32",),  # a perceptron with a norm
    ("fc1/weight 8x32; fc2/weight 32x8; norm 8",),  # an autoencoder
    ("mlp: linear1/weight 8x32; linear2/weight 32x8",),  # without a width
)
def test_a_tree_without_a_width_of_a_model_has_no_note(text):
    assert not NOTE.search(explain(tree(text)))


def test_init_warns_of_an_mlp_in_the_other_order():
    layer = {"linear1": {"weight": jnp.ones((8, 32))}}
    layer["linear2"] = {"weight": jnp.ones((32, 8))}
    params = {"ffn": layer, "norm": jnp.ones(8), "embed": jnp.ones((90, 8))}
    tx = normpre_h(1.6e-2, adam_learning_rate=1e-3)
    with pytest.warns(UserWarning, match="the name of 'ffn/linear1/weight'"):
        tx.init(params)
