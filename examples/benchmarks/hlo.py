# SPDX-License-Identifier: Apache-2.0
"""What one device does in a compiled program, read off its text: bytes of collectives, operations of products.

Loops count as often as they turn; of a conditional's branches the most expensive one counts.
"""

import math
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f64": 8, "s64": 8, "u64": 8, "c64": 8}
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.+)$")
_OPERATION = re.compile(r" ([a-z][\w\-]*)\(")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{\s*$")


class Cost(NamedTuple):
    """Per device and run: output bytes by kind of collective, and operations (two a multiply-add) of products."""

    collectives: dict[str, float]
    flops: float

    @property
    def bytes(self) -> float:
        """Output bytes of all collectives."""
        return sum(self.collectives.values())


class _Instruction(NamedTuple):
    name: str
    shape: str
    operation: str
    rest: str


def cost(text: str, turns: float | None = None) -> Cost:
    """Count a compiled program.

    Args:
        text: ``compiled.as_text()``.
        turns: how often loops turn on average whose bounds are data.

    Returns:
        Its cost.

    Raises:
        ValueError: if a loop that multiplies or communicates does not say how often it turns and ``turns`` is None.
    """
    computations, entry = _parse(text)
    known: dict[str, Cost] = {}

    def of(name: str) -> Cost:
        if name not in known:
            shapes = {i.name: i.shape for i in computations[name]}
            known[name] = _sum(_instruction(i, shapes, of, turns) for i in computations[name])
        return known[name]

    return of(entry)


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    computations: dict[str, list[_Instruction]] = {}
    entry, current = "", []
    for line in text.splitlines():
        start = _COMPUTATION.match(line)
        if start and not line.startswith(" "):
            current = computations.setdefault(start[1], [])
            if line.startswith("ENTRY"):
                entry = start[1]
            continue
        found = _INSTRUCTION.match(line)
        operation = _OPERATION.search(found[2]) if found else None
        if found and operation:
            shape, rest = found[2][: operation.start()], found[2][operation.end() :]
            current.append(_Instruction(found[1], shape, operation[1], rest))
    return computations, entry


def _instruction(i: _Instruction, shapes: dict[str, str], of: Callable[[str], Cost], turns: float | None) -> Cost:
    operation = i.operation.removesuffix("-start")
    if operation in COLLECTIVES:
        return Cost({operation: _bytes(i.shape, result_only=i.operation.endswith("-start"))}, 0)
    if i.operation == "dot":
        return Cost({}, _dot(i, shapes))
    if i.operation == "custom-call" and "matmul" in i.rest:
        raise ValueError(f"a product hidden in a custom call is not counted: {i.rest[:200]}")
    if i.operation == "while":
        body, count = re.search(r"body=%?([\w.\-]+)", i.rest), re.search(r'"known_trip_count":\{"n":"(\d+)"', i.rest)
        assert body
        inside = of(body[1])
        if count is None and turns is None and (inside.bytes or inside.flops):
            raise ValueError(f"loop {i.name} does not say how often it turns")
        return _times(inside, int(count[1]) if count else turns or 0)
    if i.operation == "conditional":
        inside = re.search(r"branch_computations=\{([^}]*)\}", i.rest)
        names = inside[1].split(",") if inside else re.findall(r"(?:true|false)_computation=([^,\s]+)", i.rest)
        branches = [of(name.strip().lstrip("%")) for name in names]
        most = {k: max(b.collectives.get(k, 0) for b in branches) for k in {k for b in branches for k in b.collectives}}
        return Cost(most, max(b.flops for b in branches))
    if i.operation in ("fusion", "call", "async-start"):
        called = re.search(r"(?:calls|to_apply)=%?([\w.\-]+)", i.rest)
        return of(called[1]) if called else Cost({}, 0)
    return Cost({}, 0)


def _dot(i: _Instruction, shapes: dict[str, str]) -> float:
    left = re.match(r"(?:\w+\[[\d,]*\]\S* )?%?([\w.\-]+)", i.rest)
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.rest)
    assert left
    assert contracted
    sizes = _sizes(shapes[left[1]])
    return 2.0 * math.prod(_sizes(i.shape)) * math.prod(sizes[int(axis)] for axis in contracted[1].split(",") if axis)


def _sizes(shape: str) -> list[int]:
    found = _ARRAY.search(shape)
    assert found
    return [int(size) for size in found[2].split(",") if size]


def _bytes(shape: str, result_only: bool) -> float:
    arrays = [math.prod(int(s) for s in sizes.split(",") if s) * _BYTES.get(t, 4) for t, sizes in _ARRAY.findall(shape)]
    return sum(arrays[len(arrays) // 2 :]) if result_only else sum(arrays)


def _times(one: Cost, n: float) -> Cost:
    return Cost({k: v * n for k, v in one.collectives.items()}, one.flops * n)


def _sum(costs: Iterable[Cost]) -> Cost:
    totals: dict[str, float] = {}
    flops = 0.0
    for one in costs:
        flops += one.flops
        for kind, size in one.collectives.items():
            totals[kind] = totals.get(kind, 0) + size
    return Cost(totals, flops)
