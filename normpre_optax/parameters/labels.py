# SPDX-License-Identifier: Apache-2.0
"""One name for the parameters of equal layers: "layers/{0..11}/up"."""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Mapping
from typing import NamedTuple

from normpre_optax.parameters import vocabulary as v
from normpre_optax.parameters.vocabulary import words

# What is before a number, the number, and the rest of a flat name.
_NUMBERED = re.compile(r"(.*?)(\d+)((?:[_.-][^0-9]*[A-Za-z][^0-9]*)?)")


class Repeated(NamedTuple):
    """Parameters with equal entries: their common name, their paths, and the entry."""

    name: str
    paths: tuple[str, ...]
    entry: Hashable


def repeated(table: Mapping[str, Hashable]) -> list[Repeated]:
    """Join the parameters of layers that have equal entries.

    A layer is a part of a path that is a number, or a name with a number at its end or
    before another name: after "_", or of a layer, a block or an expert.

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
        >>> repeated({"block_0_up": 8, "block_1_up": 8})[0].name
        'block_{0,1}_up'
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
    """Return a part of a path with "#" for its number if it names a layer.

    The number is at the end, or before the rest of a flat name: "block_0_down".
    """
    match = _NUMBERED.fullmatch(part)
    if match is None:
        return part
    stem, _, rest = match.groups()
    found = words(stem)
    is_layer = not found or not (v.UNITS | v.EXPERTS).isdisjoint(found)
    if is_layer or stem.endswith("_"):
        return f"{stem}#{rest}"
    return part


def _common_name(names: tuple[str, ...]) -> str:
    """Return one name for names that differ in a number: "layer_{0..3,7}"."""
    if len({*names}) == 1:
        return names[0]
    matches = [_NUMBERED.fullmatch(name) for name in names]
    parts = [match.groups() for match in matches if match is not None]
    stem, _, rest = parts[0]
    # As numbers: 10 follows 9.
    numbers = sorted({int(number) for _, number, _ in parts})
    # In a run of successive numbers, the difference to the index is constant.
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    texts = [_run_text([number for _, number in run]) for _, run in runs]
    return f"{stem}{{{','.join(texts)}}}{rest}"


def _run_text(run: list[int]) -> str:
    """Return successive numbers as "0..3", or as "0,1" if there are one or two."""
    if len(run) > 2:
        return f"{run[0]}..{run[-1]}"
    return ",".join(map(str, run))
