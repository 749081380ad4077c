# SPDX-License-Identifier: Apache-2.0
"""The table of what becomes of every parameter, and on a mesh of who computes what."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from normpre_optax.meshes.plan import in_words, stack_of
from normpre_optax.meshes.specs import check_spec, matrix_spec, specs_of
from normpre_optax.parameters.dims import matrix_shape
from normpre_optax.parameters.leaves import Leaf, views
from normpre_optax.parameters.rules import Choice, Chooser, chooser, counted, decide, pieces


def explain(params: Any, matrix_dims: Any = None, *, mesh: Any = None, shardings: Any = None) -> str:
    """Shows what becomes of every parameter.

    Args:
        params: the parameters, as the optimizer will see them.
        matrix_dims: as the optimizer takes it.
        mesh: a `jax.sharding.Mesh` to say who computes what on it, and what that moves.
        shardings: where the parameters lie on it, as the optimizer takes it; None asks the arrays.

    Returns:
        A plain-text table: path, shape, optimizer, matrices as count x (out x in), reason; then the totals, and with
        `mesh` how the matrices are shared out. A parameter for which the optimizer would raise is shown as such.

    Raises:
        ValueError: `matrix_dims` is a tree that does not match, or two parameters have the same path.
        TypeError: `matrix_dims` is none of the accepted kinds, or a leaf is no array.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import explain
        >>> print(explain({"up": {"kernel": jnp.zeros((4, 8)), "bias": jnp.zeros(8)}}))
        parameter  shape   optimizer  matrices     reason
        up/bias    (8,)    adamw                   bias
        up/kernel  (4, 8)  matrix     1 x (8 x 4)  (in, out)
        <BLANKLINE>
        matrix: 32 numbers in 1 parameter, 1 matrix
        adamw:  8 numbers in 1 parameter
    """
    choose = chooser(params, matrix_dims)
    leaves = views(params)
    rows = [_row(path, leaf, choose) for path, leaf in leaves.items()]
    lines = [*_aligned([_HEADER, *(row.cells for row in rows)]), "", *_totals(rows)]
    if mesh is not None:
        lines += ["", *_on_mesh(params, leaves, rows, mesh, shardings)]
    elif shardings is not None:
        raise ValueError("explain: shardings say nothing without mesh=")
    return "\n".join(lines)


def _on_mesh(params: Any, leaves: dict[str, Leaf], rows: list[_Row], mesh: Any, shardings: Any) -> list[str]:
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"explain: mesh must be a jax.sharding.Mesh or AbstractMesh, got {mesh!r}")
    sizes, stacks = dict(mesh.shape), []
    if shardings is None:
        for path, x in zip(leaves, jax.tree.leaves(params), strict=True):
            there = getattr(getattr(x, "sharding", None), "mesh", mesh)
            if not there.empty and dict(there.shape) != sizes:
                raise ValueError(f"explain: parameter {path!r} lies on another mesh: {dict(there.shape)}, not {sizes}")
    for (path, leaf), row, spec in zip(leaves.items(), rows, specs_of(params, shardings), strict=True):
        check_spec(path, leaf.shape, spec, sizes)
        for one in [] if row.choice is None else pieces(row.choice._replace(spec=spec)):
            if one.dims is not None:
                where = matrix_spec(one.spec or PartitionSpec(), one.shape, one.dims)
                stacks.append(stack_of(matrix_shape(one.shape, one.dims), "float32", where))
    lines = in_words(sizes, stacks)
    if stacks and shardings is None and AxisType.Explicit not in mesh.axis_types:
        lines.append(
            "  if they are told where the parameters lie, which Auto axes do not say: give them shardings= too"
        )
    return lines


_HEADER = ("parameter", "shape", "optimizer", "matrices", "reason")


class _Row(NamedTuple):
    cells: tuple[str, ...]
    size: int
    matrices: int
    choice: Choice | None = None


def _row(path: str, leaf: Leaf, choose: Chooser) -> _Row:
    try:
        choice = decide(path, leaf, choose)
    except (ValueError, TypeError) as error:
        return _Row((path, str(leaf.shape), "ERROR", "", getattr(error, "why", str(error))), leaf.size, 0)
    if choice.dims is None:
        return _Row((path, str(leaf.shape), "adamw", "", choice.reason), leaf.size, 0)
    counts = Counter[tuple[int, int]]()
    for one in pieces(choice):
        if one.dims is not None:
            batch, rows, columns = matrix_shape(one.shape, one.dims)
            counts[rows, columns] += batch
    matrices = ", ".join(f"{count} x ({rows} x {columns})" for (rows, columns), count in counts.items())
    return _Row((path, str(leaf.shape), "matrix", matrices, choice.reason), leaf.size, counts.total(), choice)


def _aligned(table: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def _totals(rows: list[_Row]) -> list[str]:
    lines = []
    for label in ("matrix", "adamw", "ERROR"):
        chosen = [row for row in rows if row.cells[2] == label]
        line = f"{label + ':':8}{sum(row.size for row in chosen):,} numbers in "
        line += counted(len(chosen), "parameter", "parameters")
        if label == "matrix":
            line += ", " + counted(sum(row.matrices for row in chosen), "matrix", "matrices")
        lines += [line] if chosen or label != "ERROR" else []
    return lines
