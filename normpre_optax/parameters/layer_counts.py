# SPDX-License-Identifier: Apache-2.0
"""How many layers parameters of matrices stand for: layers count, experts do not.

No name is needed. A norm belongs to a layer, so what is numbered or stacked as norms
are is a layer; and a router has an output for every expert.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from normpre_optax.parameters import vocabulary as v
from normpre_optax.parameters.dims import matrix_shape, split_axes
from normpre_optax.parameters.spec import Assignment, ParamSpec
from normpre_optax.parameters.vocabulary import words

Names = tuple[str, ...]


class Stacked(NamedTuple):
    """A parameter that shows how its layers are stacked.

    Attributes:
        names: see ``_names``.
        sizes: of the axes of the stack.
    """

    names: Names
    sizes: tuple[int, ...]


def count_layers(paths: Collection[str], found: Assignment, width: int) -> int:
    """Return how many layers have these matrices; all experts of a layer count once.

    Args:
        paths: of the parameters to be counted.
        found: the groups of all parameters.
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
    layers: dict[Names, int] = {}
    for path in paths:
        one_expert = evidence.without_experts(found[path])
        if one_expert not in layers:
            layers[one_expert] = evidence.stacked_layers(found[path])
    return sum(layers.values())


def score_matrices(found: Assignment, width: int) -> list[str]:
    """Return the paths of matrices that may be routers without a telling name.

    They have the width as inputs and an output for every expert.

    Args:
        found: the groups of all parameters.
        width: of the model.
    """
    evidence = _Evidence(found, width)
    experts = evidence.numbers_of_experts(found)
    scores = []
    for path, spec in found.items():
        if spec.dims is None or spec.given:
            continue
        count, outputs, inputs = matrix_shape(spec.shape, spec.dims)
        if inputs != width or outputs == width or outputs not in experts:
            continue
        # Experts themselves are several per layer.
        is_stacked = count > evidence.stacked_layers(spec)
        is_numbered = evidence.without_experts(spec) != _names(path)
        if not is_stacked and not is_numbered:
            scores.append(path)
    return scores


class _Evidence:
    """What the other parameters show of layers and experts.

    Attributes:
        copies: number of parameters of one shape that differ in one number.
        sizes: sizes of axes by what the names begin with, up to a number.
        norms: the norms of the width; a vector without a telling name may be one.
        blocks: what the names of norms begin with, up to a number.
        matrices: all parameters of matrices.
    """

    def __init__(self, found: Assignment, width: int) -> None:
        self.copies: Counter[tuple[Names, tuple[int, ...]]] = Counter()
        self.sizes: dict[Names, set[int]] = {}
        self.norms: list[Stacked] = []
        self.blocks: set[Names] = set()
        self.matrices: list[Stacked] = []
        for path, spec in found.items():
            names = _names(path)
            starts = [names[: at + 1] for at in _numbers(names)]
            for start in [(), *starts]:
                self.sizes.setdefault(start, set()).update(spec.shape)
            for at in _numbers(names):
                self.copies[_without(names, at), spec.shape] += 1
            if spec.kind in ("norm", "vector") and width in spec.shape:
                stack = list(spec.shape)
                stack.remove(width)
                self.norms.append(Stacked(names, tuple(stack)))
                self.blocks.update(starts)
            if spec.dims is not None:
                self.matrices.append(Stacked(names, _batch_sizes(spec)))

    def without_experts(self, spec: ParamSpec) -> Names:
        """Return the names of a matrix, equal for all experts of its layer."""
        names = _names(v.COUNTED_EXPERT.sub("", spec.path))
        starts = [names[: at + 1] for at in _numbers(names)]
        layers = [start for start in starts if start in self.blocks]
        if not layers and not _batch_sizes(spec):
            # Norms are elsewhere, or there are none.
            layers = starts[:1]
        layer: Names = ()
        for start in starts:
            if start in layers:
                layer = start
                continue
            one_expert = _without(names, len(start) - 1)
            # A router has an output for every expert.
            if self.copies[one_expert, spec.shape] in self.sizes.get(layer, ()):
                names = one_expert
        return names

    def numbers_of_experts(self, found: Assignment) -> set[int]:
        """Return how many experts layers have, of those that are not known by name."""
        numbers: set[int] = set()
        for spec in found.values():
            if spec.dims is None:
                continue
            sizes = _batch_sizes(spec)
            if math.prod(sizes) > self.stacked_layers(spec):
                numbers.update(sizes)
            names = _names(spec.path)
            for at in _numbers(names):
                if names[: at + 1] not in self.blocks:
                    numbers.add(self.copies[_without(names, at), spec.shape])
        return numbers - {1}

    def stacked_layers(self, spec: ParamSpec) -> int:
        """Return how many layers are stacked in a parameter of matrices."""
        sizes = _batch_sizes(spec)
        if not sizes:
            return 1
        stack = self._stack_of_layers(_names(spec.path), len(sizes))
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

    def _stack_of_layers(self, names: Names, axes: int) -> tuple[int, ...] | None:
        """Return the sizes of the stack of layers around a parameter.

        It is that of the nearest norm, else that of the nearest matrix with fewer batch
        axes than ``axes``; None if there are none.
        """
        fewer = [matrix for matrix in self.matrices if len(matrix.sizes) < axes]
        for evidence in (self.norms, fewer):
            # What is not stacked may be outside of the stack, as a final norm is,
            # unless it is in the same numbered block.
            inside = [
                other
                for other in evidence
                if other.sizes or _share_a_number(names, other.names)
            ]
            if inside:
                nearest = max(inside, key=lambda other: _shared(names, other.names))
                return nearest.sizes
        return None


def _names(path: str) -> Names:
    """Split a path at its numbers and slashes: "l/0/_w" of "l0_w"."""
    return tuple(re.findall(r"\d+|[^\d/]+", path))


def _numbers(names: Names) -> Iterator[int]:
    """Yield the places of numbers."""
    return (at for at, name in enumerate(names) if name.isdigit())


def _without(names: Names, at: int) -> Names:
    """Return the names with "#" for a number."""
    return (*names[:at], "#", *names[at + 1 :])


def _batch_sizes(spec: ParamSpec) -> tuple[int, ...]:
    """Return the sizes of the batch axes of a parameter; none if it has no matrices."""
    if spec.dims is None:
        return ()
    batch, _, _ = split_axes(len(spec.shape), spec.dims)
    return tuple(spec.shape[axis] for axis in batch)


def _shared(names: Sequence[str], others: Sequence[str]) -> int:
    """Return how many first names two parameters have in common."""
    depth = 0
    for name, other in zip(names, others, strict=False):
        if name != other:
            break
        depth += 1
    return depth


def _share_a_number(names: Names, others: Names) -> bool:
    """Return whether two parameters have the number of a block in common."""
    return any(name.isdigit() for name in names[: _shared(names, others)])
