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
from normpre_optax.parameters.repeats import repeated
from normpre_optax.parameters.rules import Choice, Chooser, chooser, counted, decide, pieces


def explain(
    params: Any, matrix_dims: Any = None, *, every_layer: bool = False, mesh: Any = None, shardings: Any = None
) -> str:
    """Shows what becomes of every parameter.

    Args:
        params: the parameters, as the optimizer will see them.
        matrix_dims: as the optimizer takes it.
        every_layer: whether layers that are alike in all their parameters are listed one by one, not once for all.
        mesh: a `jax.sharding.Mesh` to say who computes what on it, and what that moves.
        shardings: where the parameters lie on it, as the optimizer takes it; None asks the arrays.

    Returns:
        A plain-text table: path, shape, optimizer, matrices as count x (out x in), reason; then the totals, and with
        `mesh` how the matrices are shared out. Where layers are alike, a line stands for all of them: its shape is that
        of each, its matrices are those of all. A parameter for which the optimizer would raise is shown as such. A word
        in quotes decided by itself, in a name that may mean something else (a rule can say so).

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

        >>> blocks = [{"up": {"kernel": jnp.zeros((4, 8))}} for _ in range(24)]
        >>> print(explain({"blocks": blocks}).splitlines()[1])
        blocks/{0..23}/up/kernel  24 x (4, 8)  matrix     24 x (8 x 4)  (in, out)
    """
    choose = chooser(params, matrix_dims)
    leaves = views(params)
    rows = [_row(path, leaf, choose) for path, leaf in leaves.items()]
    table = [row.cells for row in rows] if every_layer else _joined(rows)
    lines = [*_aligned([_HEADER, *table]), "", *_totals(rows)]
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
            "  if they are told where the parameters lie, which JAX does not say on Auto axes: give them\n"
            "  shardings=jax.tree.map(lambda x: x.sharding, params); untold, XLA gathers matrices for every product"
        )
    return lines


_HEADER = ("parameter", "shape", "optimizer", "matrices", "reason")


class _Row(NamedTuple):
    cells: tuple[str, ...]
    size: int
    matrices: Counter[tuple[int, int]]
    choice: Choice | None = None


def _row(path: str, leaf: Leaf, choose: Chooser) -> _Row:
    try:
        choice = decide(path, leaf, choose)
    except (ValueError, TypeError) as error:
        return _Row((path, str(leaf.shape), "ERROR", "", getattr(error, "why", str(error))), leaf.size, Counter())
    if choice.dims is None:
        return _Row((path, str(leaf.shape), "adamw", "", choice.reason), leaf.size, Counter())
    counts = Counter[tuple[int, int]]()
    for one in pieces(choice):
        if one.dims is not None:
            batch, rows, columns = matrix_shape(one.shape, one.dims)
            counts[rows, columns] += batch
    return _Row((path, str(leaf.shape), "matrix", _in_words(counts), choice.reason), leaf.size, counts, choice)


def _joined(rows: list[_Row]) -> list[tuple[str, ...]]:
    """The cells of all rows, those of layers that are alike in one."""
    by_path, cells = {row.cells[0]: row for row in rows}, []
    for name, paths, (shape, label, _, reason) in repeated({row.cells[0]: row.cells[1:] for row in rows}):
        matrices = sum((by_path[path].matrices for path in paths), Counter[tuple[int, int]]())
        count = f"{len(paths)} x " if len(paths) > 1 else ""
        cells.append((name, count + shape, label, _in_words(matrices), reason))
    return cells


def _in_words(matrices: Counter[tuple[int, int]]) -> str:
    return ", ".join(f"{count} x ({rows} x {columns})" for (rows, columns), count in matrices.items())


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
            line += ", " + counted(sum(row.matrices.total() for row in chosen), "matrix", "matrices")
        lines += [line] if chosen or label != "ERROR" else []
    if any("' in '" in row.cells[-1] for row in rows):
        lines.append("note: a word in quotes decided by itself, in a name that may mean something else")
    return lines
