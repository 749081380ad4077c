# SPDX-License-Identifier: Apache-2.0
"""Flax NNX models: the default rule and dims_from_nnx, leaf by leaf, at init and at update."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from normpre_optax.algorithm import normpre_g
from normpre_optax.parameters.dims import MatrixDims
from normpre_optax.parameters.explain import explain
from normpre_optax.parameters.nnx import dims_from_nnx
from normpre_optax.parameters.rules import resolve
from tests.parameters.tables import chosen, under

VOCABULARY, LENGTH, WIDTH, HIDDEN, HEADS, LAYERS = 50, 5, 16, 32, 4, 3


def read(model):
    """What dims_from_nnx makes of a model, by path."""
    return chosen(nnx.state(model, nnx.Param), dims_from_nnx(model))


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.ln = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, normalize_qk=True, rngs=rngs)
        self.rms = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.mlp = Mlp(rngs)

    def __call__(self, x):
        x = x + self.attn(self.ln(x))
        return x + self.mlp(self.rms(x))


def stack(make, axis, layers=LAYERS):
    @nnx.split_rngs(splits=layers)
    @nnx.vmap(in_axes=(0,), out_axes=axis)
    def layer(rngs):
        return make(rngs)

    return layer


class Model(nnx.Module):
    def __init__(self, rngs, axis=None):
        self.wte = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.wpe = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)]) if axis is None else stack(Block, axis)(rngs)
        self.ln_f = nnx.LayerNorm(WIDTH, use_bias=False, rngs=rngs)
        self.lm_head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.wte(tokens) + self.wpe.embedding[...]
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


@functools.cache
def model(axis=None):
    return nnx.eval_shape(lambda: Model(nnx.Rngs(0), axis))


REST = dict.fromkeys(["wte/embedding", "wpe/embedding", "ln_f/scale", "lm_head/kernel"])
VECTORS = ["ln/scale", "ln/bias", "rms/scale", "mlp/up/bias", "attn/query_ln/scale", "attn/key_ln/scale"]


def block(up, to_heads, from_heads):
    table = {f"attn/{name}/kernel": to_heads for name in ("query", "key", "value")} | {"attn/out/kernel": from_heads}
    table |= {f"attn/{name}/bias": None for name in ("query", "key", "value", "out")}
    return table | {"mlp/up/kernel": up, "mlp/down/kernel": up} | dict.fromkeys(VECTORS)


PLAIN = block(MatrixDims(0, 1), MatrixDims(0, (1, 2)), MatrixDims((0, 1), 2))
UNROLLED = REST | {path: dims for i in range(LAYERS) for path, dims in under(f"blocks/{i}", PLAIN).items()}
IN_FRONT = REST | under("blocks", block(MatrixDims(1, 2), MatrixDims(1, (2, 3)), MatrixDims((1, 2), 3)))
SECOND = REST | under("blocks", block(MatrixDims(0, 2), MatrixDims(0, (2, 3)), MatrixDims((0, 2), 3)))


@pytest.mark.parametrize(("axis", "want"), [(None, UNROLLED), (0, IN_FRONT)])
def test_default_rule(axis, want):
    state = nnx.state(model(axis), nnx.Param)
    assert chosen(state) == want
    assert chosen(nnx.as_pure(state)) == want
    assert chosen(nnx.to_pure_dict(state)) == want


def test_default_rule_refuses_layers_stacked_along_axis_1():
    assert model(1).blocks.mlp.up.kernel.shape == (WIDTH, LAYERS, HIDDEN)
    with pytest.raises(ValueError, match="it looks stacked, but not in front") as caught:
        resolve(nnx.state(model(1), nnx.Param))
    assert "matrix_dims=dims_from_nnx(model)" in str(caught.value)


@pytest.mark.parametrize(("axis", "want"), [(None, UNROLLED), (0, IN_FRONT), (1, SECOND)])
def test_dims_from_nnx(axis, want):
    assert read(model(axis)) == want
    pure = nnx.as_pure(nnx.state(model(axis), nnx.Param))
    assert chosen(pure, dims_from_nnx(model(axis))) == want
    tree = dims_from_nnx(model(axis))
    assert jax.tree.structure(tree, is_leaf=lambda x: x is None) == jax.tree.structure(nnx.to_pure_dict(pure))


@pytest.mark.parametrize(
    ("axis", "from_modules", "want"),
    [(None, False, UNROLLED), (0, False, IN_FRONT), (None, True, UNROLLED), (0, True, IN_FRONT), (1, True, SECOND)],
)
def test_optimizer_sees_the_same_parameters_at_init_and_at_update(axis, from_modules, want):
    """At init nnx.Optimizer hands over variables, at update bare arrays."""
    net = Model(nnx.Rngs(0), axis)
    matrix_dims = dims_from_nnx(net) if from_modules else None
    seen = []

    def record(params):
        keys = {type(key).__name__ for path, _ in jax.tree.leaves_with_path(params) for key in path}
        seen.append(("GetAttrKey" in keys, chosen(params, matrix_dims)))
        return optax.EmptyState()

    def update(updates, state, params=None):
        record(params)
        return updates, state

    optimizer = nnx.Optimizer(net, optax.GradientTransformation(record, update), wrt=nnx.Param)
    optimizer.update(net, nnx.state(net, nnx.Param))
    assert seen == [(True, want), (False, want)]


def test_a_training_step():
    net = Mlp(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, normpre_g(1e-2, weight_decay=0.0), wrt=nnx.Param)
    before = nnx.to_pure_dict(nnx.state(net, nnx.Param))
    x = jax.random.normal(jax.random.key(1), (8, WIDTH))

    @nnx.jit
    def step(net, optimizer):
        value, grads = nnx.value_and_grad(lambda net: jnp.mean(net(x) ** 2))(net)
        optimizer.update(net, grads)
        return value

    first, second = step(net, optimizer), step(net, optimizer)
    assert second < first
    after = nnx.to_pure_dict(nnx.state(net, nnx.Param))
    change = jax.tree.map(lambda a, b: float(jnp.sqrt(jnp.mean((a - b) ** 2))), before, after)
    # Each of the two steps has RMS lr * 0.2 = 2e-3, so their sum has at most 4e-3; AdamW's first steps are lr each.
    assert 1e-3 < change["up"]["kernel"] < 4.01e-3
    assert 1e-3 < change["down"]["kernel"] < 4.01e-3
    assert change["up"]["bias"] > 1e-2


def test_gpt2_small_counts():
    """The 84.9M numbers of the 48 hidden matrices are the optimizer's, not the 78M of embedding and head."""

    class Gpt2Block(nnx.Module):
        def __init__(self, rngs):
            self.ln_1, self.ln_2 = nnx.LayerNorm(768, rngs=rngs), nnx.LayerNorm(768, rngs=rngs)
            self.attn = nnx.MultiHeadAttention(12, 768, decode=False, rngs=rngs)
            self.c_fc, self.c_proj = nnx.Linear(768, 3072, rngs=rngs), nnx.Linear(3072, 768, rngs=rngs)

    class Gpt2(nnx.Module):
        def __init__(self, rngs):
            self.wte, self.wpe = nnx.Embed(50257, 768, rngs=rngs), nnx.Embed(1024, 768, rngs=rngs)
            self.h = nnx.List([Gpt2Block(rngs) for _ in range(12)])
            self.ln_f = nnx.LayerNorm(768, rngs=rngs)
            self.lm_head = nnx.Linear(768, 50257, use_bias=False, rngs=rngs)

    net = nnx.eval_shape(lambda: Gpt2(nnx.Rngs(0)))
    lines = explain(nnx.state(net, nnx.Param)).splitlines()
    assert lines[-2] == "matrix: 84,934,656 numbers in 72 parameters, 72 matrices"  # 12 x (q, k, v, out, fc, proj)
    assert chosen(nnx.state(net, nnx.Param)) == read(net)


# Modules one by one, alone and with a layer axis anywhere.

IN_OUT = MatrixDims(0, 1)
MODULES = {
    "linear": (lambda r: nnx.Linear(4, 6, rngs=r), {"kernel": IN_OUT, "bias": None}),
    "general": (
        lambda r: nnx.LinearGeneral((4, 5), (6, 7), axis=(-2, -1), rngs=r),
        {"kernel": MatrixDims((0, 1), (2, 3)), "bias": None},
    ),
    "general batch": (
        lambda r: nnx.LinearGeneral(4, (6, 7), batch_axis={0: 8}, rngs=r),
        {"kernel": MatrixDims(1, (2, 3)), "bias": None},
    ),
    "einsum": (
        lambda r: nnx.Einsum("btd,hdk->bthk", (2, 4, 5), (2, 5), rngs=r),
        {"kernel": MatrixDims(1, (0, 2)), "bias": None},
    ),
    "einsum fan-in": (lambda r: nnx.Einsum("bthk,hkd->btd", (2, 4, 5), rngs=r), {"kernel": MatrixDims((0, 1), 2)}),
    "einsum experts": (lambda r: nnx.Einsum("etd,edf->etf", (2, 4, 5), rngs=r), {"kernel": MatrixDims(1, 2)}),
    "einsum ellipsis": (lambda r: nnx.Einsum("...d,df->...f", (4, 5), rngs=r), {"kernel": IN_OUT}),
    "einsum diagonal": (lambda r: nnx.Einsum("btd,td->btd", (4, 5), rngs=r), {"kernel": None}),
    "conv": (lambda r: nnx.Conv(3, 8, (2, 4), rngs=r), {"kernel": MatrixDims((0, 1, 2), 3), "bias": None}),
    "grouped": (
        lambda r: nnx.Conv(6, 8, (5,), feature_group_count=2, rngs=r),
        {"kernel": MatrixDims((0, 1), 2, 2), "bias": None},
    ),
    "depthwise": (lambda r: nnx.Conv(6, 6, (5,), feature_group_count=6, rngs=r), {"kernel": None, "bias": None}),
    "transposed": (
        lambda r: nnx.ConvTranspose(3, 8, (2, 4), rngs=r),
        {"kernel": MatrixDims((0, 1, 2), 3), "bias": None},
    ),
    "transposed back": (
        lambda r: nnx.ConvTranspose(3, 8, (2, 4), transpose_kernel=True, rngs=r),
        {"kernel": MatrixDims((0, 1, 3), 2), "bias": None},
    ),
    "lora": (lambda r: nnx.LoRA(4, 2, 6, rngs=r), {"lora_a": None, "lora_b": None}),
    "lora linear": (
        lambda r: nnx.LoRALinear(4, 6, lora_rank=2, rngs=r),
        {"kernel": IN_OUT, "bias": None, "lora/lora_a": None, "lora/lora_b": None},
    ),
    "embed": (lambda r: nnx.Embed(7, 4, rngs=r), {"embedding": None}),
    "layer norm": (lambda r: nnx.LayerNorm(4, rngs=r), {"scale": None, "bias": None}),
    "group norm": (lambda r: nnx.GroupNorm(4, 2, rngs=r), {"scale": None, "bias": None}),
    "lstm": (
        lambda r: nnx.OptimizedLSTMCell(4, 6, rngs=r),
        {"dense_i/kernel": IN_OUT, "dense_h/kernel": IN_OUT, "dense_h/bias": None},
    ),
}


def with_layer_axis(dims, axis):
    """The same dims once an axis has been put in at `axis`."""

    def moved(axes):
        return tuple(a + (a >= axis) for a in axes) if isinstance(axes, tuple) else axes + (axes >= axis)

    return dims and MatrixDims(moved(dims.inputs), moved(dims.outputs), dims.output_blocks)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_alone_and_stacked(name):
    make, want = MODULES[name]
    assert read(nnx.eval_shape(lambda: make(nnx.Rngs(0)))) == want
    for axis in (0, 1):
        stacked = nnx.eval_shape(lambda axis=axis: stack(make, axis, layers=11)(nnx.Rngs(0)))
        assert read(stacked) == {path: with_layer_axis(dims, axis) for path, dims in want.items()}


def test_stack_of_stacks():
    inner = stack(lambda r: nnx.Linear(4, 6, rngs=r), 0, layers=3)
    net = nnx.eval_shape(lambda: stack(inner, 1, layers=5)(nnx.Rngs(0)))
    assert net.kernel.shape == (3, 5, 4, 6)
    assert read(net) == {"kernel": MatrixDims(2, 3), "bias": None}


class Square(nnx.Module):
    """As many layers as features: the kernels alone cannot tell which axis is which."""

    def __init__(self, rngs, bias=True):
        self.a = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
        self.b = nnx.Linear(4, 8, use_bias=bias, rngs=rngs)


@pytest.mark.parametrize("axis", [0, 1])
def test_as_many_layers_as_features(axis):
    net = nnx.eval_shape(lambda: stack(Square, axis, layers=4)(nnx.Rngs(0)))
    dims = with_layer_axis(IN_OUT, axis)
    assert read(net) == {"a/kernel": dims, "b/bias": None, "b/kernel": dims}


def test_a_layer_axis_that_nothing_tells_apart_stands_in_front():
    net = nnx.eval_shape(lambda: stack(lambda r: nnx.Linear(4, 4, use_bias=False, rngs=r), 0, layers=4)(nnx.Rngs(0)))
    assert read(net) == {"kernel": MatrixDims(1, 2)}


def test_names_of_axes_tell_the_layer_axis_apart():
    net = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))
    kernel = nnx.Param(jnp.zeros((4, 4, 4)), out_sharding=("embed", "layers", "mlp"), eager_sharding=False)
    net.kernel = kernel
    assert read(net) == {"kernel": MatrixDims(0, 2)}


class Odd(nnx.Module):
    """Parameters that belong to no module of Flax, beside some that do."""

    def __init__(self, rngs):
        self.w = nnx.Param(jnp.zeros((4, 6)))
        self.tilt = nnx.Param(jnp.zeros(4))
        self.up = nnx.Linear(4, 6, rngs=rngs)


@pytest.mark.parametrize("axis", [0, 1])
def test_parameters_of_other_modules_follow_the_default_rule(axis):
    want = {"tilt": None, "up/bias": None, "up/kernel": IN_OUT, "w": IN_OUT}
    assert read(nnx.eval_shape(lambda: Odd(nnx.Rngs(0)))) == want
    stacked = nnx.eval_shape(lambda: stack(Odd, axis)(nnx.Rngs(0)))
    assert read(stacked) == {path: with_layer_axis(dims, axis) for path, dims in want.items()}


def test_a_bare_parameter_beside_a_stack_is_not_taken_for_part_of_it():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.blocks = stack(Mlp, 0)(rngs)
            self.mix = nnx.Param(jnp.zeros((4, 6)))

    net = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    up = MatrixDims(1, 2)
    assert read(net) == {"blocks/down/kernel": up, "blocks/up/bias": None, "blocks/up/kernel": up, "mix": IN_OUT}


def test_names_still_decide_what_is_a_head_an_embedding_or_a_router():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.patch_embed = nnx.Conv(3, 8, (2, 2), rngs=rngs)
            self.router = nnx.Linear(8, 4, rngs=rngs)
            self.mixer = nnx.MultiHeadAttention(2, 8, decode=False, use_bias=False, rngs=rngs)
            self.head = nnx.Linear(8, 10, rngs=rngs)
            self.table = nnx.Embed(10, 8, rngs=rngs)

    found = read(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))
    assert {path for path, dims in found.items() if dims} == {
        f"mixer/{n}/kernel" for n in ("query", "key", "value", "out")
    }
    assert {path for path, dims in found.items() if not dims} == {
        *(f"{name}/{leaf}" for name in ("patch_embed", "router", "head") for leaf in ("kernel", "bias")),
        "table/embedding",
    }


def test_wrt_other_than_param():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.LoRALinear(4, 6, lora_rank=2, rngs=rngs)

    net = Net(nnx.Rngs(0))
    adapters = nnx.state(net, nnx.LoRAParam)
    paths = ("up/lora/lora_a", "up/lora/lora_b")
    assert chosen(adapters, dims_from_nnx(net, wrt=nnx.LoRAParam)) == dict.fromkeys(paths)
    by_rule = dims_from_nnx(net, wrt=nnx.LoRAParam, rule=lambda path, leaf: IN_OUT)
    assert chosen(adapters, by_rule) == dict.fromkeys(paths, IN_OUT)
    with pytest.raises(ValueError, match=r"no prefix .* it has an entry at 'up/kernel'"):
        resolve(adapters, dims_from_nnx(net))


def test_shared_modules_and_containers():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(4, 4, rngs=rngs)
            self.again = self.first
            self.parts = nnx.Dict(
                {"x": nnx.Sequential(nnx.Linear(4, 6, rngs=rngs), nnx.relu, nnx.Linear(6, 4, rngs=rngs))}
            )

    found = read(Net(nnx.Rngs(0)))
    assert len(found) == 6
    assert {path.rpartition("/")[2]: dims for path, dims in found.items()} == {"kernel": IN_OUT, "bias": None}


def test_a_parameter_that_does_not_fit_its_module_is_an_error():
    net = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
    net.kernel = nnx.Param(jnp.zeros((6, 4)))
    with pytest.raises(ValueError, match=r"parameter 'kernel' of shape \(6, 4\) does not fit its module, .* \(4, 6\)"):
        dims_from_nnx(net)


def test_uncovered_parameter_of_another_module_is_an_error():
    class Net(nnx.Module):
        def __init__(self):
            self.cube = nnx.Param(jnp.zeros((2, 3, 4)))

    with pytest.raises(ValueError, match="no rule covers parameter 'cube'"):
        dims_from_nnx(Net())


def test_flax_is_imported_only_when_called():
    code = "import sys, normpre_optax.parameters.nnx; raise SystemExit('flax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_rule_reads_the_parameters_of_other_modules_and_only_those():
    class Experts(nnx.Module):
        def __init__(self):
            self.up = nnx.Param(jnp.zeros((3, 4, 6)))
            self.dense = nnx.Linear(4, 6, rngs=nnx.Rngs(0))

    with pytest.raises(ValueError, match=r"(?s)'up'.*rule=\.\.\."):
        dims_from_nnx(Experts())
    seen = []

    def rule(path, leaf):
        seen.append((path, leaf.shape))
        return MatrixDims(inputs=1, outputs=2)

    found = dims_from_nnx(Experts(), rule=rule)
    assert seen == [("up", (3, 4, 6))]
    assert found["up"] == MatrixDims(inputs=1, outputs=2)
    assert found["dense"] == {"kernel": IN_OUT, "bias": None}
    assert dims_from_nnx(Experts(), rule=lambda path, leaf: None)["up"] is None
