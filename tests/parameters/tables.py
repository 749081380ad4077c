# SPDX-License-Identifier: Apache-2.0
"""Trees of shapes, and what the rules decide, as tables from path to dims."""

import collections
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np

from normpre_optax.parameters.dims import MatrixDims
from normpre_optax.parameters.rules import assign

IN_OUT, OUT_IN = MatrixDims(inputs=0, outputs=1), MatrixDims(inputs=1, outputs=0)
TO_HEADS, FROM_HEADS = (
    MatrixDims(inputs=0, outputs=(1, 2)),
    MatrixDims(inputs=(0, 1), outputs=2),
)
STACKED = MatrixDims(inputs=1, outputs=2)
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


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def table(text):
    """{path: (leaf, dims)} of entries "path 8x32 0>1", separated by semicolons and
    lines.

    Sizes may have names ("embed=8,mlp=32"), no sizes are "()". "inputs>outputs" are
    missing for AdamW. {a,b} are alternatives, and "prefix:" is put in front of all
    entries that follow.
    """
    found, prefix = {}, ""
    for entry in filter(None, map(str.strip, re.split(r";|\n|(?<=:)\s", text))):
        if entry.endswith(":"):
            prefix = entry[:-1] + "/"
            continue
        pattern, sizes, *dims = entry.split()
        if "=" in sizes:
            axes = tuple(
                Axis(name, int(size))
                for name, size in re.findall(r"(\w+)=(\d+)", sizes)
            )
            leaf = NamedArray(array(*(axis.size for axis in axes)), axes)
        else:
            leaf = array(*map(int, re.findall(r"\d+", sizes)))
        sides = [tuple(map(int, side)) for side in "".join(dims).split(">")]
        for path in itertools.product(
            *(part.split(",") for part in re.split(r"[{}]", prefix + pattern))
        ):
            found["".join(path)] = leaf, MatrixDims(*sides) if dims else None
    return found


def tree(leaves):
    """A nested dict of what a table, or its text, has by "a/b" names, without the dims."""
    nested = {}
    for path, leaf in (table(leaves) if isinstance(leaves, str) else leaves).items():
        *above, last = path.split("/")
        node = nested
        for part in above:
            node = node.setdefault(part, {})
        node[last] = leaf[0] if isinstance(leaf, tuple) else leaf
    return nested


def dims_of(text):
    return {path: dims for path, (_, dims) in table(text).items()}


def chosen(params, matrix_dims=None):
    return {path: spec.dims for path, spec in assign(params, matrix_dims).items()}


def with_layers(shape, dims, layers, axis):
    """A shape and its dims with a layer axis inserted at ``axis``."""
    sides = (
        ()
        if dims is None
        else (
            [a + (a >= axis) for a in np.atleast_1d(s)]
            for s in (dims.inputs, dims.outputs)
        )
    )
    return (*shape[:axis], layers, *shape[axis:]), dims and MatrixDims(*sides)
