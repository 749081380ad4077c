# SPDX-License-Identifier: Apache-2.0
"""What looks like a mistake in a whole tree of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import optax

from normpre_optax.parameters.labels import repeated
from normpre_optax.parameters.layer_counts import score_matrices
from normpre_optax.parameters.names import Named, kind_by_name
from normpre_optax.parameters.roles import (
    matrix_shapes,
    model_width,
    residual_outputs,
    unclear_roles,
)
from normpre_optax.parameters.spec import Assignment, ParamSpec
from normpre_optax.parameters.transposed_layers import (
    exchanged_dims,
    transposed_layers,
)
from normpre_optax.parameters.tree import named_leaves
from normpre_optax.parameters.unnamed_tables import TABLES, unnamed_tables
from normpre_optax.trees import PyTree

_NO_MATRIX = "no parameter is a matrix, so all use AdamW; explain(params) shows why"
_VECTOR = (
    "the parameters are one vector without a name, updated by AdamW; optax.flatten"
    " hides the matrices: remove it"
)
_UNCLEAR = (
    "nothing shows whether {} write into the residual stream, so Hyperball sets their"
    " row norms to 1; found to write: {}. If they write, pass row_norms=, a tree of"
    " numbers"
)
_MASKED = (
    "masked matrices, such as {!r}, are not counted in the row norms that Hyperball"
    " sets: pass row_norms=, or freeze after the optimizer: optax.chain(optimizer,"
    " optax.freeze(mask))"
)
_NO_TABLE = (
    "no parameter has the name of an embedding or of an output head, but {} may be one"
    " (Flax NNX keeps only one of the names of a tied table): if so, return None for it"
    " in a rule, matrix_dims="
)
_TRANSPOSED = (
    "the name of {} is that of the first layer of an MLP, but its outputs are as many"
    " as the model is wide, {}, not its inputs. The MLP may be stored as {}, not as {}:"
    " if so, return MatrixDims(inputs={}, outputs={}) for its layers in a rule,"
    " matrix_dims="
)
_SCORES = (
    "{} have an output for every expert, so they may be routers: if so, return None for"
    " them in a rule, matrix_dims="
)
_MOST_NAMES = 3  # in a warning


def cautions(found: Assignment, params: PyTree, by_role: bool = True) -> Iterator[str]:
    """Yield what looks like a mistake; optimizers warn of it at ``init``.

    Args:
        found: the groups of the parameters.
        params: the tree of parameters.
        by_role: whether Hyperball sets row norms by the roles of matrices.
    """
    matrices = {path for path, spec in found.items() if spec.dims}
    # An empty tree is no mistake: optax.tree.map_params initializes with one.
    if found and not matrices:
        yield _VECTOR if _is_one_flat_vector(found) else _NO_MATRIX
    if by_role and matrices:
        hole = _masked_matrix(params, {_last(path) for path in matrices})
        if hole is not None:
            yield _MASKED.format(hole)
        unclear = unclear_roles(found)
        if unclear:
            yield _UNCLEAR.format(
                _joined(unclear, found), _joined(residual_outputs(found), found)
            )
    candidates = unnamed_tables(found)
    if candidates and not _hides_a_table(params):
        shown = [f"{spec.path!r} of shape {spec.shape}" for spec in candidates]
        yield _NO_TABLE.format(" or ".join(shown[:_MOST_NAMES]))
    scores = score_matrices(found, model_width(found))
    if scores:
        yield _SCORES.format(_joined({*scores}, found))
    transposed = transposed_layers(found)
    if transposed:
        yield _transposed_text(transposed, found)


def _transposed_text(specs: Sequence[ParamSpec], found: Assignment) -> str:
    """Return the note on layers that are read with inputs and outputs exchanged."""
    width, _ = matrix_shapes(found)[specs[0].path]
    read, stored, dims = exchanged_dims(specs[0])
    names = _joined({spec.path for spec in specs}, found)
    return _TRANSPOSED.format(names, width, stored, read, dims.inputs, dims.outputs)


def _joined(paths: set[str], found: Assignment) -> str:
    """Return the common names of parameters, the first three."""
    shapes = {path: spec.shape for path, spec in found.items() if path in paths}
    names = [repr(name) for name, *_ in repeated(shapes)]
    if len(names) > _MOST_NAMES:
        names[_MOST_NAMES:] = [f"{len(names) - _MOST_NAMES} others"]
    return ", ".join(names) or "none"


def _is_one_flat_vector(found: Assignment) -> bool:
    """Return whether the tree is one vector without a name, as in ``optax.flatten``."""
    return [(spec.path, len(spec.shape)) for spec in found.values()] == [("", 1)]


def _masked_matrix(params: PyTree, names: set[str]) -> str | None:
    """Return the path of the first masked parameter that is a matrix by its names.

    Args:
        params: the tree of parameters.
        names: last parts of the paths of matrices. None counts as masked only with such
            a name: it may also be what a model does not have, such as a bias.
    """
    for path, hole, *_ in named_leaves(params, _is_hole):
        masked = isinstance(hole, optax.MaskedNode)
        masked = masked or (hole is None and _last(path) in names)
        # Its shape is unknown. A matrix has two axes.
        if masked and kind_by_name(Named(path.split("/"), ndim=2)) is None:
            return path
    return None


def _hides_a_table(params: PyTree) -> bool:
    """Return whether an embedding or a head may be among the masked parameters.

    A user who masks parameters has seen which ones are matrices. None may also be what
    a model does not have, such as a bias: here, its name counts.
    """
    for path, hole, *_ in named_leaves(params, _is_hole):
        if isinstance(hole, optax.MaskedNode):
            return True
        by_name = kind_by_name(Named(path.split("/"), ndim=2))
        if hole is None and by_name is not None and by_name.kind in TABLES:
            return True
    return False


def _is_hole(node: object) -> bool:
    return node is None or isinstance(node, optax.MaskedNode)


def _last(path: str) -> str:
    return path.rpartition("/")[2]
