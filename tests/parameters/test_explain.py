# SPDX-License-Identifier: Apache-2.0
"""The table that ``explain`` prints, and its notes."""

import re

import jax.numpy as jnp

from normpre_optax.parameters.dims import MatrixDims
from normpre_optax.parameters.explain import explain
from tests import cases
from tests.parameters.tables import array, tree


def test_explain_prints_the_table():
    block = (
        "attn/query/kernel 12x768x12x64; ln/scale 12x768; mlp/fc/bias 12x3072;"
        " mlp/fc/kernel 12x768x3072"
    )
    params = tree(f"conv/kernel 3x8x8; lm_head/kernel 768x50257; blocks: {block}")
    assert explain(params).splitlines() == [
        (
            "parameter                 shape              optimizer  matrices          "
            " reason"
        ),
        (
            "blocks/attn/query/kernel  (12, 768, 12, 64)  matrix     12 x (768 x 768)  "
            " attention (d, heads, size), 1 layer axis in front"
        ),
        (
            "blocks/ln/scale           (12, 768)          adamw                        "
            " norm or scale"
        ),
        (
            "blocks/mlp/fc/bias        (12, 3072)         adamw                        "
            " bias"
        ),
        (
            "blocks/mlp/fc/kernel      (12, 768, 3072)    matrix     12 x (3072 x 768) "
            " (in, out), 1 layer axis in front"
        ),
        (
            "conv/kernel               (3, 8, 8)          ERROR                        "
            " no rule covers it: a convolution can be flattened in several ways"
        ),
        (
            "lm_head/kernel            (768, 50257)       adamw                        "
            " output head"
        ),
        "",
        "matrix: 2 parameters, 35,389,440 elements, 24 matrices",
        "adamw:  3 parameters, 38,643,456 elements",
        "ERROR:  1 parameter, 192 elements",
    ]


def test_explain_shows_what_matrix_dims_give():
    """Also an entry that does not fit, and the matrices of a fused kernel."""
    params = {
        "w": array(2, 3, 4),
        "up": array(3, 4),
        "qkv": array(2, 8, 24),
        "grouped": array(2, 8, 24),
    }
    blocks = {
        name: MatrixDims(1, 2, b) for name, b in (("qkv", 3), ("grouped", (16, 4, 4)))
    }
    shown = explain(params, {"w": MatrixDims(0, 3), "up": None} | blocks)
    for line in (
        r"grouped .* matrix +2 x \(16 x 8\), 4 x \(4 x 8\) +given by matrix_dims",
        r"qkv .* matrix +6 x \(8 x 8\) +given by matrix_dims",
        r"up .* adamw +given by matrix_dims",
        r"w .* ERROR .* outputs=3 is out of range .*",
    ):
        assert re.search(f"^{line}$", shown, re.MULTILINE), line


def test_equal_layers_have_one_line():
    """Experts inside of layers, layers in which one parameter differs, numbers of other
    things; and one by one.
    """
    layers = "norm{1,2}/scale 8; experts/{0,1,2,3}/up/kernel 8x4; fc/kernel 8x"
    params = {f"layer_{i}": tree(layers + ("16" if i % 2 else "32")) for i in range(12)}
    params |= {"deep": [tree("up/kernel 8x8") for _ in range(300)]}
    table = explain(params)
    assert [
        re.split(r"  +", line)[:4] for line in table.split("\n\n")[0].splitlines()[1:]
    ] == [
        ["deep/{0..299}/up/kernel", "300 x (8, 8)", "matrix", "300 x (8 x 8)"],
        [
            "layer_{0..11}/experts/{0..3}/up/kernel",
            "48 x (8, 4)",
            "matrix",
            "48 x (4 x 8)",
        ],
        ["layer_{0,2,4,6,8,10}/fc/kernel", "6 x (8, 32)", "matrix", "6 x (32 x 8)"],
        ["layer_{0..11}/norm1/scale", "12 x (8,)", "adamw", "norm or scale"],
        ["layer_{0..11}/norm2/scale", "12 x (8,)", "adamw", "norm or scale"],
        ["layer_{1,3,5,7,9,11}/fc/kernel", "6 x (8, 16)", "matrix", "6 x (16 x 8)"],
    ]
    lines = explain(
        {name: tree("up/kernel 8x8") for name in ("block", "block1", "block2")}
    ).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == [
        "block/up/kernel",
        "block{1,2}/up/kernel",
    ]
    every = explain(params, every_layer=True)
    assert len(every.splitlines()) == 1 + 300 + 12 * 7 + 3
    assert every.split("\n\n")[1] == table.split("\n\n")[1]
    assert re.search(
        r"^deep/299/up/kernel +\(8, 8\) +matrix +1 x \(8 x 8\) +\(in, out\)$",
        every,
        re.MULTILINE,
    )


VOCABULARY = (
    "note: a matrix that has an axis of the vocabulary size may be an output head"
)
ONE = "note: the quoted word alone decided the group"
NONE = "note: no parameter is a matrix"
MASKED = "note: masked matrices, such as 'layers/0/down'"


@cases.rows(
    "params reason note",
    (
        "policy_head/dense_0/kernel 8x8; up/kernel 8x8",
        "output head ('head' in 'policy_head')",
        ONE,
    ),
    ("wte/embedding 9x8; embed_tokens/kernel 9x8; up/kernel 8x8", "embedding", ""),
    ("wte/embedding 9x8; ln/scale 8", "norm or scale", NONE),
    (
        "word_vectors 650x8; up/kernel 8x8",
        "(in, out)",
        "note: a matrix such as 'word_vectors', longer than 64:1, may be a table",
    ),
    (
        {
            "layers": [
                {"up": array(4, 8), "down": None},
                {"up": array(4, 8), "down": array(8, 4)},
            ]
        },
        "(in, out)",
        MASKED,
    ),
    (
        "Dense_0/kernel 8x50; Embed_0/embedding 50x8",
        "(in, out), has an axis of the vocabulary size",
        VOCABULARY,
    ),
    ("Dense_0/kernel 8x50; pos_embed/embedding 50x8", "(in, out)", ""),
    ("Dense_0/kernel 8x8; Embed_0/embedding 8x8", "(in, out)", ""),
    (
        "word_embeddings/weight 90x8; token_type_embeddings/weight 2x8; up/weight 8x8",
        "embedding",
        "",
    ),
    ("ln/scale 8; type_embed/embedding 2x8; up/kernel 8x8", "norm or scale", ""),
    (
        {"a": array(8, 8, dtype=jnp.int8)},
        "ERROR                parameter 'a' has dtype int8, which has no gradient",
        "",
    ),
    (
        {"up": array(8, 8, dtype=jnp.complex64)},
        "complex64, not real floating point",
        NONE,
    ),
    ("w 2x3x4", "no rule covers it", ""),
    ({"": array(12)}, "vector", "note: the parameters are one vector without a name"),
    ({"": array(3, 4, dtype=jnp.bfloat16)}, "(in, out)", ""),
)
def test_notes(params, reason, note):
    lines = explain(tree(params)).splitlines()
    assert reason in lines[1]
    assert [line[: len(note)] for line in lines if line.startswith("note")] == [
        note
    ] * bool(note)


def test_an_embedding_called_vocab_is_no_head():
    """So its size is the vocabulary's, and a matrix of this size may be the head."""
    text = explain(
        {
            "vocab": {"embeddings": jnp.ones((120, 32))},
            "final": {"kernel": jnp.ones((32, 120))},
            "layers": [{"up": jnp.ones((32, 64)), "down": jnp.ones((64, 32))}] * 2,
        }
    )
    assert re.search(r"vocab/embeddings .* embedding", text)
    assert "may be an output head" in text


def test_a_router_without_a_name_is_noted():
    block = "norm 32; attn/{q,k,v,out} 32x32;"
    experts = "fns/{0,1,2,3}/w_up 32x48; fns/{0,1,2,3}/w_down 48x32"
    note = "an output for every expert"
    for scores, noted in (("dispatch 32x4", True), ("router 32x4", False)):
        text = explain(
            tree(f"embed 64x32; blocks/{{0,1}}: {block} {scores}; {experts}")
        )
        assert (note in text) == noted
