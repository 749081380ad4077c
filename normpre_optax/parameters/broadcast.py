# SPDX-License-Identifier: Apache-2.0
"""Options that are trees like the parameters: a function, a prefix, or the tree itself.

``whole_tree`` returns one entry for every parameter. An entry of a prefix, such as one
for a module, is repeated for all parameters below it.
"""

from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax

from normpre_optax.checks import check_number
from normpre_optax.parameters.tree import leaf_paths, named_leaves
from normpre_optax.trees import PyTree

Kinds = tuple[type, ...]


def whole_tree(
    name: str, given: PyTree, params: PyTree, kinds: Kinds, what: str
) -> PyTree:
    """Return an option that is a tree, with one entry for every parameter.

    Args:
        name: name of the option, for errors.
        given: a tree like the parameters, or a prefix of one, or a function ``(params)
            -> tree``.
        params: the tree of parameters.
        kinds: types of the entries. With ``NoneType``, None is an entry, too.
        what: the entries in words, for errors.

    Returns:
        A tree like the parameters.

    Raises:
        TypeError: if ``given`` is neither a tree of such entries nor a function.
        ValueError: if the tree does not match the parameters.
    """
    tree = given
    # An Equinox module is a callable tree.
    if callable(given) and not _is_tree_of(kinds, given):
        tree = given(params)
    if not _is_tree_of(kinds, tree):
        raise TypeError(
            f"{name} must be a tree of {what} or a function (params) -> tree, got"
            f" {tree!r}"
        )
    try:
        return jax.tree.broadcast(tree, params, is_leaf=_none_is_leaf(kinds))
    except (ValueError, TypeError) as error:
        entries = [path for path, *_ in named_leaves(tree, _none_is_leaf(kinds))]
        other = (
            "it has other containers (for a state of Flax NNX, pass"
            f" nnx.as_pure(state)): {error}"
        )
        why = _first_difference(leaf_paths(params), entries) or other
        raise ValueError(
            f"{name} must be a tree like the parameters, or a prefix of it: {why}"
        ) from error


def numbers(name: str, given: PyTree, params: PyTree) -> list[Any]:
    """Return an option that is a tree of numbers, as a list with one per parameter.

    Raises:
        TypeError: if ``given`` is neither a tree of numbers nor a function.
        ValueError: if the tree does not match the parameters, or a number is out of
            range.
    """
    tree = whole_tree(name, given, params, get_args(jax.typing.ArrayLike), "numbers")
    found = jax.tree.leaves(tree)
    for path, x in zip(leaf_paths(params), found, strict=True):
        check_number(f"{name} of {path!r}", x, name)
    return found


def _none_is_leaf(kinds: Kinds) -> Callable[[Any], bool]:
    """Return ``is_leaf`` for jax.tree: None is an entry if ``kinds`` has its type."""

    def is_leaf(node: object) -> bool:
        return node is None and type(None) in kinds

    return is_leaf


def _is_tree_of(kinds: Kinds, tree: PyTree) -> bool:
    """Return whether all leaves of a tree are of these types."""
    entries = jax.tree.leaves(tree, is_leaf=_none_is_leaf(kinds))
    return all(isinstance(x, kinds) for x in entries)


def _first_difference(paths: Sequence[str], entries: Sequence[str]) -> str:
    """Return the first parameter without an entry, or entry without one, or ""."""
    for path in paths:
        if not any(_covers(entry, path) for entry in entries):
            return f"{path!r} is missing"
    for entry in entries:
        if not any(_covers(entry, path) for path in paths):
            return f"{entry!r} is unknown"
    return ""


def _covers(entry: str, path: str) -> bool:
    """Return whether a parameter is at or below the path of an entry."""
    # The slash, or "up" would cover "up_2".
    return f"{path}/".startswith(f"{entry}/")
