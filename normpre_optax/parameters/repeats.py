# SPDX-License-Identifier: Apache-2.0
"""Repeated layers that are alike, told once: "blocks/{0..23}/mlp/up/kernel"."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from normpre_optax.parameters.leaves import counts_layers

T = TypeVar("T", bound=Hashable)


class Row(NamedTuple, Generic[T]):
    """Parameters of repeated layers of which the same is to be said: their common name, their paths, and what."""

    name: str
    paths: tuple[str, ...]
    what: T


def repeated(table: Mapping[str, T]) -> list[Row[T]]:
    """Joins the rows of repeated layers that are alike in every parameter below them.

    Layers are parts of a path that are a number, or end in one and speak of layers, blocks or experts or are named as
    Linen names its modules.

    Args:
        table: from path to what is said of the parameter.

    Returns:
        Rows in the table's order, those that are joined where the first stood.

    Example:
        >>> table = {f"blocks/{i}/{name}": name for i in range(12) for name in ("up", "down")}
        >>> [(row.name, len(row.paths)) for row in repeated(table)]
        [('blocks/{0..11}/up', 12), ('blocks/{0..11}/down', 12)]
        >>> [row.name for row in repeated({"layer_0/up": 8, "layer_1/up": 8, "layer_2/up": 16})]
        ['layer_{0,1}/up', 'layer_2/up']
    """
    return _folded([(tuple(path.split("/")), Row("", (path,), what)) for path, what in table.items()])


def pattern(name: str) -> str:
    """A regular expression for all paths with a row's name, whatever the numbers in it.

    Example:
        >>> print(pattern("blocks/{0..11}/up"))
        blocks/[0-9]+/up
    """
    return "[0-9]+".join(re.escape(part) for part in re.split(r"\{[\d.,]+\}", name))


def _folded(rows: list[tuple[tuple[str, ...], Row[T]]]) -> list[Row[T]]:
    """Rows with what is left of their paths, children that are alike joined from the leaves up."""
    children: dict[str, list[tuple[tuple[str, ...], Row[T]]]] = {}
    for (first, *rest), row in rows:
        children.setdefault(first, []).append((tuple(rest), row))
    alike: dict[Hashable, list[tuple[str, list[Row[T]]]]] = {}
    for name, below in children.items():
        inner = [row for _, row in below] if not below[0][0] else _folded(below)
        said = tuple((row.name, len(row.paths), row.what) for row in inner)
        alike.setdefault((name.rstrip("0123456789"), said) if counts_layers(name) else name, []).append((name, inner))
    found = []
    for group in alike.values():
        label = _label([name for name, _ in group])
        for same in zip(*(inner for _, inner in group), strict=True):
            below = same[0].name
            paths = tuple(path for row in same for path in row.paths)
            found.append(Row(f"{label}/{below}" if below else label, paths, same[0].what))
    return found


def _label(names: Sequence[str]) -> str:
    """One name for several that differ in the number at their end: "layer_{0..3,7}"."""
    if len(names) == 1:
        return names[0]
    stem = names[0].rstrip("0123456789")
    runs: list[list[str]] = []
    for number in sorted((name[len(stem) :] for name in names), key=lambda digits: (int(digits), digits)):
        if runs and int(number) == int(runs[-1][-1]) + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return stem + "{" + ",".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(run) for run in runs) + "}"
