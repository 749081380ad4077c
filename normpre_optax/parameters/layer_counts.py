# SPDX-License-Identifier: Apache-2.0
"""How many layers parameters of matrices stand for: layers count, experts do not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from normpre_optax.parameters import vocabulary as v
from normpre_optax.parameters.dims import split_axes
from normpre_optax.parameters.names import block_depth
from normpre_optax.parameters.spec import Assignment, ParamSpec
from normpre_optax.parameters.vocabulary import words


class Stacked(NamedTuple):
    """A parameter that shows how its layers are stacked.

    Attributes:
        parts: names of its path.
        sizes: of the axes of the stack.
    """

    parts: list[str]
    sizes: tuple[int, ...]


def count_layers(paths: Collection[str], found: Assignment, width: int) -> int:
    """Return how many layers have these matrices; all experts of a layer count once.

    Args:
        paths: of the parameters to be counted.
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
    evidence = _Evidence(found, width)
    layers: dict[str, int] = {}
    for path in paths:
        one_expert = evidence.without_experts(path)
        if one_expert not in layers:
            layers[one_expert] = evidence.stacked_layers(found[path])
    return sum(layers.values())


class _Evidence:
    """What the other parameters show of layers and experts.

    Attributes:
        below: names directly below every prefix of a path.
        routers: path and shape of every router.
        norms: the norms of the width; a vector without a telling name may be one.
        matrices: the stacked matrices.
    """

    def __init__(self, found: Assignment, width: int) -> None:
        self.below: dict[str, set[str]] = {}
        self.routers: list[tuple[str, tuple[int, ...]]] = []
        self.norms: list[Stacked] = []
        self.matrices: list[Stacked] = []
        for path, spec in found.items():
            parts = path.split("/")
            for depth, part in enumerate(parts):
                self.below.setdefault("/".join(parts[:depth]), set()).add(part)
            if spec.kind == "router":
                self.routers.append((path, spec.shape))
            if spec.kind in ("norm", "vector") and width in spec.shape:
                stack = list(spec.shape)
                stack.remove(width)
                self.norms.append(Stacked(parts, tuple(stack)))
            if _batch_sizes(spec):
                self.matrices.append(Stacked(parts, _batch_sizes(spec)))

    def without_experts(self, path: str) -> str:
        """Return the path of a matrix, equal for all experts of its layer.

        Experts are known by their name, or by a router in the same block that has as
        many outputs as there are copies.
        """
        parts = path.split("/")
        inside = block_depth(parts) + 1
        block = "/".join(parts[:inside]) + "/"
        one_expert = list(parts)
        for depth in range(inside, len(parts)):
            copies = len(self.below["/".join(parts[:depth])])
            if parts[depth].isdigit() and self._is_routed(block, copies):
                one_expert[depth] = "#"
        return v.COUNTED_EXPERT.sub("", "/".join(one_expert))

    def _is_routed(self, block: str, copies: int) -> bool:
        """Return whether a router below a path has this many outputs."""
        return any(
            copies in shape and path.startswith(block) for path, shape in self.routers
        )

    def stacked_layers(self, spec: ParamSpec) -> int:
        """Return how many layers are stacked in a parameter of matrices."""
        sizes = _batch_sizes(spec)
        if not sizes:
            return 1
        stack = self._stack_of_layers(spec.path.split("/"), len(sizes))
        if stack is not None:
            # What else is stacked are experts.
            both = Counter(sizes) & Counter(stack)
            return math.prod(both.elements())
        names = {*words(spec.path)}
        is_expert = not v.EXPERTS.isdisjoint(names) and "shared" not in names
        if is_expert and not v.COUNTED_EXPERT.search(spec.path):
            # The largest axis is that of the experts.
            sizes = tuple(sorted(sizes)[:-1])
        return math.prod(sizes)

    def _stack_of_layers(self, parts: list[str], axes: int) -> tuple[int, ...] | None:
        """Return the sizes of the stack of layers around a parameter.

        It is that of the nearest norm, else that of the nearest matrix with fewer batch
        axes than ``axes``; None if there are none.
        """
        norms = []
        for norm in self.norms:
            # One that is not stacked may be outside of the stack, as a final norm is,
            # unless it is in the same numbered block.
            if norm.sizes or _share_a_block(parts, norm.parts):
                norms.append(norm)
        if norms:
            return _nearest(parts, norms)
        fewer = [matrix for matrix in self.matrices if len(matrix.sizes) < axes]
        if fewer:
            return _nearest(parts, fewer)
        return None


def _batch_sizes(spec: ParamSpec) -> tuple[int, ...]:
    """Return the sizes of the batch axes of a parameter; none if it has no matrices."""
    if spec.dims is None:
        return ()
    batch, _, _ = split_axes(len(spec.shape), spec.dims)
    return tuple(spec.shape[axis] for axis in batch)


def _nearest(parts: Sequence[str], others: Sequence[Stacked]) -> tuple[int, ...]:
    """Return the stack of the parameter that shares the most of a path."""
    return max(others, key=lambda other: _shared(parts, other.parts)).sizes


def _shared(parts: Sequence[str], others: Sequence[str]) -> int:
    """Return how many first parts two paths have in common."""
    depth = 0
    for part, other in zip(parts, others, strict=False):
        if part != other:
            break
        depth += 1
    return depth


def _share_a_block(parts: list[str], others: Sequence[str]) -> bool:
    """Return whether two paths have the number of a block in common."""
    common = parts[: _shared(parts, others)]
    return any(any(map(str.isdigit, part)) for part in common)
