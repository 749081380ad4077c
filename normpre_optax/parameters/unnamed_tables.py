# SPDX-License-Identifier: Apache-2.0
"""Matrices that may be an embedding or an output head without such a name.

A tied table in Flax NNX is one array with two names, of which the state has the first
one by the alphabet. It may be that of the head, such as "decoder".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from normpre_optax.parameters import vocabulary as v
from normpre_optax.parameters.dims import matrix_shape
from normpre_optax.parameters.names import (
    Kind,
    layer_depth,
    layer_name,
)
from normpre_optax.parameters.roles import is_inside_layer, model_width
from normpre_optax.parameters.spec import Assignment, ParamSpec
from normpre_optax.parameters.vocabulary import words

TABLES: frozenset[Kind] = frozenset({"embedding", "head"})
# Of a language model with words, not characters. Inputs of perceptrons have fewer.
_SMALL_VOCABULARY = 10_000


def unnamed_tables(found: Assignment) -> list[ParamSpec]:
    """Return the matrices that may be an embedding or a head, if none has such a name.

    Such a matrix is outside of all layers, its name is not one of a hidden layer, and
    one of its axes is the width of the model:

    - In a tree with layers, it is the matrix with the longest axis of the tree, or else
      any such matrix if the layers are blocks of several ones. What is outside of these
      is the input or the output layer of the model, or a part of it.
    - In a tree without layers, it has the longest axis, and a feed-forward layer has a
      name or the axis is as long as a vocabulary. The first layer of a perceptron may
      have the longest axis, too.

    A few arrays, such as a single layer, have no such matrix. What ``matrix_dims``
    gives as a matrix is one.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.parameters.rules import assign
        >>> block = {"up": jnp.zeros((16, 64)), "down": jnp.zeros((64, 16))}
        >>> found = assign({"blocks": [block, block], "back": jnp.zeros((96, 16))})
        >>> [spec.path for spec in unnamed_tables(found)]
        ['back']
    """
    if any(_is_table(spec) for spec in found.values()):
        return []
    matrices = [spec for spec in found.values() if spec.dims is not None]
    if len(matrices) < 2:
        return []
    inside = _in_layers(matrices)
    width = model_width(found)
    outside = []
    for spec in matrices:
        is_plain = len(spec.shape) == 2 and spec.shape[0] != spec.shape[1]
        is_hidden = spec.path in inside or spec.given or _is_hidden(spec)
        if is_plain and not is_hidden and width in spec.shape:
            outside.append(spec)
    longest = [spec for spec in outside if _is_longest(spec, matrices)]
    if len(inside) > 1 and longest:
        return longest
    if len(inside) > 1 and any(map(_is_in_block, inside)):
        return outside
    if sum(map(_is_feed_forward, matrices)) > 1:
        return longest
    return [spec for spec in longest if _is_as_long_as_a_vocabulary(spec, matrices)]


def _is_table(spec: ParamSpec) -> bool:
    """Return whether a parameter is a table, or one that a user gave to AdamW."""
    return spec.kind in TABLES or (spec.kind == "given" and len(spec.shape) > 1)


def _in_layers(matrices: Sequence[ParamSpec]) -> set[str]:
    """Return the paths of the matrices that are in layers.

    Layers have a name, or are stacked in one array. In a tree without blocks of these,
    they are modules that have an equal layer, such as "b1" and "b2" with "b1/up" and
    "b2/up", or that have attention and another layer.
    """
    inside = set()
    for spec in matrices:
        assert spec.dims is not None
        count, _, _ = matrix_shape(spec.shape, spec.dims)
        if count > 1 or is_inside_layer(spec.path):
            inside.add(spec.path)
    if any(map(_is_in_block, inside)):
        return inside
    modules = _with_equal_layers(matrices) | _with_attention(matrices)
    for spec in matrices:
        if modules.intersection(_above(spec.path)):
            inside.add(spec.path)
    return inside


def _is_in_block(path: str) -> bool:
    """Return whether a matrix has a name of its own in its layer: not "layers_0"."""
    parts = path.split("/")
    found = words(parts[layer_depth(parts) - 1])
    return found != () and not v.UNITS.issuperset(found)


def _with_equal_layers(matrices: Sequence[ParamSpec]) -> set[str]:
    """Return the paths of modules in which a layer has one name and one shape."""
    alike: dict[object, set[str]] = defaultdict(set)
    for spec in matrices:
        parts = spec.path.split("/")
        # The last names are those of the layer.
        for i in range(layer_depth(parts) - 1):
            key = (*parts[:i], "", *parts[i + 1 :], spec.shape)
            alike[key].add("/".join(parts[: i + 1]))
    modules = set()
    for paths in alike.values():
        if len(paths) > 1:
            modules |= paths
    return modules


def _with_attention(matrices: Sequence[ParamSpec]) -> set[str]:
    """Return the paths of modules that have attention and another layer."""
    attention: set[str] = set()
    others: set[str] = set()
    for spec in matrices:
        is_attention = not v.ATTENTION.isdisjoint(words(spec.path))
        (attention if is_attention else others).update(_above(spec.path))
    # A module that has all matrices is the model.
    model = set.intersection(*({*_above(spec.path)} for spec in matrices))
    both = (attention & others) - model
    # The innermost one.
    return {path for path in both if not any(x.startswith(f"{path}/") for x in both)}


def _above(path: str) -> list[str]:
    """Return the paths of the modules that a parameter is in."""
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def _is_hidden(spec: ParamSpec) -> bool:
    """Return whether a matrix is of attention or of a feed-forward layer by its name.

    A layer called "fc" may be the last one of a model.
    """
    if layer_name(spec.path.split("/")) == "fc":
        return False
    return not v.INNER.isdisjoint(words(spec.path))


def _is_feed_forward(spec: ParamSpec) -> bool:
    return not v.FEED_FORWARD.isdisjoint(words(spec.path))


def _is_longest(spec: ParamSpec, matrices: Sequence[ParamSpec]) -> bool:
    """Return whether a matrix has an axis longer than all axes of all others."""
    return max(spec.shape) > _longest_beside(spec, matrices)


def _is_as_long_as_a_vocabulary(spec: ParamSpec, matrices: Sequence[ParamSpec]) -> bool:
    """Return whether a matrix has an axis much longer than the others of the tree."""
    long = 8 * _longest_beside(spec, matrices)
    return max(spec.shape) >= max(_SMALL_VOCABULARY, long)


def _longest_beside(spec: ParamSpec, matrices: Sequence[ParamSpec]) -> int:
    """Return the longest axis of all other matrices."""
    return max(max(x.shape) for x in matrices if x is not spec)
