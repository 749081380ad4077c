# SPDX-License-Identifier: Apache-2.0
"""What the rules see of a parameter tree: a name and a `Leaf` for every array.

`named_leaves` walks the tree and takes arrays out of their boxes (Flax NNX variables, Linen's partitioned leaves), so
that a parameter has one name whether it is boxed or not. `views` adds to each shape what only the whole tree can tell:
the names beside it, the class that holds it, and how many layer axes stand in front of it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from jax.sharding import PartitionSpec

from normpre_optax.parameters.dims import MatrixDims, split_axes

_BOXES = {("flax", "Variable"), ("flax", "VariableState"), ("flax", "AxisMetadata"), ("haliax", "NamedArray")}
_STACKS = {"layers", "blocks", "stack", "stacked", "scan", "scanned", "cells", "repeat", "repeats", "stages"}
_UNITS = {"layer", "block", "cell", "stage", "unit", "encoderblock", "decoderblock", "h", "l"} | _STACKS
_ALWAYS = {"scan", "stack"}  # a number after these counts modules, not layers: ScanBlock_0
_WEIGHTS = {"kernel", "w", "weight", "weights"}
_VECTORS = {"bias", "biases", "scale", "scales", "gamma", "beta", "offset", "gain"}
_NORMS = {"norm", "norms", "ln", "layernorm", "rmsnorm", "rms", "groupnorm", "batchnorm", "bn", "gn", "normalization"}
QUERIES = {f"{a}{b}" for a in ("query", "key", "value", "q", "k", "v") for b in ("", "_proj", "_projection")}
QUERIES |= {f"{a}{b}" for a in ("w", "w_", "to_") for b in ("q", "k", "v")}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What a rule `(path, leaf)` is shown of one parameter: everything but its values.

    Args:
        shape: its shape.
        dtype: its dtype.
        names: names of its axes where a box carries them (Linen's `with_partitioning`, Haliax), else None.
        holder: class name of the object that has it as an attribute ("Embedding", "LayerNorm"), else "".
        siblings: names of the modules beside its own.
        beside: names beside the leaf itself, its own among them; empty outside `resolve`.
        layers: number of layer axes in front that the tree shows; None where it shows nothing.
        doubt: why a layer axis in front is contradicted, else "".
        near: shapes by path of all that stands in its own and the neighbouring modules; empty outside `resolve`.

    Example:
        >>> Leaf((12, 768, 3072), np.dtype("float32"), layers=1).ndim
        3
    """

    shape: tuple[int, ...]
    dtype: Any
    names: tuple[Any, ...] | None = None
    holder: str = ""
    siblings: frozenset[str] = frozenset()
    beside: frozenset[str] = frozenset()
    layers: int | None = None
    doubt: str = ""
    near: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict, repr=False, hash=False)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)


def key_names(key_path: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns the plain names along a jax key path."""
    return tuple(str(_key(entry)) for entry in key_path)


def _key(entry: Any) -> Any:
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return entry


@functools.cache
def words(part: str) -> tuple[str, ...]:
    """Splits one part of a path into lower-case words: at anything but letters, and in camel case.

    Example:
        >>> words("RMSNorm_0"), words("token_embedder"), words("ln1")
        (('rms', 'norm'), ('token', 'embedder'), ('ln',))
    """
    return tuple(word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", part))


def is_box(node: object) -> bool:
    """Whether `node` is a box of Flax or Haliax around an array, told by its class: neither need be imported."""
    return any((cls.__module__.split(".")[0], cls.__name__) in _BOXES for cls in type(node).__mro__)


def named_leaves(tree: Any) -> Iterator[tuple[tuple[str, ...], Any, Any, tuple[Any, ...]]]:
    """Walks the arrays of a tree in jax's order, boxes opened.

    Args:
        tree: any pytree.

    Yields:
        (names along the path, array, box or None, key path) for every leaf.
    """
    for key_path, node in tree_util.tree_flatten_with_path(tree, is_leaf=is_box)[0]:
        if not is_box(node):
            yield key_names(key_path), node, None, key_path
            continue
        inner = tree_util.tree_flatten_with_path(node)[0]
        for inner_path, leaf in inner:
            suffix = key_names(inner_path) if len(inner) > 1 else ()
            yield key_names(key_path) + suffix, leaf, node, key_path


def views(params: Any) -> dict[str, Leaf]:
    """Returns every parameter's `Leaf` by its path, in jax's order.

    Args:
        params: the parameters; arrays, tracers or `jax.ShapeDtypeStruct`s.

    Returns:
        A dict from "/"-joined path to `Leaf`.

    Raises:
        ValueError: two parameters have the same path.
        TypeError: a leaf is no array.

    Example:
        >>> views({"blocks": {"w": np.zeros((4, 8, 8)), "b": np.zeros((4, 8))}})["blocks/w"].layers
        1
    """
    found: dict[str, Leaf] = {}
    for names, leaf, box, key_path in named_leaves(params):
        path = "/".join(names)
        if path in found:
            raise ValueError(f"two parameters have the path {path!r}: rename one, so that a rule can tell them apart")
        shape, dtype = _shape_dtype(path, leaf)
        found[path] = Leaf(shape, dtype, _axis_names(box, len(shape)), _holder(params, key_path))
    return _with_context(found)


def _axis_names(box: Any, ndim: int) -> tuple[Any, ...] | None:
    """The names that a box has for the axes of its array: Linen's as they are, Haliax's off its `Axis` objects."""
    names = getattr(box, "names", None)
    if names is None:
        names = tuple(axis.name for axis in getattr(box, "axes", ()) if hasattr(axis, "name"))
    return names if isinstance(names, tuple) and len(names) == ndim > 0 else None


def boxed_specs(params: Any) -> list[PartitionSpec | None]:
    """Where the boxes of Flax say that parameters lie, in the order of the leaves; None for what has no such box.

    Linen's `with_partitioning` names axes, of a mesh or for rules of the user's; NNX keeps the sharding.

    Example:
        >>> from flax.linen import Partitioned
        >>> found = boxed_specs({"kernel": Partitioned(np.ones((4, 8)), names=("fsdp", None)), "bias": np.ones(8)})
        >>> found[0], tuple(found[1])
        (None, ('fsdp', None))
    """
    found = []
    for _, _, box, _ in named_leaves(params):
        said = getattr(box, "names", None) or getattr(box, "out_sharding", None)
        said = getattr(said, "spec", said)
        found.append(PartitionSpec(*said) if isinstance(said, tuple | PartitionSpec) else None)
    return found


def _shape_dtype(path: str, leaf: Any) -> tuple[tuple[int, ...], Any]:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(f"parameter {path!r} is of {leaf.dtype}, no numbers: keep keys of random numbers elsewhere")
        return tuple(leaf.shape), leaf.dtype
    if isinstance(leaf, (bool, int, float, complex)):
        return (), np.asarray(leaf).dtype
    raise TypeError(
        f"parameter {path!r} is {leaf!r}, no array. Pass the arrays alone; of an Equinox model they are "
        "eqx.filter(model, eqx.is_inexact_array)"
    )


def _holder(tree: Any, key_path: tuple[Any, ...]) -> str:
    """Returns the class name of the object whose attribute the leaf is."""
    if not key_path or not isinstance(key_path[-1], jax.tree_util.GetAttrKey):
        return ""
    node = tree
    for entry in key_path[:-1]:
        key = _key(entry)
        try:
            node = getattr(node, key) if isinstance(entry, jax.tree_util.GetAttrKey) else node[key]
        except (AttributeError, KeyError, IndexError, TypeError):
            return ""
    return type(node).__name__


def _with_context(found: dict[str, Leaf]) -> dict[str, Leaf]:
    """Adds to each leaf what stands around it, and then the layer axes that this shows."""
    children: dict[str, set[str]] = {}
    for path in found:
        for prefix, name in _prefixes(path):
            children.setdefault(prefix, set()).add(name)
    for path, leaf in found.items():
        parts = path.split("/")
        siblings = frozenset(children[container(path)])
        beside = frozenset(children["/".join(parts[:-1])])
        found[path] = dataclasses.replace(leaf, siblings=siblings, beside=beside)
    groups: dict[str, dict[str, Leaf]] = {}
    for path, leaf in found.items():
        for prefix, _ in _prefixes(path):
            groups.setdefault(prefix, {})[path] = leaf
    shapes = {prefix: {path: leaf.shape for path, leaf in group.items()} for prefix, group in groups.items()}
    stacks = {prefix: _stack(group) for prefix, group in groups.items()}
    for path, leaf in found.items():
        layers, doubt = _layers(path, groups, stacks)
        found[path] = dataclasses.replace(leaf, layers=layers, doubt=doubt, near=shapes[container(path)])
    return found


def _prefixes(path: str) -> list[tuple[str, str]]:
    """Returns, for every container above a leaf, its path and the name of the child that leads to the leaf."""
    parts = path.split("/")
    return [("/".join(parts[:depth]), part) for depth, part in enumerate(parts)]


def module_depth(parts: list[str]) -> int:
    """Returns how many parts name the layer itself: all but a generic last one such as "kernel"."""
    generic = parts[-1].lower() in _WEIGHTS | {"bias", "b", "scale", "embedding", "embeddings"}
    return max(1, len(parts) - 1) if generic else len(parts)


def container(path: str) -> str:
    """The path of what holds the parameter's layer: "blocks/0/mlp" for "blocks/0/mlp/up/kernel"."""
    parts = path.split("/")
    return "/".join(parts[: module_depth(parts) - 1])


def own_bias(path: str, near: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape of the bias that goes with a weight, if it is among those `near`."""
    above, _, last = path.rpartition("/")
    names = ("bias", "b") if last.lower() in _WEIGHTS else (re.sub("^[wW]", "b", last), f"{last}_bias")
    names = (*names, re.sub("weight|kernel", "bias", last))
    paths = [f"{above}/{name}" if above else name for name in names if name != last]
    return next((near[path] for path in paths if path in near), None)


def fits_bias(path: str, leaf: Leaf, dims: MatrixDims) -> bool:
    """Whether a parameter's bias has the sizes that it would have if these were the parameter's axes.

    A square matrix, of which its own bias says nothing, goes as those of the same name beside it.
    """
    _, outputs, inputs = split_axes(leaf.ndim, dims)
    examples = {leaf.shape: path}
    if [leaf.shape[axis] for axis in outputs] == [leaf.shape[axis] for axis in inputs]:
        last = path.rpartition("/")[2]
        beside = {shape: other for other, shape in leaf.near.items() if other.endswith(f"/{last}")}
        examples = {shape: other for shape, other in beside.items() if len(shape) == leaf.ndim} | examples
    return all(_goes_with(own_bias(other, leaf.near), shape, dims) for shape, other in examples.items())


def _goes_with(bias: tuple[int, ...] | None, shape: tuple[int, ...], dims: MatrixDims) -> bool:
    """Whether a bias, if there is one, has the sizes of the layers and outputs."""
    if bias is None:
        return True
    batch, outputs, _ = split_axes(len(shape), dims)
    layers, rows = (tuple(shape[axis] for axis in axes) for axes in (batch, outputs))
    order = tuple if batch == tuple(range(len(batch))) else sorted
    wanted = (*layers, *rows), (*layers, math.prod(rows))
    return any(order(n for n in bias if n > 1) == order(n for n in sizes if n > 1) for sizes in wanted)


def is_vector(path: str, leaf: Leaf) -> bool:
    """Whether an unstacked parameter of this name has one axis: biases and norms, but not attention's (heads, size)."""
    parts = path.split("/")
    module = parts[-2] if len(parts) > 1 else ""
    last = words(parts[-1])
    if module.lower() in QUERIES:
        return False
    return bool(
        _VECTORS.intersection(last)
        or is_short_bias(parts, leaf)
        or _NORMS.intersection(last + words(module) + words(leaf.holder))
    )


def is_short_bias(parts: list[str], leaf: Leaf) -> bool:
    """Whether a last part "b", "b1", "bq", "b_out" is a bias: where the tree is known, only beside its "w"."""
    last = parts[-1].lower()
    if not re.fullmatch(r"b(\d+|[qkvo])?|b_.*", last):
        return False
    return f"w{last[1:]}" in {name.lower() for name in leaf.beside} if leaf.beside else len(parts) > 1


def is_norm(*parts: str) -> bool:
    """Whether one of the parts names a normalisation."""
    return any(_NORMS.intersection(words(part)) for part in parts)


def stack_depth(parts: list[str]) -> int | None:
    """Returns how many parts lead to the last name that says that layers are stacked below it, or None."""
    for depth in range(len(parts), 0, -1):
        if _is_stack(parts[depth - 1]) and not (depth < len(parts) and is_index(parts[depth])):
            return depth
    return None


def _is_stack(part: str) -> bool:
    found = set(words(part))
    return found == {"h"} or bool(found & _STACKS and (found & _ALWAYS or not part[-1:].isdigit()))


def counts_layers(part: str) -> bool:
    """Whether a part is one of several layers, or experts, that may be alike: "0", "layer_3", "MyNet_0" (Linen's)."""
    found = set(words(part))
    named = part[:1].isupper() and bool(re.fullmatch(r".*_\d+", part))
    return part[-1:].isdigit() and (named or not found or bool(found & (_UNITS | {"expert", "experts"})))


def is_index(part: str) -> bool:
    """Whether a part counts layers: "0", "layer_3", "Block_0"."""
    found = set(words(part))
    return part[-1:].isdigit() and found <= _UNITS and not found & _ALWAYS


def block_depth(parts: list[str]) -> int:
    """Returns how many parts lead into the innermost layer: past "blocks", "blocks/0", "TransformerBlock_0"."""
    for depth in range(len(parts) - 1, 0, -1):
        found = set(words(parts[depth - 1]))
        if _is_stack(parts[depth - 1]) or (parts[depth - 1][-1:].isdigit() and found & _UNITS):
            return depth
        if not found and depth > 1 and set(words(parts[depth - 2])) & _UNITS:
            return depth
    return 0


def _stack(group: dict[str, Leaf]) -> tuple[int | None, str] | None:
    """Reads the layer axes in front of a group off its biases and norms: (count, doubt), or None without evidence."""
    vectors = [leaf for path, leaf in group.items() if leaf.ndim and is_vector(path, leaf)]
    depths = {leaf.ndim - 1 for leaf in vectors}
    if not depths or (len(depths) > 1 and 0 in depths):
        return None
    for count in range(min(depths), 0, -1):
        if not _disagreement(group, count):
            return count, ""
    return (None, _disagreement(group, 1)) if min(depths) else (0, "")


def _disagreement(group: dict[str, Leaf], count: int) -> str:
    """Returns "" if all leaves of a group begin with the same `count` sizes, else a sentence naming two that do not."""
    heads: dict[tuple[int, ...], str] = {}
    for path, leaf in group.items():
        heads.setdefault(leaf.shape[:count], path)
    if len(heads) < 2:
        return ""
    (one, two), paths = list(heads)[:2], list(heads.values())
    return f"it looks stacked, but not in front ({paths[0]!r} begins with {one}, {paths[1]!r} with {two})"


def _layers(path: str, groups: Any, stacks: Any) -> tuple[int | None, str]:
    """Reads the number of layer axes in front of a parameter off the nearest module with a bias or a norm."""
    parts = path.split("/")
    root = stack_depth(parts)
    for depth in range(len(parts) - 1, (root or 0) - 1, -1):
        prefix = "/".join(parts[:depth])
        if stacks[prefix] is None:
            continue
        count, doubt = stacks[prefix]
        if doubt and root is None and depth < len(parts) - 1:
            return None, ""
        return count, doubt
    group = groups.get("/".join(parts[:root]), {}) if root else {}
    if all(other.ndim < 3 for other in group.values()):
        return None, ""
    doubt = _disagreement(group, 1)
    return (None if doubt else 1), doubt
