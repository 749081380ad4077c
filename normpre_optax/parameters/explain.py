# SPDX-License-Identifier: Apache-2.0
"""Print which group every parameter is in, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from normpre_optax.checks import check_dtype_of
from normpre_optax.parameters.cautions import cautions
from normpre_optax.parameters.dims import blocks_of, matrix_shape
from normpre_optax.parameters.labels import repeated
from normpre_optax.parameters.names import Kind
from normpre_optax.parameters.overrides import reader
from normpre_optax.parameters.roles import keeps_norms, row_norms_by_path
from normpre_optax.parameters.rules import assign, read_default
from normpre_optax.parameters.spec import (
    HOW_TO_NAME,
    Assignment,
    Reader,
    Reading,
    Rule,
    UncoveredError,
)
from normpre_optax.parameters.tree import MAX_ASPECT_RATIO, Leaf, leaves
from normpre_optax.parameters.vocabulary import words
from normpre_optax.trees import PyTree

_HEADER = ("parameter", "shape", "optimizer", "matrices", "reason")
_VOCABULARY = "has an axis of the vocabulary size"

Matrices = Counter[tuple[int, int]]  # number of matrices by (outputs, inputs)


class _Row(NamedTuple):
    """A parameter in the table.

    Args:
        path: its path.
        leaf: its shape and dtype.
        group: its optimizer, or "ERROR".
        matrices: its matrices.
        reason: why it is in the group, or why there is an error.
        kind: what it is; None for an error.
        quoted: whether one word of a longer name decided.
        vocabulary: whether it is a matrix with an axis of the vocabulary size.
    """

    path: str
    leaf: Leaf
    group: Literal["matrix", "adamw", "ERROR"]
    matrices: Matrices
    reason: str
    kind: Kind | None = None
    quoted: bool = False
    vocabulary: bool = False


def explain(
    params: PyTree,
    matrix_dims: PyTree | Rule = None,
    *,
    row_norms: PyTree = None,
    every_layer: bool = False,
) -> str:
    """Return a table of which group every parameter is in, and why.

    Args:
        params: the parameters that you pass to the optimizer.
        matrix_dims: that of the optimizer.
        row_norms: that of the optimizer, under Hyperball.
        every_layer: whether to list equal layers one by one.

    Returns:
        A plain-text table with path, shape, group, matrices as count x (out x in), and
        reason; then the totals, and notes on likely mistakes. Equal layers share a
        line, with the shape of one parameter and the matrices of all. A parameter for
        which the optimizer raises an error is shown as ERROR.

    Raises:
        ValueError: if ``matrix_dims`` is a tree that does not match, or two paths are
            equal.
        TypeError: if ``matrix_dims`` has an unsupported type, or a leaf is not an
            array.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import explain
        >>> print(explain({"up": {"kernel": jnp.zeros((4, 8)), "bias": jnp.zeros(8)}}))
        parameter  shape   optimizer  matrices     reason
        up/bias    (8,)    adamw                   bias
        up/kernel  (4, 8)  matrix     1 x (8 x 4)  (in, out)
        <BLANKLINE>
        matrix: 1 parameter, 32 elements, 1 matrix
        adamw:  1 parameter, 8 elements

        >>> blocks = [{"up": {"kernel": jnp.zeros((4, 8))}} for _ in range(24)]
        >>> print(explain({"blocks": blocks}).splitlines()[1])
        blocks/{0..23}/up/kernel  24 x (4, 8)  matrix     24 x (8 x 4)  (in, out)
    """
    read: Reader = read_default
    if matrix_dims is not None:
        read = reader(params, matrix_dims, read_default)
    rows = _marked([_row(path, leaf, read) for path, leaf in leaves(params).items()])
    found = Assignment()
    # `assign` would raise these errors.
    if not any(row.group == "ERROR" for row in rows):
        found = assign(params, matrix_dims)
    likely = (*_notes(rows), *cautions(found, params, row_norms is None))
    notes = [f"note: {text}" for text in likely]
    norms = list(_row_norms(row_norms, params, found))
    return "\n".join([*_table(rows, every_layer), "", *_totals(rows), *norms, *notes])


def _row(path: str, leaf: Leaf, read: Reader) -> _Row:
    """Return the row of a parameter."""
    try:
        reading = read(path, leaf)
        check_dtype_of(path, leaf.dtype)
    except UncoveredError as error:
        return _Row(path, leaf, "ERROR", Matrices(), error.short)
    except (ValueError, TypeError) as error:
        return _Row(path, leaf, "ERROR", Matrices(), str(error))
    return _Row(
        path,
        leaf,
        "adamw" if reading.dims is None else "matrix",
        _matrices(leaf, reading),
        reading.reason,
        reading.kind,
        reading.quoted,
    )


def _matrices(leaf: Leaf, reading: Reading) -> Matrices:
    """Return the matrices of a parameter; those of its output blocks are several."""
    matrices = Matrices()
    if reading.dims is None:
        return matrices
    for _, dims, shape in blocks_of(leaf.shape, reading.dims):
        count, outputs, inputs = matrix_shape(shape, dims)
        matrices[outputs, inputs] += count
    return matrices


def _marked(rows: Sequence[_Row]) -> list[_Row]:
    """Return the rows with marks at matrices that have an axis as long as a table."""
    sizes = _vocabulary_sizes(rows)
    marked = []
    for row in rows:
        is_matrix = row.group == "matrix" and row.leaf.ndim == 2
        if is_matrix and not sizes.isdisjoint(row.leaf.shape):
            reason = f"{row.reason}, {_VOCABULARY}"
            row = row._replace(reason=reason, vocabulary=True)
        marked.append(row)
    return marked


def _vocabulary_sizes(rows: Iterable[_Row]) -> set[int]:
    """Return the larger axis sizes of embeddings that are no widths.

    A norm or another embedding shows that a size is a width.
    """
    tables, widths = [], set()
    for row in rows:
        if row.kind == "embedding" and row.leaf.ndim == 2:
            tables.append(row.leaf.shape)
        if row.kind == "norm":
            widths.update(row.leaf.shape)
    # The smaller axis of a table is its width.
    widths.update(min(shape) for shape in tables)
    return {max(shape) for shape in tables} - widths


def _table(rows: Sequence[_Row], every_layer: bool) -> list[str]:
    """Return the lines of the table; equal layers share a line."""
    by_path = {row.path: row for row in rows}
    groups = [(row.path, (row.path,)) for row in rows]
    if not every_layer:
        entries = {row.path: (row.leaf.shape, row.group, row.reason) for row in rows}
        groups = [(name, paths) for name, paths, _ in repeated(entries)]
    cells: list[tuple[str, ...]] = [_HEADER]
    for name, paths in groups:
        cells.append(_cells(name, [by_path[path] for path in paths]))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]


def _cells(name: str, rows: Sequence[_Row]) -> tuple[str, ...]:
    """Return a line of the table, for parameters that differ only in their matrices."""
    matrices = Matrices()
    for row in rows:
        matrices += row.matrices
    counts = [f"{n} x ({out} x {inputs})" for (out, inputs), n in matrices.items()]
    shape = str(rows[0].leaf.shape)
    if len(rows) > 1:
        shape = f"{len(rows)} x {shape}"
    return name, shape, rows[0].group, ", ".join(counts), rows[0].reason


def _totals(rows: Sequence[_Row]) -> Iterator[str]:
    """Yield the numbers of parameters, elements and matrices of each group."""
    for group in ("matrix", "adamw", "ERROR"):
        found = [row for row in rows if row.group == group]
        if group == "ERROR" and not found:
            continue
        counts = [
            _counted(len(found), "parameter", "parameters"),
            _counted(sum(row.leaf.size for row in found), "element", "elements"),
        ]
        if group == "matrix":
            matrices = sum(row.matrices.total() for row in found)
            counts.append(_counted(matrices, "matrix", "matrices"))
        yield f"{group + ':':8}" + ", ".join(counts)


def _counted(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


def _row_norms(row_norms: PyTree, params: PyTree, found: Assignment) -> Iterator[str]:
    """Yield a line with the row norms that Hyperball sets, if they differ."""
    start = "row norms under Hyperball: "
    if keeps_norms(row_norms):
        yield f"{start}those that the matrices have"
        return
    norms = {}
    for path, norm in row_norms_by_path(row_norms, params, found).items():
        if found[path].dims is not None:
            norms[path] = f"{float(norm):.2g}"
    written = {path: norm for path, norm in norms.items() if norm != "1"}
    if not written:
        return
    texts = []
    for name, paths, _ in repeated(written):
        texts.append(f"{written[paths[0]]} for {name}")
    others = "the others" if len(written) < len(norms) else "none"
    texts.append(f"1 for {others}")
    yield f"{start}{', '.join(texts)}"


def _notes(rows: Sequence[_Row]) -> Iterator[str]:
    """Yield what looks like a mistake in a single parameter."""
    if any(row.group == "ERROR" and not words(row.path) for row in rows):
        yield f"some parameters have no names: {HOW_TO_NAME}"
    if any(row.quoted for row in rows):
        yield (
            "the quoted word alone decided the group; its name may mean something else"
        )
    long = [row.path for row in rows if any(map(_is_long, row.matrices))]
    if long:
        yield (
            f"a matrix such as {long[0]!r}, longer than {MAX_ASPECT_RATIO}:1, may be a"
            " table: return None in a rule"
        )
    if any(row.vocabulary for row in rows):
        yield (
            f"a matrix that {_VOCABULARY} may be an output head; if it is one, return"
            " None for it in a rule"
        )


def _is_long(shape: tuple[int, int]) -> bool:
    return max(shape) > MAX_ASPECT_RATIO * min(shape)
