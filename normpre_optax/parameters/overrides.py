# SPDX-License-Identifier: Apache-2.0
"""The option ``matrix_dims``: a rule, a tree, or a function that returns a tree."""

from __future__ import annotations

import contextlib
import inspect

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from normpre_optax.parameters.dims import MatrixDims, as_matrix_dims, check_dims
from normpre_optax.parameters.spec import Reader, Reading, UncoveredError
from normpre_optax.parameters.tree import Leaf, named_leaves
from normpre_optax.trees import PyTree

GIVEN = "given by matrix_dims"
_WRONG_TREE = "matrix_dims does not match the parameters"
_KINDS = (
    "None, a rule (path, leaf), a function of the parameters, or a tree of MatrixDims"
    " and None"
)


def reader(params: PyTree, matrix_dims: PyTree, default: Reader) -> Reader:
    """Return the function ``(path, leaf) -> Reading`` of a ``matrix_dims``.

    Args:
        params: the tree of parameters.
        matrix_dims: the option, not None.
        default: the default rule. Where the option agrees with it, it says why.

    Raises:
        TypeError: if ``matrix_dims`` has an unsupported type.
        ValueError: if it is a tree that does not match the parameters.
    """
    if _is_tree(matrix_dims):
        return _tree_reader(params, matrix_dims, default)
    count = _count_required_arguments(matrix_dims)
    if count == 1:
        return _tree_reader(params, matrix_dims(params), default)
    if count == 2:
        rule = matrix_dims

        def read(path: str, leaf: Leaf) -> Reading:
            return _given(path, leaf, rule(path, leaf), default)

        return read
    takes = f" of {count} arguments" if count else ""
    raise TypeError(f"matrix_dims must be {_KINDS}; got {matrix_dims!r}{takes}")


def _is_tree(matrix_dims: PyTree) -> bool:
    """Return whether the option is a tree of entries, or something else like one.

    A container can be callable, such as an Equinox module. A callable can be a
    container, such as jax's Partial.
    """
    if _is_entry(matrix_dims):
        return True
    entries, structure = jax.tree.flatten(matrix_dims, is_leaf=_is_entry)
    if jax.tree_util.treedef_is_leaf(structure) and entries:
        return False
    if not callable(matrix_dims):
        return True
    return bool(entries) and all(map(_is_entry, entries))


def _is_entry(value: object) -> bool:
    return value is None or isinstance(value, MatrixDims | MuonDimensionNumbers)


def _count_required_arguments(function: object) -> int:
    """Return the number of positional arguments without a default; 0 if no function."""
    if not callable(function):
        return 0
    arguments = inspect.signature(function).parameters.values()
    required = [
        x
        for x in arguments
        # Kinds are ordered: positional ones come first.
        if x.default is x.empty and x.kind <= x.POSITIONAL_OR_KEYWORD
    ]
    return len(required)


def _given(path: str, leaf: Leaf, value: object, default: Reader) -> Reading:
    """Return the reading of a value that a user passed, after checking it."""
    dims = as_matrix_dims(path, value)
    if dims is not None:
        check_dims(path, leaf.shape, dims)
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise TypeError(
                f"parameter {path!r} is complex, a matrix must be real: None passes it"
                " to AdamW"
            )
    # Where the default rule says the same, it also knows the kind and a reason.
    with contextlib.suppress(UncoveredError):
        reading = default(path, leaf)
        if dims == reading.dims:
            return reading
    if dims is not None:
        return Reading(dims, "matrix", GIVEN, given=True)
    by_itself = None
    with contextlib.suppress(UncoveredError):
        by_itself = default(path, Leaf(leaf.shape, leaf.dtype)).dims
    return Reading(None, "given", GIVEN, default=by_itself, given=True)


def _tree_reader(params: PyTree, dims: PyTree, default: Reader) -> Reader:
    """Return the reader of a tree, or a prefix of one: it finds entries by paths."""
    entries = {
        path: as_matrix_dims(path, value)
        for path, value, *_ in named_leaves(dims, _is_entry)
    }

    def nearest(path: str) -> str:
        while path and path not in entries:
            path = path.rpartition("/")[0]
        return path

    # An entry for a parameter that is masked or filtered out is in use.
    used = {nearest(path) for path, *_ in named_leaves(params, _is_removed)}
    for path, entry in entries.items():
        if entry is not None and path not in used:
            raise ValueError(
                f"{_WRONG_TREE}: it has an entry at {path!r}, where there is no"
                " parameter"
            )

    def read(path: str, leaf: Leaf) -> Reading:
        if nearest(path) not in entries:
            raise ValueError(
                f"{_WRONG_TREE}: it has no entry for {path!r} or its parents (None"
                " means AdamW)"
            )
        reading = _given(path, leaf, entries[nearest(path)], default)
        # A rule may pass on what the default rule says, but an entry is the user's.
        return reading._replace(given=True)

    return read


def _is_removed(node: object) -> bool:
    """Return whether a node replaces a removed parameter."""
    return node is None or isinstance(node, optax.MaskedNode)
