# SPDX-License-Identifier: Apache-2.0
"""The row norms of matrices under Hyperball.

They depend on whether a matrix writes into the residual stream.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from normpre_optax.checks import check_choice
from normpre_optax.parameters import vocabulary as v
from normpre_optax.parameters.broadcast import numbers
from normpre_optax.parameters.dims import matrix_shape, split_axes
from normpre_optax.parameters.labels import repeated
from normpre_optax.parameters.names import (
    Kind,
    block_depth,
    layer_depth,
    layer_name,
    stack_depth,
)
from normpre_optax.parameters.spec import Assignment, ParamSpec
from normpre_optax.parameters.vocabulary import words
from normpre_optax.trees import PyTree

_OUTPUTS = v.OUTPUTS | v.SECOND_LAYERS
# Kinds of parameters with an axis as long as the model is wide.
_AS_WIDE: frozenset[Kind] = frozenset({"norm", "embedding"})


def row_norms_by_path(
    row_norms: PyTree, params: PyTree, found: Assignment
) -> dict[str, Any]:
    """Return the option ``row_norms`` of Hyperball as numbers by path.

    Args:
        row_norms: None or "keep" (by role, see ``row_norms_by_role``), a number, a tree
            of numbers like the parameters or a prefix of it, or a function ``(params)
            -> tree``.
        params: the tree of parameters.
        found: the groups of the parameters.

    Raises:
        TypeError: if ``row_norms`` has an unsupported type.
        ValueError: if it is another word, a number is out of range, or the tree does
            not match the parameters.
    """
    if row_norms is None:
        return row_norms_by_role(found)
    if isinstance(row_norms, str):
        check_choice("row_norms", row_norms, ("keep",))
        # For matrices of zeros, which have no norm to keep.
        return row_norms_by_role(found)
    return dict(zip(found, numbers("row_norms", row_norms, params), strict=True))


def row_norms_by_role(found: Assignment) -> dict[str, float]:
    """Return the row norms that Hyperball sets, by path of the matrix.

    They are ``sqrt(in / (out k))`` for the ``k`` matrices that write into the residual
    stream, and 1 for all others.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.parameters.roles import row_norms_by_role
        >>> from normpre_optax.parameters.rules import assign
        >>> layers = [
        ...     {"up": jnp.zeros((8, 32)), "down": jnp.zeros((32, 8))} for _ in range(4)
        ... ]
        >>> row_norms_by_role(assign({"layers": layers}))["layers/0/down"]
        1.0
    """
    outputs = residual_outputs(found)
    # The numbered experts of a layer count once.
    layers = {}
    for path in outputs:
        layers[v.COUNTED_EXPERT.sub("", path)] = _layers(found[path])
    k = sum(layers.values())
    norms = {}
    for path, (m, n) in matrix_shapes(found).items():
        # With 1 / k, the residual stream does not grow with depth.
        norms[path] = math.sqrt(n / (m * k)) if path in outputs else 1.0
    return norms


def residual_outputs(found: Assignment) -> set[str]:
    """Return the paths of matrices that write into the residual stream.

    They are outputs of attention and of feed-forward layers. A matrix with as many
    outputs as the model is wide writes if its name says so, or if it is inside a layer
    (by its path, or as one of several with a shape and a number), has another number of
    inputs, and no name of a query or an up projection.
    """
    shapes = matrix_shapes(found)
    width = model_width(found)
    several: set[str] = set()
    for _, paths, _ in repeated(shapes):
        if len(paths) > 1:
            several.update(paths)

    def writes(path: str, n: int) -> bool:
        if _is_named_output(path):
            return True
        inside = path in several or _is_inside_layer(path)
        return n != width and inside and not _reads(path)

    return {path for path, (m, n) in shapes.items() if m == width and writes(path, n)}


def matrix_shapes(found: Assignment) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of the matrices, by path."""
    shapes = {}
    for path, spec in found.items():
        if spec.dims is not None:
            _, outputs, inputs = matrix_shape(spec.shape, spec.dims)
            shapes[path] = outputs, inputs
    return shapes


def model_width(found: Assignment) -> int:
    """Return the size that most matrices, norms and embeddings have, or 0.

    Of several such sizes, it is the smallest.
    """
    shapes: list[tuple[int, ...]] = [*matrix_shapes(found).values()]
    sizes = {size for shape in shapes for size in shape}
    shapes += [spec.shape for spec in found.values() if spec.kind in _AS_WIDE]
    # A square matrix counts once.
    count = Counter(size for shape in shapes for size in {*shape})
    return min(sizes, key=lambda size: (-count[size], size), default=0)


def _is_inside_layer(path: str) -> bool:
    parts = path.split("/")
    return block_depth(parts) > 0 or stack_depth(parts) is not None


def _reads(path: str) -> bool:
    """Return whether a matrix reads the residual stream, by the name of its layer."""
    name = layer_name(path.split("/"))
    if not v.READERS.isdisjoint(words(name)):
        return True
    return name in v.QUERIES and not v.ATTENTION.isdisjoint(words(path))


def _is_named_output(path: str) -> bool:
    """Return whether the name of a layer is that of an output or a second layer.

    For a plain name, as in "attention/output/dense", the module above decides.
    """
    parts = path.split("/")
    names = [part for part in parts[: layer_depth(parts)] if words(part)]
    *_, above, own = ["", "", *names]
    if own.lower() not in ("dense", "linear"):
        return own.lower() in _OUTPUTS
    return above.lower() in _OUTPUTS or not v.ATTENTION.isdisjoint(words(above))


def _layers(spec: ParamSpec) -> int:
    """Return how many layers are stacked in a parameter of matrices.

    They are all batch axes but that of stacked experts, the largest.
    """
    assert spec.dims is not None
    batch, _, _ = split_axes(len(spec.shape), spec.dims)
    sizes = sorted(spec.shape[axis] for axis in batch)
    found = {*words(spec.path)}
    is_expert = not v.EXPERTS.isdisjoint(found) and "shared" not in found
    if is_expert and not v.COUNTED_EXPERT.search(spec.path):
        sizes = sizes[:-1]
    return math.prod(sizes)
