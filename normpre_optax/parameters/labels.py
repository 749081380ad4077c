# SPDX-License-Identifier: Apache-2.0
"""One name for the parameters of equal layers: "layers/{0..11}/up"."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping
from typing import NamedTuple

from normpre_optax.parameters import vocabulary as v
from normpre_optax.parameters.vocabulary import words

_DIGITS = "0123456789"


class Repeated(NamedTuple):
    """Parameters with equal entries: their common name, their paths, and the entry."""

    name: str
    paths: tuple[str, ...]
    entry: Hashable


def repeated(table: Mapping[str, Hashable]) -> list[Repeated]:
    """Join the parameters of layers that have equal entries.

    A layer is a part of a path that is a number, or a name with a number at its end:
    after "_", or of a layer, a block or an expert.

    Example:
        >>> from normpre_optax.parameters.labels import repeated
        >>> table = {
        ...     f"blocks/{i}/{name}": name for i in range(12) for name in ("up", "down")
        ... }
        >>> [(name, len(paths)) for name, paths, _ in repeated(table)]
        [('blocks/{0..11}/up', 12), ('blocks/{0..11}/down', 12)]
        >>> table = {"layer_0/up": 8, "layer_1/up": 8, "layer_2/up": 16}
        >>> [group.name for group in repeated(table)]
        ['layer_{0,1}/up', 'layer_2/up']
    """
    groups: dict[tuple[tuple[str, ...], Hashable], list[list[str]]] = {}
    for path, entry in table.items():
        parts = path.split("/")
        pattern = tuple(_without_number(part) for part in parts)
        groups.setdefault((pattern, entry), []).append(parts)
    joined = []
    for (_, entry), same in groups.items():
        name = "/".join(_common_name(names) for names in zip(*same, strict=True))
        paths = tuple("/".join(parts) for parts in same)
        joined.append(Repeated(name, paths, entry))
    return joined


def _without_number(part: str) -> str:
    """Return a part of a path with "#" for its number if it names a layer."""
    stem = part.rstrip(_DIGITS)
    found = words(part)
    is_layer = not found or not (v.UNITS | v.EXPERTS).isdisjoint(found)
    if stem != part and (is_layer or stem.endswith("_")):
        return f"{stem}#"
    return part


def _common_name(names: tuple[str, ...]) -> str:
    """Return one name for names that differ in their last number: "layer_{0..3,7}"."""
    if len({*names}) == 1:
        return names[0]
    stem = names[0].rstrip(_DIGITS)
    # As numbers: 10 follows 9.
    numbers = sorted({int(name[len(stem) :]) for name in names})
    # In a run of successive numbers, the difference to the index is constant.
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    texts = [_run_text([number for _, number in run]) for _, run in runs]
    return f"{stem}{{{','.join(texts)}}}"


def _run_text(run: list[int]) -> str:
    """Return successive numbers as "0..3", or as "0,1" if there are one or two."""
    if len(run) > 2:
        return f"{run[0]}..{run[-1]}"
    return ",".join(map(str, run))
