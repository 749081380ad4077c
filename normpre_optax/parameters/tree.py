# SPDX-License-Identifier: Apache-2.0
"""The leaves of a parameter tree: their paths, and what is around them.

``leaves`` returns a ``Leaf`` for every array. A leaf does not change. What the leaves
around it show, such as the number of layer axes, is asked of its ``Tree``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from normpre_optax.parameters import vocabulary as v
from normpre_optax.parameters.feed_forward import sizes_as_wide
from normpre_optax.parameters.names import (
    VECTORS,
    Named,
    is_inside_gate,
    kind_by_name,
    layer_depth,
    stack_depth,
)
from normpre_optax.parameters.vocabulary import words
from normpre_optax.trees import PyTree

_BOXES = {
    ("flax", "Variable"),
    ("flax", "VariableState"),
    ("flax", "AxisMetadata"),
    ("haliax", "NamedArray"),
}
_NO_ARRAY = (
    "parameter {!r} is {!r}, which is not an array. Pass only arrays; for an Equinox"
    " model: eqx.filter(model, eqx.is_inexact_array)"
)
# of hidden matrices; tables, and attention kernels read with the wrong axes, exceed it
MAX_ASPECT_RATIO = 64

KeyPath = tuple[Any, ...]  # of jax.tree_util


class Shaped(Protocol):
    """What a rule needs to know of a parameter: an array, or its shape and dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    @property
    def dtype(self) -> Any:
        """Its dtype."""
        ...

    @property
    def ndim(self) -> int:
        """Number of axes."""
        ...


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter without its values, as a rule ``(path, leaf)`` gets it.

    Args:
        shape: its shape.
        dtype: its dtype.
        names: axis names from a box (Linen's ``with_partitioning``, Haliax); else None.
        class_name: class of the object that has it as an attribute ("Embedding",
            "LayerNorm"); else "".
        near: leaves of its own module and of its sibling modules, by path.
        tree: the tree that it is in; an empty one for a leaf by itself.

    Example:
        >>> from normpre_optax.parameters.tree import leaves
        >>> found = leaves({"up": {"w": np.zeros((8, 16)), "b": np.zeros(16)}})
        >>> found["up/w"].shape, [*found["up/w"].near]
        ((8, 16), ['up/b', 'up/w'])
    """

    shape: tuple[int, ...]
    dtype: jax.typing.DTypeLike
    names: tuple[object, ...] | None = None
    class_name: str = ""
    near: Mapping[str, Leaf] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )
    tree: Tree = dataclasses.field(
        default_factory=lambda: Tree(), repr=False, compare=False
    )

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Tree:
    """The leaves of a parameter tree, and what those around a path show about it.

    Args:
        leaves: all leaves by path, in jax's order.
        below: all leaves below a path, by path.
        vectors: paths of biases and norms, which have one axis unless layers are
            stacked.
    """

    leaves: dict[str, Leaf] = dataclasses.field(default_factory=dict)
    below: dict[str, dict[str, Leaf]] = dataclasses.field(default_factory=dict)
    vectors: set[str] = dataclasses.field(default_factory=set)

    @functools.cached_property
    def sizes_as_wide(self) -> Counter[int]:
        """How many norms, tables and routers have an axis of a size."""
        found = []
        for path, leaf in self.leaves.items():
            axes = leaf.names or ()
            named = Named(path.split("/"), leaf.ndim, leaf.class_name, axes, leaf.near)
            by_name = kind_by_name(named)
            if by_name is not None:
                found.append((by_name.kind, leaf.shape))
        return sizes_as_wide(found)

    @property
    def width(self) -> int:
        """The size that most of them have, or 0 if there are several."""
        counted = self.sizes_as_wide.most_common(2)
        counts = [count for _, count in counted]
        if len(counts) != len({*counts}) or not counts:
            return 0
        return counted[0][0]

    def layer_axes(self, path: str) -> tuple[int | None, str]:
        """Return the number of layer axes in front, by the nearest biases and norms.

        Returns:
            The number, or None if nothing shows it; and why there seem to be layer axes
            that are not in front, or "".

        Example:
            >>> from normpre_optax.parameters.tree import leaves
            >>> layers = {"w": np.zeros((4, 8, 16)), "b": np.zeros((4, 16))}
            >>> leaves({"layers": layers})["layers/w"].tree.layer_axes("layers/w")
            (1, '')
        """
        parts = path.split("/")
        root = stack_depth(parts)
        for depth in range(len(parts) - 1, (root or 0) - 1, -1):
            group = self.below.get("/".join(parts[:depth]), {})
            # A bias or a norm has one axis, and those of layers.
            layers = [
                len(group[other].shape) - 1
                for other in group
                if other in self.vectors and group[other].shape
            ]
            if layers and max(layers) == 0:
                return 0, ""
            if layers and min(layers) > 0:
                count, error = _common_axes(group, min(layers))
                # Outside of a stack, vectors of another module show nothing.
                is_own = root is not None or depth == len(parts) - 1
                return count, error if is_own else ""
        if root is None:
            return None, ""
        return self._axes_of_stack("/".join(parts[:root]))

    def _axes_of_stack(self, path: str) -> tuple[int | None, str]:
        """Return ``layer_axes`` below the name of a stack that has no vectors."""
        group = self.below.get(path, {})
        if all(len(leaf.shape) < 3 for leaf in group.values()):
            return None, ""
        error = _different_starts(group, 1)
        if error:
            return None, error
        return 1, ""


def _common_axes(group: Mapping[str, Leaf], most: int) -> tuple[int | None, str]:
    """Return how many axes in front have equal sizes, and why the first one has not."""
    errors = [_different_starts(group, count) for count in range(1, most + 1)]
    return errors.count("") or None, errors[0]


def _different_starts(group: Mapping[str, Leaf], count: int) -> str:
    """Return which two leaves differ in the sizes of their first axes, or ""."""
    starts: dict[tuple[int, ...], str] = {}
    for path, leaf in group.items():
        starts.setdefault(leaf.shape[:count], path)
    if len(starts) < 2:
        return ""
    (sizes, path), (other_sizes, other) = [*starts.items()][:2]
    return (
        f"it looks stacked, but not on axis 0 ({path!r} has leading sizes {sizes},"
        f" {other!r} {other_sizes})"
    )


def is_box(node: object) -> bool:
    """Return whether a node is a Flax or Haliax box around an array.

    These packages are not imported: the name of the class decides.
    """
    return any(
        (cls.__module__.split(".")[0], cls.__name__) in _BOXES
        for cls in type(node).__mro__
    )


def named_leaves(
    tree: PyTree, is_leaf: Callable[[Any], bool] = lambda node: False
) -> Iterator[tuple[str, Any, Any, KeyPath]]:
    """Yield (path, leaf, its box or None, key path) in jax's order.

    A path is "/"-joined names, also those in tuple keys. It is the same with and
    without a box, or another container of one array below a name like "weight".
    """
    found = []
    nodes, _ = tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: is_leaf(node) or is_box(node)
    )
    for keys, node in nodes:
        box = None
        inner = [((), node)]
        if is_box(node):
            box = node
            inner, _ = tree_util.tree_flatten_with_path(node, is_leaf=is_leaf)
        for inner_keys, leaf in inner:
            # The keys in a box of one array are no names.
            named_keys = keys + inner_keys if len(inner) > 1 else keys
            found.append((_names_of(named_keys), leaf, box, keys))
    # The number of arrays below each part of a path.
    below = Counter(
        "/".join(parts[:depth]) for parts, *_ in found for depth in range(1, len(parts))
    )
    for parts, leaf, box, keys in found:
        path = "/".join(parts)
        for end in _ends_of_containers(parts):
            container = "/".join(parts[:end])
            if below[container] == 1:
                path = container
                break
        yield path, leaf, box, keys


def _names_of(keys: KeyPath) -> list[str]:
    """Return the names in a key path of jax: those of tuple keys are several."""
    parts: list[str] = []
    for key in keys:
        own = getattr(key, "key", None)
        if isinstance(own, tuple):
            parts += map(str, own)
        else:
            # Dots are those of PyTorch's state_dict.
            parts += tree_util.keystr((key,), simple=True).split(".")
    return parts


def _ends_of_containers(parts: list[str]) -> list[int]:
    """Return the depths at which a path ends if only one array is below."""
    ends = [
        depth
        for depth, part in enumerate(parts[:-1], start=1)
        if part.lower() in v.WEIGHTS and parts[-1] not in v.WEIGHTS
    ]
    # The "value" of attention is no container.
    is_value = len(parts) > 1 and parts[-1] in ("value", "raw_value")
    if is_value and v.ATTENTION.isdisjoint(words(parts[-2])):
        ends.append(len(parts) - 1)
    return ends


def leaf_paths(tree: PyTree) -> list[str]:
    """Return the "/"-joined paths of all arrays, in jax's order.

    Example:
        >>> from normpre_optax.parameters.tree import leaf_paths
        >>> leaf_paths({"up": {"kernel": 1.0, "bias": 2.0}, "layers": [3.0]})
        ['layers/0', 'up/bias', 'up/kernel']
    """
    return [path for path, *_ in named_leaves(tree)]


def leaves(params: PyTree) -> dict[str, Leaf]:
    """Return a ``Leaf`` for every array, by path, in jax's order.

    Raises:
        ValueError: if two parameters have one path.
        TypeError: if a leaf is not an array, or a mask or a random key.
    """
    tree = Tree()
    for path, array, box, keys in named_leaves(params):
        if path in tree.leaves:
            raise ValueError(
                f"two parameters have the path {path!r}: rename one of them"
            )
        # jax takes numbers of Python for arrays.
        if isinstance(array, (bool, int, float, complex)):
            array = np.asarray(array)
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise TypeError(_NO_ARRAY.format(path, array))
        if array.dtype == bool or jnp.issubdtype(array.dtype, jax.dtypes.extended):
            raise TypeError(
                f"parameter {path!r} has dtype {array.dtype}: remove masks and random"
                " keys"
            )
        shape = tuple(array.shape)
        names, class_name = None, ""
        if box is not None:
            names = _axis_names(box, len(shape))
        if keys and isinstance(keys[-1], tree_util.GetAttrKey):
            class_name = _class_name(params, keys)
        parts = path.split("/")
        prefixes = ["/".join(parts[:depth]) for depth in range(len(parts))]
        groups = [tree.below.setdefault(prefix, {}) for prefix in prefixes]
        depth = layer_depth(parts) - 1
        # Experts are beside a gate, also if it is a module: "gate/dense/kernel".
        if v.GATES.intersection(words(parts[depth - 1])) and is_inside_gate(parts):
            depth -= 1
        near = groups[depth]  # leaves that follow are added to it
        leaf = Leaf(shape, array.dtype, names, class_name, near, tree)
        tree.leaves[path] = leaf
        for group in groups:
            group[path] = leaf
    # The names beside a bias count, so all leaves have to be there.
    for path, leaf in tree.leaves.items():
        parts = path.split("/")
        named = Named(parts, len(leaf.shape), leaf.class_name, near=leaf.near)
        # The bias of a query may have an axis of heads, too.
        if parts[-2:][0].lower() not in v.QUERIES and kind_by_name(named, VECTORS):
            tree.vectors.add(path)
    return tree.leaves


def _axis_names(box: object, ndim: int) -> tuple[object, ...] | None:
    """Return the names of axes in a box of Linen or of Haliax, or None."""
    names = getattr(box, "names", None)
    if not names:
        axes = getattr(box, "axes", ())
        names = tuple(getattr(axis, "name", None) for axis in axes)
    if isinstance(names, tuple) and len(names) == ndim > 0:
        return names
    return None


def _class_name(params: PyTree, keys: KeyPath) -> str:
    """Return the class of the object that has a leaf as an attribute, or ""."""
    node = params
    with contextlib.suppress(AttributeError, KeyError, IndexError, TypeError):
        for key in keys[:-1]:
            if isinstance(key, tree_util.GetAttrKey):
                node = getattr(node, key.name)
            else:
                node = node[getattr(key, "key", getattr(key, "idx", None))]
        return type(node).__name__
    return ""
