# SPDX-License-Identifier: Apache-2.0
"""The table that `explain` prints; what it says of meshes is held by their tests."""

import re

import jax
import jax.numpy as jnp

from normpre_optax.parameters.dims import MatrixDims
from normpre_optax.parameters.explain import explain


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_explain_prints_the_table():
    params = {
        "blocks": {
            "attn": {"out": {"kernel": array(12, 12, 64, 768)}, "query": {"kernel": array(12, 768, 12, 64)}},
            "ln": {"scale": array(12, 768)},
            "mlp": {"fc": {"bias": array(12, 3072), "kernel": array(12, 768, 3072)}},
        },
        "lm_head": {"kernel": array(768, 50257)},
        "wte": {"embedding": array(50257, 768)},
    }
    assert explain(params).splitlines() == [
        "parameter                 shape              optimizer  matrices           reason",
        "blocks/attn/out/kernel    (12, 12, 64, 768)  matrix     12 x (768 x 768)   "
        "attention (heads, size, d), 1 layer axis in front",
        "blocks/attn/query/kernel  (12, 768, 12, 64)  matrix     12 x (768 x 768)   "
        "attention (d, heads, size), 1 layer axis in front",
        "blocks/ln/scale           (12, 768)          adamw                         norm or scale",
        "blocks/mlp/fc/bias        (12, 3072)         adamw                         bias",
        "blocks/mlp/fc/kernel      (12, 768, 3072)    matrix     12 x (3072 x 768)  (in, out), 1 layer axis in front",
        "lm_head/kernel            (768, 50257)       adamw                         output head",
        "wte/embedding             (50257, 768)       adamw                         embedding",
        "",
        "matrix: 42,467,328 numbers in 3 parameters, 36 matrices",
        "adamw:  77,240,832 numbers in 4 parameters",
    ]


def test_explain_shows_what_would_fail():
    params = {"w": array(2, 3, 4), "up": array(3, 4)}
    table = explain(params)
    assert re.search(r"^w +\(2, 3, 4\) +ERROR +no rule covers it$", table, re.MULTILINE)
    assert re.search(r"^up +\(3, 4\) +matrix +1 x \(4 x 3\) +\(in, out\)$", table, re.MULTILINE)
    assert table.endswith("ERROR:  24 numbers in 1 parameter")
    wrong = explain(params, {"w": MatrixDims(0, 3), "up": None})
    assert re.search(r"^w .* ERROR .* outputs=3 is out of range", wrong, re.MULTILINE)
    assert re.search(r"^up .* adamw +given by matrix_dims$", wrong, re.MULTILINE)


def test_explain_counts_the_matrices_of_a_fused_kernel():
    params = {"qkv": {"kernel": array(2, 8, 24)}}
    fused = explain(params, {"qkv": MatrixDims(inputs=1, outputs=2, output_blocks=3)})
    assert re.search(r"matrix +6 x \(8 x 8\) +given by matrix_dims", fused)
