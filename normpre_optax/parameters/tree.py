# SPDX-License-Identifier: Apache-2.0
"""The leaves of a parameter tree: their paths, the ``Leaf`` that a rule gets, and the
number of layer axes in front.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from normpre_optax.parameters import vocabulary as v
from normpre_optax.parameters.vocabulary import words

_BOXES = {
    ("flax", "Variable"),
    ("flax", "VariableState"),
    ("flax", "AxisMetadata"),
    ("haliax", "NamedArray"),
}
# of hidden matrices; tables, and attention kernels read with the wrong axes, exceed it
MAX_ASPECT_RATIO = 64


@dataclasses.dataclass
class Leaf:
    """A parameter without its values, as a rule ``(path, leaf)`` gets it.

    Args:
        shape: its shape.
        dtype: its dtype.
        names: axis names from a box (Linen's ``with_partitioning``, Haliax); else None.
        class_name: class of the object that has it as an attribute ("Embedding",
            "LayerNorm"); else "".
        layers: number of layer axes in front, from the parameters nearby; None if they
            do not show it.
        layers_error: why a layer axis is expected but is not in front, or why there is
            no name to read; else "".
        is_vector: whether it has the name of a bias or norm, which has one axis unless
            layers are stacked.
        near: leaves of its own module and of its sibling modules, by path.

    Example:
        >>> from normpre_optax.parameters.tree import leaves
        >>> leaves({"blocks": {"w": np.zeros((4, 8, 16)), "b": np.zeros((4, 16))}})[
        ...     "blocks/w"
        ... ].layers
        1
    """

    shape: tuple[int, ...]
    dtype: Any
    names: tuple[Any, ...] | None = None
    class_name: str = ""
    layers: int | None = None
    layers_error: str = ""
    is_vector: bool = False
    near: Mapping[str, Leaf] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def is_box(node: Any) -> bool:
    """Return whether a node is a Flax or Haliax box around an array, without importing
    these packages.
    """
    return any(
        (cls.__module__.split(".")[0], cls.__name__) in _BOXES
        for cls in type(node).__mro__
    )


def named_leaves(
    tree: Any, is_leaf: Callable[[Any], bool] = lambda node: False
) -> Iterator[tuple[str, Any, Any, tuple[Any, ...]]]:
    """Yield (path, leaf, its box or None, key path) in jax's order.

    A path is "/"-joined names, also those in tuple keys. It is the same with and
    without a box, or another container of one array below a name like "weight".
    """
    found = []
    for keys, node in tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: is_leaf(node) or is_box(node)
    )[0]:
        inner = (
            tree_util.tree_flatten_with_path(node, is_leaf=is_leaf)[0]
            if is_box(node)
            else [((), node)]
        )
        for inner_keys, leaf in inner:
            parts: list[str] = []
            for key in keys + inner_keys * (len(inner) > 1):
                own = getattr(key, "key", None)
                # Dots are those of PyTorch's state_dict.
                parts += (
                    map(str, own)
                    if isinstance(own, tuple)
                    else tree_util.keystr((key,), simple=True).split(".")
                )
            found.append((parts, leaf, node if is_box(node) else None, keys))
    below = Counter(
        "/".join(parts[:depth]) for parts, *_ in found for depth in range(1, len(parts))
    )
    for parts, leaf, box, keys in found:
        ends = [
            i + 1
            for i, part in enumerate(parts[:-1])
            if part.lower() in v.WEIGHTS and parts[-1] not in v.WEIGHTS
        ]
        if (
            len(parts) > 1
            and parts[-1] in ("value", "raw_value")
            and not v.ATTENTION.intersection(words(parts[-2]))
        ):
            ends.append(len(parts) - 1)
        end = next(
            (end for end in ends if below["/".join(parts[:end])] == 1), len(parts)
        )
        yield "/".join(parts[:end]), leaf, box, keys


def leaf_paths(tree: Any) -> list[str]:
    """Return the "/"-joined paths of all arrays, in jax's order.

    Example:
        >>> from normpre_optax.parameters.tree import leaf_paths
        >>> leaf_paths({"up": {"kernel": 1.0, "bias": 2.0}, "layers": [3.0]})
        ['layers/0', 'up/bias', 'up/kernel']
    """
    return [path for path, *_ in named_leaves(tree)]


def leaves(params: Any) -> dict[str, Leaf]:
    """Return a ``Leaf`` for every array, by path, in jax's order."""
    found: dict[str, Leaf] = {}
    below: dict[str, dict[str, Leaf]] = {}  # all leaves below a path
    for path, array, box, keys in named_leaves(params):
        if path in found:
            raise ValueError(
                f"two parameters have the path {path!r}: rename one of them"
            )
        array = (
            np.asarray(array)
            if isinstance(array, (bool, int, float, complex))
            else array
        )
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            arrays = (
                "Pass only arrays; for an Equinox model: eqx.filter(model,"
                " eqx.is_inexact_array)"
            )
            raise TypeError(
                f"parameter {path!r} is {array!r}, which is not an array. {arrays}"
            )
        if array.dtype == bool or jnp.issubdtype(array.dtype, jax.dtypes.extended):
            raise TypeError(
                f"parameter {path!r} has dtype {array.dtype}: remove masks and random"
                " keys"
            )
        # The names of axes, in boxes of Linen and of Haliax.
        names = getattr(box, "names", None) or tuple(
            getattr(axis, "name", None) for axis in getattr(box, "axes", ())
        )
        names = (
            names
            if isinstance(names, tuple) and len(names) == len(array.shape) > 0
            else None
        )
        owner = (
            _class_name(params, keys)
            if keys and isinstance(keys[-1], tree_util.GetAttrKey)
            else ""
        )
        found[path] = Leaf(tuple(array.shape), array.dtype, names, owner)
        parts = path.split("/")
        for depth in range(len(parts)):
            below.setdefault("/".join(parts[:depth]), {})[path] = found[path]
    for path, leaf in found.items():
        parts = path.split("/")
        leaf.near = below["/".join(parts[: layer_depth(parts) - 1])]
        leaf.is_vector = (
            parts[-2:][0].lower() not in v.QUERIES and vector_kind(parts, leaf) != ""
        )
    for path, leaf in found.items():
        parts = path.split("/")
        leaf.layers, leaf.layers_error = _layer_axes(parts, below)
        if len(found) > 1 and not any(map(words, parts)):
            leaf.layers_error = (
                "its path has no name, so it may be an embedding, an output head or a"
                " hidden matrix"
            )
    return found


def _class_name(node: Any, keys: tuple[Any, ...]) -> str:
    with contextlib.suppress(AttributeError, KeyError, IndexError, TypeError):
        for key in keys[:-1]:
            attribute = isinstance(key, tree_util.GetAttrKey)
            node = (
                getattr(node, key.name)
                if attribute
                else node[getattr(key, "key", getattr(key, "idx", None))]
            )
        return type(node).__name__
    return ""


def names_below(leaf: Leaf, parts: list[str]) -> set[str]:
    """Return the names directly below a path, among the leaves near a leaf."""
    others = (other.split("/") for other in leaf.near)
    return {other[len(parts)] for other in others if other[: len(parts)] == parts}


def layer_depth(parts: list[str]) -> int:
    """Return how many parts of a path name the layer: all but a generic last one such
    as "kernel".
    """
    return max(1, len(parts) - (parts[-1].lower() in v.GENERIC))


def layer_name(parts: list[str]) -> str:
    """Return the name of the layer in lower case: the last one that is not generic and
    not a number.
    """
    return next(
        (part.lower() for part in reversed(parts[: layer_depth(parts)]) if words(part)),
        "",
    )


def vector_kind(parts: list[str], leaf: Leaf) -> str:
    """Return "bias" or "norm or scale" for a parameter that has one axis unless it is
    stacked; else "".
    """
    last, module = words(parts[-1]), parts[-2] if len(parts) > 1 else ""
    short = parts[-1].lower()
    if v.SHORT_BIAS.fullmatch(short):  # in a known tree, a bias has its "w" next to it
        beside = {name.lower() for name in names_below(leaf, parts[:-1])}
        if f"w{short[1:]}" in beside if beside else module:
            return "bias"
    if v.BIASES.intersection(last):
        return "bias"
    own = v.SCALES.union(v.NORMS).intersection(last)
    above = v.NORMS.intersection(words(module) + words(leaf.class_name))
    above = (
        above
        and not v.INNER.intersection(last)
        and not v.DENSE.intersection(words(module))
    )
    return "norm or scale" if own or above else ""


def stack_depth(parts: list[str]) -> int | None:
    """Return the depth of the last name under which layers are stacked, or None."""
    for depth in range(len(parts), 0, -1):
        part, found = parts[depth - 1], {*words(parts[depth - 1])}
        stacked = found & v.STACKS and (
            found & v.ALWAYS_STACKS or not part[-1:].isdigit()
        )
        following = parts[depth] if depth < len(parts) else ""
        counted = following[-1:].isdigit() and v.UNITS.difference(
            v.ALWAYS_STACKS
        ).issuperset(words(following))
        if (stacked or found == {"h"}) and not counted:
            return depth
    return None


def block_depth(parts: list[str]) -> int:
    """Return the depth below the innermost layer's name: "blocks", "block" before "0",
    "TransformerBlock_0"; or 0.
    """
    for depth in range(len(parts) - 1, 0, -1):
        part, found = parts[depth - 1], v.UNITS.intersection(words(parts[depth - 1]))
        if found and (
            found & v.STACKS
            or found == {"h"}
            or part[-1:].isdigit()
            or parts[depth].isdigit()
        ):
            return depth
    return 0


def _layer_axes(
    parts: list[str], below: dict[str, dict[str, Leaf]]
) -> tuple[int | None, str]:
    """Return the number of layer axes in front by the nearest biases and norms, and why
    they are not in front.
    """
    root = stack_depth(parts)
    for depth in range(len(parts) - 1, (root or 0) - 1, -1):
        path = "/".join(parts[:depth])
        counts = [
            len(x.shape) - 1 for x in below[path].values() if x.is_vector and x.shape
        ]
        if counts and max(counts) == 0:
            return 0, ""
        if counts and min(counts) > 0:
            errors = [
                _different_starts(below[path], count)
                for count in range(1, min(counts) + 1)
            ]
            unrelated = root is None and depth < len(parts) - 1
            return errors.count("") or None, (
                "" if unrelated or not errors[0] else errors[0]
            )
    group = below.get("/".join(parts[:root]), {}) if root else {}
    if all(len(leaf.shape) < 3 for leaf in group.values()):
        return None, ""
    error = _different_starts(group, 1)
    return None if error else 1, error


def _different_starts(group: dict[str, Leaf], count: int) -> str:
    """Return "" if the first ``count`` axes of all leaves have equal sizes, else which
    two differ.
    """
    starts: dict[tuple[int, ...], str] = {}
    for path, leaf in group.items():
        starts.setdefault(leaf.shape[:count], path)
    (a, first), (b, second) = [*starts.items(), ((), "")][:2]
    differ = (
        f"it looks stacked, but not on axis 0 ({first!r} has leading sizes {a},"
        f" {second!r} {b})"
    )
    return differ if len(starts) > 1 else ""


def repeated(table: Mapping[str, Any]) -> list[tuple[str, tuple[str, ...], Any]]:
    """Join the parameters of layers that have equal entries: return their common name,
    their paths, and the entry.

    A layer is a part of a path that is a number, or a name with a number at its end:
    after "_", or of a layer, a block or an expert.

    Example:
        >>> from normpre_optax.parameters.tree import repeated
        >>> table = {
        ...     f"blocks/{i}/{name}": name for i in range(12) for name in ("up", "down")
        ... }
        >>> [(name, len(paths)) for name, paths, _ in repeated(table)]
        [('blocks/{0..11}/up', 12), ('blocks/{0..11}/down', 12)]
        >>> [
        ...     name
        ...     for name, *_ in repeated(
        ...         {"layer_0/up": 8, "layer_1/up": 8, "layer_2/up": 16}
        ...     )
        ... ]
        ['layer_{0,1}/up', 'layer_2/up']
    """
    groups: dict[tuple[Hashable, Any], list[list[str]]] = {}
    for path, entry in table.items():
        parts = path.split("/")
        groups.setdefault((tuple(map(_numbered, parts)), entry), []).append(parts)
    return [
        (
            "/".join(map(_label, zip(*same, strict=True))),
            tuple(map("/".join, same)),
            entry,
        )
        for (_, entry), same in groups.items()
    ]


def _numbered(part: str) -> str:
    """Return a part of a path with "#" for its number if it names a layer."""
    stem, found = part.rstrip("0123456789"), words(part)
    layer = not found or (v.UNITS | v.EXPERTS).intersection(found) or stem.endswith("_")
    return f"{stem}#" if layer and stem != part else part


def _label(names: tuple[str, ...]) -> str:
    """Return one name for names that differ in their last number: "layer_{0..3,7}"."""
    if len({*names}) == 1:
        return names[0]
    stem = names[0].rstrip("0123456789")
    numbers = enumerate(sorted({int(name[len(stem) :]) for name in names}))
    runs = [
        [n for _, n in run]
        for _, run in itertools.groupby(numbers, lambda pair: pair[1] - pair[0])
    ]
    found = ",".join(
        f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run))
        for run in runs
    )
    return f"{stem}{{{found}}}"
