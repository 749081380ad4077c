# SPDX-License-Identifier: Apache-2.0
"""The row norms of matrices under Hyperball.

They depend on whether a matrix writes into the residual stream.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

from normpre_optax.checks import check_choice
from normpre_optax.parameters import vocabulary as v
from normpre_optax.parameters.broadcast import numbers
from normpre_optax.parameters.dims import matrix_shape
from normpre_optax.parameters.labels import repeated
from normpre_optax.parameters.layer_counts import count_layers
from normpre_optax.parameters.names import (
    Kind,
    block_depth,
    layer_depth,
    layer_name,
    stack_depth,
)
from normpre_optax.parameters.spec import Assignment
from normpre_optax.parameters.vocabulary import words
from normpre_optax.trees import PyTree

_OUTPUTS = v.OUTPUTS | v.SECOND_LAYERS
# Last words of an output, after a word of attention.
_ENDS = {("o",), ("wo",), ("out",), ("output",), ("proj",), ("projection",)}
# Kinds of parameters with an axis as long as the model is wide.
_AS_WIDE: frozenset[Kind] = frozenset({"norm", "embedding"})


def row_norms_by_path(
    row_norms: PyTree, params: PyTree, found: Assignment
) -> dict[str, Any]:
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
    # Under "keep" for matrices of zeros, which have no norm to keep.
    if row_norms is None or keeps_norms(row_norms):
        return row_norms_by_role(found)
    return dict(zip(found, numbers("row_norms", row_norms, params), strict=True))


def keeps_norms(row_norms: PyTree) -> bool:
    """Return whether the option is "keep"; raise a ValueError for another word."""
    if not isinstance(row_norms, str):
        return False
    check_choice("row_norms", row_norms, ("keep",))
    return True


def row_norms_by_role(found: Assignment) -> dict[str, float]:
    """Return the row norms that Hyperball sets, by path of the matrix.

    They are ``sqrt(in / (out k))`` for the ``k`` matrices that write into the residual
    stream, and 1 for all others.

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
    roles = _Roles(found)
    outputs = roles.writers()
    k = count_layers(outputs, found, roles.width)
    norms = {}
    for path, (m, n) in roles.shapes.items():
        # With 1 / k, the residual stream does not grow with depth.
        norms[path] = math.sqrt(n / (m * k)) if path in outputs else 1.0
    return norms


def residual_outputs(found: Assignment) -> set[str]:
    """Return the paths of matrices that write into the residual stream.

    They have as many outputs as the model is wide, and one of these shows it:

    - another number of inputs, which a matrix of the width makes, such as that of an
      up projection; or a place inside a layer (by the path, or as one of several with a
      shape and a number), and no name of a query or an up projection;
    - the name of an output or of a second layer;
    - query, key and value beside it, maybe fused, and no other such matrix.
    """
    return _Roles(found).writers()


def unclear_roles(found: Assignment) -> set[str]:
    """Return the paths of matrices in layers that may write, but nothing shows it.

    They have as many inputs and outputs as the model is wide, and no telling name.
    """
    roles = _Roles(found)
    writers = roles.writers()
    return {
        path
        for path in roles.as_wide
        if path not in writers and roles.is_in_layer(path) and not roles.reads(path)
    }


class _Roles:
    """What shapes and places say of matrices.

    Attributes:
        shapes: (outputs, inputs) by path.
        width: of the model.
        as_wide: paths of the matrices with as many outputs.
    """

    def __init__(self, found: Assignment) -> None:
        self.shapes = matrix_shapes(found)
        self.width = model_width(found)
        self.as_wide = {p for p, (m, _) in self.shapes.items() if m == self.width}
        self._several: set[str] = set()
        for _, paths, _ in repeated(self.shapes):
            if len(paths) > 1:
                self._several.update(paths)
        # Sizes that are made from the residual stream.
        self._made = {m for m, n in self.shapes.values() if n == self.width != m}
        self._modules: dict[str, dict[str, str]] = {}
        for path in self.shapes:
            module, name = _module_and_name(path)
            self._modules.setdefault(module, {})[name] = path

    def writers(self) -> set[str]:
        """Return the paths of the matrices that write into the residual stream."""
        return {path for path in self.as_wide if self._writes(path)}

    def is_in_layer(self, path: str) -> bool:
        """Return whether a matrix is in a layer, or one of several alike."""
        return path in self._several or is_inside_layer(path)

    def reads(self, path: str) -> bool:
        """Return whether a matrix reads the residual stream, by the name of its layer.

        A name such as "key" counts in attention, or with another such name beside it.
        """
        name = layer_name(path.split("/"))
        if not v.READERS.isdisjoint(words(name)):
            return True
        module, own = _module_and_name(path)
        *_, last = ["", *words(own)]
        if own not in v.QUERIES and last not in v.QUERIES:
            return False
        beside = v.QUERIES & self._modules[module].keys()
        return len(beside) > 1 or not v.ATTENTION.isdisjoint(words(path))

    def _writes(self, path: str) -> bool:
        if _is_named_output(path):
            return True
        if self.reads(path):
            return False
        _, inputs = self.shapes[path]
        if inputs != self.width:
            return self.is_in_layer(path) or self._is_made(inputs)
        return self._is_beside_queries(path)

    def _is_made(self, inputs: int) -> bool:
        """Return whether a matrix of the width has these outputs, or two times them.

        A fused gate and up projection has two times as many.
        """
        return inputs in self._made or 2 * inputs in self._made

    def _is_beside_queries(self, path: str) -> bool:
        """Return whether this is the one other matrix beside query, key and value.

        A matrix with three times as many outputs as inputs is all of them, fused.
        """
        module, own = _module_and_name(path)
        beside = self._modules[module]
        queries = v.QUERIES & beside.keys()
        shapes = {name: self.shapes[other] for name, other in beside.items()}
        fused = (3 * self.width, self.width)
        is_attention = len(queries) > 1 or fused in shapes.values()
        square = (self.width, self.width)
        others = [name for name in shapes.keys() - queries if shapes[name] == square]
        return is_attention and others == [own]


def matrix_shapes(found: Assignment) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of the matrices, by path."""
    shapes = {}
    for path, spec in found.items():
        if spec.dims is not None:
            _, outputs, inputs = matrix_shape(spec.shape, spec.dims)
            shapes[path] = outputs, inputs
    return shapes


def model_width(found: Assignment) -> int:
    """Return the size that most matrices, norms and embeddings have, or 0.

    Of several such sizes, it is the smallest.
    """
    shapes: list[tuple[int, ...]] = [*matrix_shapes(found).values()]
    sizes = {size for shape in shapes for size in shape}
    shapes += [spec.shape for spec in found.values() if spec.kind in _AS_WIDE]
    # A square matrix counts once.
    count = Counter(size for shape in shapes for size in {*shape})
    return min(sizes, key=lambda size: (-count[size], size), default=0)


def is_inside_layer(path: str) -> bool:
    """Return whether a path is below the name or the number of a layer."""
    parts = path.split("/")
    if block_depth(parts) > 0 or stack_depth(parts) is not None:
        return True
    number, _ = _split_number(parts[layer_depth(parts) - 1])
    return number != ""


def _is_named_output(path: str) -> bool:
    """Return whether the name of a layer is that of an output or a second layer.

    For a plain name, as in "attention/output/dense", the module above decides.
    """
    parts = path.split("/")
    names = [part for part in parts[: layer_depth(parts)] if words(part)]
    *_, above, own = ["", "", *names]
    _, own = _split_number(own.lower())
    if own not in ("dense", "linear"):
        return own in _OUTPUTS or _ends_as_an_output(own)
    return above.lower() in _OUTPUTS or not v.ATTENTION.isdisjoint(words(above))


def _ends_as_an_output(name: str) -> bool:
    """Return whether a longer name is that of an output: "w_down", "attn_wo"."""
    found = words(name)
    if "down" in found:
        return True
    return found[-1:] in _ENDS and not v.ATTENTION.isdisjoint(found)


def _module_and_name(path: str) -> tuple[str, str]:
    """Return the module of a layer, and its name in there, in lower case."""
    parts = path.split("/")
    *above, own = parts[: layer_depth(parts)]
    number, name = _split_number(own.lower())
    return "/".join([*above, number]), name


def _split_number(name: str) -> tuple[str, str]:
    """Return the number of a layer in front of a flat name, and the rest.

    "block_0_down" is ("block_0", "down").
    """
    match = re.fullmatch(r"(.*\d)[_.-](.*[A-Za-z].*)", name)
    if match is None:
        return "", name
    return match[1], match[2]
