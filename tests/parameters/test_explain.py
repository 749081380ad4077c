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


def test_layers_that_are_alike_are_told_once():
    """Experts inside of layers, layers in which one parameter differs, numbers of other things; and one by one."""
    layers = {
        f"layer_{i}": {
            "norm1": {"scale": array(8)},
            "norm2": {"scale": array(8)},
            "fc": {"kernel": array(8, 16 if i % 2 else 32)},
            "experts": [{"up": {"kernel": array(8, 4)}} for _ in range(4)],
        }
        for i in range(12)
    }
    params = {**layers, "deep": [{"up": {"kernel": array(8, 8)}} for _ in range(300)]}
    table = explain(params)
    assert [re.split(r"  +", line)[:4] for line in table.split("\n\n")[0].splitlines()[1:]] == [
        ["deep/{0..299}/up/kernel", "300 x (8, 8)", "matrix", "300 x (8 x 8)"],
        *(
            row
            for numbers, width in (("{0,2,4,6,8,10}", 32), ("{1,3,5,7,9,11}", 16))
            for row in (
                [f"layer_{numbers}/experts/{{0..3}}/up/kernel", "24 x (8, 4)", "matrix", "24 x (4 x 8)"],
                [f"layer_{numbers}/fc/kernel", f"6 x (8, {width})", "matrix", f"6 x ({width} x 8)"],
                [f"layer_{numbers}/norm1/scale", "6 x (8,)", "adamw", "norm or scale"],
                [f"layer_{numbers}/norm2/scale", "6 x (8,)", "adamw", "norm or scale"],
            )
        ),
    ]
    every = explain(params, every_layer=True)
    assert len(every.splitlines()) == 1 + 300 + 12 * 7 + 3
    assert every.split("\n\n")[1] == table.split("\n\n")[1]
    assert re.search(r"^deep/299/up/kernel +\(8, 8\) +matrix +1 x \(8 x 8\) +\(in, out\)$", every, re.MULTILINE)


def test_a_word_that_decided_by_itself_is_noted():
    table = explain({"policy_head": {"dense_0": {"kernel": array(8, 8)}}, "wte": {"embedding": array(9, 8)}})
    assert re.search(r"^policy_head/dense_0/kernel .* output head \('head' in 'policy_head'\)$", table, re.MULTILINE)
    assert table.endswith("note: a word in quotes decided by itself, in a name that may mean something else")
    assert "note" not in explain({"wte": {"embedding": array(9, 8)}, "embed_tokens": {"kernel": array(9, 8)}})


def test_explain_counts_the_matrices_of_a_fused_kernel():
    params = {"qkv": {"kernel": array(2, 8, 24)}}
    fused = explain(params, {"qkv": MatrixDims(inputs=1, outputs=2, output_blocks=3)})
    assert re.search(r"matrix +6 x \(8 x 8\) +given by matrix_dims", fused)
