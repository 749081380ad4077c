# SPDX-License-Identifier: Apache-2.0
"""Print which group every parameter is in, and why."""

from __future__ import annotations

from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

from normpre_optax.checks import check_dtype_of
from normpre_optax.parameters.cautions import cautions
from normpre_optax.parameters.dims import blocks_of, matrix_shape
from normpre_optax.parameters.roles import row_norms_by_role
from normpre_optax.parameters.rules import (
    Assignment,
    Reading,
    assign,
    default_reading,
    reader,
)
from normpre_optax.parameters.tree import (
    MAX_ASPECT_RATIO,
    Leaf,
    leaves,
    repeated,
)

_VOCABULARY = "has an axis of the vocabulary size"
_Row = namedtuple("_Row", "path leaf group matrices reason")


def explain(params: Any, matrix_dims: Any = None, *, every_layer: bool = False) -> str:
    """Return a table of which group every parameter is in, and why.

    Args:
        params: the parameters that you pass to the optimizer.
        matrix_dims: that of the optimizer.
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
    read = default_reading if matrix_dims is None else reader(params, matrix_dims)
    rows = [_row(path, leaf, read) for path, leaf in leaves(params).items()]
    sizes = _vocabulary_sizes(rows)
    for i, row in enumerate(rows):
        if (
            row.group == "matrix"
            and row.leaf.ndim == 2
            and sizes.intersection(row.leaf.shape)
        ):
            rows[i] = row._replace(reason=f"{row.reason}, {_VOCABULARY}")
    by_path, table = (
        {row.path: row for row in rows},
        [("parameter", "shape", "optimizer", "matrices", "reason")],
    )
    entries = {row.path: (row.leaf.shape, row.group, row.reason) for row in rows}
    joined = (
        [(path, (path,), entry) for path, entry in entries.items()]
        if every_layer
        else repeated(entries)
    )
    for name, paths, (shape, group, reason) in joined:
        matrices = sum(
            (by_path[path].matrices for path in paths), Counter[tuple[int, int]]()
        )
        counts = ", ".join(
            f"{count} x ({out} x {inputs})" for (out, inputs), count in matrices.items()
        )
        table.append(
            (
                name,
                f"{len(paths)} x " * (len(paths) > 1) + str(shape),
                group,
                counts,
                reason,
            )
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        *("  ".join(map(str.ljust, line, widths)).rstrip() for line in table),
        "",
        *_totals(rows),
    ]
    found = (
        Assignment()
        if any(row.group == "ERROR" for row in rows)
        else assign(params, matrix_dims)
    )
    return "\n".join(
        [
            *lines,
            *_row_norms(found),
            *(f"note: {x}" for x in (*_notes(rows), *cautions(found, params))),
        ]
    )


def _row(path: str, leaf: Leaf, read: Callable[[str, Leaf], Reading]) -> _Row:
    try:
        dims, reason = read(path, leaf)
        check_dtype_of(path, leaf.dtype)
    except (ValueError, TypeError) as error:
        return _Row(path, leaf, "ERROR", Counter(), getattr(error, "short", str(error)))
    matrices = Counter[tuple[int, int]]()
    for _, one, shape in blocks_of(leaf.shape, dims) if dims else ():
        count, outputs, inputs = matrix_shape(shape, one)
        matrices[outputs, inputs] += count
    return _Row(path, leaf, "matrix" if dims else "adamw", matrices, reason)


def _vocabulary_sizes(rows: list[_Row]) -> set[int]:
    """Return the larger axis sizes of embeddings, except those that a norm or another
    embedding shows to be widths.
    """
    tables = [
        row.leaf.shape
        for row in rows
        if row.reason.startswith("embedding") and row.leaf.ndim == 2
    ]
    widths = {min(shape) for shape in tables}
    widths.update(
        size for row in rows if row.reason == "norm or scale" for size in row.leaf.shape
    )
    return {max(shape) for shape in tables} - widths


def _totals(rows: list[_Row]) -> Iterator[str]:
    for group in ("matrix", "adamw", "ERROR"):
        found = [row for row in rows if row.group == group]
        counts = [
            (len(found), "parameter", "parameters"),
            (sum(row.leaf.size for row in found), "element", "elements"),
        ]
        if group == "matrix":
            counts.append(
                (sum(row.matrices.total() for row in found), "matrix", "matrices")
            )
        if found or group != "ERROR":
            yield f"{group + ':':8}" + ", ".join(
                f"{n:,} {one if n == 1 else many}" for n, one, many in counts
            )


def _row_norms(found: Assignment) -> Iterator[str]:
    """Return a line with the row norms that Hyperball sets, if they differ."""
    norms = row_norms_by_role(found)
    written = {path: norm for path, norm in norms.items() if norm != 1}
    if written:
        each = "".join(
            f"{norm:.2g} for {name}, " for name, _, norm in repeated(written)
        )
        yield (
            f"row norms under Hyperball: {each}1 for"
            f" {'the others' if len(written) < len(norms) else 'none'}"
        )


def _notes(rows: list[_Row]) -> Iterator[str]:
    if any("' in '" in row.reason for row in rows):
        yield (
            "the quoted word alone decided the group; its name may mean something else"
        )

    def is_long(shape):
        return max(shape) > MAX_ASPECT_RATIO * min(shape)

    if long := [row.path for row in rows if any(map(is_long, row.matrices))]:
        yield (
            f"a matrix such as {long[0]!r}, longer than {MAX_ASPECT_RATIO}:1, may be a"
            " table: return None in a rule"
        )
    if any(row.reason.endswith(_VOCABULARY) for row in rows):
        yield (
            f"a matrix that {_VOCABULARY} may be an output head; if it is one, return"
            " None for it in a rule"
        )
