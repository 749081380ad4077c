# SPDX-License-Identifier: Apache-2.0
"""The default rule on whole models of Linen, Equinox, Haiku and plain dicts: every leaf of every table."""

import collections

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax.training.train_state import TrainState

from normpre_optax.algorithm import normpre_g
from normpre_optax.parameters.dims import MatrixDims
from normpre_optax.parameters.rules import resolve
from tests.parameters.tables import chosen, under

IN_OUT, OUT_IN = MatrixDims(inputs=0, outputs=1), MatrixDims(inputs=1, outputs=0)
TO_HEADS, FROM_HEADS = MatrixDims(inputs=0, outputs=(1, 2)), MatrixDims(inputs=(0, 1), outputs=2)
VOCABULARY, LENGTH, WIDTH, HIDDEN, HEADS, LAYERS = 50, 5, 16, 32, 4, 3


# Flax Linen.


class LinenBlock(nn.Module):
    """Pre-norm attention and MLP; `names` boxes every kernel, as large-scale code bases do."""

    names: bool = False

    @nn.compact
    def __call__(self, x, _=None):
        def kernel(*names):
            init = nn.initializers.lecun_normal()
            return nn.with_partitioning(init, names) if self.names else init

        y = nn.LayerNorm()(x)

        def heads(features, axis, names, name):
            return nn.DenseGeneral(features, axis=axis, use_bias=False, kernel_init=kernel(*names), name=name)

        if self.names:
            shape = (HEADS, WIDTH // HEADS)
            q, k, v = (heads(shape, -1, ("embed", "heads", "kv"), n)(y) for n in ("query", "key", "value"))
            y = heads(WIDTH, (-2, -1), ("heads", "kv", "embed"), "out")(nn.dot_product_attention(q, k, v))
        else:
            y = nn.MultiHeadDotProductAttention(HEADS)(y, y)
        x = x + y
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
            for _ in range(2):
                x, _ = LinenBlock(self.names)(x)
        else:
            stack = nn.scan(
                LinenBlock,
                variable_axes={"params": self.axis},
                split_rngs={"params": True},
                length=LAYERS,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            x, _ = stack(self.names)(x, None)
        return nn.Dense(VOCABULARY, use_bias=False, name="lm_head")(nn.LayerNorm(use_bias=False)(x))


def linen(**options):
    tokens = jax.ShapeDtypeStruct((2, LENGTH), jnp.int32)
    return jax.eval_shape(LinenModel(**options).init, jax.random.key(0), tokens)


LINEN_REST = {"Embed_0/embedding": None, "LayerNorm_0/scale": None, "lm_head/kernel": None, "pos_embedding": None}


def linen_block(up, to_heads, from_heads):
    attention = {
        f"{name}/{leaf}": to_heads if leaf == "kernel" else None
        for name in ("query", "key", "value")
        for leaf in ("bias", "kernel")
    }
    return {
        "Dense_0/bias": None,
        "Dense_0/kernel": up,
        "Dense_1/kernel": up,
        "LayerNorm_0/bias": None,
        "LayerNorm_0/scale": None,
        **under("MultiHeadDotProductAttention_0", attention | {"out/bias": None, "out/kernel": from_heads}),
        "RMSNorm_0/scale": None,
    }


LINEN_STACKED = linen_block(
    MatrixDims(inputs=1, outputs=2), MatrixDims(inputs=1, outputs=(2, 3)), MatrixDims(inputs=(1, 2), outputs=3)
)


def test_linen_layer_by_layer():
    block = linen_block(IN_OUT, TO_HEADS, FROM_HEADS)
    want = {**LINEN_REST, **under("LinenBlock_0", block), **under("LinenBlock_1", block)}
    variables = linen()
    assert chosen(variables["params"]) == want
    assert chosen(variables) == under("params", want)


def test_linen_scanned_in_front():
    params = linen(axis=0)["params"]
    assert params["ScanLinenBlock_0"]["Dense_0"]["bias"].shape == (LAYERS, HIDDEN)
    assert chosen(params) == {**LINEN_REST, **under("ScanLinenBlock_0", LINEN_STACKED)}


def test_linen_scanned_along_axis_1_is_an_error():
    params = linen(axis=1)["params"]
    assert params["ScanLinenBlock_0"]["Dense_0"]["kernel"].shape == (WIDTH, LAYERS, HIDDEN)
    with pytest.raises(ValueError, match=r"'ScanLinenBlock_0/Dense_0/kernel' .* it looks stacked, but not in front"):
        resolve(params)


@pytest.mark.parametrize(
    ("axis", "up", "to_heads", "from_heads"),
    [
        (None, IN_OUT, TO_HEADS, FROM_HEADS),
        (0, MatrixDims(1, 2), MatrixDims(1, (2, 3)), MatrixDims((1, 2), 3)),
        (1, MatrixDims(0, 2), MatrixDims(0, (2, 3)), MatrixDims((0, 2), 3)),
    ],
)
def test_linen_with_boxed_names_along_any_axis(axis, up, to_heads, from_heads):
    params = linen(axis=axis, names=True)["params"]
    kernels = {"Dense_0/kernel": up, "Dense_1/kernel": up, "out/kernel": from_heads}
    kernels |= {f"{name}/kernel": to_heads for name in ("query", "key", "value")}
    vectors = {"Dense_0/bias": None, "LayerNorm_0/bias": None, "LayerNorm_0/scale": None, "RMSNorm_0/scale": None}
    names = ["ScanLinenBlock_0"] if axis is not None else ["LinenBlock_0", "LinenBlock_1"]
    want = dict(LINEN_REST)
    for name in names:
        want |= under(name, kernels | vectors)
    assert chosen(params) == want


@pytest.mark.parametrize("names", [False, True])
def test_linen_train_state_step(names):
    """Boxed or not, init and update of a TrainState see the same parameters."""
    model, tokens = LinenModel(axis=0, names=names), jnp.zeros((2, LENGTH), int)

    def step(key):
        params = model.init(key, tokens)["params"]
        state = TrainState.create(apply_fn=model.apply, params=params, tx=normpre_g(1e-3))
        grads = jax.grad(lambda p: jnp.sum(model.apply({"params": p}, tokens) ** 2))(params)
        return params, state.apply_gradients(grads=grads).params

    before, after = jax.eval_shape(step, jax.random.key(0))
    assert jax.tree.structure(after) == jax.tree.structure(before)
    assert resolve(after) == resolve(before)


# Equinox.


class EquinoxBlock(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    scale_free: eqx.nn.RMSNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, use_output_bias=True, key=key)
        self.scale_free = eqx.nn.RMSNorm(WIDTH, use_bias=False)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, depth=1, key=key)


class EquinoxModel(eqx.Module):
    lookup: eqx.nn.Embedding
    positions: jax.Array
    blocks: list[EquinoxBlock] | EquinoxBlock
    last: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key, stacked):
        self.lookup = eqx.nn.Embedding(VOCABULARY, WIDTH, key=key)
        self.positions = jnp.zeros((LENGTH, WIDTH))
        keys = jax.random.split(key, LAYERS)
        self.blocks = eqx.filter_vmap(EquinoxBlock)(keys) if stacked else [EquinoxBlock(key) for key in keys]
        self.last = eqx.nn.LayerNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, VOCABULARY, key=key)


def equinox_block(dims):
    projections = {f"attention/{name}_proj/weight": dims for name in ("query", "key", "value", "output")}
    layers = {
        f"mlp/layers/{i}/{leaf}": dims if leaf == "weight" else None for i in (0, 1) for leaf in ("weight", "bias")
    }
    vectors = ("norm/weight", "norm/bias", "attention/output_proj/bias", "scale_free/weight")
    return projections | layers | dict.fromkeys(vectors)


EQUINOX_REST = dict.fromkeys(["lookup/weight", "positions", "last/weight", "last/bias", "head/weight", "head/bias"])


def test_equinox_layer_by_layer():
    params = eqx.filter(EquinoxModel(jax.random.key(0), stacked=False), eqx.is_inexact_array)
    want = dict(EQUINOX_REST)
    for i in range(LAYERS):
        want |= under(f"blocks/{i}", equinox_block(OUT_IN))
    assert chosen(params) == want


def test_equinox_stacked_by_filter_vmap():
    params = eqx.filter(EquinoxModel(jax.random.key(0), stacked=True), eqx.is_inexact_array)
    assert params.blocks.mlp.layers[0].weight.shape == (LAYERS, HIDDEN, WIDTH)
    assert chosen(params) == EQUINOX_REST | under("blocks", equinox_block(MatrixDims(inputs=2, outputs=1)))


def test_equinox_embedding_is_known_by_its_class_but_not_in_a_dict():
    """The documented limit: without the class only the name is left, and (V, d) named "lookup" looks like a Linear."""
    embedding = eqx.nn.Embedding(VOCABULARY, WIDTH, key=jax.random.key(0))
    assert chosen({"lookup": embedding}) == {"lookup/weight": None}
    assert chosen({"lookup": {"weight": embedding.weight}}) == {"lookup/weight": OUT_IN}
    assert chosen({"embedding": {"weight": embedding.weight}}) == {"embedding/weight": None}


def test_equinox_convolution_is_an_error():
    params = eqx.filter({"patch": eqx.nn.Conv2d(3, 8, 4, key=jax.random.key(0))}, eqx.is_inexact_array)
    with pytest.raises(ValueError, match=r"parameter 'patch/weight' of shape \(8, 3, 4, 4\): a convolution"):
        resolve(params)


def test_equinox_table_is_the_same_when_frozen_parts_are_none():
    model = EquinoxModel(jax.random.key(0), stacked=False)
    params = eqx.filter(model, eqx.is_inexact_array)
    frozen = eqx.tree_at(lambda m: (m.blocks[0].mlp.layers[0].weight, m.lookup.weight), params, (None, None))
    want = chosen(params)
    del want["blocks/0/mlp/layers/0/weight"], want["lookup/weight"]
    assert chosen(frozen) == want


# Haiku.


def haiku_model(tokens):
    x = hk.Embed(VOCABULARY, WIDTH)(tokens)
    x = x + hk.get_parameter("pos_embs", (LENGTH, WIDTH), init=hk.initializers.TruncatedNormal())
    for _ in range(2):
        y = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        x = x + hk.MultiHeadAttention(
            HEADS, WIDTH // HEADS, w_init=hk.initializers.VarianceScaling(), model_size=WIDTH
        )(y, y, y)
        x = x + hk.nets.MLP([HIDDEN, WIDTH])(hk.RMSNorm(-1)(x))

    def layer(y):
        return hk.Linear(WIDTH, name="mix")(hk.LayerNorm(-1, True, True)(y))

    x = hk.experimental.layer_stack(LAYERS)(layer)(x)
    return hk.Linear(VOCABULARY, name="lm_head")(x)


def test_haiku():
    tokens = jax.ShapeDtypeStruct((2, LENGTH), jnp.int32)
    params = jax.eval_shape(hk.transform(haiku_model).init, jax.random.key(0), tokens)
    want = {"embed/embeddings": None, "~/pos_embs": None, "lm_head/w": None, "lm_head/b": None}
    for suffix in ("", "_1"):
        for name in ("query", "key", "value", "linear"):
            want |= under(f"multi_head_attention{suffix}/{name}", {"w": IN_OUT, "b": None})
        for i in (0, 1):
            want |= under(f"mlp{suffix}/~/linear_{i}", {"w": IN_OUT, "b": None})
        want |= {f"layer_norm{suffix}/scale": None, f"layer_norm{suffix}/offset": None, f"rms_norm{suffix}/scale": None}
    stacked = {
        "mix/w": MatrixDims(inputs=1, outputs=2),
        "mix/b": None,
        "layer_norm/scale": None,
        "layer_norm/offset": None,
    }
    assert chosen(params) == want | under("__layer_stack_no_per_layer", stacked)


# Haliax, whose boxes name every axis; Levanter's models are made of them.


Axis = collections.namedtuple("Axis", "name size")


@jax.tree_util.register_pytree_node_class
class NamedArray:
    """As haliax has it: one child without a key, axes as auxiliary data."""

    __module__ = "haliax.core"

    def __init__(self, array, axes):
        self.array, self.axes = array, axes

    def tree_flatten(self):
        return (self.array,), self.axes

    @classmethod
    def tree_unflatten(cls, axes, children):
        return cls(children[0], axes)


def named(**axes):
    return NamedArray(array(*axes.values()), tuple(Axis(*axis) for axis in axes.items()))


def test_haliax():
    stack = {
        "self_attn": {
            "q_proj": {"weight": named(layers=3, kv_head=2, q_heads_per_group=4, head_size=8, embed=16)},
            "k_proj": {"weight": named(layers=3, kv_head=2, head_size=8, embed=16)},
            "o_proj": {"weight": named(layers=3, embed=16, heads=8, head_size=8)},
        },
        "attn": {"c_attn": {"weight": named(layers=3, qkv=3, heads=2, head_size=8, embed=16)}},
        "mlp": {"up_proj": {"weight": named(layers=3, mlp=32, embed=16), "bias": named(layers=3, mlp=32)}},
        "ln_1": {"weight": named(layers=3, embed=16)},
    }
    params = {
        "transformer": {"layers": {"stacked": stack}},
        "embeddings": {"token_embeddings": {"weight": named(vocab=50, embed=16)}},
        "lm_head": {"weight": named(vocab=50, embed=16)},
        "plain": {"weight": named(mlp=32, embed=16)},
    }
    front = "transformer/layers/stacked"
    assert chosen(params) == {
        "embeddings/token_embeddings/weight": None,
        "lm_head/weight": None,
        "plain/weight": OUT_IN,
        f"{front}/attn/c_attn/weight": MatrixDims(inputs=4, outputs=(1, 2, 3)),
        f"{front}/ln_1/weight": None,
        f"{front}/mlp/up_proj/bias": None,
        f"{front}/mlp/up_proj/weight": MatrixDims(inputs=2, outputs=1),
        f"{front}/self_attn/k_proj/weight": MatrixDims(inputs=3, outputs=(1, 2)),
        f"{front}/self_attn/o_proj/weight": MatrixDims(inputs=(2, 3), outputs=1),
        f"{front}/self_attn/q_proj/weight": MatrixDims(inputs=4, outputs=(1, 2, 3)),
    }
    tx = normpre_g(1e-3)
    stepped = jax.eval_shape(lambda p: tx.update(p, tx.init(p), p)[0], params)
    assert jax.tree.structure(stepped) == jax.tree.structure(params)


# Plain dicts.


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def nested(table):
    tree = {}
    for path, leaf in table.items():
        node = tree
        *above, last = path.split("/")
        for part in above:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree


def agrees(table):
    """Checks a table of path -> (shape, dims) leaf by leaf."""
    assert chosen(nested({path: array(*shape) for path, (shape, _) in table.items()})) == {
        path: dims for path, (_, dims) in table.items()
    }


def gpt2_block(leaf, dims):
    """The four matrices of a GPT-2 block in the layout that `leaf` implies."""
    sizes = {"attn/c_attn": (16, 48), "attn/c_proj": (16, 16), "mlp/c_fc": (16, 64), "mlp/c_proj": (64, 16)}
    table = {f"{path}/{leaf}": (shape if dims == IN_OUT else shape[::-1], dims) for path, shape in sizes.items()}
    table |= {f"{path}/bias": (shape[1:], None) for path, shape in sizes.items()}
    return table | {f"ln_1/{leaf}": ((16,), None), "ln_1/bias": ((16,), None), f"ln_2/{leaf}": ((16,), None)}


def in_stack(table):
    """The same table with a layer axis in front."""
    stacked = {}
    for path, (shape, dims) in table.items():
        stacked[path] = (3, *shape), dims and MatrixDims(inputs=dims.inputs + 1, outputs=dims.outputs + 1)
    return stacked


@pytest.mark.parametrize(("leaf", "dims"), [("kernel", IN_OUT), ("weight", OUT_IN), ("w", IN_OUT)])
def test_names_of_nanogpt(leaf, dims):
    rest = {
        f"transformer/wte/{leaf}": ((50, 16), None),
        f"transformer/wpe/{leaf}": ((8, 16), None),
        f"transformer/ln_f/{leaf}": ((16,), None),
        f"lm_head/{leaf}": ((50, 16), None),
    }
    block = gpt2_block(leaf, dims)
    agrees(rest | under("transformer/h/0", block) | under("transformer/h/1", block))
    agrees(rest | under("transformer/h", in_stack(block)))


def llama_block(leaf, dims):
    table = {f"self_attn/{name}_proj": ((16, 8) if name in "kv" else (16, 16), dims) for name in "qkvo"}
    table |= {f"mlp/{name}_proj": ((16, 32), dims) for name in ("gate", "up", "down")}
    table |= {f"self_attn/{name}_norm": ((4,), None) for name in "qk"}
    table |= {"input_layernorm": ((16,), None), "post_attention_layernorm": ((16,), None)}
    return {f"{path}/{leaf}": value for path, value in table.items()}


@pytest.mark.parametrize(("leaf", "dims"), [("kernel", IN_OUT), ("weight", OUT_IN)])
def test_names_of_llama_and_qwen(leaf, dims):
    rest = {
        f"model/embed_tokens/{leaf}": ((50, 16), None),
        f"model/norm/{leaf}": ((16,), None),
        f"lm_head/{leaf}": ((50, 16), None),
    }
    block = llama_block(leaf, dims)
    agrees(rest | under("model/layers/0", block) | under("model/layers/1", block))
    agrees(rest | under("model/layers", in_stack(block)))


def test_names_of_the_original_llama():
    block = {f"attention/w{name}/weight": ((16, 16), OUT_IN) for name in "qkvo"}
    block |= {f"feed_forward/w{i}/weight": ((32, 16), OUT_IN) for i in (1, 2, 3)}
    block |= {"attention_norm/weight": ((16,), None), "ffn_norm/weight": ((16,), None)}
    rest = {"tok_embeddings/weight": ((50, 16), None), "norm/weight": ((16,), None), "output/weight": ((50, 16), None)}
    agrees(rest | under("layers/0", block) | under("layers/1", block))


def test_names_of_a_mixture_of_experts():
    block = llama_block("weight", OUT_IN)
    block = {path: value for path, value in block.items() if not path.startswith("mlp/")}
    for i in range(2):
        block |= under(f"mlp/experts/{i}", {f"{n}_proj/weight": ((32, 16), OUT_IN) for n in ("gate", "up", "down")})
    block |= under("mlp/shared_expert", {f"{n}_proj/weight": ((32, 16), OUT_IN) for n in ("gate", "up", "down")})
    block |= {"mlp/gate/weight": ((2, 16), None), "mlp/shared_expert_gate/weight": ((1, 16), None)}
    agrees(under("layers/0", block))


def test_a_hand_written_stack_of_bare_arrays():
    block = {
        "wqkv": ((3, 16, 48), MatrixDims(inputs=1, outputs=2)),
        "bqkv": ((3, 48), None),
        "w1": ((3, 16, 64), MatrixDims(inputs=1, outputs=2)),
        "b1": ((3, 64), None),
        "w2": ((3, 64, 16), MatrixDims(inputs=1, outputs=2)),
        "b2": ((3, 16), None),
        "mix": ((3, 16), None),
        "g": ((3, 16), None),
    }
    agrees(under("layers", block) | {"tok_emb": ((50, 16), None), "unembed": ((16, 50), None)})


def test_a_bare_list_of_matrices_reads_in_out():
    assert chosen([array(3, 4), array(4), (array(4, 5), array(5))]) == {
        "0": IN_OUT,
        "1": None,
        "2/0": IN_OUT,
        "2/1": None,
    }
