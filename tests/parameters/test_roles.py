# SPDX-License-Identifier: Apache-2.0
"""Which matrices write into the residual stream, on the known models, and the row norms
that follow.
"""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normpre_optax as npo
from normpre_optax.parameters import presets
from normpre_optax.parameters.dims import matrix_shape
from normpre_optax.parameters.roles import (
    residual_outputs,
    row_norms_by_role,
    unclear_roles,
)
from normpre_optax.parameters.rules import assign
from tests import cases
from tests.parameters.tables import tree
from tests.parameters.test_models import MODELS, entries_of

WRITES = re.compile(
    # of attention, and of Mamba
    r"(c_proj|o_proj|/out|out_proj|output/dense|attn_vec_einsum)/(weight|kernel|w)$"
    # of feed-forward layers
    r"|(c_proj|linear2?|down_proj|wo|fc2|output/dense)(/(weight|kernel|w))?$"
)
# Residual branches of two layers, where they are not an attention and a feed-forward
# layer each.
BRANCHES = {"DeepSeek-V3": 6, "Whisper": 10, "Mamba": 2}


@pytest.mark.parametrize("key", MODELS, ids="-".join)
def test_the_matrices_that_write_are_found_and_counted(key):
    model, _, preset = key
    found = assign(tree(entries_of(*key)), getattr(presets, preset) if preset else None)
    outputs = residual_outputs(found)
    assert outputs == {
        path for path, spec in found.items() if spec.dims and WRITES.search(path)
    }
    norms, k = row_norms_by_role(found), BRANCHES.get(model, 4)
    for path in outputs:
        _, outs, ins = matrix_shape(found[path].shape, found[path].dims)
        np.testing.assert_allclose(norms[path], np.sqrt(ins / (outs * k)))
    assert {norms[path] for path in norms.keys() - outputs} == {1.0}
    assert not unclear_roles(found)


@cases.rows(
    "leaves outputs",
    (
        (
            "up/{0,1}/kernel 8x32; down/{0,1}/kernel 32x8; attention/{0,1}/out/kernel"
            " 2x4x8"
        ),
        {"down", "attention"},
    ),
    ("Block_0/Dense_0/kernel 8x32; Block_0/Dense_1/kernel 32x8", {"Block_0"}),
    (
        (
            "TransformerMLP_{0,1}/dense_in/kernel 8x24;"
            " TransformerMLP_{0,1}/dense_out/kernel 24x8"
        ),
        {"TransformerMLP_0", "TransformerMLP_1"},
    ),
    # One of several with a shape and a number: blocks with names of their own, modules
    # of Haiku; not of a plain MLP.
    (
        (
            "Blk_{0,1}/Dense_0/kernel 8x32; Blk_{0,1}/Dense_1/kernel 32x8;"
            " Dense_0/kernel 20x8"
        ),
        {"Blk_0", "Blk_1"},
    ),
    ("linear{,_2}/w 8x32; linear_{1,3}/w 32x8; norm/scale 8", {"linear_1", "linear_3"}),
    # Nothing of the width makes its inputs.
    (
        "Blk_{0,1}/Dense_0/kernel 8x40; Blk_{0,1}/Dense_1/kernel 24x8",
        {"Blk_0", "Blk_1"},
    ),
    ("0/kernel 8x16; 2/kernel 16x4; 4/kernel 4x4", set()),
    (
        "input/kernel 20x8; layers/{0,1}/w 8x8",
        set(),
    ),  # neither a place inside a layer nor a name
    ("layers/{0,1}/w1 8x8; layers/{0,1}/w2 8x8", {"layers"}),
    (
        "up/{0,1}/w 8x32; to_out/0/w 8x8; mha/linear/w 8x8; dense/w 8x8; w_out/w 8x8",
        {"to_out", "mha", "w_out"},
    ),
    # What reads another width does not write, although it has as many outputs as the
    # residual stream.
    (
        (
            "layers/{0,1}/cross/to_k/w 12x8; layers/{0,1}/attn/key/w 12x8;"
            " layers/{0,1}/attn/q_b_proj/w 4x8"
        ),
        set(),
    ),
)
def test_small_models(leaves, outputs):
    assert {
        path.split("/")[0] for path in residual_outputs(assign(tree(leaves)))
    } == outputs


# A stranger's names: path and shape, the matrices that write, and how many they are in
# all layers.
STACKED = (
    "embed/embedding 512x64; layers: norm/scale 3x64; attn/{q,k,v,out}/kernel 3x64x64;"
)
LISTED = (
    "embed/embedding 512x64; layers/{0,1,2}: norm/scale 64;"
    " attn/{q,k,v,out}/kernel 64x64;"
)
STRANGERS = {
    "flat names": (
        "block_{0,1,2}_attn_{q,k,v,out} 64x64; block_{0,1,2}_up 64x256;"
        " block_{0,1,2}_down 256x64; embed 512x64; norm 64",
        {"block_0_attn_out", "block_0_down"},
        6,
    ),
    "flat names that say nothing": (
        "b{0,1,2}_{wq,wk,wv,mix} 64x64; b{0,1,2}_a 64x256; b{0,1,2}_b 256x64;"
        " embed 512x64; norm 64",
        {"b0_mix", "b0_b"},
        6,
    ),
    "fused attention": (
        "embed 512x64; net/{0,1,2}: a/x/kernel 64x192; a/z/kernel 64x64;"
        " b/x/kernel 64x256; b/z/kernel 256x64",
        {"net/0/a/z/kernel", "net/0/b/z/kernel"},
        6,
    ),
    "modules that say nothing": (
        "embed 512x64; net/{0,1,2}: a/{wq,wk,wv,z}/kernel 64x64; b/x/kernel 64x176;"
        " b/y/kernel 64x176; b/z/kernel 176x64",
        {"net/0/a/z/kernel", "net/0/b/z/kernel"},
        6,
    ),
    "Keras' names of functional models": (
        "embedding/embeddings 512x64; mha{,_1}/{query,key,value}/kernel 64x4x16;"
        " mha{,_1}/attention_output/kernel 4x16x64; dense{,_2}/kernel 64x256;"
        " dense{_1,_3}/kernel 256x64",
        {"mha/attention_output/kernel", "dense_1/kernel"},
        4,
    ),
    "keras-hub": (
        "gpt/embed/embeddings 512x64; gpt/transformer_layer_{0,1}:"
        " self_attention/{query,key,value}/kernel 64x4x16;"
        " self_attention/attention_output/kernel 4x16x64;"
        " feedforward_intermediate_dense/kernel 64x256;"
        " feedforward_output_dense/kernel 256x64",
        {
            "gpt/transformer_layer_0/self_attention/attention_output/kernel",
            "gpt/transformer_layer_0/feedforward_output_dense/kernel",
        },
        4,
    ),
    "a stack whose only norm is the final one": (
        "embed/embedding 512x64; final_norm/scale 64; layers:"
        " attn/{q,k,v,out}/kernel 3x64x64; up/kernel 3x64x128; down/kernel 3x128x64",
        {"layers/attn/out/kernel", "layers/down/kernel"},
        6,
    ),
    "experts by name": (
        STACKED
        + "router/kernel 3x64x5; experts/up 3x5x64x128; experts/down 3x5x128x64",
        {"layers/attn/out/kernel", "layers/experts/down"},
        6,
    ),
    "experts without a name": (
        STACKED + "router/kernel 3x64x5; up 3x5x64x128; down 3x5x128x64",
        {"layers/attn/out/kernel", "layers/down"},
        6,
    ),
    "as many experts as layers": (
        STACKED + "router/kernel 3x64x3; up 3x3x64x128; down 3x3x128x64",
        {"layers/attn/out/kernel", "layers/down"},
        6,
    ),
    "experts without norms": (
        STACKED.replace("norm/scale 3x64;", "")
        + "router/kernel 3x64x5; up 3x5x64x128; down 3x5x128x64",
        {"layers/attn/out/kernel", "layers/down"},
        6,
    ),
    "one array of experts a layer": (
        LISTED + "router/kernel 64x5; up 5x64x128; down 5x128x64",
        {"layers/0/attn/out/kernel", "layers/0/down"},
        6,
    ),
    "numbered experts without a name": (
        LISTED + "router/kernel 64x4; ff/{0,1,2,3}/up 64x128; ff/{0,1,2,3}/down 128x64",
        {"layers/0/attn/out/kernel", *(f"layers/0/ff/{i}/down" for i in range(4))},
        6,
    ),
    "numbered experts beside a router without a name": (
        LISTED + "ff/fns/{0,1,2,3}/w_up 64x96; ff/fns/{0,1,2,3}/w_down 96x64;"
        " ff/dispatch 64x4",
        {"layers/0/attn/out/kernel", "layers/0/ff/fns/0/w_down"},
        6,
    ),
    "numbered experts in the module of the router": (
        LISTED + "ff/{0,1,2,3}/w_up 64x96; ff/{0,1,2,3}/w_down 96x64; ff/router 64x4",
        {"layers/0/attn/out/kernel", "layers/0/ff/0/w_down"},
        6,
    ),
    "experts with numbers in their names": (
        LISTED + "ff/e{0,1,2,3}_w_up 64x96; ff/e{0,1,2,3}_w_down 96x64; ff/wr 64x4",
        {"layers/0/attn/out/kernel", "layers/0/ff/e0_w_down"},
        6,
    ),
    "matrices with the numbers of experts": (
        LISTED + "ff/w_up{0,1,2,3} 64x96; ff/w_down{0,1,2,3} 96x64; ff/wr 64x4",
        {"layers/0/attn/out/kernel", "layers/0/ff/w_down0"},
        6,
    ),
    "experts in flat names": (
        "embed 512x64; l{0,1,2}_ln 64; l{0,1,2}_attn_{wq,wk,wv,wo} 64x64;"
        " l{0,1,2}_router 64x4; l{0,1,2}_w_up 4x64x96; l{0,1,2}_w_down 4x96x64",
        {"l0_attn_wo", "l0_w_down"},
        6,
    ),
    "numbered experts in flat names": (
        "embed 512x64; l{0,1,2}_ln 64; l{0,1,2}_{wq,wk,wv,wo} 64x64;"
        " l{0,1,2}_router 64x4; l{0,1,2}_expert{0,1,2,3}_w_up 64x96;"
        " l{0,1,2}_expert{0,1,2,3}_w_down 96x64",
        {"l0_wo", "l0_expert0_w_down"},
        6,
    ),
    "one array of experts a layer, without norms": (
        "embed 512x64; blocks/{0,1,2}: attn/{wq,wk,wv,wo} 64x64; ff/router 64x4;"
        " ff/w_up 4x64x96; ff/w_down 4x96x64",
        {"blocks/0/attn/wo", "blocks/0/ff/w_down"},
        6,
    ),
    "experts as wide as the model": (
        LISTED + "router/kernel 64x5; w_up 5x64x64; w_down 5x64x64",
        {"layers/0/attn/out/kernel", "layers/0/w_down"},
        6,
    ),
    "as many layers as experts and heads": (
        "embed 512x64; norms/{0,1,2,3}/scale 64; attn/{0,1,2,3}/{q,k,v}/kernel 64x4x16;"
        " attn/{0,1,2,3}/out/kernel 4x16x64; up/{0,1,2,3}/kernel 64x256;"
        " down/{0,1,2,3}/kernel 256x64",
        {"attn/0/out/kernel", "down/0/kernel"},
        8,
    ),
    "a plain MLP": ("0/kernel 8x16; 1/kernel 16x16; 2/kernel 16x4", set(), 0),
}


def _without_numbers(paths):
    return {re.sub(r"_?\d+", "", path) for path in paths}


@pytest.mark.parametrize("name", STRANGERS)
def test_names_that_say_nothing_change_nothing(name):
    leaves, outputs, k = STRANGERS[name]
    found = assign(tree(leaves), presets.experts_in_front)
    written = residual_outputs(found)
    assert _without_numbers(written) == _without_numbers(outputs)
    norms = row_norms_by_role(found)
    for path in written:
        _, outs, ins = matrix_shape(found[path].shape, found[path].dims)
        np.testing.assert_allclose(norms[path], np.sqrt(ins / (outs * k)))
    assert not unclear_roles(found)


def test_what_nothing_shows_is_said():
    """By ``explain`` and at ``init``; not where row norms are given."""
    shapes = "embed 512x64; layers/{0,1}: mix/kernel 64x64; up 64x256; down 256x64"
    params = jax.tree.map(lambda x: jnp.ones(x.shape), tree(shapes))
    said = (
        r"whether 'layers/\{0,1\}/mix/kernel' write into the residual stream.*"
        r"found to write: 'layers/\{0,1\}/down'"
    )
    assert re.search(said, npo.explain(params))
    with pytest.warns(UserWarning, match=said):
        npo.normpre_h(0.02, adam_learning_rate=1e-3).init(params)
    given = jax.tree.map(lambda _: 0.5, params)
    with warnings.catch_warnings(action="error"):
        npo.normpre_h(0.02, adam_learning_rate=1e-3, row_norms=given).init(params)
        npo.muon(0.02).init(params)
    text = npo.explain(params, row_norms=given)
    assert "residual stream" not in text
    assert "row norms under Hyperball: 0.5 for layers/{0,1}/down" in text
    assert "those that the matrices have" in npo.explain(params, row_norms="keep")
