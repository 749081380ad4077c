# SPDX-License-Identifier: Apache-2.0
"""How many layers a parameter of matrices stands for: layers count, experts do not."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from normpre_optax.parameters import vocabulary as v
from normpre_optax.parameters.dims import split_axes
from normpre_optax.parameters.names import block_depth
from normpre_optax.parameters.spec import Assignment, ParamSpec
from normpre_optax.parameters.vocabulary import words

_NUMBER = re.compile(r"\d+")


def count_layers(paths: Collection[str], found: Assignment, width: int) -> int:
    """Return how many matrices of one expert each the parameters have, in all layers.

    Args:
        paths: those to be counted. The numbered experts of a layer count once.
        found: the groups of all parameters, which show what is a layer: norms are
            stacked with their layers, and routers have an output for every expert.
        width: of the model.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.parameters.layer_counts import count_layers
        >>> from normpre_optax.parameters.rules import assign
        >>> layers = {"norm": jnp.ones((16, 8)), "attn": {"out": jnp.ones((16, 8, 8))}}
        >>> count_layers(["layers/attn/out"], assign({"layers": layers}), width=8)
        16
    """
    below: dict[str, set[str]] = {}
    for path in found:
        parts = path.split("/")
        for depth in range(len(parts)):
            below.setdefault("/".join(parts[:depth]), set()).add(parts[depth])
    layers: dict[str, int] = {}
    for path in paths:
        one_expert = _without_experts(path, found, below)
        layers[one_expert] = _stacked_layers(found[path], found, width)
    return sum(layers.values())


def _without_experts(
    path: str, found: Assignment, below: Mapping[str, set[str]]
) -> str:
    """Return the path of a matrix, equal for all experts of its layer.

    Experts are known by their name, or by a router in the same block that has as many
    outputs as there are copies.

    Args:
        path: of the matrix.
        found: the groups of all parameters.
        below: the names directly below every prefix of a path.
    """
    parts = path.split("/")
    inside = block_depth(parts) + 1
    routers = None
    for depth in range(inside, len(parts)):
        if not parts[depth].isdigit():
            continue
        if routers is None:
            routers = _router_sizes("/".join(parts[:inside]) + "/", found)
        if len(below["/".join(parts[:depth])]) in routers:
            parts[depth] = "#"
    return v.COUNTED_EXPERT.sub("", "/".join(parts))


def _router_sizes(block: str, found: Assignment) -> set[int]:
    """Return the sizes of routers below a path."""
    sizes: set[int] = set()
    for path, spec in found.items():
        if spec.kind == "router" and path.startswith(block):
            sizes.update(spec.shape)
    return sizes


def _stacked_layers(spec: ParamSpec, found: Assignment, width: int) -> int:
    """Return how many layers are stacked in a parameter of matrices."""
    assert spec.dims is not None
    batch, _, _ = split_axes(len(spec.shape), spec.dims)
    sizes = sorted(spec.shape[axis] for axis in batch)
    if not sizes:
        return 1
    stack = _stack_of_norms(spec.path, found, width)
    if stack is None:
        stack = _stack_of_matrices(spec.path, len(sizes), found)
    if stack is not None:
        # What else is stacked are experts.
        both = Counter(sizes) & Counter(stack)
        return math.prod(both.elements())
    names = {*words(spec.path)}
    is_expert = not v.EXPERTS.isdisjoint(names) and "shared" not in names
    if is_expert and not v.COUNTED_EXPERT.search(spec.path):
        # The largest axis is that of the experts.
        sizes = sizes[:-1]
    return math.prod(sizes)


def _stack_of_norms(path: str, found: Assignment, width: int) -> tuple[int, ...] | None:
    """Return the sizes of the stack that the nearest norms of the width are in.

    None means that they show nothing: norms without a stack may be outside of it, such
    as a final norm, unless they share a numbered block with the parameter.
    """
    nearest: tuple[int, ...] | None = None
    depth = -1
    for other, spec in found.items():
        # A vector without a telling name may be the scale of a norm.
        if spec.kind not in ("norm", "vector") or width not in spec.shape:
            continue
        shared = _common_depth(path.split("/"), other.split("/"))
        if shared > depth and (len(spec.shape) > 1 or _is_numbered(path, shared)):
            stack = list(spec.shape)
            stack.remove(width)
            nearest, depth = tuple(stack), shared
    return nearest


def _stack_of_matrices(
    path: str, axes: int, found: Assignment
) -> tuple[int, ...] | None:
    """Return the sizes of the stack of the nearest matrix with fewer batch axes."""
    nearest: tuple[int, ...] | None = None
    depth = -1
    for other, spec in found.items():
        if spec.dims is None:
            continue
        batch, _, _ = split_axes(len(spec.shape), spec.dims)
        shared = _common_depth(path.split("/"), other.split("/"))
        if 0 < len(batch) < axes and shared > depth:
            nearest = tuple(spec.shape[axis] for axis in batch)
            depth = shared
    return nearest


def _common_depth(parts: Iterable[str], others: Iterable[str]) -> int:
    depth = 0
    for part, other in zip(parts, others, strict=False):
        if part != other:
            break
        depth += 1
    return depth


def _is_numbered(path: str, depth: int) -> bool:
    """Return whether the first parts of a path have the number of a block."""
    parts = path.split("/")
    return 0 < block_depth(parts) < depth or any(
        _NUMBER.search(part) for part in parts[:depth]
    )
