# SPDX-License-Identifier: Apache-2.0
"""The row norm of every matrix under Hyperball, by whether it writes into the residual
stream.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from normpre_optax.checks import check_choice
from normpre_optax.parameters import vocabulary as v
from normpre_optax.parameters.broadcast import numbers
from normpre_optax.parameters.dims import matrix_shape, split_axes
from normpre_optax.parameters.rules import Assignment, ParamSpec
from normpre_optax.parameters.tree import (
    block_depth,
    layer_depth,
    layer_name,
    repeated,
    stack_depth,
)
from normpre_optax.parameters.vocabulary import words


def row_norms_by_path(row_norms: Any, params: Any, found: Assignment) -> dict[str, Any]:
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
        # A zero matrix has no norm to keep.
        return row_norms_by_role(found)
    return dict(zip(found, numbers("row_norms", row_norms, params), strict=True))


def row_norms_by_role(found: Assignment) -> dict[str, float]:
    """Return 1 for every matrix, and ``sqrt(in / (out k))`` for the ``k`` matrices that
    write to the residual stream.

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
    outputs, shapes = residual_outputs(found), _shapes(found)
    k = sum(
        {
            v.COUNTED_EXPERT.sub("", path): _layers(found[path]) for path in outputs
        }.values()
    )
    return {
        path: math.sqrt(n / (m * k)) if path in outputs else 1.0
        for path, (m, n) in shapes.items()
    }


def residual_outputs(found: Assignment) -> set[str]:
    """Return the paths of matrices that write into the residual stream: of attention
    and of the feed-forward layers.

    The width is the size that most matrices, norms and embeddings have. A matrix with
    that many outputs writes if its name says so, or if it is inside a layer (by its
    path, or as one of several with a shape and a number), has another number of inputs,
    and no name of a query or an up projection.
    """
    shapes = _shapes(found)
    others = [
        spec.shape
        for spec in found.values()
        if spec.reason.startswith(("norm", "embedding"))
    ]
    count = Counter(size for shape in (*shapes.values(), *others) for size in {*shape})
    equal = {
        path for _, paths, _ in repeated(shapes) if len(paths) > 1 for path in paths
    }

    def inside(path):
        return (
            path in equal
            or block_depth(path.split("/"))
            or stack_depth(path.split("/")) is not None
        )

    width = min(
        set().union(*shapes.values()), key=lambda size: (-count[size], size), default=0
    )

    def writes(path, n):
        return _is_named_output(path) or (
            n != width and inside(path) and not _reads(path)
        )

    return {path for path, (m, n) in shapes.items() if m == width and writes(path, n)}


def _shapes(found: Assignment) -> dict[str, tuple[int, int]]:
    return {
        path: matrix_shape(s.shape, s.dims)[1:]
        for path, s in found.items()
        if s.dims is not None
    }


def _reads(path: str) -> bool:
    name = layer_name(path.split("/"))
    return bool(
        v.READERS.intersection(words(name))
        or (name in v.QUERIES and v.ATTENTION.intersection(words(path)))
    )


def _is_named_output(path: str) -> bool:
    *_, above, own = [
        "",
        "",
        *filter(words, path.split("/")[: layer_depth(path.split("/"))]),
    ]
    if own.lower() not in ("dense", "linear"):
        return own.lower() in v.OUTPUTS | v.SECOND_LAYERS
    return above.lower() in v.OUTPUTS | v.SECOND_LAYERS or bool(
        v.ATTENTION.intersection(words(above))
    )


def _layers(spec: ParamSpec) -> int:
    """Return how many layers are stacked in a parameter: all batch axes but that of
    stacked experts.
    """
    sizes = sorted(
        spec.shape[axis]
        for axis in (split_axes(len(spec.shape), spec.dims)[0] if spec.dims else ())
    )
    found = {*words(spec.path)}
    experts = (
        found & v.EXPERTS
        and "shared" not in found
        and not v.COUNTED_EXPERT.search(spec.path)
    )
    return math.prod(sizes[:-1] if experts else sizes)
