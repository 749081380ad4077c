# SPDX-License-Identifier: Apache-2.0
"""The default rule on whole models of NNX, Linen, Equinox and Haiku: every leaf of
every tree.
"""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from normpre_optax.parameters.explain import explain
from normpre_optax.parameters.rules import assign
from tests.parameters.tables import IN_OUT, OUT_IN, chosen, dims_of, with_layers

VOCABULARY, LENGTH, WIDTH, HIDDEN, HEADS, LAYERS = 50, 5, 16, 32, 4, 3
TOKENS = jax.ShapeDtypeStruct((2, LENGTH), jnp.int32)
ATTENTION = (
    "attn/{query,key,value}/kernel () 0>12; attn/out/kernel () 01>2;"
    " attn/{query,key,value,out}/bias ()"
)
NOT_FRONT = "it looks stacked, but not on axis 0"


def blocks(prefix, text, axis=None):
    """Dims of the text's parameters, in one block or with the layers stacked along an
    axis.
    """

    def moved(dims):
        return dims if axis is None else with_layers((), dims, LAYERS, axis)[1]

    return {f"{prefix}/{path}": moved(dims) for path, dims in dims_of(text).items()}


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.ln, self.rms = (
            nnx.LayerNorm(WIDTH, rngs=rngs),
            nnx.RMSNorm(WIDTH, rngs=rngs),
        )
        self.attn = nnx.MultiHeadAttention(
            HEADS, WIDTH, decode=False, normalize_qk=True, rngs=rngs
        )
        self.down = nnx.LoRALinear(
            HIDDEN, WIDTH, lora_rank=2, use_bias=False, rngs=rngs
        )


class NnxModel(nnx.Module):
    def __init__(self, rngs, axis):
        self.wte, self.wpe = (
            nnx.Embed(VOCABULARY, WIDTH, rngs=rngs),
            nnx.Embed(LENGTH, WIDTH, rngs=rngs),
        )
        stack = nnx.split_rngs(splits=LAYERS)(
            nnx.vmap(NnxBlock, in_axes=(0,), out_axes=axis or 0)
        )
        self.blocks = nnx.List([NnxBlock(rngs)]) if axis is None else stack(rngs)
        self.lm_head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)


# Flax 0.12.6, the oldest that is supported, has it under its former name.
as_pure = getattr(nnx, "as_pure", None) or nnx.pure


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_nnx_with_and_without_variables(axis):
    state = nnx.state(nnx.eval_shape(lambda: NnxModel(nnx.Rngs(0), axis)), nnx.Param)
    if axis == 1:
        with pytest.raises(ValueError, match=NOT_FRONT):
            assign(state)
        return
    block = (
        "down/kernel () 0>1; down/lora/{lora_a,lora_b} ();"
        " {ln/scale,ln/bias,rms/scale} ()"
    )
    block += "; attn/{query_ln,key_ln}/scale (); " + ATTENTION
    want = blocks("blocks/0" if axis is None else "blocks", block, axis)
    want |= dict.fromkeys(
        ["wte/embedding", "wpe/embedding", "lm_head/kernel", "lm_head/bias"]
    )
    assert (
        chosen(state)
        == chosen(as_pure(state))
        == chosen(nnx.to_pure_dict(state))
        == want
    )


class LinenBlock(nn.Module):
    """Attention and MLP; with ``names`` all kernels are boxed, as in large code bases."""

    names: bool = False

    @nn.compact
    def __call__(self, x, _=None):
        def kernel(*names):
            init = nn.initializers.lecun_normal()
            return nn.with_partitioning(init, names) if self.names else init

        heads, out = kernel("embed", "heads", "kv"), kernel("heads", "kv", "embed")
        x = x + nn.MultiHeadAttention(
            HEADS, kernel_init=heads, out_kernel_init=out, name="attn"
        )(nn.LayerNorm()(x))
        up = nn.Dense(HIDDEN, kernel_init=kernel("embed", "mlp"))(nn.RMSNorm()(x))
        return (
            x + nn.Dense(WIDTH, use_bias=False, kernel_init=kernel("mlp", "embed"))(up),
            None,
        )


class LinenModel(nn.Module):
    axis: int | None = None
    names: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        x = x + self.param(
            "pos_embedding", nn.initializers.normal(), (1, LENGTH, WIDTH)
        )
        block, options = (
            LinenBlock,
            {
                "metadata_params": {nn.PARTITION_NAME: "layers"},
                "split_rngs": {"params": True},
            },
        )
        if self.axis is not None:
            block = nn.scan(
                block, variable_axes={"params": self.axis}, length=LAYERS, **options
            )
        x, _ = block(self.names)(x, None)
        return nn.Dense(VOCABULARY, use_bias=False)(nn.LayerNorm(use_bias=False)(x))


@pytest.mark.parametrize(
    ("axis", "names"), [(None, False), (0, False), (1, False), (1, True)]
)
def test_linen(axis, names):
    variables = jax.eval_shape(LinenModel(axis, names).init, jax.random.key(0), TOKENS)
    if axis == 1 and not names:
        with pytest.raises(ValueError, match=NOT_FRONT):
            assign(variables["params"])
        return
    block = ATTENTION + "; {Dense_0,Dense_1}/kernel () 0>1"
    block += "; {Dense_0,LayerNorm_0}/bias (); {LayerNorm_0,RMSNorm_0}/scale ()"
    want = blocks("LinenBlock_0" if axis is None else "ScanLinenBlock_0", block, axis)
    want |= {
        "Embed_0/embedding": None,
        "LayerNorm_0/scale": None,
        "pos_embedding": None,
        "Dense_0/kernel": IN_OUT,
    }
    assert chosen(variables["params"]) == want
    assert chosen(variables) == {f"params/{path}": dims for path, dims in want.items()}
    lines = [
        line
        for line in explain(variables["params"]).splitlines()
        if line.startswith("Dense_0/kernel")
    ]
    assert lines[0].endswith(
        "(in, out), has an axis of the vocabulary size"
    )  # the head without a name


class EquinoxBlock(eqx.Module):
    norm: eqx.nn.LayerNorm
    attn: eqx.nn.MultiheadAttention
    scale_free: eqx.nn.RMSNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.norm, self.scale_free = (
            eqx.nn.LayerNorm(WIDTH),
            eqx.nn.RMSNorm(WIDTH, use_bias=False),
        )
        self.attn = eqx.nn.MultiheadAttention(
            HEADS, WIDTH, use_output_bias=True, key=key
        )
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, depth=1, key=key)


@pytest.mark.parametrize("axis", [None, 0])
def test_equinox(axis):
    def model(key):
        stack = eqx.filter_vmap(EquinoxBlock)(jax.random.split(key, LAYERS))
        return {
            "lookup": eqx.nn.Embedding(VOCABULARY, WIDTH, key=key),
            "positions": jnp.zeros((LENGTH, WIDTH)),
            "blocks": [EquinoxBlock(key)] if axis is None else stack,
            "head": eqx.nn.Linear(WIDTH, VOCABULARY, key=key),
            "conv": eqx.nn.Conv2d(3, 8, 4, key=key),
        }

    params = eqx.filter(
        eqx.filter_eval_shape(model, jax.random.key(0)),
        lambda x: isinstance(x, jax.ShapeDtypeStruct),
    )
    with pytest.raises(
        ValueError,
        match=r"parameter 'conv/weight' of shape \(8, 3, 4, 4\): a convolution",
    ):
        assign(params)
    del params["conv"]
    block = (
        "attn/{query,key,value,output}_proj/weight () 1>0; mlp/layers/{0,1}/weight ()"
        " 1>0; attn/output_proj/bias ()"
    )
    block += "; mlp/layers/{0,1}/bias (); {norm/weight,norm/bias,scale_free/weight} ()"
    want = blocks("blocks/0" if axis is None else "blocks", block, axis)
    want |= dict.fromkeys(["lookup/weight", "positions", "head/weight", "head/bias"])
    assert chosen(params) == want
    frozen = eqx.tree_at(lambda m: m["lookup"].weight, params, None)
    assert chosen(frozen) == {
        path: dims for path, dims in want.items() if path != "lookup/weight"
    }
    assert chosen({"lookup": {"weight": params["lookup"].weight}}) == {
        "lookup/weight": OUT_IN
    }  # without its class


def haiku_model(tokens):
    x = hk.Embed(VOCABULARY, WIDTH)(tokens)
    x = x + hk.get_parameter(
        "pos_embs", (LENGTH, WIDTH), init=hk.initializers.TruncatedNormal()
    )
    y = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
    init = hk.initializers.VarianceScaling()
    x = x + hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init=init, model_size=WIDTH)(
        y, y, y
    )
    x = x + hk.nets.MLP([HIDDEN, WIDTH])(hk.RMSNorm(-1)(x))
    x = hk.experimental.layer_stack(LAYERS)(
        lambda y: hk.Linear(WIDTH, name="mix")(hk.LayerNorm(-1, True, True)(y))
    )(x)
    return hk.Linear(VOCABULARY, name="lm_head")(x)


def test_haiku():
    params = jax.eval_shape(hk.transform(haiku_model).init, jax.random.key(0), TOKENS)
    text = """
        {embed/embeddings,~/pos_embs,lm_head/w,lm_head/b,layer_norm/scale,layer_norm/offset,rms_norm/scale} ()
        multi_head_attention/{query,key,value,linear}/w () 0>1; multi_head_attention/{query,key,value,linear}/b ()
        mlp/~/{linear_0,linear_1}/w () 0>1; mlp/~/{linear_0,linear_1}/b ()
    """
    stack = blocks(
        "__layer_stack_no_per_layer",
        "mix/w () 0>1; {mix/b,layer_norm/scale,layer_norm/offset} ()",
        0,
    )
    assert chosen(params) == dims_of(text) | stack
