# SPDX-License-Identifier: Apache-2.0
"""The default rule on whole models of NNX, Linen, Equinox, Haiku, Haliax and plain dicts: every leaf of every tree."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from normpre_optax.parameters.dims import MatrixDims
from normpre_optax.parameters.explain import explain
from normpre_optax.parameters.rules import assign
from tests.parameters.tables import FROM_HEADS, IN_OUT, OUT_IN, STACKED, TO_HEADS, array, chosen, dims_of, tree, under

VOCABULARY, LENGTH, WIDTH, HIDDEN, HEADS, LAYERS = 50, 5, 16, 32, 4, 3
TOKENS = jax.ShapeDtypeStruct((2, LENGTH), jnp.int32)
FRONT = (STACKED, MatrixDims(1, (2, 3)), MatrixDims((1, 2), 3))
SECOND = (MatrixDims(0, 2), MatrixDims(0, (2, 3)), MatrixDims((0, 2), 3))
NOT_FRONT = "it looks stacked, but not in front"


# Flax NNX.


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.ln = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, normalize_qk=True, rngs=rngs)
        self.rms = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.LoRALinear(HIDDEN, WIDTH, lora_rank=2, use_bias=False, rngs=rngs)


class NnxModel(nnx.Module):
    def __init__(self, rngs, axis=None):
        self.wte, self.wpe = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs), nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        if axis is None:
            self.blocks = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])
        else:
            stack = nnx.vmap(NnxBlock, in_axes=(0,), out_axes=axis)
            self.blocks = nnx.split_rngs(splits=LAYERS)(lambda rngs: stack(rngs))(rngs)
        self.ln_f = nnx.LayerNorm(WIDTH, use_bias=False, rngs=rngs)
        self.lm_head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)


def nnx_model(axis):
    return nnx.state(nnx.eval_shape(lambda: NnxModel(nnx.Rngs(0), axis)), nnx.Param)


def nnx_table(up, to_heads, from_heads):
    table = {f"attn/{name}/kernel": to_heads for name in ("query", "key", "value")} | {"attn/out/kernel": from_heads}
    table |= {f"attn/{name}/bias": None for name in ("query", "key", "value", "out")}
    table |= dict.fromkeys(["ln/scale", "ln/bias", "rms/scale", "up/bias", "attn/query_ln/scale", "attn/key_ln/scale"])
    return table | {"up/kernel": up, "down/kernel": up, "down/lora/lora_a": None, "down/lora/lora_b": None}


@pytest.mark.parametrize("axis", [None, 0])
def test_nnx_with_and_without_variables(axis):
    want = dict.fromkeys(["wte/embedding", "wpe/embedding", "ln_f/scale", "lm_head/kernel"])
    table = nnx_table(*FRONT) if axis == 0 else nnx_table(IN_OUT, TO_HEADS, FROM_HEADS)
    for name in ["blocks"] if axis == 0 else [f"blocks/{i}" for i in range(LAYERS)]:
        want |= under(name, table)
    state = nnx_model(axis)
    assert chosen(state) == chosen(nnx.as_pure(state)) == chosen(nnx.to_pure_dict(state)) == want


def test_nnx_stacked_along_axis_1_is_an_error():
    with pytest.raises(ValueError, match=NOT_FRONT):
        assign(nnx_model(1))


def test_nnx_optimizer_passes_the_same_parameters_at_init_and_at_update():
    """At init nnx.Optimizer passes variables, at update bare arrays."""
    net, seen = NnxBlock(nnx.Rngs(0)), []
    tx = optax.stateless(lambda updates, params: [seen.append(chosen(params)), updates][1])
    tx = optax.GradientTransformation(lambda params: [seen.append(chosen(params)), tx_state][1], tx.update)
    tx_state = optax.EmptyState()
    nnx.Optimizer(net, tx, wrt=nnx.Param).update(net, nnx.state(net, nnx.Param))
    assert seen == [nnx_table(IN_OUT, TO_HEADS, FROM_HEADS)] * 2


def test_gpt2_small_counts():
    """The matrix group has the 84.9M elements of the hidden matrices, not the 78M of embedding and head."""
    layer = "attn/{query,key,value}/kernel 768x12x64; attn/out/kernel 12x64x768"
    layer += "; c_fc/kernel 768x3072; c_proj/kernel 3072x768"
    params = {"h": [tree(layer) for _ in range(12)], "wte": tree("embedding 50257x768")}
    assert "matrix: 72 parameters, 84,934,656 elements, 72 matrices" in explain(params).splitlines()


# Flax Linen.


class LinenBlock(nn.Module):
    """Attention and MLP; with ``names`` all kernels are boxed, as in large code bases."""

    names: bool = False

    @nn.compact
    def __call__(self, x, _=None):
        def kernel(*names):
            init = nn.initializers.lecun_normal()
            return nn.with_partitioning(init, names) if self.names else init

        def heads(features, axis, names, name):
            return nn.DenseGeneral(features, axis=axis, kernel_init=kernel(*names), name=name)

        y, shape = nn.LayerNorm()(x), (HEADS, WIDTH // HEADS)
        q, k, v = (heads(shape, -1, ("embed", "heads", "kv"), n)(y) for n in ("query", "key", "value"))
        x = x + heads(WIDTH, (-2, -1), ("heads", "kv", "embed"), "out")(nn.dot_product_attention(q, k, v))
        up = nn.Dense(HIDDEN, kernel_init=kernel("embed", "mlp"))(nn.RMSNorm()(x))
        return x + nn.Dense(WIDTH, use_bias=False, kernel_init=kernel("mlp", "embed"))(up), None


class LinenModel(nn.Module):
    axis: int | None = None
    names: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        x = x + self.param("pos_embedding", nn.initializers.normal(), (1, LENGTH, WIDTH))
        if self.axis is None:
            x, _ = LinenBlock(self.names)(x)
        else:
            options = {
                "split_rngs": {"params": True},
                "length": LAYERS,
                "metadata_params": {nn.PARTITION_NAME: "layers"},
            }
            x, _ = nn.scan(LinenBlock, variable_axes={"params": self.axis}, **options)(self.names)(x, None)
        return nn.Dense(VOCABULARY, use_bias=False)(nn.LayerNorm(use_bias=False)(x))


@pytest.mark.parametrize("names", [False, True])
@pytest.mark.parametrize(("axis", "dims"), [(None, (IN_OUT, TO_HEADS, FROM_HEADS)), (0, FRONT), (1, SECOND)])
def test_linen(axis, dims, names):
    variables = jax.eval_shape(LinenModel(axis, names).init, jax.random.key(0), TOKENS)
    if axis == 1 and not names:
        with pytest.raises(ValueError, match=NOT_FRONT):
            assign(variables["params"])
        return
    up, to_heads, from_heads = dims
    block = {"Dense_0/kernel": up, "Dense_1/kernel": up, "out/kernel": from_heads}
    block |= {f"{name}/kernel": to_heads for name in ("query", "key", "value")}
    block |= dict.fromkeys([f"{name}/bias" for name in ("query", "key", "value", "out", "Dense_0", "LayerNorm_0")])
    block |= {"LayerNorm_0/scale": None, "RMSNorm_0/scale": None}
    want = {"Embed_0/embedding": None, "LayerNorm_0/scale": None, "pos_embedding": None, "Dense_0/kernel": IN_OUT}
    want |= under("LinenBlock_0" if axis is None else "ScanLinenBlock_0", block)
    assert chosen(variables["params"]) == want
    assert chosen(variables) == under("params", want)
    assert "\nDense_0/kernel" in explain(variables["params"])  # the head without a name
    assert "(in, out), has an axis of the vocabulary size" in explain(variables["params"])


# Equinox.


class EquinoxBlock(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    scale_free: eqx.nn.RMSNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.norm, self.scale_free = eqx.nn.LayerNorm(WIDTH), eqx.nn.RMSNorm(WIDTH, use_bias=False)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, use_output_bias=True, key=key)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, depth=1, key=key)


@pytest.mark.parametrize("stacked", [False, True])
def test_equinox(stacked):
    keys = jax.random.split(jax.random.key(0), LAYERS)
    params = {
        "lookup": eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0]),
        "positions": jnp.zeros((LENGTH, WIDTH)),
        "blocks": eqx.filter_vmap(EquinoxBlock)(keys) if stacked else [EquinoxBlock(key) for key in keys],
        "head": eqx.nn.Linear(WIDTH, VOCABULARY, key=keys[0]),
    }
    dims = MatrixDims(inputs=2, outputs=1) if stacked else OUT_IN
    block = {f"attention/{name}_proj/weight": dims for name in ("query", "key", "value", "output")}
    block |= {f"mlp/layers/{i}/{x}": dims if x == "weight" else None for i in (0, 1) for x in ("weight", "bias")}
    block |= dict.fromkeys(["norm/weight", "norm/bias", "attention/output_proj/bias", "scale_free/weight"])
    want = dict.fromkeys(["lookup/weight", "positions", "head/weight", "head/bias"])
    for name in ["blocks"] if stacked else [f"blocks/{i}" for i in range(LAYERS)]:
        want |= under(name, block)
    params = eqx.filter(params, eqx.is_inexact_array)
    assert chosen(params) == want
    frozen = eqx.tree_at(lambda m: m["lookup"].weight, params, None)
    assert chosen(frozen) == {path: dims for path, dims in want.items() if path != "lookup/weight"}
    assert chosen({"lookup": {"weight": params["lookup"].weight}}) == {"lookup/weight": OUT_IN}  # without its class
    with pytest.raises(ValueError, match=r"parameter 'patch/weight' of shape \(8, 3, 4, 4\): a convolution"):
        assign({"patch": eqx.filter(eqx.nn.Conv2d(3, 8, 4, key=keys[0]), eqx.is_inexact_array)})


# Haiku.


def haiku_model(tokens):
    x = hk.Embed(VOCABULARY, WIDTH)(tokens)
    x = x + hk.get_parameter("pos_embs", (LENGTH, WIDTH), init=hk.initializers.TruncatedNormal())
    y = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
    init = hk.initializers.VarianceScaling()
    x = x + hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init=init, model_size=WIDTH)(y, y, y)
    x = x + hk.nets.MLP([HIDDEN, WIDTH])(hk.RMSNorm(-1)(x))
    x = hk.experimental.layer_stack(LAYERS)(lambda y: hk.Linear(WIDTH, name="mix")(hk.LayerNorm(-1, True, True)(y)))(x)
    return hk.Linear(VOCABULARY, name="lm_head")(x)


def test_haiku():
    params = jax.eval_shape(hk.transform(haiku_model).init, jax.random.key(0), TOKENS)
    want = {"embed/embeddings": None, "~/pos_embs": None, "lm_head/w": None, "lm_head/b": None}
    for name in [f"multi_head_attention/{x}" for x in ("query", "key", "value", "linear")]:
        want |= {f"{name}/w": IN_OUT, f"{name}/b": None}
    want |= {f"mlp/~/linear_{i}/{x}": IN_OUT if x == "w" else None for i in (0, 1) for x in "wb"}
    want |= dict.fromkeys(["layer_norm/scale", "layer_norm/offset", "rms_norm/scale"])
    stacked = {"mix/w": STACKED, "mix/b": None, "layer_norm/scale": None, "layer_norm/offset": None}
    assert chosen(params) == want | under("__layer_stack_no_per_layer", stacked)


# Haliax and plain dicts.


def test_haliax():
    text = """
        q_proj/weight layers=3,kv_head=2,group=4,head_size=8,embed=16 4>123; plain/weight mlp=32,embed=16 1>0
        k_proj/weight layers=3,kv_head=2,head_size=8,embed=16 3>12; ln_1/weight layers=3,embed=16
        o_proj/weight layers=3,embed=16,heads=8,head_size=8 23>1; up_proj/bias layers=3,mlp=32
        up_proj/weight layers=3,mlp=32,embed=16 2>1; lm_head/weight vocab=50,embed=16
    """
    assert chosen(tree(text)) == dims_of(text)


def test_stacks_and_lists_of_bare_arrays():
    text = (
        "tok_emb 50x16; unembed 16x50; layers: wqkv 3x16x48 1>2; bqkv 3x48; w1 3x16x64 1>2; b1 3x64; mix 3x16; g 3x16"
    )
    assert chosen(tree(text)) == dims_of(text)
    bare = [array(3, 4), array(4), (array(4, 5), array(5))]
    assert chosen(bare) == {"0": IN_OUT, "1": None, "2/0": IN_OUT, "2/1": None}
