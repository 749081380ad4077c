# SPDX-License-Identifier: Apache-2.0
"""Embeddings and output heads without such a name: the note and the warning, and the
trees that have none.
"""

import warnings

import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from normpre_optax import explain, hyperball, muon, normpre_h
from normpre_optax.parameters import presets
from normpre_optax.parameters.rules import default_matrix_dims
from tests import cases
from tests.parameters.tables import IN_OUT, tree
from tests.parameters.test_models import MODELS, entries_of

NOTE = "no parameter has the name of an embedding or of an output head, but"
# Names of the embedding and of the head. The state has the first one by the alphabet.
PAIRS = """
    tokens_in/back encoder_embed/cls embed/decoder tok/attend lookup/fc wte/a_out vocab/dec table/project
    symbols/readback emb/classify words/final tokens/proj
"""


class Block(nnx.Module):
    def __init__(self, width, hidden, rngs):
        self.ln = nnx.LayerNorm(width, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, width, rngs=rngs)


class Tied(nnx.Module):
    """The head has the array of the embedding: only one of both names is in the state."""

    def __init__(self, embedding, head, layers, sizes, rngs):
        vocabulary, width, hidden = sizes
        table = nnx.Embed(vocabulary, width, rngs=rngs)
        output = nnx.Linear(width, vocabulary, use_bias=False, rngs=rngs)
        output.kernel = table.embedding
        setattr(self, embedding, table)
        setattr(self, head, output)
        if layers == "list":
            self.blocks = nnx.List([Block(width, hidden, rngs) for _ in range(2)])
        elif layers == "stack":
            self.body = nnx.vmap(lambda r: Block(width, hidden, r))(rngs.split(3))
        elif layers == "attributes":
            self.b1, self.b2 = (Block(width, hidden, rngs) for _ in range(2))
        elif layers == "one":
            self.core = Block(width, hidden, rngs)
        else:
            self.up = nnx.Linear(width, hidden, rngs=rngs)
            self.down = nnx.Linear(hidden, width, rngs=rngs)


def state_of(pair, layers="list", sizes=(96, 16, 64)):
    def model():
        return Tied(*pair.split("/"), layers, sizes, nnx.Rngs(0))

    return nnx.state(nnx.eval_shape(model), nnx.Param)


@pytest.mark.parametrize("pair", PAIRS.split())
@pytest.mark.parametrize("layers", ["list", "stack", "attributes", "one", "none"])
def test_a_tied_table_with_the_name_of_the_head_has_a_note(pair, layers):
    text = explain(state_of(pair, layers))
    first = min(pair.split("/"))
    shown = next(line for line in text.splitlines() if line.startswith(f"{first}/"))
    assert " matrix " in shown
    assert f"{NOTE} '{first}/kernel' of shape (96, 16) may be one" in text


@pytest.mark.parametrize("layers", ["list", "stack", "attributes", "one"])
@cases.rows(
    "sizes",
    ((128256, 4096, 14336),),  # Llama's
    ((262144, 2560, 10240),),  # Gemma's
    ((64, 16, 64),),  # a vocabulary as large as a hidden layer, or smaller
    ((65, 384, 1536),),
    ((27, 64, 256),),
)
def test_the_size_of_the_vocabulary_does_not_matter_beside_layers(layers, sizes):
    for pair in ("tokens_in/back", "lookup/fc"):
        assert NOTE in explain(state_of(pair, layers, sizes))


@cases.rows(
    "make",
    (lambda: normpre_h(1.6e-2, adam_learning_rate=1e-3),),
    (lambda: muon(0.02),),
    (lambda: hyperball(0.01),),
)
def test_init_warns(make):
    params = tree("blocks/{0,1}/up 16x64; blocks/{0,1}/down 64x16; back/kernel 96x16")
    params = {**params, "norm": jnp.ones(16)}
    zeros = _zeros(params)
    with pytest.warns(UserWarning, match=rf"{NOTE} 'back/kernel'.*None for it in a"):
        make().init(zeros)


def _zeros(params):
    if isinstance(params, dict):
        return {name: _zeros(x) for name, x in params.items()}
    return jnp.zeros(params.shape)


def test_a_rule_that_passes_the_table_to_adamw_ends_the_warning():
    params = tree("blocks/{0,1}/up 16x64; blocks/{0,1}/down 64x16; back/kernel 96x16")

    def rule(path, leaf):
        if path == "back/kernel":
            return None
        return default_matrix_dims(path, leaf)

    assert NOTE in explain(params)
    assert NOTE not in explain(params, rule)
    # A tree is the user's answer for every parameter.
    assert NOTE not in explain(params, IN_OUT)


@cases.rows(
    "leaves names",
    # Not tied: the largest ones, and no more than three.
    ("blocks/{0,1}/up 8x32; words 96x8; back 8x96", ["back", "words"]),
    ("blocks/{0,1}/up 8x32; a 9x8; b 10x8; c 11x8; d 12x8", ["a", "b", "c"]),
    ("params/blocks/{0,1}/up 8x32; params/words 96x8", ["params/words"]),
    ("model: attn/q/kernel 8x8; mlp/{up,in}/w 8x32; words 96x8", ["model/words"]),
    (
        "encoder: attn/q/w 8x8; mlp/up/w 8x32; mlp/down/w 32x8; words 33x8",
        ["encoder/words"],
    ),
    ("body/{a,b}/mix 8x8; body/{a,b}/fold 8x24; words 20x8", ["words"]),
    ("layers/{0,1}/kernel 8x8; words 20x8", ["words"]),
    ("{b1,b2}/attn/q 8x8; {b1,b2}/l1/w 8x32; {b1,b2}/l2/w 32x8; words 20x8", ["words"]),
    ("core/attn/q 8x8; core/l1/w 8x32; core/l2/w 32x8; words 20x8", ["words"]),
    # Without layers and their names, a vocabulary counts.
    ("lstm 256x1024; decoder 20000x256", ["decoder"]),
)
def test_other_trees_with_a_note(leaves, names):
    line = explain(tree(leaves)).splitlines()[-1]
    assert NOTE in line
    assert line.split("'")[1::2] == names


@cases.rows(
    "leaves",
    # A single layer, or a few arrays.
    ("kernel 8x32",),
    ("up/kernel 8x32; up/bias 32",),
    ("up 8x32; down 32x8; mix 8x24",),
    ("{query,key,value}/kernel 8x2x4; out/kernel 2x4x8; gate_up 8x64; down 32x8",),
    ("attn/{q,k,v}/kernel 8x8; Dense_0/kernel 8x32; Dense_1/kernel 32x8",),
    ("layers/proj/kernel 2x24x16; mlp/up/kernel 24x32; norm/scale 24",),
    ("wide 12x5; narrow 5x12",),
    # Perceptrons and autoencoders.
    ("Dense_0/kernel 784x256; Dense_{1,2}/kernel 256x256; Dense_3/kernel 256x10",),
    ("fc1/kernel 784x256; fc2/kernel 256x128; fc3/kernel 128x10",),
    ("mlp/linear_0/w 3072x300; mlp/linear_1/w 300x100; mlp/linear_2/w 100x10",),
    ("encoder/a 784x256; encoder/b 256x64; decoder/a 64x256; decoder/b 256x784",),
    ("layers_0/kernel 20x64; layers_1/kernel 64x64; mean/kernel 64x6",),
    ("layers/{0,1,2}/kernel 64x64; last/kernel 64x10",),
    ("actor/Dense_0/kernel 8x64; critic/Dense_0/kernel 8x64; actor/last 64x4",),
    # An embedding or a head elsewhere.
    ("blocks/{0,1}/up 8x32; back 96x8; patch_embed/kernel 48x8",),
    ("blocks/{0,1}/up 8x32; input 20x8; head 8x10",),
    # Nothing outside of the layers, or nothing that is not square.
    ("blocks/{0,1}/up 8x32; blocks/{0,1}/down 32x8; norm/scale 8; mix 8x8",),
    # A projector outside of the layers.
    ("blocks/{0,1}/up 8x32; mlp/up 8x64; mlp/down 64x8",),
)
def test_trees_without_a_note(leaves):
    assert NOTE not in explain(tree(leaves))


def test_parameters_that_are_masked_may_be_the_table():
    layers = tree("blocks/{0,1}/up 8x32; back 96x8")
    assert NOTE in explain(layers)
    assert NOTE in explain({**layers, "bias": None})
    assert NOTE not in explain({**layers, "words": optax.MaskedNode()})
    assert NOTE not in explain({**layers, "wte": {"embedding": None}})


@pytest.mark.parametrize("key", MODELS, ids="-".join)
def test_known_models_have_no_note(key):
    rule = getattr(presets, key[-1]) if key[-1] else None
    assert NOTE not in explain(tree(entries_of(*key)), rule)


def test_no_warning_for_a_single_layer():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        normpre_h(1.6e-2, adam_learning_rate=1e-3).init(
            {"up": {"kernel": jnp.ones((4, 8))}, "down": {"kernel": jnp.ones((8, 4))}}
        )
