# SPDX-License-Identifier: Apache-2.0
"""Which matrices write into the residual stream, on the known models, and the row norms
that follow.
"""

import re

import numpy as np
import pytest

from normpre_optax.parameters import presets
from normpre_optax.parameters.dims import matrix_shape
from normpre_optax.parameters.roles import residual_outputs, row_norms_by_role
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
